#include "scheduler.h"

#include <dlfcn.h>
#include <linux/futex.h>
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <setjmp.h>
#include <signal.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

namespace schedule {
namespace {

constexpr int64_t kNever = INT64_MAX;
constexpr int64_t kLeapNs = 60'000'000;  // more than the engine's 50 ms
// A schedule that takes longer does not end.
constexpr uint64_t kMostOperations = 1'000'000;
constexpr int64_t kMostNs = 60'000'000'000;
constexpr int kFirstPid = 0x7f000000;  // more than a process ID or a descriptor can be
constexpr int kRanks = 8;

template <class Function>
Function* real(const char* name) {
  return reinterpret_cast<Function*>(dlsym(RTLD_NEXT, name));
}
const auto real_syscall = real<decltype(syscall)>("syscall");
const auto real_create = real<decltype(pthread_create)>("pthread_create");
const auto real_join = real<decltype(pthread_join)>("pthread_join");
const auto real_close = real<decltype(close)>("close");
const auto real_sysconf = real<decltype(sysconf)>("sysconf");
const auto real_clock_gettime = real<decltype(clock_gettime)>("clock_gettime");

struct Thread {
  int number, rank;
  pthread_t handle{};
  void* (*start)(void*) = nullptr;
  void* argument = nullptr;
  void* result = nullptr;
  enum { kReady, kWaiting, kEnded, kDead } state = kReady;
  const void* waits_for = nullptr;
  const char* waits_in = "";
  int64_t deadline = kNever;
  bool timed_out = false, is_joined = false;
  int64_t priority = 0;
  std::atomic<uint32_t> turn{0};
  jmp_buf end;
  // Where its functions were called, and its latest operation.
  size_t depth = 0;
  std::array<void*, 64> callers;
  void* place = nullptr;
};
thread_local Thread* self = nullptr;

struct Event {
  Thread* thread;
  const char* what;
  const void* address;
  void* place;
};

// The current run's. Only the thread whose turn it is uses them.
uint64_t seed;
Dice dice;
std::vector<std::unique_ptr<Thread>> threads;
std::unordered_map<const void*, Thread*> owners;  // of mutexes
uint64_t n_operations, n_wake_ups;
int64_t now_ns, tick_ns;
std::array<bool, kRanks> ended;
int victim;
uint64_t n_until_death;
std::array<Event, 256> events;
// How the order is chosen.
bool by_priority;
std::vector<uint64_t> changes;  // when the priority of the running thread becomes the lowest
int64_t lowest;
uint64_t switch_in, leap_in;  // one in so many
bool share_cpu;
long n_cpus;

void futex(std::atomic<uint32_t>& word, int operation, uint32_t value) {
  real_syscall(SYS_futex, &word, operation, value, nullptr, nullptr, 0);
}

void give_turn(Thread& next) {
  next.turn.store(1);
  futex(next.turn, FUTEX_WAKE_PRIVATE, 1);
}

void await_turn() {
  while (self->turn.load() == 0) futex(self->turn, FUTEX_WAIT_PRIVATE, 0);
  self->turn = 0;
  if (self->state == Thread::kDead) longjmp(self->end, 1);  // nothing is destroyed
}

// --- the choice of the next thread ---

void end_wait(Thread& thread, bool timed_out) {
  thread.state = Thread::kReady;
  thread.timed_out = timed_out;
  thread.deadline = kNever;
}

void wait_for_time_out() {
  Thread* first = nullptr;
  for (const auto& thread : threads) {
    if (thread->state != Thread::kWaiting || thread->deadline == kNever) continue;
    if (first == nullptr || thread->deadline < first->deadline) first = thread.get();
  }
  if (first == nullptr) finding("a deadlock: every thread waits, none of them with a time-out");
  if (!may_time_out()) finding("a lost wake-up: no thread can continue before a time-out");
  now_ns = std::max(now_ns, first->deadline);
  if (now_ns > kMostNs) finding("a wait that does not end");
  end_wait(*first, true);
}

// There may be none before a time-out.
Thread& next_thread() {
  if (!by_priority && self->state == Thread::kReady && !dice.one_in(switch_in)) return *self;
  std::array<Thread*, 64> ready;
  size_t n = 0;
  while (n == 0) {
    for (const auto& thread : threads) {
      if (thread->state == Thread::kReady) ready.at(n++) = thread.get();
    }
    if (n == 0) wait_for_time_out();
  }
  if (!by_priority) return *ready[dice() % n];
  const auto is_lower = [](const Thread* a, const Thread* b) { return a->priority < b->priority; };
  return **std::max_element(ready.begin(), ready.begin() + n, is_lower);
}

void pass_turn() {
  Thread& next = next_thread();
  if (&next == self) return;
  ++totals.switches;
  give_turn(next);
  await_turn();
}

void wake(const void* address, size_t at_most = SIZE_MAX) {
  std::vector<Thread*> waiting;
  for (const auto& thread : threads) {
    if (thread->state == Thread::kWaiting && thread->waits_for == address) waiting.push_back(thread.get());
  }
  if (at_most < waiting.size()) std::swap(waiting[0], waiting[dice() % waiting.size()]);
  for (size_t i = 0; i < std::min(at_most, waiting.size()); ++i) end_wait(*waiting[i], false);
}

void kill(int rank) {
  end_process(rank);
  for (const auto& thread : threads) {
    if (thread->rank != rank || thread->state == Thread::kEnded) continue;
    thread->state = Thread::kDead;
    wake(thread.get());
    // What is common to the process and here belongs to all ranks, such as the recorder, is free.
    std::erase_if(owners, [&](const auto& each) {
      if (each.second == thread.get()) wake(each.first);
      return each.second == thread.get();
    });
  }
}

// As if the process was stopped for a while, or busy.
void leap() {
  now_ns += kLeapNs;
  for (const auto& thread : threads) {
    if (thread->state == Thread::kWaiting && thread->deadline <= now_ns) end_wait(*thread, true);
  }
}

// Precedes each operation.
void operation(const char* what, const void* address, void* place) {
  if (self == nullptr) return;
  self->place = place;
  events[n_operations % events.size()] = {self, what, address, place};
  totals.hash = (totals.hash ^ static_cast<uint64_t>(self->number * 31 + what[0])) * 0x100000001B3;
  ++totals.operations;
  if (++n_operations > kMostOperations) finding("no end");
  if (self->rank == victim && --n_until_death == 0) kill(victim);
  if (leap_in != 0 && dice.one_in(leap_in)) leap();
  if (by_priority && std::find(changes.begin(), changes.end(), n_operations) != changes.end())
    self->priority = --lowest;
  pass_turn();
}

// Returns false after a time-out.
bool wait(const void* address, const char* in, int64_t deadline = kNever) {
  self->state = Thread::kWaiting;
  self->waits_for = address;
  self->waits_in = in;
  self->deadline = deadline;
  self->timed_out = false;
  pass_turn();
  return !self->timed_out;
}

int64_t ns_of(const timespec& time) { return time.tv_sec * 1'000'000'000LL + time.tv_nsec; }

// --- threads ---

Thread& add_thread(int rank) {
  threads.push_back(std::make_unique<Thread>());
  Thread& thread = *threads.back();
  thread.number = static_cast<int>(threads.size()) - 1;
  thread.rank = rank;
  thread.priority = static_cast<int64_t>(dice() >> 16);
  ++totals.threads;
  return thread;
}

void* start_thread(void* argument) {
  Thread& thread = *static_cast<Thread*>(argument);
  self = &thread;
  if (setjmp(thread.end) == 0) {
    await_turn();
    thread.result = thread.start(thread.argument);
    thread.state = Thread::kEnded;
    wake(&thread);
    give_turn(next_thread());
  }
  self = nullptr;  // the destructors of its thread_local variables follow
  return thread.result;
}

int create(pthread_t* handle, const pthread_attr_t* attributes, void* (*start)(void*), void* argument, void* place) {
  if (self == nullptr) return real_create(handle, attributes, start, argument);
  Thread& thread = add_thread(self->rank);
  thread.start = start;
  thread.argument = argument;
  pthread_attr_t small;  // so that the C library keeps the stacks of all threads for the next ones
  pthread_attr_init(&small);
  pthread_attr_setstacksize(&small, 256 << 10);
  if (real_create(&thread.handle, &small, start_thread, &thread) != 0) std::abort();
  *handle = thread.handle;
  operation("start a thread", &thread, place);
  return 0;
}

void join(Thread& thread) {
  if (thread.state == Thread::kDead) give_turn(thread);  // to its end
  real_join(thread.handle, nullptr);
  thread.is_joined = true;
}

int join(pthread_t handle, void** result, void* place) {
  if (self == nullptr) return real_join(handle, result);
  const auto is_it = [&](const auto& thread) {
    return thread->number != 0 && !thread->is_joined && pthread_equal(thread->handle, handle) != 0;
  };
  Thread& thread = **std::find_if(threads.begin(), threads.end(), is_it);
  operation("join", &thread, place);
  while (thread.state != Thread::kEnded && thread.state != Thread::kDead) wait(&thread, "join");
  join(thread);
  if (result != nullptr) *result = thread.result;
  return 0;
}

// --- locks and conditions ---

int lock(const void* mutex, void* place) {
  if (self == nullptr) return 0;
  operation("lock", mutex, place);
  while (owners.contains(mutex)) wait(mutex, "lock");
  owners[mutex] = self;
  return 0;
}

int unlock(const void* mutex) {
  if (self == nullptr) return 0;
  owners.erase(mutex);
  wake(mutex);
  return 0;
}

int wait_for_condition(const void* condition, const void* mutex, int64_t deadline, void* place) {
  operation("wait for a condition", condition, place);
  unlock(mutex);
  const bool woken = wait(condition, "condition", deadline);
  while (owners.contains(mutex)) wait(mutex, "lock");
  owners[mutex] = self;
  return woken ? 0 : ETIMEDOUT;
}

int notify(const void* condition, size_t at_most, void* place) {
  operation("notify", condition, place);
  wake(condition, at_most);
  return 0;
}

long system_call(long number, const std::array<long, 6>& a, void* place) {
  const auto result = [](long error) { return error == 0 ? 0 : (errno = static_cast<int>(error), -1); };
  if (number == SYS_gettid) return self->number + 1;
  if (number == SYS_pidfd_open && a[0] >= kFirstPid) return a[0];
  if (number == SYS_tgkill) return result(threads.at(a[1] - 1)->state == Thread::kEnded ? ESRCH : 0);
  if (number != SYS_futex) return real_syscall(number, a[0], a[1], a[2], a[3], a[4], a[5]);
  auto* word = reinterpret_cast<uint32_t*>(a[0]);
  if ((a[1] & FUTEX_CMD_MASK) == FUTEX_WAKE) {
    operation("wake", word, place);
    const auto waits = [&](const auto& thread) {
      return thread->state == Thread::kWaiting && thread->waits_for == word;
    };
    if (std::none_of(threads.begin(), threads.end(), waits) || ++n_wake_ups != drop_wake_up) wake(word, a[2]);
    return 0;
  }
  operation("wait", word, place);
  if (*word != static_cast<uint32_t>(a[2])) return result(EAGAIN);
  const auto* timeout = reinterpret_cast<const timespec*>(a[3]);
  return result(wait(word, "futex", timeout == nullptr ? kNever : now_ns + ns_of(*timeout)) ? 0 : ETIMEDOUT);
}

// --- findings ---

// The functions at these addresses, of ours if others are inlined in these.
std::vector<std::string> functions_at(const std::vector<void*>& places) {
  std::string command = "addr2line -aCfips -e /proc/" + std::to_string(getpid()) + "/exe";
  char text[1024];
  for (void* place : places) {
    std::snprintf(text, sizeof(text), " %p", static_cast<void*>(static_cast<char*>(place) - 1));
    command += text;
  }
  std::vector<std::string> functions;
  FILE* output = popen((command + " 2>/dev/null").c_str(), "r");
  while (output != nullptr && std::fgets(text, sizeof(text), output) != nullptr) {
    const bool is_first = std::strncmp(text, "0x", 2) == 0;
    const std::string function = std::strstr(text, is_first ? ": " : "by) ") + (is_first ? 2 : 4);
    if (is_first) functions.emplace_back();
    if (is_first || functions.back().compare(0, 6, "horo::") != 0) functions.back() = function;
  }
  constexpr std::string_view kAnonymous = "(anonymous namespace)::";
  for (std::string& function : functions) {  // without its parameters
    if (const size_t at = function.find(kAnonymous); at != std::string::npos) function.erase(at, kAnonymous.size());
    const size_t at = function.rfind(" at ");
    if (at == std::string::npos) function = "another library";
    else
      function = function.substr(0, std::min(at, function.find('('))) +
                 function.substr(at, function.find_first_of(" \n", at + 4) - at);
  }
  functions.resize(places.size());
  return functions;
}

void print(const Thread& thread) {
  const char* states[] = {"can run", "waits: ", "has ended", "was killed"};
  std::printf("  thread %d of rank %d %s%s\n", thread.number, thread.rank, states[thread.state],
              thread.state == Thread::kWaiting ? thread.waits_in : "");
  if (thread.state == Thread::kEnded) return;
  std::vector<void*> places{thread.place};
  for (size_t i = std::min(thread.depth, thread.callers.size()); i-- > 1;) places.push_back(thread.callers[i]);
  for (const std::string& function : functions_at(places)) std::printf("      %s\n", function.c_str());
}

}  // namespace

void finding(const std::string& what) {
  if (is_quiet) _exit(kFound);
  self = nullptr;
  std::printf("schedule %lu: %s. The latest operations:\n", seed, what.c_str());
  std::vector<void*> places;
  const uint64_t first = n_operations - std::min<uint64_t>(n_operations, events.size());
  for (uint64_t i = first; i < n_operations; ++i) places.push_back(events[i % events.size()].place);
  const std::vector<std::string> functions = functions_at(places);
  for (uint64_t i = first; i < n_operations; ++i) {
    const Event& event = events[i % events.size()];
    if (event.thread == nullptr) continue;
    std::printf("  thread %d of rank %d: %s %p in %s\n", event.thread->number, event.thread->rank, event.what,
                event.address, functions[i - first].c_str());
  }
  for (const auto& thread : threads) print(*thread);
  std::printf("schedule %lu: %s, after %lu operations, at %.3f s\n", seed, what.c_str(), n_operations, 1e-9 * now_ns);
  std::fflush(stdout);
  _exit(kFound);
}

void run(uint64_t number, const std::function<void()>& body) {
  seed = number;
  dice = {number};
  threads.clear();
  owners.clear();
  events = {};
  ended = {};
  n_operations = n_wake_ups = n_until_death = 0;
  victim = INT32_MAX;
  now_ns = 1'000'000'000;
  by_priority = dice.one_in(2);
  changes.clear();
  for (uint64_t n = dice() % 6; n > 0; --n) changes.push_back(dice() % (64 << dice() % 8));
  lowest = 0;
  switch_in = std::array{1, 2, 5, 20}[dice() % 4];
  leap_in = std::array{0, 0, 100, 1000}[dice() % 4];
  // Ranks spin before they sleep if they have a core each; so that this does not take most operations, time flies then.
  share_cpu = !dice.one_in(4);
  tick_ns = share_cpu && dice.one_in(2) ? 1'000 : 200'000;
  n_cpus = dice.one_in(2) ? 1 : 64;
  self = &add_thread(-1);
  body();
  for (const auto& thread : threads) {
    if (thread->state == Thread::kDead && !thread->is_joined) join(*thread);
  }
  self = nullptr;
}

void take_time() { leap(); }

void set_rank(int rank) { self->rank = rank; }

int pid_of(int rank) { return kFirstPid + rank; }

void end_process(int rank) { ended.at(static_cast<size_t>(rank)) = true; }

bool has_ended(int rank) { return ended.at(static_cast<size_t>(rank)); }

void kill_after(int rank, uint64_t n) {
  victim = rank;
  n_until_death = n;
}

}  // namespace schedule

// --- in place of the C library's ---

using namespace schedule;

#define PLACE __builtin_return_address(0)

extern "C" {

int pthread_create(pthread_t* handle, const pthread_attr_t* attributes, void* (*start)(void*),
                   void* argument) noexcept {
  return create(handle, attributes, start, argument, PLACE);
}
int pthread_join(pthread_t handle, void** result) { return join(handle, result, PLACE); }
int pthread_sigmask(int, const sigset_t*, sigset_t*) noexcept { return 0; }  // any thread's crash is a finding
int pthread_mutex_lock(pthread_mutex_t* mutex) noexcept { return lock(mutex, PLACE); }
int pthread_mutex_unlock(pthread_mutex_t* mutex) noexcept { return unlock(mutex); }
int pthread_cond_wait(pthread_cond_t* condition, pthread_mutex_t* mutex) {
  return wait_for_condition(condition, mutex, kNever, PLACE);
}
int pthread_cond_timedwait(pthread_cond_t* condition, pthread_mutex_t* mutex, const timespec* until) {
  return wait_for_condition(condition, mutex, ns_of(*until), PLACE);
}
int pthread_cond_clockwait(pthread_cond_t* condition, pthread_mutex_t* mutex, clockid_t, const timespec* until) {
  return wait_for_condition(condition, mutex, ns_of(*until), PLACE);
}
int pthread_cond_signal(pthread_cond_t* condition) noexcept { return notify(condition, 1, PLACE); }
int pthread_cond_broadcast(pthread_cond_t* condition) noexcept { return notify(condition, SIZE_MAX, PLACE); }

long syscall(long number, ...) noexcept {
  std::array<long, 6> arguments;
  va_list list;
  va_start(list, number);
  for (long& argument : arguments) argument = va_arg(list, long);
  va_end(list);
  if (self != nullptr) return system_call(number, arguments, PLACE);
  const auto& a = arguments;
  return real_syscall(number, a[0], a[1], a[2], a[3], a[4], a[5]);
}
int poll(pollfd* descriptors, nfds_t, int) {
  operation("poll", nullptr, PLACE);
  return !hides_ends && has_ended(descriptors[0].fd - kFirstPid);
}
int close(int descriptor) { return descriptor >= kFirstPid ? 0 : real_close(descriptor); }
int clock_gettime(clockid_t clock, timespec* time) noexcept {
  if (self == nullptr) return real_clock_gettime(clock, time);
  now_ns += tick_ns;
  *time = {now_ns / 1'000'000'000, now_ns % 1'000'000'000};
  return 0;
}
int sched_yield() noexcept {
  operation("yield", nullptr, PLACE);
  return 0;
}
int sched_getcpu() noexcept { return self == nullptr || share_cpu ? 0 : self->number; }
long sysconf(int name) noexcept {
  return self != nullptr && name == _SC_NPROCESSORS_ONLN ? n_cpus : real_sysconf(name);
}

// --- in place of TSan's library ---

void __tsan_init() {}
void __tsan_func_entry(void* caller) {
  if (self != nullptr && self->depth++ < self->callers.size()) self->callers[self->depth - 1] = caller;
}
void __tsan_func_exit() {
  if (self != nullptr) --self->depth;
}
void __tsan_vptr_update(void**, void*) {}
void __tsan_vptr_read(void**) {}
void __tsan_read_range(void*, size_t) {}
void __tsan_write_range(void*, size_t) {}
void __tsan_atomic_thread_fence(int) {}
void __tsan_atomic_signal_fence(int) {}

#define PLAIN(N)                          \
  void __tsan_read##N(void*) {}           \
  void __tsan_write##N(void*) {}          \
  void __tsan_unaligned_read##N(void*) {} \
  void __tsan_unaligned_write##N(void*) {}
PLAIN(1)
PLAIN(2)
PLAIN(4)
PLAIN(8)
PLAIN(16)

// Reference counts are changed in the order acq_rel, which nothing else here uses.
#define DEFINE(RESULT, BITS, NAME, PARAMETERS, ...)                                                            \
  RESULT __tsan_atomic##BITS##_##NAME PARAMETERS {                                                             \
    const bool is_operation = order != __ATOMIC_RELAXED && order != __ATOMIC_ACQ_REL;                          \
    if (is_operation) operation(#NAME, const_cast<const void*>(static_cast<const volatile void*>(at)), PLACE); \
    return __VA_ARGS__;                                                                                        \
  }
#define ATOMIC(BITS, T)                                                                                              \
  DEFINE(T, BITS, load, (const volatile T* at, int order), __atomic_load_n(at, __ATOMIC_SEQ_CST))                    \
  DEFINE(void, BITS, store, (volatile T * at, T value, int order), __atomic_store_n(at, value, __ATOMIC_SEQ_CST))    \
  DEFINE(T, BITS, exchange, (volatile T * at, T value, int order), __atomic_exchange_n(at, value, __ATOMIC_SEQ_CST)) \
  DEFINE(T, BITS, fetch_add, (volatile T * at, T value, int order), __atomic_fetch_add(at, value, __ATOMIC_SEQ_CST)) \
  DEFINE(T, BITS, fetch_sub, (volatile T * at, T value, int order), __atomic_fetch_sub(at, value, __ATOMIC_SEQ_CST)) \
  DEFINE(int, BITS, compare_exchange_strong, (volatile T * at, T * expected, T value, int order, int),               \
         __atomic_compare_exchange_n(at, expected, value, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST))                \
  DEFINE(int, BITS, compare_exchange_weak, (volatile T * at, T * expected, T value, int order, int),                 \
         __atomic_compare_exchange_n(at, expected, value, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST))
ATOMIC(8, uint8_t)
ATOMIC(32, uint32_t)
ATOMIC(64, uint64_t)

}  // extern "C"
