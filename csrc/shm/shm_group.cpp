#include "shm/shm_group.h"

#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <sys/ioctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <sstream>

#include "recorder/recorder.h"
#include "shm/futex.h"
#include "shm/text.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace horo {
namespace {

// The chunks in progress, one of every rank, should stay in cache; measured best between 64 KiB and 1 MiB with 2 ranks
// on 2 cores, and half of that with 4 ranks on them.
constexpr size_t kSlotBytes = 256 * 1024;
constexpr size_t kSmallestChunk = 32 * 1024;
// Ranks pack this many chunks ahead of the one being reduced, so that none waits for the slowest at every step.
constexpr size_t kAhead = 2;
// Enough that no rank overwrites what a peer may still read: see allreduce().
constexpr size_t kSlots = kAhead + 4;

// From this many chunks on, it is worth a few microseconds to measure how far the ranks are from each other; if they
// share cores there may be no answer, and that time is lost.
constexpr size_t kSomeChunks = 4;
constexpr size_t kManyChunks = 64;

constexpr size_t kTextBytes = 480;
constexpr double kIdleSeconds = 0.05;
constexpr auto kSpin = std::chrono::microseconds(100);
constexpr auto kShortSpin = std::chrono::microseconds(3);

enum State : uint32_t { kTakingPart = 0, kLeft = 1, kGaveUp = 2, kLostPeer = 3 };

void pause_briefly() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Counted from 1; 0 or less if the kernel does not say.
int this_cpu() { return sched_getcpu() + 1; }

// Whether a has reached b; counters wrap around.
bool reached(uint32_t a, uint32_t b) { return static_cast<int32_t>(a - b) >= 0; }

// How often the kernel has killed a process of this host because memory was exhausted.
long oom_kills() {
  std::ifstream counters("/proc/vmstat");
  std::string name;
  long value = 0;
  while (counters >> name >> value) {
    if (name == "oom_kill") return value;
  }
  return 0;
}

// The status, as returned by wait(), of a process that has ended and been reaped by its parent; -1 if the kernel does
// not provide it, as before Linux 6.15. Makes only system calls.
int exit_status(int pidfd) {
  struct {                   // pidfd_info of <linux/pidfd.h>, which is newer than many systems
    uint64_t mask = 1 << 3;  // PIDFD_INFO_EXIT
    uint64_t cgroup;
    uint32_t ids[11];
    int32_t status;
  } info;
  const bool known = pidfd >= 0 && ioctl(pidfd, _IOWR(0xFF, 11, info), &info) == 0 && (info.mask & 1 << 3) != 0;
  return known ? info.status : -1;
}

// The same, also before its parent has reaped it: then it is in /proc.
int exit_status(int pid, int pidfd) {
  std::ifstream file("/proc/" + std::to_string(pid) + "/stat");
  std::ostringstream all;
  all << file.rdbuf();  // an iterator would throw if the process vanishes meanwhile
  const std::string text = all.str();
  const size_t name_end = text.rfind(')');
  if (name_end != std::string::npos && text.compare(name_end, 3, ") Z") == 0) {
    return std::atoi(text.c_str() + text.rfind(' '));
  }
  return exit_status(pidfd);
}

// Describes a status.
std::string how_it_died(int status, long n_oom_kills_before) {
  std::string how = "died (killed, out of memory, or os._exit)";
  if (status >= 0 && WIFSIGNALED(status)) {
    how = "was killed by signal " + std::to_string(WTERMSIG(status)) + " (" + strsignal(WTERMSIG(status)) + ")";
  } else if (status >= 0) {
    how = "ended with os._exit(" + std::to_string(WEXITSTATUS(status)) + ") or similar";
  }
  if (oom_kills() > n_oom_kills_before) {
    how += " (and the kernel has killed a process of this host because memory was exhausted)";
  }
  return how;
}

// A line of text that uses no memory from the heap.
class Line {
 public:
  Line& operator<<(const char* text) {
    while (*text != 0 && size_ < sizeof(text_)) text_[size_++] = *text++;
    return *this;
  }
  Line& operator<<(int number) {  // not negative
    char digits[12];
    char* first = digits + sizeof(digits);
    *--first = 0;
    do *--first = static_cast<char>('0' + number % 10);
    while ((number /= 10) != 0);
    return *this << first;
  }
  void print() const {
    if (write(STDERR_FILENO, text_, size_) < 0) return;
  }

 private:
  char text_[kTextBytes];
  size_t size_ = 0;
};

// The group that reports a killed peer at SIGTERM, and the process in which it does so (not in forked children).
std::atomic<ShmGroup*> reporter{nullptr};
std::atomic<pid_t> reporter_pid{0};

}  // namespace

// A counter that one rank advances and for which all may wait.
struct alignas(64) ShmGroup::Flag {
  std::atomic<uint32_t> value;
  std::atomic<uint32_t> n_sleepers;
  std::atomic<int> cpu;  // the CPU on which the rank last advanced it, by this_cpu()
};

struct alignas(4096) ShmGroup::RankBlock {
  Flag entered;
  Flag packed;
  Flag reduced;
  Flag wake_up;
  std::atomic<uint32_t> demanded;  // the latest handshake that peers' engines are to enter
  std::atomic<uint32_t> state;
  SharedText<kTextBytes> label;   // this rank's current or last operation
  SharedText<kTextBytes> reason;  // why it gave up or left
  std::atomic<int32_t> reporter;  // rank 0's: which rank of the host reports why the job ends, counted from 1
  bool oversubscribed;            // according to the CPUs that this rank sees
  Distance::Shared distance;
  // Two, because a fast rank may enter the next handshake while a slow one still reads this one's headers.
  Header headers[2];
  int64_t entered_ns[2];
};

std::vector<Distance::Shared*> ShmGroup::shared_distances(uint8_t* memory, int size) {
  std::vector<Distance::Shared*> all;
  for (int r = 0; r < size; ++r) all.push_back(&reinterpret_cast<RankBlock*>(memory)[r].distance);
  return all;
}

size_t ShmGroup::memory_bytes(int size) {
  return static_cast<size_t>(size) * (sizeof(RankBlock) + kSlots * kSlotBytes);
}

ShmGroup::ShmGroup(uint8_t* memory, int rank, int size, std::vector<int> pids, std::vector<std::string> names)
    : memory_(memory),
      rank_(rank),
      size_(size),
      pids_(std::move(pids)),
      names_(std::move(names)),
      distance_(shared_distances(memory, size), rank) {
  cpu_set_t cpus;
  const bool known = sched_getaffinity(0, sizeof(cpus), &cpus) == 0;
  const long n_cpus = std::max(known ? CPU_COUNT(&cpus) : 0L, sysconf(_SC_NPROCESSORS_ONLN));
  oversubscribed_ = block(rank_).oversubscribed = size_ > n_cpus;
  n_oom_kills_ = oom_kills();
  for (int r = 0; r < size_; ++r) {
    int fd = -1;
#ifdef SYS_pidfd_open
    if (r != rank_ && pids_[r] != 0) fd = static_cast<int>(syscall(SYS_pidfd_open, pids_[r], 0));
#endif
    pidfds_.push_back(fd);
  }
}

ShmGroup::~ShmGroup() {
  ShmGroup* self = this;
  reporter.compare_exchange_strong(self, nullptr);
  for (int fd : pidfds_) {
    if (fd >= 0) close(fd);
  }
}

ShmGroup::RankBlock& ShmGroup::block(int rank) const {
  return *reinterpret_cast<RankBlock*>(memory_ + static_cast<size_t>(rank) * sizeof(RankBlock));
}

uint8_t* ShmGroup::slot(int rank, size_t chunk) const {
  uint8_t* slots = memory_ + static_cast<size_t>(size_) * sizeof(RankBlock);
  return slots + (static_cast<size_t>(rank) * kSlots + chunk % kSlots) * kSlotBytes;
}

// --- waiting ---

void ShmGroup::signal(Flag& flag, uint32_t value) {
  flag.cpu.store(this_cpu(), std::memory_order_relaxed);
  flag.value.store(value, std::memory_order_seq_cst);
  if (flag.n_sleepers.load(std::memory_order_seq_cst) != 0) futex_wake(flag.value);
}

void ShmGroup::wait_for(int rank, Flag RankBlock::* which, uint32_t value, const Round* round) {
  Flag& flag = block(rank).*which;
  const auto is_there = [&] { return reached(flag.value.load(std::memory_order_acquire), value); };
  if (is_there()) return;
  // Going to sleep and waking up takes longer than a chunk, and makes the others sleep, too: so spin for a while. But
  // with more ranks than cores, a spinning waiter may keep the rank it waits for from running, and on that rank's own
  // core it always does.
  const auto until = std::chrono::steady_clock::now() + (oversubscribed_ ? kShortSpin : kSpin);
  const auto may_run = [&] {
    const int cpu = this_cpu();
    return cpu <= 0 || flag.cpu.load(std::memory_order_relaxed) != cpu;
  };
  while (may_run() && std::chrono::steady_clock::now() < until) {
    for (int i = 0; i < 20; ++i) {
      if (is_there()) return;
      pause_briefly();
    }
    if (oversubscribed_) sched_yield();
  }
  StallDetector::Wait wait(detector_);
  while (true) {
    flag.n_sleepers.fetch_add(1, std::memory_order_seq_cst);
    const uint32_t seen = flag.value.load(std::memory_order_seq_cst);
    if (!reached(seen, value)) futex_wait(flag.value, seen, kIdleSeconds);
    flag.n_sleepers.fetch_sub(1, std::memory_order_seq_cst);
    std::string cause;
    if (!is_there()) {
      report_wait(wait, which, value, round);
      cause = why_lost(rank);
    }
    // Again: while this rank wrote a stall report, the other may have arrived, and then left.
    if (is_there()) {
      wait.over();
      return;
    }
    if (!cause.empty()) lost(cause, operation());
    if (block(rank_).state.load() == kLeft) {  // another thread has ended the world or the program
      throw PeerLost(name(rank_) + " has left (" + block(rank_).reason.get() + ") while it " +
                     PeerLost::doing(operation()));
    }
    check_not_given_up();  // in the same way
    const auto interrupted = [&](const std::string& why) {
      abandon("it was interrupted" + why);
      note_broken("this rank was interrupted in the middle of an operation" + why);
    };
    try {
      if (on_idle) on_idle();
    } catch (const std::exception& error) {
      interrupted(": " + in_one_line(error));
      throw;
    } catch (...) {  // Python ends threads in this way if they request the GIL after the program has ended
      interrupted("");
      throw;
    }
  }
}

void ShmGroup::wait_for_all(Flag RankBlock::* flag, uint32_t value, const Round* round) {
  // Starting with the next rank spreads the ranks over the flags, and ends with the ranks most likely to be late.
  for (int i = 1; i < size_; ++i) wait_for((rank_ + i) % size_, flag, value, round);
}

void ShmGroup::watched_by(std::shared_ptr<StallDetector> detector, std::vector<int> ranks) {
  scope_ = detector->scope(ranks);
  ranks_ = std::move(ranks);
  detector_ = std::move(detector);
}

void ShmGroup::report_wait(StallDetector::Wait& wait, Flag RankBlock::* which, uint32_t value, const Round* round) {
  if (detector_ == nullptr) return;
  std::vector<uint32_t> flags;
  std::vector<int> arrived, late;
  for (int r = 0; r < size_; ++r) {
    const bool here = reached((block(r).*which).value.load(std::memory_order_acquire), value);
    (here ? arrived : late).push_back(ranks_[r]);
    flags.push_back(round != nullptr && here ? block(r).headers[value % 2].flags : 0);
  }
  unless_stalled([&] {
    const std::string label = block(rank_).label.get();
    if (round != nullptr) {
      wait.look();
      round->on_wait(flags);
    } else if (label == kJoin) detector_->check();
    else wait.report_if_due(label + scope_, arrived, late);
  });
}

void ShmGroup::unless_stalled(const std::function<void()>& look) {
  try {
    look();
  } catch (const Stalled& stalled) {
    note_broken(stalled.what());
    abandon(stalled.what());
    throw;
  }
}

std::string ShmGroup::label() const { return block(rank_).label.get(); }

std::string ShmGroup::name(int rank) const { return names_[rank]; }

bool ShmGroup::died(int rank) {
  if (pids_[rank] == 0) return false;
  if (pidfds_[rank] >= 0) {
    pollfd descriptor{pidfds_[rank], POLLIN, 0};
    return poll(&descriptor, 1, 0) > 0;
  }
  return kill(pids_[rank], 0) != 0 && errno == ESRCH;
}

void ShmGroup::lost(const std::string& cause, const std::string& operation) {
  // A rank that gives up since nothing has moved says so first: then all raise the same error.
  if (detector_ != nullptr) unless_stalled([&] { detector_->check(); });
  const PeerLost lost(cause, name(rank_), operation);
  note_broken(lost.what());
  pass_on(cause);
  throw lost;
}

void ShmGroup::set_label(const std::string& label) {
  is_between_ = label.empty();
  if (!label.empty()) block(rank_).label.set(label);
}

std::string ShmGroup::operation() const { return is_between_ ? "" : label(); }

void ShmGroup::check_peers(int awaited, const std::string& label) {
  set_label(label);
  if (const std::string cause = why_lost(awaited); !cause.empty()) lost(cause, label);
}

std::string ShmGroup::why_lost(int awaited) {
  for (int r = 0; r < size_; ++r) {
    if (r == rank_) continue;
    RankBlock& peer = block(r);
    const uint32_t state = peer.state.load(std::memory_order_acquire);
    const std::string last = !peer.label.empty() ? ", last seen in " + peer.label.get() + "," : "";
    if (state == kGaveUp) return name(r) + " gave up (" + peer.reason.get() + ")";
    if (state == kLostPeer) return peer.reason.get();
    if (state == kLeft && r == awaited) return name(r) + " has left (" + peer.reason.get() + ")" + last;
    if (state == kTakingPart && died(r)) {
      // It may have left between the two checks.
      if (peer.state.load(std::memory_order_acquire) != kTakingPart) continue;
      return name(r) + " " + how_it_died(exit_status(pids_[r], pidfds_[r]), n_oom_kills_) + last;
    }
  }
  return "";
}

void ShmGroup::abandon(const std::string& reason) { end(kGaveUp, reason); }

void ShmGroup::pass_on(const std::string& cause) { end(kLostPeer, cause); }

void ShmGroup::leave(const std::string& reason) { end(kLeft, reason); }

void ShmGroup::end(uint32_t how, const std::string& reason) {
  RankBlock& own = block(rank_);
  {
    // An engine's thread may give up while the program leaves: the reason is that of the state.
    const std::lock_guard lock(mutex_);
    const uint32_t state = own.state.load();
    if (state == kGaveUp || state == kLostPeer || state == how) return;
    own.reason.set(reason);
    own.state.store(how, std::memory_order_seq_cst);
  }
  for (Flag* flag : {&own.entered, &own.packed, &own.reduced}) futex_wake(flag->value);
}

bool ShmGroup::has_left(int rank) const { return block(rank).state.load(std::memory_order_acquire) != kTakingPart; }

std::vector<int> ShmGroup::peer_pids(bool silent) const {
  std::vector<int> pids;
  for (int r = 0; r < size_; ++r) {
    const uint32_t state = block(r).state.load(std::memory_order_acquire);
    if (r != rank_ && (silent ? state == kTakingPart : state != kLeft)) pids.push_back(pids_[r]);
  }
  return pids;
}

bool ShmGroup::claim_report() {
  int32_t nobody = 0;
  return block(0).reporter.compare_exchange_strong(nobody, rank_ + 1);
}

bool ShmGroup::peer_reports() {
  const int reporter = block(0).reporter.load() - 1;
  return reporter >= 0 && reporter != rank_ && !died(reporter);
}

void ShmGroup::report_at_sigterm() {
  reporter_pid = getpid();
  reporter = this;
  struct sigaction action;
  if (sigaction(SIGTERM, nullptr, &action) != 0 || (action.sa_flags & SA_SIGINFO) != 0) return;
  if (action.sa_handler != SIG_DFL) return;
  action.sa_handler = on_sigterm;
  action.sa_flags = static_cast<int>(SA_RESETHAND | SA_NODEFER);  // so that raising it again ends the process
  sigaction(SIGTERM, &action, nullptr);
}

void ShmGroup::on_sigterm(int signal) {
  ShmGroup* group = reporter;
  if (group != nullptr && reporter_pid == getpid()) group->report_killed_peer();
  raise(signal);
}

// Runs in a signal handler: no locks, no memory from the heap.
void ShmGroup::report_killed_peer() noexcept {
  for (int r = 0; r < size_; ++r) {
    if (r == rank_ || pidfds_[r] < 0 || block(r).state.load() != kTakingPart) continue;
    // Peers that die from SIGTERM were sent it by the same launcher.
    const int status = exit_status(pidfds_[r]);
    if (status < 0 || !WIFSIGNALED(status) || WTERMSIG(status) == SIGTERM) continue;
    if (!claim_report()) return;
    Line line;
    line << "[horo_lite] " << names_[r].c_str() << " was killed by signal " << WTERMSIG(status) << ", and "
         << names_[rank_].c_str() << " was ended by its launcher\n";
    line.print();
    return;
  }
}

// --- handshake ---

static std::string unusable(const std::string& why) {
  return "an operation failed, and this group of ranks can no longer be used (" + why +
         "): to continue, call shutdown() and then init() on every rank";
}

void ShmGroup::check_usable() const {
  if (is_broken_.load(std::memory_order_acquire)) {
    const std::lock_guard lock(mutex_);
    throw PeerLost(unusable(broken_));
  }
  check_not_given_up();
}

// For any thread: one that waits for a message may learn of a loss during an operation.
void ShmGroup::note_broken(const std::string& why) {
  const std::lock_guard lock(mutex_);
  if (broken_.empty()) broken_ = why;
  is_broken_.store(true, std::memory_order_release);
}

void ShmGroup::check_not_given_up() const {
  RankBlock& own = block(rank_);
  const uint32_t state = own.state.load(std::memory_order_acquire);
  if (state == kGaveUp) throw PeerLost(unusable("this rank gave up (" + own.reason.get() + ")"));
}

std::vector<Header> ShmGroup::agree(const std::string& label, const Header& mine, const Round* round) {
  check_usable();
  if (detector_ != nullptr) detector_->check();
  RankBlock& own = block(rank_);
  set_label(label);
  ++entered_;
  // Peers compare it with their counter, which wraps around: see reached().
  if (entered_ % (1u << 20) == 0) raise_demanded(entered_);
  own.headers[entered_ % 2] = mine;
  if (detector_ != nullptr) own.entered_ns[entered_ % 2] = StallDetector::clock_ns();
  signal(own.entered, entered_);
  if (round != nullptr && round->demands) demand(entered_);
  wait_for_all(&RankBlock::entered, entered_, round);
  if (entered_ == 1) {  // ranks may see different CPUs, but chunks must be the same
    for (int r = 0; r < size_; ++r) oversubscribed_ = oversubscribed_ || block(r).oversubscribed;
  }
  std::vector<Header> headers(size_);
  int last = rank_;
  bool all_call = true;
  for (int r = 0; r < size_; ++r) {
    headers[r] = block(r).headers[entered_ % 2];
    all_call = all_call && (headers[r].flags & kCalls) != 0;
    if (block(r).entered_ns[entered_ % 2] > block(last).entered_ns[entered_ % 2]) last = r;
  }
  if (all_call && last != rank_ && detector_ != nullptr) {
    const int64_t since = own.entered_ns[entered_ % 2], until = block(last).entered_ns[entered_ % 2];
    detector_->waited_for(ranks_[last], detector_->running_ns(since, until));
  }
  return headers;
}

void ShmGroup::wake(int rank) {
  Flag& wake_up = block(rank).wake_up;
  wake_up.value.fetch_add(1, std::memory_order_seq_cst);
  if (wake_up.n_sleepers.load(std::memory_order_seq_cst) != 0) futex_wake(wake_up.value);
}

void ShmGroup::raise_demanded(uint32_t handshake) {
  std::atomic<uint32_t>& demanded = block(rank_).demanded;
  // Another thread may demand a later one.
  for (uint32_t last = demanded; !reached(last, handshake);) demanded.compare_exchange_weak(last, handshake);
}

void ShmGroup::demand(uint32_t handshake) {
  raise_demanded(handshake);
  for (int r = 0; r < size_; ++r) {
    if (r != rank_) wake(r);
  }
}

bool ShmGroup::is_demanded() const {
  const uint32_t entered = block(rank_).entered.value.load(std::memory_order_acquire);
  for (int r = 0; r < size_; ++r) {
    if (r != rank_ && !reached(entered, block(r).demanded.load(std::memory_order_seq_cst))) return true;
  }
  return false;
}

uint32_t ShmGroup::n_wake_ups() const { return block(rank_).wake_up.value.load(std::memory_order_seq_cst); }

void ShmGroup::wait_for_wake_up(uint32_t n_wake_ups, double timeout_s) {
  Flag& wake_up = block(rank_).wake_up;
  wake_up.n_sleepers.fetch_add(1, std::memory_order_seq_cst);
  if (!is_demanded()) futex_wait(wake_up.value, n_wake_ups, timeout_s);
  wake_up.n_sleepers.fetch_sub(1, std::memory_order_seq_cst);
}

// --- all-reduce ---

size_t ShmGroup::chunk_bytes(size_t total_bytes) const {
  return std::clamp(total_bytes / 16, kSmallestChunk, oversubscribed_ ? kSlotBytes / 2 : kSlotBytes);
}

Stores ShmGroup::stores_for(size_t n_chunks) {
  // Regardless of this rank's own setting, since the others need its answers.
  if (size_ > 1 && n_chunks >= (oversubscribed_ ? kManyChunks : kSomeChunks)) distance_.measure();
  return stores();
}

// For each chunk: every rank packs the shares of the others into its slot; the owner of a share sums it over all slots
// in rank order, reading its own contribution from its tensors, and writes the result into its tensors and its slot;
// then every rank unpacks the shares of the others. Three chunks are in progress at any time.
//
// When this rank packs chunk p = c + kAhead at the start of step c, it has seen every rank's reduction of chunk c - 2,
// which a peer signals in its own step c - 2, after it unpacked chunk c - 4 = p - kSlots and all before it. So no rank
// still reads the previous contents of the slot. (Shares of different chunks may overlap in a slot, so all of it must
// be free.) The next operation begins with a handshake, when every rank is done with this one.
void ShmGroup::allreduce(const Layout& layout, const std::vector<double>& weights, Factor factor) {
  RankBlock& own = block(rank_);
  const size_t n_chunks = layout.n_chunks();
  const uint32_t packed = packed_;
  const uint32_t reduced = reduced_;
  Stores stores = distance_.stores(slot_stores);
  std::vector<const uint8_t*> images(size_);
  size_t next = 0;
  PhaseClock clock;
  for (size_t chunk = 0; chunk <= n_chunks; ++chunk) {
    for (; next < std::min(n_chunks, chunk + kAhead + 1); ++next) {
      for (int share = 0; share < size_; ++share) {
        if (share != rank_) layout.encode(next, share, slot(rank_, next), stores);
      }
      signal(own.packed, ++packed_);
    }
    clock.ends(Phase::kPack);
    if (chunk < n_chunks) {
      wait_for_all(&RankBlock::packed, packed + static_cast<uint32_t>(chunk) + 1);
      clock.ends(Phase::kWait);
      if (chunk == 0) stores = stores_for(n_chunks);  // now that all are here
      for (int r = 0; r < size_; ++r) images[r] = slot(r, chunk);
      layout.reduce(chunk, rank_, images, rank_, weights, factor, slot(rank_, chunk), true, stores);
      signal(own.reduced, ++reduced_);
      clock.ends(Phase::kReduce);
    }
    if (chunk > 0) {
      const size_t done = chunk - 1;
      for (int i = 1; i < size_; ++i) {
        const int share = (rank_ + i) % size_;
        wait_for(share, &RankBlock::reduced, reduced + static_cast<uint32_t>(done) + 1);
        clock.ends(Phase::kWait);
        layout.decode(done, share, slot(share, done));
        clock.ends(Phase::kUnpack);
      }
    }
  }
}

// For each chunk: every rank packs the shares of the others into its slot; the owner of a share sums it over all slots
// in rank order, reading its own contribution from its tensors, and writes the result into its tensors. No rank needs
// the others' results, so there is no second half as in an all-reduce. The next operation begins with a handshake, when
// every rank has read what it needs.
void ShmGroup::reduce_scatter(const Layout& layout, const std::vector<double>& weights, Factor factor) {
  RankBlock& own = block(rank_);
  const size_t n_chunks = layout.n_chunks();
  const uint32_t packed = packed_;
  const uint32_t reduced = reduced_;
  Stores stores = distance_.stores(slot_stores);
  std::vector<const uint8_t*> images(size_);
  size_t next = 0;
  for (size_t chunk = 0; chunk < n_chunks; ++chunk) {
    for (; next < std::min(n_chunks, chunk + kAhead + 1); ++next) {
      // All ranks must have read the previous contents of this slot.
      if (next >= kSlots) wait_for_all(&RankBlock::reduced, reduced + static_cast<uint32_t>(next - kSlots) + 1);
      for (int i = 1; i < size_; ++i) layout.encode(next, (rank_ + i) % size_, slot(rank_, next), stores);
      signal(own.packed, ++packed_);
    }
    wait_for_all(&RankBlock::packed, packed + static_cast<uint32_t>(chunk) + 1);
    if (chunk == 0) stores = stores_for(n_chunks);  // now that all are here
    for (int r = 0; r < size_; ++r) images[r] = slot(r, chunk);
    // The image of the result is not read.
    layout.reduce(chunk, rank_, images, rank_, weights, factor, slot(rank_, chunk), true);
    signal(own.reduced, ++reduced_);
  }
}

// Every element is read and written by the owner of its share only, so ranks wait for each other only once, at the end.
void ShmGroup::reduce_in_place(const Layout& layout, const std::vector<ptrdiff_t>& distances, Factor factor) {
  PhaseClock clock;
  const bool to_all = layout.n_shares() == size_;
  for (size_t chunk = 0; chunk < layout.n_chunks(); ++chunk) {
    layout.reduce_in_place(chunk, to_all ? rank_ : 0, distances, factor, to_all);
  }
  signal(block(rank_).reduced, ++reduced_);
  clock.ends(Phase::kReduce);
  wait_for_all(&RankBlock::reduced, reduced_);
  clock.ends(Phase::kWait);
}

// --- moving bytes ---

void ShmGroup::exchange(const std::vector<Buffer>& stream, const std::vector<size_t>& stream_bytes,
                        const std::vector<Wanted>& wanted) {
  RankBlock& own = block(rank_);
  const size_t longest = *std::max_element(stream_bytes.begin(), stream_bytes.end());
  const size_t n_rounds = (longest + kSlotBytes - 1) / kSlotBytes;
  const uint32_t packed = packed_;
  const uint32_t reduced = reduced_;
  const Stores stores = stores_for(n_rounds);
  Cursor out(stream);
  std::vector<Cursor> in;
  in.reserve(wanted.size());
  std::vector<size_t> total;
  for (const Wanted& part : wanted) {
    in.emplace_back(part.buffers);
    total.push_back(0);
    for (const Buffer& buffer : part.buffers) total.back() += buffer.n_bytes;
  }
  size_t next = 0;
  for (size_t round = 0; round < n_rounds; ++round) {
    for (; next < std::min(n_rounds, round + kAhead + 1); ++next) {
      // All ranks must have taken the previous contents of this slot.
      if (next >= kSlots) wait_for_all(&RankBlock::reduced, reduced + static_cast<uint32_t>(next - kSlots) + 1);
      const size_t begin = std::min(stream_bytes[rank_], next * kSlotBytes);
      const size_t end = std::min(stream_bytes[rank_], begin + kSlotBytes);
      uint8_t* target = slot(rank_, next);
      out.step(end - begin, [&](uint8_t* data, size_t at, size_t n) { copy_bytes(target + at, data, n, stores); });
      finish_stores(stores);
      signal(own.packed, ++packed_);
    }
    for (size_t w = 0; w < wanted.size(); ++w) {
      const Wanted& part = wanted[w];
      const size_t begin = std::max(part.begin, round * kSlotBytes);
      const size_t end = std::min(part.begin + total[w], (round + 1) * kSlotBytes);
      if (begin >= end) continue;
      wait_for(part.source, &RankBlock::packed, packed + static_cast<uint32_t>(round) + 1);
      const uint8_t* from = slot(part.source, round) + (begin - round * kSlotBytes);
      in[w].step(end - begin,
                 [&](uint8_t* data, size_t at, size_t n) { copy_bytes(data, from + at, n, Stores::kCached); });
    }
    signal(own.reduced, ++reduced_);
  }
  // No rank reads a slot any more: the next operation need not begin with a handshake.
  if (n_rounds != 0) wait_for_all(&RankBlock::reduced, reduced + static_cast<uint32_t>(n_rounds));
}

}  // namespace horo
