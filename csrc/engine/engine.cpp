#include "engine/engine.h"

#include <pthread.h>
#include <signal.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <iterator>
#include <optional>
#include <utility>

#include "recorder/recorder.h"
#include "shm/futex.h"

namespace horo {
namespace {

// How long a thread waits for an asynchronous operation before its engine announces it: this saves rounds.
constexpr double kBlockedSeconds = 0.05;
// How often a waiting thread looks for what cannot wake it.
constexpr double kIdleSeconds = 0.05;
constexpr double kForeverSeconds = 3600.0;
// The name of the engine's thread in `top -H`, gdb and py-spy; the kernel allows 15 characters.
constexpr const char* kThreadName = "horo_lite async";

int this_thread() { return static_cast<int>(syscall(SYS_gettid)); }

// A joined rank's stand-in, while this thread submits it.
struct StandingIn {
  const Engine* engine;
  const std::string& name;
};
thread_local const StandingIn* standing_in = nullptr;

// Sets a variable for the time of a scope.
template <class Value>
class During {
 public:
  During(Value& variable, Value value) : variable_(variable), before_(std::exchange(variable, std::move(value))) {}
  ~During() { variable_ = std::move(before_); }
  During(const During&) = delete;
  During& operator=(const During&) = delete;

 private:
  Value& variable_;
  Value before_;
};

// A rank's announcements of a round.
class Writer {
 public:
  void number(uint64_t value) { text_.append(reinterpret_cast<const char*>(&value), sizeof(value)); }
  void real(double value) { text_.append(reinterpret_cast<const char*>(&value), sizeof(value)); }
  void string(const std::string& value) {
    number(value.size());
    text_ += value;
  }
  const std::string& text() const { return text_; }

 private:
  std::string text_;
};

class Reader {
 public:
  explicit Reader(const std::string& text) : text_(text) {}
  bool at_end() const { return position_ == text_.size(); }
  uint64_t number() { return plain<uint64_t>(); }
  double real() { return plain<double>(); }
  std::string string() {
    const size_t n = number();
    if (n > text_.size() - position_) throw std::runtime_error("engine: a peer's message is cut short");
    position_ += n;
    return text_.substr(position_ - n, n);
  }

 private:
  template <class T>
  T plain() {
    if (sizeof(T) > text_.size() - position_) throw std::runtime_error("engine: a peer's message is cut short");
    T value;
    std::memcpy(&value, text_.data() + position_, sizeof(T));
    position_ += sizeof(T);
    return value;
  }
  const std::string& text_;
  size_t position_ = 0;
};

void write_entry(Writer& writer, const Entry& entry) {
  writer.string(entry.name);
  writer.number(entry.is_withdrawal);
  if (entry.is_withdrawal) return;
  writer.number(entry.digest);
  writer.number(static_cast<uint64_t>(entry.count));
  writer.real(entry.weight);
}

Entry read_entry(Reader& reader) {
  Entry entry;
  entry.name = reader.string();
  entry.is_withdrawal = reader.number() != 0;
  if (entry.is_withdrawal) return entry;
  entry.digest = reader.number();
  entry.count = static_cast<int64_t>(reader.number());
  entry.weight = reader.real();
  return entry;
}

}  // namespace

bool Job::wait(double timeout_s) {
  std::unique_lock lock(mutex_);
  return changed_.wait_for(lock, std::chrono::duration<double>(timeout_s), [this] { return done(); });
}

void Job::result() const {
  if (error_) std::rethrow_exception(error_);
}

void Job::record(Operation what) {
  what.submitted_ns = submitted_ns;
  record_ = Recorder::of_process().submit(title(), what);
}

void Job::place(uint64_t position) {
  const std::lock_guard lock(mutex_);
  position_ = position;
  Recorder::of_process().place(record_, position);
}

uint64_t Job::position() const {
  const std::lock_guard lock(mutex_);
  return position_;
}

void Job::begin() {
  const std::lock_guard lock(mutex_);
  begun_ns = StallDetector::clock_ns();
  PhaseClock::times = {};
  if (record_ != 0) Recorder::of_process().begin(record_, begun_ns);
}

void Job::finish(std::exception_ptr error) {
  const std::lock_guard lock(mutex_);
  if (done()) return;  // by a shutdown() in the middle of it
  error_ = error;
  done_ns = StallDetector::clock_ns();
  if (record_ != 0) Recorder::of_process().finish(record_, done_ns, error != nullptr);
  done_.store(true, std::memory_order_release);
  changed_.notify_all();
}

void Job::end_call(std::exception_ptr error) {
  error_ = error;
  done_.store(true, std::memory_order_release);
}

Engine::Engine(std::unique_ptr<Channel> channel, std::vector<int> ranks, Explain explain)
    : channel_(std::move(channel)),
      ranks_(std::move(ranks)),
      explain_(std::move(explain)),
      pid_(getpid()),
      owner_(this_thread()),
      owner_thread_(std::this_thread::get_id()),
      on_wait_([this](const std::vector<uint32_t>& flags) { report_wait(flags); }) {
  channel_->set_on_idle([this] {
    if (calling_ != nullptr && on_idle) on_idle();
  });
  // Signals are handled by the training thread.
  sigset_t all, old;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &old);
  thread_ = std::thread([this] { loop(); });
  pthread_sigmask(SIG_SETMASK, &old, nullptr);
  pthread_getcpuclockid(thread_.native_handle(), &thread_clock_);
}

double Engine::busy_s() const {
  timespec time;
  if (clock_gettime(thread_clock_, &time) != 0) return 0;  // the thread has ended
  return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
}

Engine::~Engine() {
  if (!thread_.joinable()) return;
  if (getpid() != pid_) {  // a forked child has no such thread, and the mutex may have been locked at the fork
    thread_.detach();
    return;
  }
  try {
    std::unique_lock lock(mutex_);
    stopped_ = true;
    announce(lock);
  } catch (...) {  // Python is shutting down; the thread wakes up by itself after a while
  }
  thread_.join();
  channel_->set_on_idle(nullptr);
}

void Engine::submit(std::shared_ptr<Job> job, const Operation* record) {
  job->submitted_ns = StallDetector::clock_ns();
  const bool stands_in = standing_in != nullptr && standing_in->engine == this;
  if (stands_in) job->label = std::exchange(job->entry.name, standing_in->name);
  std::unique_lock lock(mutex_);
  if (broken_) throw_broken(lock, *job);
  if (stopping_) throw std::invalid_argument("'" + job->title() + "' was submitted after shutdown()");
  if (jobs_.contains(job->entry.name)) {
    throw std::invalid_argument("an operation named '" + job->title() +
                                "' is already in flight on this rank: synchronize() it first, or give this one "
                                "another name=");
  }
  check_apart(*job);
  if (record != nullptr) job->record(*record);  // before it can run, so that no rank's record of it is ahead of this
  jobs_.emplace(job->entry.name, job);
  for (const auto& [begin, end] : job->changes) changing_[begin] = {end, job->title()};
  if (stands_in) return;
  unannounced_.push_back(job->entry);
  announce(lock);
  if (detector_ != nullptr) detector_->doing(job->entry.name, StallDetector::clock_ns());
}

// Throws why the group is broken; or, if a call has thrown that already, that the group can no longer be used. A stall
// is thrown again by what is submitted.
void Engine::throw_broken(std::unique_lock<std::mutex>& lock, const Job& job, bool in_call) {
  const std::exception_ptr error = broken_;
  const bool is_seen = broken_seen_;
  broken_seen_ = is_seen || in_call;
  lock.unlock();
  if (is_seen && (in_call || !broken_by_stall_)) channel_->check_usable();
  try {
    std::rethrow_exception(error);
  } catch (const PeerLost& lost) {
    throw lost.in(job.title());
  }
}

// Unlocks, after a change of what this rank has to announce.
void Engine::announce(std::unique_lock<std::mutex>& lock) {
  // The message of a round in progress has been sent: once all have entered that round, the next one follows.
  const uint64_t round = std::exchange(demands_, true) ? 0 : round_.load();
  lock.unlock();
  if (round != 0) channel_->demand(round);
  channel_->wake();
}

void Engine::check_apart(const Job& job) const {
  for (const auto& [begin, end] : job.changes) {
    auto found = changing_.lower_bound(end);  // of the extents that begin before the end, the last reaches farthest
    if (found == changing_.begin() || (--found)->second.first <= begin) continue;
    throw std::invalid_argument(job.title() + " would change memory that " + found->second.second +
                                " in flight changes, too: synchronize() that one first, or use the out-of-place call");
  }
}

void Engine::withdraw(const std::shared_ptr<Job>& job) {
  std::unique_lock lock(mutex_);
  const auto found = jobs_.find(job->entry.name);
  if (found == jobs_.end() || found->second != job) return;
  Entry withdrawal;
  withdrawal.name = job->entry.name;
  withdrawal.is_withdrawal = true;
  unannounced_.push_back(std::move(withdrawal));
  announce(lock);
}

// --- the driver ---

class Engine::Over {
 public:
  Over(Engine& engine, const Job& job) : engine_(engine), job_(job) {}
  ~Over() {
    if (drives) {
      engine_.release(&job_);
    } else {
      engine_.end_wait(job_);
      const std::lock_guard lock(engine_.mutex_);
      --engine_.n_calls_;
    }
  }
  Over(const Over&) = delete;
  Over& operator=(const Over&) = delete;
  bool drives = false;

 private:
  Engine& engine_;
  const Job& job_;
};

void Engine::call(const std::shared_ptr<Job>& job) {
  const int64_t now = StallDetector::clock_ns();
  if (job->entry.name != kJoin) job->label = std::exchange(job->entry.name, kProgram);
  std::unique_lock lock(mutex_);
  if (broken_) throw_broken(lock, *job, true);
  if (stopping_) throw std::invalid_argument("'" + job->title() + "' was called after shutdown()");
  awaits_.push_back(
      {job, ++n_awaits_, now, StallDetector::thread_abort_ns, Await::kInCall, std::this_thread::get_id()});
  ++n_calls_;
  Over over(*this, *job);
  while (is_driven_) {
    wait_for_release(lock);
    if (!is_driven_) break;
    ++n_in_handlers_;  // which may wait for the engine's thread
    lock.unlock();
    try {
      if (on_idle) on_idle();
    } catch (...) {
      // The others make this call: this rank's next one must not be matched with it.
      channel_->abandon("it was interrupted in " + job->title());
      lock.lock();
      --n_in_handlers_;
      lock.unlock();
      throw;
    }
    lock.lock();
    --n_in_handlers_;
  }
  if (broken_) throw_broken(lock, *job, true);  // meanwhile
  if (stopping_) {
    lock.unlock();
    throw PeerLost("shutdown() was called in the middle of " + job->title());
  }
  --n_calls_;
  over.drives = is_driven_ = true;
  driver_ = std::this_thread::get_id();
  calling_ = job;
  is_announced_ = false;
  if (detector_ != nullptr) detector_->doing(job->title(), now);
  const During<std::function<StallDetector::Overdue(int64_t)>> limits(StallDetector::overdue_of_others,
                                                                      [this](int64_t ns) { return overdue(ns); });
  try {
    lock.unlock();
    while (!job->done()) {
      const uint32_t n_wake_ups = channel_->n_wake_ups();
      if (advance()) continue;
      channel_->wait(n_wake_ups, kIdleSeconds);
      report_wait();
      check_peers();
      if (on_idle) on_idle();
    }
    if (unmatched_wait_) report_wait();  // it is over
  } catch (...) {
    fail_all(std::current_exception());
    const std::lock_guard seen(mutex_);
    broken_seen_ = error_seen_ = true;
    throw;
  }
  job->result();
}

bool Engine::take_over() {
  std::unique_lock lock(mutex_);
  if (broken_) return false;
  if (is_driven_ || n_calls_ != n_in_handlers_) {
    wait_for_release(lock);
    return false;
  }
  driver_ = std::this_thread::get_id();
  return is_driven_ = true;
}

void Engine::release(const Job* call) {
  calling_.reset();
  driver_ = std::thread::id();
  const bool is_rest = !ready_.empty();
  bool sleep;
  {
    const std::lock_guard lock(mutex_);
    if (call != nullptr) forget_wait(*call);
    is_driven_ = false;
    ++n_releases_;
    sleep = n_sleepers_ != 0;
  }
  if (sleep) futex_wake(n_releases_);
  if (is_rest) channel_->wake();
}

// Returns after some time at the latest.
void Engine::wait_for_release(std::unique_lock<std::mutex>& lock) {
  const uint32_t n_releases = n_releases_;
  ++n_sleepers_;
  lock.unlock();
  futex_wait(n_releases_, n_releases, kIdleSeconds);
  lock.lock();
  --n_sleepers_;
}

void Engine::loop() {
  pthread_setname_np(pthread_self(), kThreadName);
  StallDetector::overdue_of_others = [this](int64_t now_ns) { return overdue(now_ns); };
  while (true) {
    // Before what it is compared with: whoever changes that wakes this thread afterwards.
    const uint32_t n_wake_ups = channel_->n_wake_ups();
    size_t n_jobs;
    {
      const std::lock_guard lock(mutex_);
      if (stopped_ || broken_ || (stopping_ && jobs_.empty())) break;
      n_jobs = jobs_.size();
    }
    pump(n_wake_ups, n_jobs != 0 ? kIdleSeconds : kForeverSeconds);
  }
  const std::lock_guard lock(mutex_);
  ended_ = true;
  end_.notify_all();
}

void Engine::pump(uint32_t n_wake_ups, double timeout_s) {
  if (!take_over()) return;
  bool is_idle = false;
  try {
    is_idle = !advance();
    if (is_idle || unmatched_wait_) report_wait();
    if (is_idle) check_peers();
  } catch (...) {
    fail_all(std::current_exception());
  }
  release();
  if (!is_idle) return;
  try {
    channel_->wait(n_wake_ups, timeout_s);
  } catch (...) {
    while (!take_over()) {
      const std::lock_guard lock(mutex_);
      if (broken_) return;
    }
    fail_all(std::current_exception());
    release();
  }
}

bool Engine::advance() {
  if (is_due()) {
    std::unique_lock lock(mutex_);
    exchange_round(lock);
  } else if (!ready_.empty()) {
    auto [name, known] = std::move(ready_.front());
    ready_.pop_front();
    run_ready(name, std::move(known));
  } else {
    return false;
  }
  return true;
}

// Whether this rank enters the next round now.
bool Engine::is_due() {
  if (!ready_.empty()) return has_run_ && channel_->needs_handshakes();  // on all ranks alike
  if (calling_ != nullptr && (!is_announced_ || !is_quiet_)) return true;
  {
    const std::lock_guard lock(mutex_);
    if (!unannounced_.empty()) return true;
    const Waits waits = waiting();
    if (!waits.none() && (!is_quiet_ || waits != announced_waits_)) return true;
  }
  return channel_->is_demanded();
}

// --- waits ---

void Engine::watched_by(std::shared_ptr<StallDetector> detector) {
  const std::lock_guard lock(mutex_);
  detector_ = std::move(detector);
}

void Engine::begin_wait(std::shared_ptr<Job> job, bool beside) {
  const std::lock_guard lock(mutex_);
  forget_wait(*job);
  const int64_t abort_ns = StallDetector::thread_abort_ns;
  awaits_.push_back({std::move(job), ++n_awaits_, StallDetector::clock_ns(), abort_ns,
                     beside ? Await::kBeside : Await::kHere, std::this_thread::get_id()});
}

void Engine::end_wait(const Job& job) {
  const std::lock_guard lock(mutex_);
  forget_wait(job);
}

// Other threads may wait for the same job.
void Engine::forget_wait(const Job& job) {
  const std::thread::id thread = std::this_thread::get_id();
  std::erase_if(awaits_, [&](const Await& await) { return await.job.get() == &job && await.thread == thread; });
}

const Engine::Await* Engine::awaited() const {
  const Await* first = nullptr;
  for (const Await& await : awaits_) {
    if (await.job->done()) continue;
    const bool is_sooner =
        first != nullptr && await.abort_ns != 0 &&
        (first->abort_ns == 0 || await.since_ns + await.abort_ns < first->since_ns + first->abort_ns);
    if (first == nullptr || is_sooner) first = &await;
  }
  return first;
}

// The limit of the threads that wait for this one's operations.
StallDetector::Overdue Engine::overdue(int64_t now_ns) {
  const std::lock_guard lock(mutex_);
  const Await* await = awaited();
  if (await == nullptr || await->abort_ns == 0 || detector_ == nullptr) return {};
  return {await->abort_ns, detector_->running_ns(await->since_ns, now_ns) - await->abort_ns};
}

// Returns which waits this rank is in, and has been for some time if they are for asynchronous operations. A wait that
// is over does not count, even if its thread has not woken up yet.
Engine::Waits Engine::waiting() const {
  Waits waits;
  if (stopping_ && !jobs_.empty()) waits.program = UINT64_MAX;
  if (awaits_.empty()) return waits;
  int64_t long_ago = 0;
  const auto is_long = [&](const Await& await) {
    if (long_ago == 0) long_ago = StallDetector::clock_ns() - static_cast<int64_t>(kBlockedSeconds * 1e9);
    return await.since_ns <= long_ago;
  };
  // If the training thread has ended, any thread may be the training thread.
  const auto counts = [&](std::thread::id thread) {
    return thread == owner_thread_ || syscall(SYS_tgkill, pid_, owner_, 0) != 0;
  };
  for (const Await& await : awaits_) {
    // A call that still waits for the driver's end has announced nothing: it counts once it drives.
    const bool counts_yet = await.how == Await::kInCall ? await.job == calling_ : is_long(await);
    if (await.job->done() || !counts_yet) continue;
    if (await.how == Await::kBeside) waits.beside = await.number;
    else if (waits.program == 0 && counts(await.thread)) waits.program = await.number;
  }
  return waits;
}

std::string Engine::waits_in() {
  const std::lock_guard lock(mutex_);
  if (const Await* await = awaited()) return await->job->title();
  return stopping_ ? "shutdown()" : "";
}

size_t Engine::n_in_flight() {
  const std::lock_guard lock(mutex_);
  return jobs_.size();
}

// --- rounds ---

// Unlocks.
void Engine::exchange_round(std::unique_lock<std::mutex>& lock) {
  Header mine;
  Writer more;
  Round round{false, on_wait_, nullptr};
  announced_waits_ = waiting();
  // The others may already wait for operations that only this rank lacks.
  const bool joins = calling_ != nullptr && !is_announced_ && calling_->entry.name == kJoin;
  // While operations are ready, all ranks enter it anyway.
  round.demands = ready_.empty() && (is_quiet_ || joins || !unannounced_.empty());
  for (const Entry& entry : unannounced_) write_entry(more, entry);
  unannounced_.clear();
  demands_ = round.demands || !ready_.empty();
  round_ = channel_->next_handshake();
  lock.unlock();
  if (calling_ != nullptr && !is_announced_) {
    const Entry& entry = calling_->entry;
    if (entry.name == kJoin) write_entry(more, entry);
    else mine = {entry.digest, entry.count, entry.weight, kCalls};
    is_announced_ = true;
  }
  mine.flags |= kEntered;
  if (announced_waits_.program != 0) mine.flags |= kBlocked;
  if (announced_waits_.beside != 0) mine.flags |= kBlockedBeside;
  mine.n_more = static_cast<uint32_t>(more.text().size());
  round_since_ns_ = 0;
  const std::vector<Header> headers = channel_->agree(label(), mine, &round);
  round_ = 0;
  has_run_ = false;

  ++n_rounds_;
  bool all_call = !known_.contains(kProgram), is_more = false;
  for (const Header& header : headers) {
    all_call = all_call && (header.flags & kCalls) != 0;
    is_more = is_more || header.n_more != 0;
  }
  if (all_call && !is_more) {  // nothing else is new
    Known known;
    known.has.assign(headers.size(), true);
    known.entries.reserve(headers.size());
    for (const Header& header : headers) {
      known.entries.push_back({kProgram, header.digest, header.count, header.weight, ++n_announced_});
    }
    is_quiet_ = false;
    run_ready(kProgram, std::move(known));
    return;
  }
  const std::vector<std::string> everyone =
      is_more ? channel_->gather(more.text(), headers) : std::vector<std::string>(headers.size());
  is_quiet_ = !is_more;
  for (int r = 0; r < channel_->size(); ++r) {
    const Header& header = headers[r];
    if ((header.flags & kCalls) != 0) {
      announced(r, {kProgram, header.digest, header.count, header.weight});
      is_quiet_ = false;
    }
    Reader reader(everyone[r]);
    while (!reader.at_end()) announced(r, read_entry(reader));
  }
  collect_ready();
  fail_if_stuck(headers);
}

void Engine::announced(int rank, Entry entry) {
  if (entry.is_withdrawal) {
    withdrawn(rank, entry.name);
    return;
  }
  entry.sequence = ++n_announced_;
  const auto [found, is_first] = known_.try_emplace(entry.name);
  auto& [name, known] = *found;
  if (is_first) {
    order_.push_back(name);
    known.position = entry.sequence;
    known.entries.resize(channel_->size());
    known.has.resize(channel_->size());
  }
  known.has[rank] = true;
  known.latest = known.round == n_rounds_ ? -1 : rank;
  known.round = n_rounds_;
  known.entries[rank] = std::move(entry);
  if (rank != channel_->rank()) return;
  if (const std::shared_ptr<Job> job = find(name)) job->place(known.position);
}

// Moves what all ranks have submitted to `ready_`.
void Engine::collect_ready() {
  std::vector<std::string> ready;
  const auto is_due = [this](const std::string& name) { return is_ready(name); };
  std::copy_if(order_.begin(), order_.end(), std::back_inserter(ready), is_due);
  order_.erase(std::remove_if(order_.begin(), order_.end(), is_due), order_.end());
  // Ranks that have joined take part in all operations before the end of join().
  std::stable_partition(ready.begin(), ready.end(), [](const std::string& name) { return name != kJoin; });
  for (const std::string& name : ready) {
    std::pair<std::string, Known> next(name, std::move(known_.at(name)));
    // The program waits for its call. Then it may continue, while the engine's thread runs the rest.
    if (name == kProgram) ready_.push_front(std::move(next));
    else ready_.push_back(std::move(next));
    known_.erase(name);
  }
}

void Engine::run_ready(const std::string& name, Known known) {
  record_last_rank(name, known);
  if (unmatched_wait_ && unmatched_name_ == name) {
    unmatched_wait_->over();
    unmatched_wait_.reset();
  }
  run(name, std::move(known));
}

// If no rank can continue by itself, ends what is unmatched.
void Engine::fail_if_stuck(const std::vector<Header>& headers) {
  bool all_blocked = ready_.empty(), all_beside = ready_.empty();
  for (int r = 0; r < channel_->size(); ++r) {
    if (has_joined(r)) continue;  // it takes part in the others' operations
    all_blocked = all_blocked && (headers[r].flags & kBlocked) != 0;
    all_beside = all_beside && (headers[r].flags & kBlockedBeside) != 0;
  }
  const size_t n_unmatched = known_.size() - known_.count(kJoin);
  if (all_blocked && n_unmatched != 0) fail_unmatched(false);
  else if (all_beside && n_unmatched > known_.count(kProgram)) fail_unmatched(true);
}

// Treats what `rank` has submitted under this name as not submitted, unless it was run in an earlier round.
void Engine::withdrawn(int rank, const std::string& name) {
  const auto found = known_.find(name);
  if (found == known_.end() || !found->second.has[rank]) return;
  found->second.has[rank] = false;
  if (std::find(found->second.has.begin(), found->second.has.end(), true) == found->second.has.end()) {
    known_.erase(found);
    order_.erase(std::find(order_.begin(), order_.end(), name));
  }
  if (rank != channel_->rank()) return;
  if (const std::shared_ptr<Job> job = take(name)) {
    job->is_withdrawn = true;
    // Its result is not waited for.
    job->finish(std::make_exception_ptr(Mismatch(name + " was withdrawn on this rank")));
  }
}

bool Engine::has_joined(int rank) const {
  const auto found = known_.find(kJoin);
  return found != known_.end() && found->second.has[rank];
}

bool Engine::is_ready(const std::string& name) const {
  const Known& known = known_.at(name);
  for (int r = 0; r < channel_->size(); ++r) {
    if (!known.has[r] && (name == kJoin || !has_joined(r))) return false;
  }
  return true;
}

std::vector<int> Engine::numbers(const std::function<bool(int)>& is_so) const {
  std::vector<int> numbers;
  for (int r = 0; r < channel_->size(); ++r) {
    if (is_so(r)) numbers.push_back(ranks_[r]);
  }
  return numbers;
}

// Returns this rank's job of that name; null if there is none.
std::shared_ptr<Job> Engine::find(const std::string& name) {
  if (calling_ != nullptr && calling_->entry.name == name) return calling_;
  const std::lock_guard lock(mutex_);
  const auto found = jobs_.find(name);
  return found == jobs_.end() ? nullptr : found->second;
}

// Returns the same, which is no longer in flight.
std::shared_ptr<Job> Engine::take(const std::string& name) {
  if (calling_ != nullptr && calling_->entry.name == name) return calling_;
  const std::lock_guard lock(mutex_);
  const auto found = jobs_.find(name);
  if (found == jobs_.end()) return nullptr;
  const std::shared_ptr<Job> job = found->second;
  jobs_.erase(found);
  for (const auto& [begin, end] : job->changes) changing_.erase(begin);
  // A withdrawal that came while it ran is obsolete, and peers may have ended by the time it is announced.
  std::erase_if(unannounced_, [&](const Entry& entry) { return entry.name == name; });
  return job;
}

void Engine::run(const std::string& name, Known known) {
  std::shared_ptr<Job> job = find(name);  // null if this rank has joined, and until it takes part
  const bool has_joined = job == nullptr;
  static const std::string others_call = "a blocking call";
  const std::string& title = job != nullptr ? job->title() : name == kProgram ? others_call : name;
  std::exception_ptr error;
  is_quiet_ = false;  // if ranks wait for something else, they may be stuck after this
  try {
    check_alike(title, job.get(), known);
    if (std::find(known.has.begin(), known.has.end(), false) != known.has.end()) {
      job = stand_in(name, job, &known);
      check_alike(title, job.get(), known);
    } else if (job != calling_) {
      channel_->set_label(title);  // a call's label is that of its round
    }
    has_run_ = true;
    has_moved_ = true;
    if (job != calling_) job->begin();
    job->run(known.entries);
  } catch (const Mismatch&) {
    error = std::current_exception();
  } catch (const Recoverable& recoverable) {
    error = recoverable.error;
  } catch (const std::invalid_argument&) {  // arguments that all ranks have compared are invalid: nothing was moved
    error = std::current_exception();
  } catch (...) {
    // Whatever the error is, other ranks may still be in the middle of the operation.
    if (job == nullptr || job != calling_) failed_in_ = title;
    take(name);
    if (job != nullptr) finish(*job, std::current_exception());
    throw;
  }
  // The operation's own waits have found stops during it.
  seen_ns_ = StallDetector::clock_ns();
  if (unmatched_wait_) unmatched_wait_->resume();
  take(name);
  if (job == nullptr) return;          // a rank that has joined waits for the next operation
  if (has_joined) job->finish(error);  // to be raised by the ranks that submitted it
  else finish(*job, error);
}

// Throws on all ranks, given this rank's job if it has one, unless all that have submitted it have submitted the same.
void Engine::check_alike(const std::string& title, const Job* job, const Known& known) {
  const Entry* first = nullptr;
  bool alike = true;
  for (int r = 0; r < channel_->size(); ++r) {
    if (!known.has[r]) continue;
    if (first == nullptr) first = &known.entries[r];
    alike = alike && known.entries[r].digest == first->digest;
  }
  if (alike) return;
  std::vector<std::string> descriptions;
  const std::vector<std::string> everyone = exchange(job == nullptr ? "" : job->describe());
  for (int r = 0; r < channel_->size(); ++r) {
    if (known.has[r]) descriptions.push_back(everyone[r]);
  }
  throw Mismatch(explain_(title, descriptions, numbers([&](int r) { return known.has[r]; })));
}

// Returns this rank's job for an operation, and fills in the entries of ranks that have joined.
std::shared_ptr<Job> Engine::stand_in(const std::string& name, std::shared_ptr<Job> job, Known* known) {
  Writer mine;
  if (job != nullptr) {
    const Participation participation = job->participation(numbers([&](int r) { return !known->has[r]; }));
    mine.string(participation.refusal);
    mine.number(static_cast<uint64_t>(participation.count));
    mine.real(participation.weight);
    mine.string(participation.text);
  }
  const std::vector<std::string> everyone = exchange(mine.text());
  const auto first = static_cast<size_t>(std::find(known->has.begin(), known->has.end(), true) - known->has.begin());
  Reader reader(everyone[first]);
  if (const std::string refusal = reader.string(); !refusal.empty()) throw Mismatch(refusal);
  Entry entry = known->entries[first];
  entry.count = static_cast<int64_t>(reader.number());
  entry.weight = reader.real();
  if (job == nullptr) {
    const StandingIn part{this, name};
    const During<const StandingIn*> submitting(standing_in, &part);
    find(kJoin)->stand_in(reader.string());
    job = find(name);
    if (job == nullptr) throw std::logic_error("a rank that has joined did not take part in an operation");
  }
  // Their memory is ready only now.
  const std::vector<Header> headers = channel_->agree(job->title(), {job->entry.digest}, nullptr);
  for (size_t r = 0; r < known->has.size(); ++r) {
    if (known->has[r]) continue;
    known->has[r] = true;
    known->entries[r] = entry;
    known->entries[r].digest = headers[r].digest;
  }
  return job;
}

void Engine::finish(Job& job, std::exception_ptr error) {
  if (&job == calling_.get()) return job.end_call(error);  // and throws its error
  if (error) {
    const std::lock_guard lock(mutex_);
    if (!failed_) failed_ = error;
  }
  job.finish(error);
}

void Engine::result(const Job& job) {
  try {
    job.result();
  } catch (...) {
    const std::lock_guard lock(mutex_);
    error_seen_ = true;
    broken_seen_ = broken_seen_ || broken_;
    throw;
  }
}

std::string Engine::label() {
  if (calling_ != nullptr) return calling_->title();
  const std::string label = "the matching of asynchronous operations";
  if (!ready_.empty()) {
    if (const std::shared_ptr<Job> job = find(ready_.front().first)) return job->title();
  }
  const std::lock_guard lock(mutex_);
  if (const Await* await = awaited()) return await->job->title() + ", in " + label;
  return jobs_.empty() ? "" : jobs_.begin()->second->title() + ", in " + label;
}

std::vector<std::string> Engine::exchange(const std::string& mine) {
  Header header;
  header.n_more = static_cast<uint32_t>(mine.size());
  const std::vector<Header> headers = channel_->agree(label(), header, nullptr);
  has_run_ = false;
  return channel_->gather(mine, headers);
}

void Engine::check_peers() {
  for (const auto& [name, known] : known_) {
    if (!known.has[channel_->rank()]) continue;  // does not affect this rank
    const std::shared_ptr<Job> job = find(name);
    for (int r = 0; r < channel_->size(); ++r) {
      if (!known.has[r]) channel_->check(r, job == nullptr ? name : job->title());
    }
  }
}

// Reports to the stall detector that the program waits for an operation that some ranks have not submitted. `flags` are
// those of all ranks during a round.
void Engine::report_wait(const std::vector<uint32_t>& flags) {
  std::string name, title;
  int64_t since = 0;
  {
    const std::lock_guard lock(mutex_);
    if (detector_ == nullptr) return;
    if (const Await* await = awaited()) {
      since = await->since_ns;
      name = await->job->entry.name;
      title = await->job->title();
    } else if (stopping_) {
      since = stopping_ns_;
      const auto found = std::find_if(known_.begin(), known_.end(),
                                      [&](const auto& each) { return each.second.has[channel_->rank()]; });
      if (found != known_.end()) name = title = found->first;
    }
  }
  const auto found = known_.find(name);
  const bool is_known = found != known_.end();
  const bool waits = is_known || !flags.empty();
  if (name.empty() && waits) {  // only the engine waits
    if (round_since_ns_ == 0) round_since_ns_ = StallDetector::clock_ns();
    since = round_since_ns_;
    title = "the matching of asynchronous operations";
  }
  // The first look at a wait is a moment after it has begun.
  seen_ns_ = detector_->look(since == 0 ? StallDetector::clock_ns() : std::max(since, seen_ns_));
  if (std::exchange(has_moved_, false)) moved_ns_ = seen_ns_;
  // A rank that has joined waits only while the others do nothing.
  if (waits && name == kJoin) since = std::max(since, moved_ns_);
  if (unmatched_wait_ && (!waits || since != unmatched_since_ns_)) {
    unmatched_wait_->over();
    unmatched_wait_.reset();
  }
  if (!waits) return;
  if (!unmatched_wait_) unmatched_wait_.emplace(detector_, since);
  unmatched_since_ns_ = since;
  unmatched_name_ = name;
  const auto is_late = [&](int r) {
    if (!is_known) return flags[r] == 0;
    if (found->second.has[r]) return false;
    // What is announced in this round is not known yet.
    if (name == kProgram && !flags.empty() && (flags[r] & kCalls) != 0) return false;
    return name == kJoin || !has_joined(r);
  };
  unmatched_wait_->report_if_due(title + detector_->scope(ranks_), numbers([&](int r) { return !is_late(r); }),
                                 numbers(is_late));
}

// Records which rank was the last to submit an operation that the program waits for.
void Engine::record_last_rank(const std::string& name, const Known& known) {
  if (known.latest < 0 || known.latest == channel_->rank()) return;
  const std::lock_guard lock(mutex_);
  if (detector_ == nullptr) return;
  for (const Await& await : awaits_) {
    if (await.job->entry.name != name) continue;
    seen_ns_ = detector_->look(std::max(await.since_ns, seen_ns_));
    detector_->waited_for(ranks_[known.latest], detector_->running_ns(await.since_ns, seen_ns_));
  }
}

// All ranks wait, none of them for an operation that all have submitted: every name in flight lacks some rank. Does
// nothing if one of them does not wait any more.
void Engine::fail_unmatched(bool only_beside) {
  Writer confirmation;
  {
    const std::lock_guard lock(mutex_);
    const Waits waits = waiting();
    const bool still =
        only_beside ? waits.beside == announced_waits_.beside : waits.program == announced_waits_.program;
    // A call that waits to drive is announced in the next round, whatever its thread waited for in this one; but not
    // after shutdown().
    confirmation.number(still && unannounced_.empty() && (n_calls_ == 0 || stopping_));
  }
  confirmation.string(waits_in());
  std::vector<std::string> calls;
  bool confirmed = true;
  for (const std::string& text : exchange(confirmation.text())) {
    Reader reader(text);
    confirmed = reader.number() != 0 && confirmed;
    calls.push_back(reader.string());
  }
  if (!confirmed) return;
  // As soon as the first job has failed, its thread may submit again, under any of these names.
  std::map<std::string, Known> unmatched;
  unmatched.swap(known_);
  order_.clear();
  for (const char* kept : {kJoin, only_beside ? kProgram : kJoin}) {
    if (auto known = unmatched.extract(kept)) {
      known_.insert(std::move(known));
      order_.emplace_back(kept);
    }
  }
  ++n_failed_;
  std::vector<std::pair<std::shared_ptr<Job>, std::string>> failed;
  for (const auto& [name, known] : unmatched) {
    if (!known.has[channel_->rank()]) continue;
    const std::string have = ranks_text(numbers([&](int r) { return known.has[r]; }));
    const auto lacks = [&](int r) { return !known.has[r] && !has_joined(r); };
    std::string elsewhere;
    for (int r = 0; r < channel_->size(); ++r) {
      if (lacks(r) && !calls[r].empty()) elsewhere += ", rank " + std::to_string(ranks_[r]) + " in " + calls[r];
    }
    const std::shared_ptr<Job> job = take(name);
    failed.emplace_back(job, job->title() + (name == kProgram ? " was called by " : " was submitted by ") + have +
                                 " but not by " + ranks_text(numbers(lacks)) + ", and every rank is waiting" +
                                 elsewhere +
                                 ": none can continue. Look for a call that some ranks do not make, such as "
                                 "one inside `if rank == 0`, or make in another order. Asynchronous operations "
                                 "are matched by name.");
  }
  for (const auto& [job, text] : failed) finish(*job, std::make_exception_ptr(Mismatch(text)));
}

void Engine::fail_all(std::exception_ptr error) {
  unmatched_wait_.reset();
  // An operation's own error is raised by its handle; all other handles, and later ones, raise why the engine stopped.
  std::string reason = "asynchronous operations stopped";
  bool is_loss = true;
  std::optional<PeerLost> lost_peer;
  try {
    std::rethrow_exception(error);
  } catch (const PeerLost& lost) {
    lost_peer = lost.in(label());  // of what was submitted meanwhile
    reason = lost_peer->what();
  } catch (const Stalled& stalled) {
    reason = stalled.what();
    is_loss = false;
  } catch (const std::exception& e) {
    if (calling_ != nullptr && failed_in_.empty()) reason = calling_->title() + " raised " + in_one_line(e);
    else reason = (failed_in_.empty() ? "the matching of asynchronous operations" : failed_in_) + " raised " + e.what();
  } catch (...) {
  }
  std::map<std::string, std::shared_ptr<Job>> jobs;
  {
    const std::lock_guard lock(mutex_);
    if (broken_) return;
    broken_ = is_loss ? std::make_exception_ptr(lost_peer.value_or(PeerLost(reason))) : error;
    broken_by_stall_ = !is_loss;
    jobs.swap(jobs_);
    changing_.clear();
    unannounced_.clear();
  }
  if (is_loss) {
    std::string in_flight;
    for (const auto& [name, job] : jobs) in_flight += (in_flight.empty() ? "; in flight: " : ", ") + name;
    if (in_flight.size() > 200) in_flight.replace(200, std::string::npos, " …");
    error = std::make_exception_ptr(PeerLost(reason + in_flight));
  }
  try {
    if (lost_peer) channel_->pass_on(*lost_peer);
    else channel_->abandon(reason);
  } catch (...) {  // peers must detect it themselves
  }
  for (auto& [name, job] : jobs) finish(*job, error);
}

void Engine::drain() {
  if (drives_here() && n_in_flight() != 0) {
    const std::string where = calling_ != nullptr ? calling_->title() : "an asynchronous operation";
    fail_all(std::make_exception_ptr(PeerLost("shutdown() was called in the middle of " + where)));
  }
  {
    std::unique_lock lock(mutex_);
    stopping_ = true;
    stopping_ns_ = StallDetector::clock_ns();
    announce(lock);
  }
  const auto has_ended = [this] {
    std::unique_lock lock(mutex_);
    return end_.wait_for(lock, std::chrono::duration<double>(kBlockedSeconds), [this] { return ended_; });
  };
  if (std::this_thread::get_id() != thread_.get_id()) {  // that ends when it returns from here
    while (!has_ended()) {
      if (on_idle) on_idle();
    }
    if (thread_.joinable()) thread_.join();
  }
  if (failed_ && !error_seen_) std::rethrow_exception(failed_);
}

}  // namespace horo
