#include "engine.h"

#include <pthread.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <iterator>

namespace horo {
namespace {

// How long the training thread waits before its engine tells the others that it does, and how often it repeats it.
constexpr double kBlockedSeconds = 0.05;
constexpr double kForeverSeconds = 3600.0;
// Without THREAD_MULTIPLE: how soon the engine is back with its next call of MPI, unless it waits for a peer, and how
// many of those one poll() serves at most.
constexpr double kNextCallSeconds = 100e-6;
constexpr int kCallsPerPoll = 100;

// What a rank says in a round: which wait it is in, then its news.
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

}  // namespace

bool Job::wait(double timeout_s) {
  std::unique_lock lock(mutex_);
  return changed_.wait_for(lock, std::chrono::duration<double>(timeout_s), [this] { return done(); });
}

void Job::result() const {
  if (error_) std::rethrow_exception(error_);
}

void Job::finish(std::exception_ptr error) {
  const std::lock_guard lock(mutex_);
  error_ = error;
  done_.store(true, std::memory_order_release);
  changed_.notify_all();
}

Engine::Engine(std::unique_ptr<Channel> channel,
               std::function<std::string(const std::string&, const std::vector<std::string>&)> explain)
    : channel_(std::move(channel)), explain_(std::move(explain)), pid_(getpid()) {
  // Signals are the training thread's business.
  sigset_t all, old;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &old);
  thread_ = std::thread([this] { loop(); });
  pthread_sigmask(SIG_SETMASK, &old, nullptr);
}

Engine::~Engine() {
  if (!thread_.joinable()) return;
  if (getpid() != pid_) {  // a forked child has no such thread, and whoever held the mutex then holds it for ever
    thread_.detach();
    return;
  }
  {
    const std::lock_guard lock(mutex_);
    stopped_ = true;
  }
  try {
    channel_->stop();
  } catch (...) {  // Python is ending; the thread looks round by itself
  }
  thread_.join();
}

void Engine::submit(std::shared_ptr<Job> job) {
  {
    const std::lock_guard lock(mutex_);
    if (broken_) std::rethrow_exception(broken_);
    if (stopping_) throw std::invalid_argument("'" + job->entry.name + "' was submitted after shutdown()");
    if (!jobs_.emplace(job->entry.name, job).second) {
      throw std::invalid_argument("an operation named '" + job->entry.name +
                                  "' is in flight already on this rank: synchronize() it first, or give this one "
                                  "another name=");
    }
    news_.push_back(job->entry);
  }
  channel_->wake();
}

void Engine::set_awaited(std::shared_ptr<Job> job) {
  const std::lock_guard lock(mutex_);
  awaited_ = std::move(job);
  ++n_awaited_;
}

// Which wait the training thread has been in for some time; 0: in none, or in one that is over even if it has not woken
// up yet. Odd: a wait for an asynchronous operation.
uint64_t Engine::waiting() {
  const uint64_t direct = direct_waits();
  uint64_t wait = 0;
  {
    const std::lock_guard lock(mutex_);
    if (stopping_ && !jobs_.empty()) wait = 1;
    else if (awaited_ != nullptr && !awaited_->done()) wait = 2 * n_awaited_ + 1;
    else if (direct % 2 == 1) wait = 2 * direct;
  }
  const auto now = std::chrono::steady_clock::now();
  if (wait != wait_) {
    wait_ = wait;
    wait_began_ = now;
  }
  // Whether a direct call is over is known only once its thread runs again.
  const double patience_s = wait % 2 == 1 ? kBlockedSeconds : 6 * kBlockedSeconds;
  return std::chrono::duration<double>(now - wait_began_).count() < patience_s ? 0 : wait;
}

void Engine::wait(Job& job) {
  if (serve) serve(kBlockedSeconds);
  else job.wait(kBlockedSeconds);
}

bool Engine::poll(const Job& job) {
  for (int i = 0; serve && i < kCallsPerPoll && !job.done() && serve(kNextCallSeconds); ++i) {
  }
  return job.done();
}

size_t Engine::n_in_flight() {
  const std::lock_guard lock(mutex_);
  return jobs_.size();
}

void Engine::loop() {
  while (true) {
    size_t n_jobs;
    {
      const std::lock_guard lock(mutex_);
      if (stopped_ || broken_ || (stopping_ && jobs_.empty())) break;
      n_jobs = jobs_.size();
    }
    pump(n_jobs != 0 ? kBlockedSeconds : kForeverSeconds);
  }
  ended_ = true;
}

void Engine::pump(double timeout_s) {
  try {
    const auto should_meet = [this] {
      {
        const std::lock_guard lock(mutex_);
        if (broken_) std::rethrow_exception(broken_);
        if (!news_.empty()) return true;
      }
      return channel_->peer_is_ahead();
    };
    if (!should_meet()) {
      channel_->wait(known_.empty() ? timeout_s : std::min(timeout_s, kBlockedSeconds));
      check_peers();
      // This rank waits while some name lacks its match: tell the others, who may be waiting as well. Told twice, since
      // only then it is certain that all did at one moment.
      const bool stuck = !known_.empty() && waiting() != 0 && n_stuck_rounds_ < 2;
      if (!stuck && !should_meet()) return;
    }
    round();
  } catch (...) {
    fail_all(std::current_exception());
  }
}

void Engine::round() {
  Writer mine;
  const uint64_t wait = waiting();
  mine.number(wait);
  {
    const std::lock_guard lock(mutex_);
    for (const Entry& entry : news_) {
      mine.string(entry.name);
      mine.number(entry.digest);
      mine.real(entry.weight);
    }
    news_.clear();
  }
  const std::vector<std::string> everyone = channel_->meet(mine.text());

  const int n_ranks = channel_->size();
  std::vector<uint64_t> waits(n_ranks);
  bool something_new = false;
  for (int r = 0; r < n_ranks; ++r) {
    Reader reader(everyone[r]);
    waits[r] = reader.number();
    while (!reader.at_end()) {
      something_new = true;
      Entry entry;
      entry.name = reader.string();
      entry.digest = reader.number();
      entry.weight = reader.real();
      if (r == 0) order_.push_back(entry.name);
      Known& known = known_[entry.name];
      known.entries.resize(n_ranks);
      known.has.resize(n_ranks);
      known.has[r] = true;
      known.n += 1;
      known.entries[r] = std::move(entry);
    }
  }

  std::vector<std::string> ready;
  const auto is_ready = [&](const std::string& name) { return known_.at(name).n == n_ranks; };
  std::copy_if(order_.begin(), order_.end(), std::back_inserter(ready), is_ready);
  order_.erase(std::remove_if(order_.begin(), order_.end(), is_ready), order_.end());
  for (const std::string& name : ready) {
    const std::vector<Entry> entries = std::move(known_.at(name).entries);
    known_.erase(name);
    run(name, entries);
  }

  // Direct calls that all ranks wait in will end by themselves.
  const bool all_wait = std::all_of(waits.begin(), waits.end(), [](uint64_t w) { return w != 0; }) &&
                        std::any_of(waits.begin(), waits.end(), [](uint64_t w) { return w % 2 == 1; });
  const bool nothing_moved = !something_new && ready.empty() && waits == last_waits_;
  const bool still = !last_waits_.empty() && wait != 0 && last_waits_[channel_->rank()] == wait;
  n_stuck_rounds_ = wait == 0 ? 0 : still ? n_stuck_rounds_ + 1 : 1;
  last_waits_ = waits;
  if (all_wait && nothing_moved && !known_.empty()) fail_unmatched();
}

std::shared_ptr<Job> Engine::take(const std::string& name) {
  const std::lock_guard lock(mutex_);
  const auto found = jobs_.find(name);
  if (found == jobs_.end()) return nullptr;
  const std::shared_ptr<Job> job = found->second;
  jobs_.erase(found);
  return job;
}

void Engine::run(const std::string& name, const std::vector<Entry>& entries) {
  std::shared_ptr<Job> job;
  {
    const std::lock_guard lock(mutex_);
    job = jobs_.at(name);
  }
  std::exception_ptr error;
  try {
    const bool alike = std::all_of(entries.begin(), entries.end(),
                                   [&](const Entry& entry) { return entry.digest == entries[0].digest; });
    if (!alike) throw Mismatch(explain_(name, channel_->meet(job->describe())));
    job->run(entries);
  } catch (const Mismatch&) {
    error = std::current_exception();
  } catch (const Recoverable& recoverable) {
    error = recoverable.error;
  } catch (...) {
    // Whatever this was, the other ranks may be in the middle of it still.
    take(name);
    job->finish(std::current_exception());
    throw;
  }
  take(name);
  job->finish(error);
}

void Engine::check_peers() {
  for (const auto& [name, known] : known_) {
    if (!known.has[channel_->rank()]) continue;  // not this rank's loss
    for (int r = 0; r < channel_->size(); ++r) {
      if (!known.has[r]) channel_->check(r, name);
    }
  }
}

// All ranks wait, none for an operation that all have submitted: every name in flight is somebody's alone.
void Engine::fail_unmatched() {
  // As soon as the first job is failed, its thread may submit again, under any of these names.
  std::map<std::string, Known> unmatched;
  unmatched.swap(known_);
  order_.clear();
  std::vector<std::pair<std::shared_ptr<Job>, std::string>> failed;
  for (const auto& [name, known] : unmatched) {
    if (!known.has[channel_->rank()]) continue;
    std::string have, lack;
    for (int r = 0; r < channel_->size(); ++r) {
      std::string& list = known.has[r] ? have : lack;
      list += (list.empty() ? "" : ", ") + std::to_string(r);
    }
    failed.emplace_back(take(name), "'" + name + "' was submitted by rank " + have + " but not by rank " + lack +
                                        ", and every rank is waiting: nothing can go on. Asynchronous operations are "
                                        "matched by name; see that every rank submits the same ones.");
  }
  for (const auto& [job, text] : failed) job->finish(std::make_exception_ptr(Mismatch(text)));
}

void Engine::fail_all(std::exception_ptr error) {
  std::map<std::string, std::shared_ptr<Job>> jobs;
  {
    const std::lock_guard lock(mutex_);
    broken_ = error;
    jobs.swap(jobs_);
    news_.clear();
  }
  std::string reason = "its engine stopped";
  try {
    std::rethrow_exception(error);
  } catch (const std::exception& e) {
    reason = e.what();
  } catch (...) {
  }
  try {
    channel_->abandon(reason);
  } catch (...) {  // peers will have to find out by themselves
  }
  for (auto& [name, job] : jobs) job->finish(error);
}

void Engine::drain() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  channel_->wake();
  while (serve && !ended_) serve(1e-3);
  if (thread_.joinable()) thread_.join();
}

}  // namespace horo
