// Which ranks wait for which, and which are late.
//
// A waiting rank has nothing else to do, so it watches the others, and no thread is needed for that. A thread that has
// slept for 50 ms writes what it waits for on a board that the ranks of a host share, and updates it twenty times a
// second. A rank that has waited for too long claims the report by one compare-and-swap and prints the board, with the
// Python stacks of late ranks. A late rank need not do anything for that, and could not: its peers send it a signal,
// whose handler (Python's faulthandler, which does not need the GIL) writes the stacks into a file that its peers can
// read. Between hosts, waiting ranks inform each other over the control channel, and the late rank's host reports. A
// handshake costs 30 ns more: a read of the clock, a copy of its label and a read of one word.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "group.h"

namespace horo {

// "rank 2", "ranks 0-3, 5"
std::string ranks_text(std::vector<int> ranks);

// How long the others have waited for one rank.
struct Lateness {
  int64_t n_last = 0;     // how often it was last
  double waited_s = 0.0;  // time waited by each of the others, on average
};

// While a rank has joined, only its engine knows whether the others make progress.
inline constexpr const char* kJoin = "join()";

class StallDetector {
 public:
  static size_t memory_bytes(int size);

  // Ranks are numbered as in the world, and `names[r]` is their name in messages. `memory` is shared by the ranks of
  // this host, which are those with the same number in `hosts`, and was zeroed when it was created. `pids[r]` is 0 for
  // threads of this process.
  StallDetector(uint8_t* memory, int rank, std::vector<int> hosts, std::vector<int> pids,
                std::vector<std::string> names);

  int rank() const { return rank_; }
  int size() const { return static_cast<int>(names_.size()); }

  // How long a rank may wait before a report is made, and before every rank throws Stalled. 0: without limit.
  void set_limits(double warn_s, double abort_s);
  double warn_s() const { return 1e-9 * static_cast<double>(warn_ns_); }
  double abort_s() const { return 1e-9 * static_cast<double>(abort_ns_); }
  // A limit, and by how much a wait has exceeded it; none if the limit is 0.
  struct Overdue {
    int64_t abort_ns = 0;
    int64_t by_ns = 0;
  };
  // How long this thread may wait, in addition to the limit of all waits. 0: without limit.
  static thread_local int64_t thread_abort_ns;
  // For a thread that waits on behalf of others: which of their limits is exceeded, or will be first.
  static thread_local std::function<Overdue(int64_t now_ns)> overdue_of_others;
  // Declares that on `signal`, this process appends its stacks to its file `fd`, an anonymous one.
  void give_stacks(int fd, int signal);
  // Does not report that rank as late for expect_s. "": ends that.
  void announce(int rank, const std::string& what, double expect_s);

  // Nanoseconds, by a clock that all processes of a host share.
  static int64_t clock_ns();
  // Records what this rank does now; this is only a store.
  void doing(const std::string& what, int64_t now_ns);
  // " of ranks 0, 2", for a part of the world.
  std::string scope(const std::vector<int>& ranks) const;

  // Records how long this rank has waited for `rank`, which was last.
  void waited_for(int rank, int64_t ns);
  // Returns the time. Long after `seen_ns`, when a wait in progress last did this, the process was stopped in between,
  // as a suspended job is.
  int64_t look(int64_t seen_ns);
  // How much of this time the process was not stopped, as far as look() has noticed.
  int64_t running_ns(int64_t since_ns, int64_t until_ns) const;
  // The lateness of every rank, as observed by the ranks of this host.
  std::vector<Lateness> lateness() const;

  // Throws if the ranks have stalled.
  void check() const;
  // Makes check() throw this on every rank of this host from now on.
  void stall(const std::string& reason);

  // What a thread waits for: on the board from the first report_if_due() until this object is destroyed.
  class Wait {
   public:
    explicit Wait(std::shared_ptr<StallDetector> detector, int64_t since_ns = clock_ns());
    ~Wait();
    Wait(const Wait&) = delete;
    Wait& operator=(const Wait&) = delete;

    // Must be called a few times per second. Some ranks are `late`; others, some of which this rank knows, have
    // `arrived`. Reports if it is time to, and no other rank does. Throws Stalled.
    void report_if_due(const std::string& what, const std::vector<int>& arrived, const std::vector<int>& late);
    // Records that the wait has succeeded: if the stall was reported, so is its end.
    void over();
    // Detects whether this rank was stopped since the last call; returns the time.
    int64_t look();
    // Declares that since the last call, this thread did something else.
    void resume() { seen_ns_ = clock_ns(); }

   private:
    std::shared_ptr<StallDetector> detector_;
    const int64_t since_ns_;
    int64_t seen_ns_;  // the time of the last call
    int slot_ = -1;
  };

 private:
  struct Board;
  struct Row;
  struct Slot;
  struct Waiting;  // one wait, read from the board

  Board& board() const;
  Row& row(int rank) const;
  // For each other rank: how often this rank waited for it, and how long.
  std::atomic<int64_t>* waits_of(int rank) const;
  std::vector<Waiting> waiting() const;
  std::vector<int> late(const std::vector<Waiting>& waits) const;
  bool is_stopped(int rank) const;
  std::string who_waits(const std::vector<Waiting>& waits, int64_t now) const;
  std::string last_call(int rank, int64_t now) const;
  std::string report(int64_t since_ns) const;
  std::string stacks(int rank) const;
  bool is_here(int rank) const { return hosts_[rank] == hosts_[rank_]; }
  bool is_reporter(const std::vector<int>& arrived, const std::vector<int>& late) const;
  Overdue overdue(int64_t since_ns, int64_t now) const;
  bool report_or_stall(int64_t since_ns, int64_t now, bool is_reporter);
  bool all_excused(const std::vector<int>& late, int64_t now) const;

  uint8_t* memory_;
  int rank_;
  std::vector<int> hosts_;
  std::vector<int> pids_;
  std::vector<std::string> names_;
  std::atomic<int64_t> warn_ns_{0};
  std::atomic<int64_t> abort_ns_{0};
  mutable std::mutex mutex_;
  std::vector<std::pair<int64_t, int64_t>> stops_;  // of this process, in order
};

}  // namespace horo
