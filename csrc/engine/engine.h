// One thread per rank that runs asynchronous operations, matched by name across ranks.
//
// Engines exchange in rounds. In each, every rank announces what was submitted since the last one; operations that all
// ranks have submitted are then run by all, in the order in which they were first announced. No training thread is
// needed for a round: an engine with nothing to announce takes part as soon as another one wakes it.
//
// What a rank has submitted it can withdraw. That, too, is announced in a round, so that all ranks agree on whether the
// operation was still matched: either it runs on every rank, or this rank's submission counts on none.
//
// A rank that has submitted kJoin submits nothing more until all have. What only such ranks lack is run, too: one of
// those that have it describes how to take part, and the job of a rank that has joined is made from that.
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

// Wraps what a job threw on every rank alike, so that it ends the job and not the engine.
struct Recoverable {
  std::exception_ptr error;
};

// How a rank that has joined takes part in an operation of the others.
struct Participation {
  std::string refusal;  // or why it cannot
  double weight = 1.0;  // of what it contributes
  std::string text;
};

// How the engines of all ranks reach each other.
class Channel {
 public:
  virtual ~Channel() = default;
  virtual int rank() const = 0;
  virtual int size() const = 0;
  // Enters the next round and returns every rank's bytes, in rank order. `label` is what messages call this.
  virtual std::vector<std::string> exchange(const std::string& mine, const std::string& label) = 0;
  // Returns when `wake` was called, when a peer has entered a round this rank has not, or after the time-out.
  virtual void wait(double timeout_s) = 0;
  virtual void wake() = 0;
  // The engine ends: it must not go on waiting, where that can be helped.
  virtual void stop() = 0;
  virtual bool peer_is_ahead() = 0;
  // Throws if `rank`, which has not submitted `name`, never will: it has left or died.
  virtual void check(int rank, const std::string& name) = 0;
  // This rank can go no further: peers must not wait for it.
  virtual void abandon(const std::string& reason) = 0;
  // The same, because of what became of another rank.
  virtual void pass_on(const PeerLost& lost) = 0;
};

// One rank's announcement of one operation.
struct Entry {
  std::string name;
  uint64_t digest = 0;  // of everything that must be alike
  double weight = 1.0;
  uint64_t sequence = 0;  // its number among all announcements, alike on every rank
  bool is_withdrawal = false;
};

// Memory from its first byte to the one behind its last.
using Extent = std::pair<uintptr_t, uintptr_t>;

class Job {
 public:
  Entry entry;
  // What it changes of the caller's memory while it is in flight.
  std::vector<Extent> changes;
  // Runs on the engine's thread with every rank's entry, in rank order.
  std::function<void(const std::vector<Entry>&)> run;
  // What is alike or not, one thing a line; asked only once there is a mismatch.
  std::function<std::string()> describe;
  // Asked only where ranks have joined.
  std::function<Participation(const std::vector<int>& joined)> participation;
  // Of kJoin: submits this rank's part in what the participation is for.
  std::function<void(const std::string& participation)> stand_in;
  // When it was submitted, all ranks had submitted it, and it was done, by StallDetector::clock_ns(); 0: not yet.
  std::atomic<int64_t> submitted_ns{0}, begun_ns{0}, done_ns{0};

  // Its record, from now on; see Recorder.
  void record_as(uint64_t number);
  // All ranks know it by this number.
  void place(uint64_t position);
  uint64_t position() const;  // 0: no round has announced it yet
  // All ranks have submitted it.
  void begin();
  bool done() const { return done_.load(std::memory_order_acquire); }
  // True when the job is done; false after the time-out.
  bool wait(double timeout_s);
  // Throws what the job threw.
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

  // Whether a thread waits in a direct call: a number that changes whenever that begins or ends, odd while it lasts;
  // which thread that is, and what it waits in.
  struct DirectWait {
    uint64_t number = 0;
    int thread = 0;     // as the kernel numbers it
    std::string label;  // while it lasts
  };
  using DirectWaits = std::function<DirectWait()>;

  // `ranks` are what messages call the ranks. `explain(label, descriptions, whose)` makes the text of a MismatchError.
  // The engine's thread begins at once, since peers may: what it calls is given here.
  Engine(std::unique_ptr<Channel> channel, std::vector<int> ranks, Explain explain, DirectWaits direct_waits = nullptr);
  ~Engine();

  // Where the channel needs the training thread to call MPI: does that for up to so many seconds, and returns whether
  // there was anything to do. To be set at once, or not at all.
  std::function<bool(double timeout_s)> serve;

  // Called while draining, a few times a second, so that signals are seen; throws to stop waiting.
  std::function<void()> on_idle;

  // The training thread's waits are seen by the stall detector of the world. To be called before the first submission,
  // or not at all.
  void watched_by(std::shared_ptr<StallDetector> detector);

  // Throws std::invalid_argument where the name is in flight already, or something that changes the same memory. From
  // the engine's own thread: a stand-in's job, of which the others know.
  void submit(std::shared_ptr<Job> job);
  // The job is done soon, whatever the program does on other ranks: unless it has been run by then, it never will be.
  void withdraw(const std::shared_ptr<Job>& job);
  // A thread of the program waits for this job, counted from the latest of these until end_wait(). When all ranks wait
  // and nothing can run, that is a mismatch. A rank waits when the thread that made its engine does: as long as that
  // one computes, it may come to what others wait for, whatever other threads of the rank wait for. `beside` the
  // training thread, which may go on meanwhile, jobs are waited for one after the other in one order on all ranks:
  // there it is one when all ranks wait so.
  void begin_wait(std::shared_ptr<Job> job, bool beside = false);
  void end_wait(const Job& job);
  // Lets the engine go on; returns when the job is done, and before that once in a while.
  void wait(Job& job);
  // Whether the job is done; lets the engine go on a little, if that needs this thread.
  bool poll(const Job& job);
  size_t n_in_flight();
  // How often everything that lacked a match has failed: alike on all ranks.
  uint64_t n_failed() const { return n_failed_; }
  double busy_s() const;  // that the engine's thread has had a core
  // What the job threw, which somebody has seen then.
  void result(const Job& job);
  // Completes what all ranks have submitted, then stops. Errors stay with their jobs, but if nobody has seen any, this
  // throws the first.
  void drain();

 private:
  struct Known {                 // who has submitted one name, and their announcements
    std::vector<Entry> entries;  // by rank
    std::vector<bool> has;
    uint64_t position = 0;  // alike on every rank: the number of the first announcement
    uint64_t round = 0;     // the latest in which somebody did
    int latest = -1;        // who; -1: several at once
  };

  struct Await {
    std::shared_ptr<Job> job;
    uint64_t number;
    int64_t since_ns;
    bool beside;
    int thread;
  };
  struct Waits {  // 0: in none that has lasted for some time
    uint64_t training = 0;
    uint64_t beside = 0;
    bool operator==(const Waits&) const = default;
  };

  void loop();
  void pump(double timeout_s);  // one turn of the loop
  void exchange_round();
  void announced(int rank, Entry entry);
  void withdrawn(int rank, const std::string& name);
  bool run_ready();
  bool are_stuck(const std::vector<Waits>& waits, bool moved);
  bool has_joined(int rank) const;
  bool is_ready(const std::string& name) const;
  void run(const std::string& name, Known known);
  std::shared_ptr<Job> stand_in(const std::string& name, std::shared_ptr<Job> job, Known* known);
  // What messages call the ranks of which that is so.
  std::vector<int> numbers(const std::function<bool(int rank)>& is_so) const;
  Waits waiting();
  std::string waits_in();        // the same in words
  const Await* awaited() const;  // the longest wait that is not over; under the mutex
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
  int owner_;  // the thread that made this
  std::thread thread_;
  clockid_t thread_clock_;  // of the time that it has had a core
  std::atomic<uint64_t> n_failed_{0};

  // Guards what follows. Never held while the channel or a job runs: those may want the GIL, whose holder may want
  // this.
  std::mutex mutex_;
  std::map<std::string, std::shared_ptr<Job>> jobs_;                 // in flight
  std::map<uintptr_t, std::pair<uintptr_t, std::string>> changing_;  // extents, and the jobs in flight that change them
  std::deque<Entry> unannounced_;                                    // submitted, in no round yet
  std::exception_ptr broken_;
  std::exception_ptr failed_;  // the first job's that failed
  bool error_seen_ = false;    // of any of them
  std::vector<Await> awaits_;  // one a thread that waits
  uint64_t n_awaits_ = 0;      // up to now
  bool stopping_ = false;
  int64_t stopping_ns_ = 0;  // since when
  bool stopped_ = false;
  bool ended_ = false;  // the thread has left its loop
  std::condition_variable end_;

  std::shared_ptr<StallDetector> detector_;

  // Only for the engine's own thread.
  std::optional<StallDetector::Wait> unmatched_wait_;  // the training thread's wait for a name that some lack
  int64_t unmatched_since_ns_ = 0;
  int64_t moved_ns_ = 0;   // when an operation was run last
  std::string failed_in_;  // the operation that ended the engine, if one did
  uint64_t n_rounds_ = 0;
  std::map<std::string, Known> known_;  // announced by some ranks, not yet by all; alike on every rank
  std::vector<std::string> order_;      // in which they were announced
  uint64_t n_announced_ = 0;
  uint64_t wait_ = 0;  // see waiting()
  std::chrono::steady_clock::time_point wait_began_;
  std::vector<Waits> last_waits_;  // every rank's waits, as of the last round
  int n_stuck_rounds_ = 0;         // in a row in which this rank was in the same wait
};

}  // namespace horo
