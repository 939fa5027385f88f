// One thread per rank that runs asynchronous operations, matched by name across ranks.
//
// Engines exchange messages in rounds. In each round, every rank announces what was submitted since the last one; then
// all run the operations that all ranks have submitted, in the order in which they were first announced. A round does
// not need the training thread: an engine with nothing to announce takes part as soon as another one wakes it.
//
// A rank can withdraw what it has submitted. This, too, is announced in a round, so that all ranks agree on whether the
// operation was still matched: either it runs on every rank, or this rank's submission counts on none.
//
// A rank that has submitted kJoin submits nothing more until all have. Operations that only such ranks lack are run,
// too: a rank that has submitted one describes how to take part, and ranks that have joined make their job from that.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "group.h"
#include "shm/stall_detector.h"

namespace horo {

// Wraps an error that a job throws on every rank, so that it ends the job and not the engine.
struct Recoverable {
  std::exception_ptr error;
};

// How a rank that has joined takes part in an operation of the others.
struct Participation {
  std::string refusal;  // why it cannot, if so
  int64_t count = 0;
  double weight = 1.0;  // of its contribution
  std::string text;
};

// The communication between the engines of all ranks.
class Channel {
 public:
  virtual ~Channel() = default;
  virtual int rank() const = 0;
  virtual int size() const = 0;
  // Enters the next round and returns every rank's bytes, in rank order. `label` is its name in messages.
  virtual std::vector<std::string> exchange(const std::string& mine, const std::string& label) = 0;
  // Returns when `wake` was called, when a peer has entered a round that this rank has not, or after the time-out.
  virtual void wait(double timeout_s) = 0;
  virtual void wake() = 0;
  virtual bool peer_is_ahead() = 0;
  // Throws if `rank`, which has not submitted `name`, never will, because it has left or died.
  virtual void check(int rank, const std::string& name) = 0;
  // This rank cannot continue: peers must not wait for it.
  virtual void abandon(const std::string& reason) = 0;
  // The same, because another rank was lost.
  virtual void pass_on(const PeerLost& lost) = 0;
};

// One rank's announcement of one operation.
struct Entry {
  std::string name;
  uint64_t digest = 0;  // of everything that must be the same on all ranks
  int64_t count = 0;    // may differ between ranks, such as a size
  double weight = 1.0;
  uint64_t sequence = 0;  // its number among all announcements, the same on every rank
  bool is_withdrawal = false;
};

// Memory from its first byte to one past its last.
using Extent = std::pair<uintptr_t, uintptr_t>;

class Job {
 public:
  Entry entry;
  // The caller's memory that it changes while it is in flight.
  std::vector<Extent> changes;
  // Runs on the engine's thread with every rank's entry, in rank order.
  std::function<void(const std::vector<Entry>&)> run;
  // Describes what is compared, one item per line; called only after a mismatch.
  std::function<std::string()> describe;
  // Called only if ranks have joined.
  std::function<Participation(const std::vector<int>& joined)> participation;
  // For kJoin: submits this rank's part in the operation that the participation describes.
  std::function<void(const std::string& participation)> stand_in;
  // When this rank and when all ranks had submitted it, and when it was done, by StallDetector::clock_ns(); 0: not yet.
  std::atomic<int64_t> submitted_ns{0}, begun_ns{0}, done_ns{0};

  // Sets its record; see Recorder.
  void record_as(uint64_t number);
  // Sets its number, which is the same on all ranks.
  void place(uint64_t position);
  uint64_t position() const;  // 0: no round has announced it yet
  // Called when all ranks have submitted it.
  void begin();
  bool done() const { return done_.load(std::memory_order_acquire); }
  // Returns true when the job is done; false after the time-out.
  bool wait(double timeout_s);
  // Throws the job's error, if there is one.
  void result() const;
  bool failed() const { return done() && error_; }
  bool is_withdrawn = false;  // once it is done
  void finish(std::exception_ptr error);

 private:
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::atomic<bool> done_{false};
  std::exception_ptr error_;
  uint64_t record_ = 0;
  uint64_t position_ = 0;
};

class Engine {
 public:
  using Explain =
      std::function<std::string(const std::string& label, const std::vector<std::string>&, const std::vector<int>&)>;

  // Whether a thread waits in a direct call: a number that changes whenever a wait begins or ends, odd during it; which
  // thread it is, and in which call it waits.
  struct DirectWait {
    uint64_t number = 0;
    int thread = 0;     // the kernel's thread ID
    std::string label;  // valid during the wait
  };
  using DirectWaits = std::function<DirectWait()>;

  // `ranks` are the ranks' numbers in messages. `explain(label, descriptions, whose)` returns the text of a
  // MismatchError. The engine's thread starts immediately, since peers may submit: so its callbacks are passed here.
  Engine(std::unique_ptr<Channel> channel, std::vector<int> ranks, Explain explain, DirectWaits direct_waits = nullptr);
  ~Engine();

  // Called a few times per second while draining, to handle signals; throws to stop waiting.
  std::function<void()> on_idle;

  // Reports the training thread's waits to the stall detector of the world. Must be called before the first submission,
  // or not at all.
  void watched_by(std::shared_ptr<StallDetector> detector);

  // Throws std::invalid_argument if the name is already in flight, or an operation that changes the same memory. The
  // engine's own thread submits jobs of stand-ins, which the others know already.
  void submit(std::shared_ptr<Job> job);
  // Makes the job end soon, whatever the program does on other ranks: unless it has been run by then, it never will be.
  void withdraw(const std::shared_ptr<Job>& job);
  // Records that a thread of the program waits for this job, from the latest call until end_wait(). If all ranks wait
  // and nothing can run, that is a mismatch. A rank counts as waiting when the thread that created its engine waits: as
  // long as that thread computes, it may still submit what others wait for, whatever other threads wait for. `beside`:
  // another thread waits while the training thread may continue. Such threads wait for one job at a time, in the same
  // order on all ranks: it is a mismatch if all ranks wait in this way.
  void begin_wait(std::shared_ptr<Job> job, bool beside = false);
  void end_wait(const Job& job);
  size_t n_in_flight();
  // How often all operations without a match have failed; the same on all ranks.
  uint64_t n_failed() const { return n_failed_; }
  double busy_s() const;  // CPU time of the engine's thread
  // Throws the job's error, if there is one, which then counts as seen.
  void result(const Job& job);
  // Completes what all ranks have submitted, then stops. Errors stay with their jobs, but if none has been seen, this
  // throws the first one.
  void drain();

 private:
  struct Known {                 // which ranks have submitted a name, and their announcements
    std::vector<Entry> entries;  // by rank
    std::vector<bool> has;
    uint64_t position = 0;  // the number of the first announcement, the same on every rank
    uint64_t round = 0;     // the latest round with an announcement
    int latest = -1;        // the rank that announced in it; -1: several
  };

  struct Await {
    std::shared_ptr<Job> job;
    uint64_t number;
    int64_t since_ns;
    int64_t abort_ns;  // the thread's limit; 0: none
    bool beside;
    int thread;
  };
  struct Waits {  // 0: in no wait that has lasted for some time
    uint64_t training = 0;
    uint64_t beside = 0;
    bool operator==(const Waits&) const = default;
  };

  void loop();
  void pump(double timeout_s);  // one iteration of the loop
  void exchange_round();
  void announced(int rank, Entry entry);
  void withdrawn(int rank, const std::string& name);
  bool run_ready();
  bool are_stuck(const std::vector<Waits>& waits, bool moved);
  bool has_joined(int rank) const;
  bool is_ready(const std::string& name) const;
  void run(const std::string& name, Known known);
  std::shared_ptr<Job> stand_in(const std::string& name, std::shared_ptr<Job> job, Known* known);
  // The numbers, in messages, of the ranks for which `is_so`.
  std::vector<int> numbers(const std::function<bool(int rank)>& is_so) const;
  Waits waiting();
  std::string waits_in();  // the same, as text
  // The wait in progress whose own limit is exceeded first, else the longest; under the mutex.
  const Await* awaited() const;
  StallDetector::Overdue overdue(int64_t now_ns);
  std::vector<std::string> exchange(const std::string& mine);
  void check_peers();
  void report_wait();
  void record_last_rank(const std::string& name, const Known& known);
  void finish(Job& job, std::exception_ptr error);
  void fail_unmatched();
  void fail_all(std::exception_ptr error);
  std::shared_ptr<Job> take(const std::string& name);
  void check_apart(const Job& job) const;  // under the mutex

  std::unique_ptr<Channel> channel_;
  std::vector<int> ranks_;
  Explain explain_;
  DirectWaits direct_waits_;
  int pid_;
  int owner_;  // the thread that created this engine
  std::thread thread_;
  clockid_t thread_clock_;  // its CPU time
  std::atomic<uint64_t> n_failed_{0};

  // Guards the following members. Never held while the channel or a job runs: these may need the GIL, whose holder may
  // need this.
  std::mutex mutex_;
  std::map<std::string, std::shared_ptr<Job>> jobs_;                 // in flight
  std::map<uintptr_t, std::pair<uintptr_t, std::string>> changing_;  // extents, and the jobs in flight that change them
  std::deque<Entry> unannounced_;                                    // submitted, not announced yet
  std::exception_ptr broken_;
  std::exception_ptr failed_;  // the error of the first job that failed
  bool error_seen_ = false;    // of any job
  std::vector<Await> awaits_;  // one for each thread that waits
  uint64_t n_awaits_ = 0;      // so far
  bool stopping_ = false;
  int64_t stopping_ns_ = 0;  // when stopping began
  bool stopped_ = false;
  bool ended_ = false;  // the thread has left its loop
  std::condition_variable end_;

  std::shared_ptr<StallDetector> detector_;

  // Only for the engine's own thread.
  std::optional<StallDetector::Wait> unmatched_wait_;  // the training thread's wait for a name that some lack
  int64_t unmatched_since_ns_ = 0;
  int64_t moved_ns_ = 0;   // when the last operation was run
  std::string failed_in_;  // the operation that ended the engine, if one did
  uint64_t n_rounds_ = 0;
  std::map<std::string, Known> known_;  // announced by some ranks, not yet by all; the same on every rank
  std::vector<std::string> order_;      // the order in which they were announced
  uint64_t n_announced_ = 0;
  uint64_t wait_ = 0;  // see waiting()
  std::chrono::steady_clock::time_point wait_began_;
  std::vector<Waits> last_waits_;  // every rank's waits, as of the last round
  int n_stuck_rounds_ = 0;         // consecutive rounds in which this rank was in the same wait
};

}  // namespace horo
