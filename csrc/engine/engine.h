// The operations of a group of ranks, matched across ranks: asynchronous ones by name, and the program's blocking
// calls, of which a rank makes one at a time, by their order.
//
// Engines exchange messages in rounds. In each round, every rank announces what was submitted since the last one; then
// all run the operations that all ranks have submitted, in the order in which they were first announced. Where
// operations need a handshake between them, that is a round, too: a blocking call waits for one of them, and not for
// the rest.
//
// One thread of a rank at a time is the driver, which makes rounds and runs operations: a thread that makes a blocking
// call, until that is done, and otherwise the engine's own thread. So a blocking call needs no other thread, and
// asynchronous operations need no thread of the program.
//
// A round begins when all ranks have entered it. A rank whose program waits enters the next one at once, and waits
// there. A rank whose program computes enters it when it has something to announce, or when another rank, which has,
// demands it; that its program has made a blocking call is not worth waking the others, since these must make the same
// call anyway. After a quiet round, in which no rank announced anything, all wait, and enter the next one only if one
// of them has news.
//
// If every rank is blocked and nothing is matched, none can continue: what is unmatched fails on all of them. A wait
// that begins a round can be ended only by a round, or by a signal: so the ranks confirm that they are in the same wait
// still.
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
#include "recorder/recorder.h"
#include "shm/shm_group.h"
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

// The communication between the engines of all ranks. Only the driver makes calls, except where any thread may.
class Channel {
 public:
  virtual ~Channel() = default;
  virtual int rank() const = 0;
  virtual int size() const = 0;
  // For the driver: the number of the next handshake.
  virtual uint64_t next_handshake() const = 0;
  // The handshake: returns every rank's header, in rank order. `label` is its name in messages; "": this rank is
  // between two operations.
  virtual std::vector<Header> agree(const std::string& label, const Header& mine, const Round* round) = 0;
  // Returns every rank's bytes, in rank order, after a handshake with their numbers.
  virtual std::vector<std::string> gather(const std::string& mine, const std::vector<Header>& headers) = 0;
  // Names the operation that follows.
  virtual void set_label(const std::string& label) = 0;
  // Whether there must be a handshake between two operations.
  virtual bool needs_handshakes() const = 0;
  // Called a few times per second while waiting; throws to stop waiting.
  virtual void set_on_idle(std::function<void()> on_idle) = 0;

  // The following are for any thread. Makes the engines of the others enter that handshake, which this rank has entered
  // or is about to.
  virtual void demand(uint64_t handshake) = 0;
  // Whether another rank demands a handshake that this rank has not entered.
  virtual bool is_demanded() = 0;
  // Returns once the number of calls of wake() differs, a handshake is demanded, or after the time-out.
  virtual void wait(uint32_t n_wake_ups, double timeout_s) = 0;
  virtual uint32_t n_wake_ups() = 0;
  virtual void wake() = 0;
  // Throws if an operation has failed, and the group can no longer be used.
  virtual void check_usable() = 0;
  // Throws if `rank`, which has not submitted `name`, never will, because it has left or died.
  virtual void check(int rank, const std::string& name) = 0;
  // This rank cannot continue: peers must not wait for it.
  virtual void abandon(const std::string& reason) = 0;
  // The same, because another rank was lost.
  virtual void pass_on(const PeerLost& lost) = 0;
};

// The name under which the program's blocking calls are matched. No operation has it.
inline constexpr const char* kProgram = "\n";

// One rank's announcement of one operation.
struct Entry {
  std::string name;     // its key
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
  std::string label;  // its name in messages, if that is not the entry's
  const std::string& title() const { return label.empty() ? entry.name : label; }
  // The caller's memory that it changes while it is in flight.
  std::vector<Extent> changes;
  // Runs on the driver's thread with every rank's entry, in rank order.
  std::function<void(const std::vector<Entry>&)> run;
  // Describes what is compared, one item per line; called only after a mismatch.
  std::function<std::string()> describe;
  // Called only if ranks have joined.
  std::function<Participation(const std::vector<int>& joined)> participation;
  // For kJoin: submits this rank's part in the operation that the participation describes.
  std::function<void(const std::string& participation)> stand_in;
  // When this rank and when all ranks had submitted it, and when it was done, by StallDetector::clock_ns(); 0: not yet.
  std::atomic<int64_t> submitted_ns{0}, begun_ns{0}, done_ns{0};

  // Adds it to the recorder, with its title and when it was submitted.
  void record(Operation what);
  // Sets its number, which is the same on all ranks.
  void place(uint64_t position);
  uint64_t position() const;  // 0: no round has announced it yet
  // Called when all ranks have submitted it.
  void begin();
  // Instead of finish(), for a call, whose thread makes this call.
  void end_call(std::exception_ptr error);
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

  // `ranks` are the ranks' numbers in messages. `explain(label, descriptions, whose)` returns the text of a
  // MismatchError. The engine's thread starts immediately, since peers may submit: so its callbacks are passed here.
  Engine(std::unique_ptr<Channel> channel, std::vector<int> ranks, Explain explain);
  ~Engine();

  // Called a few times per second while call() or drain() waits, to handle signals; throws to stop waiting, after which
  // the group can no longer be used.
  std::function<void()> on_idle;

  // Reports the training thread's waits to the stall detector of the world. Must be called before the first submission,
  // or not at all.
  void watched_by(std::shared_ptr<StallDetector> detector);

  // Throws std::invalid_argument if the name is already in flight, or an operation that changes the same memory. Within
  // `stand_in`, the job is this rank's part in the operation that the others have submitted.
  void submit(std::shared_ptr<Job> job, const Operation* record = nullptr);
  // Makes a blocking call: returns once all ranks have made it and this thread has run it, or throws its error. Also
  // for a kJoin. One thread at a time.
  void call(const std::shared_ptr<Job>& job);
  // Makes the job end soon, whatever the program does on other ranks: unless it has been run by then, it never will be.
  void withdraw(const std::shared_ptr<Job>& job);
  // Records that this thread of the program waits for this job, from its latest call until end_wait(). If all ranks
  // wait and nothing can run, that is a mismatch. A rank counts as waiting when the thread that created its engine
  // waits: as long as that thread computes, it may still submit what others wait for, whatever other threads wait for.
  // `beside`: another thread waits while the training thread may continue. Such threads wait for one job at a time, in
  // the same order on all ranks: it is a mismatch if all ranks wait in this way.
  void begin_wait(std::shared_ptr<Job> job, bool beside = false);
  void end_wait(const Job& job);
  // Whether this thread makes a round or runs an operation: it is in a signal handler, a finalizer or a hook, until
  // whose end nothing can be completed.
  bool drives_here() const { return driver_ == std::this_thread::get_id(); }
  size_t n_in_flight();
  // How often all operations without a match have failed; the same on all ranks.
  uint64_t n_failed() const { return n_failed_; }
  double busy_s() const;  // CPU time of the engine's thread
  // Throws the job's error, if there is one, which then counts as seen.
  void result(const Job& job);
  // Completes what all ranks have submitted, then stops. Errors stay with their jobs, but if none has been seen, this
  // throws the first one. If this thread drives, nothing is completed: what is in flight fails.
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
    enum { kHere, kBeside, kInCall } how;
    std::thread::id thread;
  };
  struct Waits {           // the numbers of the waits that count, 0 if there are none
    uint64_t program = 0;  // of its training thread
    uint64_t beside = 0;
    bool operator==(const Waits&) const = default;
    bool none() const { return program == 0 && beside == 0; }
  };
  class Over;  // the end of a call

  void loop();
  void pump(uint32_t n_wake_ups, double timeout_s);  // one iteration of the loop
  // For the engine's own thread. False, after a while, if a call drives or is about to.
  bool take_over();
  void release(const Job* call = nullptr);  // the call that has driven, if any
  void wait_for_release(std::unique_lock<std::mutex>& lock);
  void announce(std::unique_lock<std::mutex>& lock);
  [[noreturn]] void throw_broken(std::unique_lock<std::mutex>& lock, const Job& job, bool in_call = false);
  void exchange_round(std::unique_lock<std::mutex>& lock);
  bool advance();  // makes a round or runs an operation; false if neither is due
  bool is_due();
  void announced(int rank, Entry entry);
  void withdrawn(int rank, const std::string& name);
  void collect_ready();
  void run_ready(const std::string& name, Known known);
  void fail_if_stuck(const std::vector<Header>& headers);
  bool has_joined(int rank) const;
  bool is_ready(const std::string& name) const;
  std::shared_ptr<Job> find(const std::string& name);
  void run(const std::string& name, Known known);
  void check_alike(const std::string& title, const Job* job, const Known& known);
  std::shared_ptr<Job> stand_in(const std::string& name, std::shared_ptr<Job> job, Known* known);
  // The numbers, in messages, of the ranks for which `is_so`.
  std::vector<int> numbers(const std::function<bool(int rank)>& is_so) const;
  Waits waiting() const;   // for the driver, under the mutex
  std::string waits_in();  // the same, as text
  // The wait in progress whose own limit is exceeded first, else the longest; under the mutex.
  const Await* awaited() const;
  void forget_wait(const Job& job);  // of this thread; under the mutex
  StallDetector::Overdue overdue(int64_t now_ns);
  std::string label();  // of this rank's handshakes
  std::vector<std::string> exchange(const std::string& mine);
  void check_peers();
  void report_wait(const std::vector<uint32_t>& flags = {});
  void record_last_rank(const std::string& name, const Known& known);
  void finish(Job& job, std::exception_ptr error);
  void fail_unmatched(bool only_beside);
  void fail_all(std::exception_ptr error);
  std::shared_ptr<Job> take(const std::string& name);
  void check_apart(const Job& job) const;  // under the mutex

  std::unique_ptr<Channel> channel_;
  std::vector<int> ranks_;
  Explain explain_;
  int pid_;
  int owner_;  // the thread that created this engine, by the kernel's ID
  std::thread::id owner_thread_;
  std::thread thread_;
  clockid_t thread_clock_;  // its CPU time
  std::atomic<uint64_t> n_failed_{0};

  // Guards the following members. Never held while the channel or a job runs: these may need the GIL, whose holder may
  // need this.
  mutable std::mutex mutex_;
  bool is_driven_ = false;                                           // there is a driver
  int n_calls_ = 0;                                                  // that wait to drive
  int n_in_handlers_ = 0;                                            // of these, those whose threads handle a signal
  int n_sleepers_ = 0;                                               // threads that sleep until the driver's release
  bool demands_ = false;                                             // the round in progress, if any, is demanded
  std::map<std::string, std::shared_ptr<Job>> jobs_;                 // in flight
  std::map<uintptr_t, std::pair<uintptr_t, std::string>> changing_;  // extents, and the jobs in flight that change them
  std::deque<Entry> unannounced_;                                    // submitted, not announced yet
  std::exception_ptr broken_;
  bool broken_seen_ = false;
  bool broken_by_stall_ = false;
  std::exception_ptr failed_;  // the error of the first job that failed
  bool error_seen_ = false;    // of any job
  std::vector<Await> awaits_;  // one for each thread that waits
  uint64_t n_awaits_ = 0;      // so far
  bool stopping_ = false;
  int64_t stopping_ns_ = 0;  // when stopping began
  bool stopped_ = false;
  bool ended_ = false;  // the thread has left its loop
  std::condition_variable end_;

  std::atomic<std::thread::id> driver_{};  // of the thread that drives, if any
  std::atomic<uint32_t> n_releases_{0};    // changed under the mutex
  std::atomic<uint64_t> round_{0};         // the handshake of the round in progress; set under the mutex
  std::shared_ptr<StallDetector> detector_;

  // Only for the driver.
  std::shared_ptr<Job> calling_;  // the call that drives
  bool is_announced_ = false;     // its entry
  bool is_quiet_ = false;         // no rank announced anything in the last round, and nothing has run since
  Waits announced_waits_;         // in the last round
  bool has_run_ = false;          // an operation, since the last handshake
  std::function<void(const std::vector<uint32_t>&)> on_wait_;
  std::optional<StallDetector::Wait> unmatched_wait_;  // the training thread's wait for a name that some lack
  int64_t unmatched_since_ns_ = 0;
  std::string unmatched_name_;
  int64_t round_since_ns_ = 0;  // when the wait in a round was first noticed; 0: not yet
  bool has_moved_ = false;      // an operation was run, after moved_ns_
  int64_t moved_ns_ = 0;
  int64_t seen_ns_ = 0;    // when the driver last looked whether this process was stopped
  std::string failed_in_;  // the operation that ended the engine, if one did
  uint64_t n_rounds_ = 0;
  std::map<std::string, Known> known_;               // announced by some ranks, not yet by all; the same on every rank
  std::vector<std::string> order_;                   // the order in which they were announced
  std::deque<std::pair<std::string, Known>> ready_;  // announced by all, in the order in which they are run
  uint64_t n_announced_ = 0;
};

}  // namespace horo
