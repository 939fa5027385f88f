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

#include "recorder/recorder.h"

namespace horo {
namespace {

// How long the training thread waits before its engine announces it, and how often the engine repeats that.
constexpr double kBlockedSeconds = 0.05;
constexpr double kForeverSeconds = 3600.0;
// The name of the engine's thread in `top -H`, gdb and py-spy; the kernel allows 15 characters.
constexpr const char* kThreadName = "horo_lite async";

int this_thread() { return static_cast<int>(syscall(SYS_gettid)); }

// A rank's message of a round: which waits it is in, then its announcements.
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

void Job::record_as(uint64_t number) {
  const std::lock_guard lock(mutex_);
  record_ = number;
  Recorder& recorder = Recorder::of_process();
  recorder.place(record_, position_);
  if (begun_ns != 0) recorder.begin(record_, begun_ns);
  if (done()) recorder.finish(record_, done_ns, error_ != nullptr);
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
  Recorder::of_process().begin(record_, begun_ns);
}

void Job::finish(std::exception_ptr error) {
  const std::lock_guard lock(mutex_);
  error_ = error;
  done_ns = StallDetector::clock_ns();
  Recorder::of_process().finish(record_, done_ns, error != nullptr);
  done_.store(true, std::memory_order_release);
  changed_.notify_all();
}

Engine::Engine(std::unique_ptr<Channel> channel, std::vector<int> ranks, Explain explain, DirectWaits direct_waits)
    : channel_(std::move(channel)),
      ranks_(std::move(ranks)),
      explain_(std::move(explain)),
      direct_waits_(std::move(direct_waits)),
      pid_(getpid()),
      owner_(this_thread()) {
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
  {
    const std::lock_guard lock(mutex_);
    stopped_ = true;
  }
  try {
    channel_->wake();
  } catch (...) {  // Python is shutting down; the thread wakes up by itself after a while
  }
  thread_.join();
}

void Engine::submit(std::shared_ptr<Job> job) {
  job->submitted_ns = StallDetector::clock_ns();
  {
    const std::lock_guard lock(mutex_);
    if (broken_) std::rethrow_exception(broken_);
    if (stopping_) throw std::invalid_argument("'" + job->entry.name + "' was submitted after shutdown()");
    if (jobs_.contains(job->entry.name)) {
      throw std::invalid_argument("an operation named '" + job->entry.name +
                                  "' is already in flight on this rank: synchronize() it first, or give this one "
                                  "another name=");
    }
    check_apart(*job);
    jobs_.emplace(job->entry.name, job);
    for (const auto& [begin, end] : job->changes) changing_[begin] = {end, job->entry.name};
    if (std::this_thread::get_id() == thread_.get_id()) return;
    unannounced_.push_back(job->entry);
  }
  if (detector_ != nullptr) detector_->doing(job->entry.name, StallDetector::clock_ns());
  channel_->wake();
}

void Engine::check_apart(const Job& job) const {
  for (const auto& [begin, end] : job.changes) {
    auto found = changing_.lower_bound(end);  // of the extents that begin before the end, the last reaches farthest
    if (found == changing_.begin() || (--found)->second.first <= begin) continue;
    throw std::invalid_argument(job.entry.name + " would change memory that " + found->second.second +
                                " in flight changes, too: synchronize() that one first, or use the out-of-place call");
  }
}

void Engine::withdraw(const std::shared_ptr<Job>& job) {
  {
    const std::lock_guard lock(mutex_);
    const auto found = jobs_.find(job->entry.name);
    if (found == jobs_.end() || found->second != job) return;
    Entry withdrawal;
    withdrawal.name = job->entry.name;
    withdrawal.is_withdrawal = true;
    unannounced_.push_back(std::move(withdrawal));
  }
  channel_->wake();
}

void Engine::watched_by(std::shared_ptr<StallDetector> detector) {
  const std::lock_guard lock(mutex_);
  detector_ = std::move(detector);
}

void Engine::begin_wait(std::shared_ptr<Job> job, bool beside) {
  const std::lock_guard lock(mutex_);
  std::erase_if(awaits_, [&](const Await& await) { return await.job == job; });
  const int64_t abort_ns = StallDetector::thread_abort_ns;
  awaits_.push_back({std::move(job), ++n_awaits_, StallDetector::clock_ns(), abort_ns, beside, this_thread()});
}

void Engine::end_wait(const Job& job) {
  const std::lock_guard lock(mutex_);
  std::erase_if(awaits_, [&](const Await& await) { return await.job.get() == &job; });
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

// Returns which waits this rank has been in for some time; a wait that is over does not count, even if its thread has
// not woken up yet. The training thread's number is odd if it waits for an asynchronous operation.
Engine::Waits Engine::waiting() {
  const DirectWait direct = direct_waits_ ? direct_waits_() : DirectWait{};
  // If that thread has ended, any thread may be the training thread.
  const bool is_anyones = syscall(SYS_tgkill, pid_, owner_, 0) != 0;
  const auto counts = [&](int thread) { return is_anyones || thread == owner_; };
  uint64_t wait = 0, beside = 0;
  {
    const std::lock_guard lock(mutex_);
    const auto long_ago = StallDetector::clock_ns() - static_cast<int64_t>(kBlockedSeconds * 1e9);
    for (const Await& await : awaits_) {
      if (await.job->done()) continue;
      if (!await.beside && counts(await.thread) && wait == 0) wait = 2 * await.number + 1;
      if (await.beside && await.since_ns <= long_ago) beside = await.number;
    }
    if (stopping_ && !jobs_.empty()) wait = 1;
    else if (wait == 0 && direct.number % 2 == 1 && counts(direct.thread)) wait = 2 * direct.number;
  }
  const auto now = std::chrono::steady_clock::now();
  if (wait != wait_) {
    wait_ = wait;
    wait_began_ = now;
  }
  // Over MPI, the end of a direct call is known only when its thread runs again.
  const double patience_s = wait % 2 == 1 ? kBlockedSeconds : 6 * kBlockedSeconds;
  return {std::chrono::duration<double>(now - wait_began_).count() < patience_s ? 0 : wait, beside};
}

std::string Engine::waits_in() {
  {
    const std::lock_guard lock(mutex_);
    if (const Await* await = awaited()) return await->job->entry.name;
    if (stopping_) return "shutdown()";
  }
  return direct_waits_ ? direct_waits_().label : "";
}

size_t Engine::n_in_flight() {
  const std::lock_guard lock(mutex_);
  return jobs_.size();
}

void Engine::loop() {
  pthread_setname_np(pthread_self(), kThreadName);
  StallDetector::overdue_of_others = [this](int64_t now_ns) { return overdue(now_ns); };
  while (true) {
    size_t n_jobs;
    {
      const std::lock_guard lock(mutex_);
      if (stopped_ || broken_ || (stopping_ && jobs_.empty())) break;
      n_jobs = jobs_.size();
    }
    pump(n_jobs != 0 ? kBlockedSeconds : kForeverSeconds);
  }
  unmatched_wait_.reset();
  const std::lock_guard lock(mutex_);
  ended_ = true;
  end_.notify_all();
}

void Engine::pump(double timeout_s) {
  try {
    const auto round_is_due = [this] {
      {
        const std::lock_guard lock(mutex_);
        if (broken_) std::rethrow_exception(broken_);
        if (!unannounced_.empty()) return true;
      }
      return channel_->peer_is_ahead();
    };
    if (!round_is_due()) {
      channel_->wait(known_.empty() ? timeout_s : std::min(timeout_s, kBlockedSeconds));
      report_wait();
      check_peers();
      // This rank waits while some name lacks its match: announce that to the others, which may be waiting, too.
      // Twice, since only then is it certain that all waited at the same time.
      const bool stuck = !known_.empty() && waiting() != Waits{} && n_stuck_rounds_ < 2;
      if (!stuck && !round_is_due()) return;
    }
    exchange_round();
    if (unmatched_wait_) report_wait();
  } catch (...) {
    unmatched_wait_.reset();
    fail_all(std::current_exception());
  }
}

void Engine::exchange_round() {
  Writer mine;
  const Waits wait = waiting();
  mine.number(wait.training);
  mine.number(wait.beside);
  {
    const std::lock_guard lock(mutex_);
    for (const Entry& entry : unannounced_) write_entry(mine, entry);
    unannounced_.clear();
  }
  const std::vector<std::string> everyone = exchange(mine.text());

  ++n_rounds_;
  std::vector<Waits> waits(channel_->size());
  bool something_new = false;
  for (int r = 0; r < channel_->size(); ++r) {
    Reader reader(everyone[r]);
    waits[r].training = reader.number();
    waits[r].beside = reader.number();
    something_new = something_new || !reader.at_end();
    while (!reader.at_end()) announced(r, read_entry(reader));
  }
  const bool something_ran = run_ready();
  if (are_stuck(waits, something_new || something_ran) && known_.size() > known_.count(kJoin)) fail_unmatched();
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
  const std::lock_guard lock(mutex_);
  if (const auto job = jobs_.find(name); job != jobs_.end()) job->second->place(known.position);
}

// Runs the operations that all ranks have submitted; returns whether there were any.
bool Engine::run_ready() {
  std::vector<std::string> ready;
  const auto is_due = [this](const std::string& name) { return is_ready(name); };
  std::copy_if(order_.begin(), order_.end(), std::back_inserter(ready), is_due);
  order_.erase(std::remove_if(order_.begin(), order_.end(), is_due), order_.end());
  // Ranks that have joined take part in all operations before the end of join().
  std::stable_partition(ready.begin(), ready.end(), [](const std::string& name) { return name != kJoin; });
  for (const std::string& name : ready) {
    record_last_rank(name, known_.at(name));
    Known known = std::move(known_.at(name));
    known_.erase(name);
    run(name, std::move(known));
  }
  if (!ready.empty()) moved_ns_ = StallDetector::clock_ns();
  return !ready.empty();
}

// Whether no rank can continue by itself: all of them wait, as in the last round, and nothing has `moved` in this one
// (another thread's operation, while one waits).
bool Engine::are_stuck(const std::vector<Waits>& waits, bool moved) {
  // If all ranks wait in direct calls, these will end by themselves.
  bool all_wait = true, some_wait_here = false, all_wait_beside = true;
  for (int r = 0; r < channel_->size(); ++r) {
    if (has_joined(r)) continue;  // it takes part in the others' operations
    all_wait = all_wait && waits[r].training != 0;
    some_wait_here = some_wait_here || waits[r].training % 2 == 1;
    all_wait_beside = all_wait_beside && waits[r].beside != 0;
  }
  const Waits& wait = waits[channel_->rank()];
  const bool nothing_moved = !moved && waits == last_waits_;
  const bool still = !moved && !last_waits_.empty() && last_waits_[channel_->rank()] == wait;
  n_stuck_rounds_ = wait == Waits{} ? 0 : still ? n_stuck_rounds_ + 1 : 1;
  last_waits_ = waits;
  return nothing_moved && ((all_wait && some_wait_here) || all_wait_beside);
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

std::shared_ptr<Job> Engine::take(const std::string& name) {
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
  std::shared_ptr<Job> job;  // null if this rank has joined, and until it takes part
  {
    const std::lock_guard lock(mutex_);
    if (const auto found = jobs_.find(name); found != jobs_.end()) job = found->second;
  }
  const bool has_joined = job == nullptr;
  std::exception_ptr error;
  try {
    const Entry* first = nullptr;
    bool alike = true;
    for (int r = 0; r < channel_->size(); ++r) {
      if (!known.has[r]) continue;
      if (first == nullptr) first = &known.entries[r];
      alike = alike && known.entries[r].digest == first->digest;
    }
    if (!alike) {
      std::vector<std::string> descriptions;
      const std::vector<std::string> everyone = exchange(job == nullptr ? "" : job->describe());
      for (int r = 0; r < channel_->size(); ++r) {
        if (known.has[r]) descriptions.push_back(everyone[r]);
      }
      throw Mismatch(explain_(name, descriptions, numbers([&](int r) { return known.has[r]; })));
    }
    if (std::find(known.has.begin(), known.has.end(), false) != known.has.end()) job = stand_in(name, job, &known);
    job->begin();
    job->run(known.entries);
  } catch (const Mismatch&) {
    error = std::current_exception();
  } catch (const Recoverable& recoverable) {
    error = recoverable.error;
  } catch (const std::invalid_argument&) {  // arguments that all ranks have compared are invalid: nothing was moved
    error = std::current_exception();
  } catch (...) {
    // Whatever the error is, other ranks may still be in the middle of the operation.
    failed_in_ = name;
    take(name);
    if (job != nullptr) finish(*job, std::current_exception());
    throw;
  }
  take(name);
  if (job == nullptr) return;          // a rank that has joined waits for the next operation
  if (has_joined) job->finish(error);  // to be raised by the ranks that submitted it
  else finish(*job, error);
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
    std::shared_ptr<Job> join;
    {
      const std::lock_guard lock(mutex_);
      join = jobs_.at(kJoin);
    }
    join->stand_in(reader.string());
    const std::lock_guard lock(mutex_);
    job = jobs_.at(name);
  }
  for (size_t r = 0; r < known->has.size(); ++r) {
    if (!known->has[r]) known->entries[r] = entry;
  }
  return job;
}

void Engine::finish(Job& job, std::exception_ptr error) {
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
    throw;
  }
}

std::vector<std::string> Engine::exchange(const std::string& mine) {
  std::string label = "the matching of asynchronous operations";
  {
    const std::lock_guard lock(mutex_);
    if (const Await* await = awaited()) label = await->job->entry.name + ", in " + label;
    else if (!jobs_.empty()) label = jobs_.begin()->first + ", in " + label;
  }
  return channel_->exchange(mine, label);
}

void Engine::check_peers() {
  for (const auto& [name, known] : known_) {
    if (!known.has[channel_->rank()]) continue;  // does not affect this rank
    for (int r = 0; r < channel_->size(); ++r) {
      if (!known.has[r]) channel_->check(r, name);
    }
  }
}

// Reports to the stall detector that the program waits for an operation that some ranks have not submitted.
void Engine::report_wait() {
  auto found = known_.end();
  int64_t since = 0;
  {
    const std::lock_guard lock(mutex_);
    if (detector_ == nullptr) return;
    if (const Await* await = awaited()) {
      since = await->since_ns;
      found = known_.find(await->job->entry.name);
    } else if (stopping_) {
      since = stopping_ns_;
      found = std::find_if(known_.begin(), known_.end(),
                           [&](const auto& each) { return each.second.has[channel_->rank()]; });
    }
  }
  const bool waits = found != known_.end();
  // A rank that has joined waits only while the others do nothing.
  if (waits && found->first == kJoin) since = std::max(since, moved_ns_);
  if (unmatched_wait_ && (!waits || since != unmatched_since_ns_)) {
    unmatched_wait_->over();
    unmatched_wait_.reset();
  }
  if (!waits) return;
  if (!unmatched_wait_) unmatched_wait_.emplace(detector_, since);
  unmatched_since_ns_ = since;
  const std::vector<bool>& has = found->second.has;
  const auto is_late = [&](int r) { return !has[r] && (found->first == kJoin || !has_joined(r)); };
  unmatched_wait_->report_if_due(found->first + detector_->scope(ranks_), numbers([&](int r) { return !is_late(r); }),
                                 numbers(is_late));
}

// Records which rank was the last to submit an operation that the program waits for.
void Engine::record_last_rank(const std::string& name, const Known& known) {
  const std::lock_guard lock(mutex_);
  if (detector_ == nullptr || known.latest < 0 || known.latest == channel_->rank()) return;
  for (const Await& await : awaits_) {
    if (await.job->entry.name != name) continue;
    if (unmatched_wait_) unmatched_wait_->look();
    detector_->waited_for(ranks_[known.latest], detector_->running_ns(await.since_ns, StallDetector::clock_ns()));
  }
}

// All ranks wait, none of them for an operation that all have submitted: every name in flight lacks some rank.
void Engine::fail_unmatched() {
  // As soon as the first job has failed, its thread may submit again, under any of these names.
  std::map<std::string, Known> unmatched;
  unmatched.swap(known_);
  order_.clear();
  if (auto join = unmatched.extract(kJoin)) {
    known_.insert(std::move(join));
    order_.emplace_back(kJoin);
  }
  ++n_failed_;
  const std::vector<std::string> calls = exchange(waits_in());
  std::vector<std::pair<std::shared_ptr<Job>, std::string>> failed;
  for (const auto& [name, known] : unmatched) {
    if (!known.has[channel_->rank()]) continue;
    const std::string have = ranks_text(numbers([&](int r) { return known.has[r]; }));
    const auto lacks = [&](int r) { return !known.has[r] && !has_joined(r); };
    std::string elsewhere;
    for (int r = 0; r < channel_->size(); ++r) {
      if (lacks(r) && !calls[r].empty()) elsewhere += ", rank " + std::to_string(ranks_[r]) + " in " + calls[r];
    }
    failed.emplace_back(take(name), name + " was submitted by " + have + " but not by " + ranks_text(numbers(lacks)) +
                                        ", and every rank is waiting" + elsewhere +
                                        ": none can continue. Look for a call that some ranks do not make, such as "
                                        "one inside `if rank == 0`, or make in another order. Asynchronous operations "
                                        "are matched by name.");
  }
  for (const auto& [job, text] : failed) finish(*job, std::make_exception_ptr(Mismatch(text)));
}

void Engine::fail_all(std::exception_ptr error) {
  // An operation's own error is raised by its handle; all other handles, and later ones, raise why the engine stopped.
  std::string reason = "asynchronous operations stopped";
  bool is_loss = true;
  std::optional<PeerLost> lost_peer;
  try {
    std::rethrow_exception(error);
  } catch (const PeerLost& lost) {
    reason = lost.what();
    lost_peer = lost;
  } catch (const Stalled& stalled) {
    reason = stalled.what();
    is_loss = false;
  } catch (const std::exception& e) {
    reason = (failed_in_.empty() ? "the matching of asynchronous operations" : failed_in_) + " raised " + e.what();
  } catch (...) {
  }
  std::map<std::string, std::shared_ptr<Job>> jobs;
  {
    const std::lock_guard lock(mutex_);
    broken_ = is_loss ? std::make_exception_ptr(PeerLost(reason)) : error;
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
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
    stopping_ns_ = StallDetector::clock_ns();
  }
  channel_->wake();
  const auto has_ended = [this] {
    std::unique_lock lock(mutex_);
    return end_.wait_for(lock, std::chrono::duration<double>(kBlockedSeconds), [this] { return ended_; });
  };
  while (!has_ended()) {
    if (on_idle) on_idle();
  }
  if (thread_.joinable()) thread_.join();
  if (failed_ && !error_seen_) std::rethrow_exception(failed_);
}

}  // namespace horo
