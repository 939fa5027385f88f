// Who waits for whom, and who is late.
//
// A rank that waits has nothing else to do: it watches the others. What each thread waits for stands on a board
// that the ranks of a host share; a rank that has waited for too long reports all of it, with the Python stacks of
// those that are late. A late rank need not do anything for that, and could not: its peers send it a signal, whose
// handler (Python's faulthandler, which wants no GIL) writes the stacks into a file that its peers can read.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "group.h"

namespace horo {

// How long the others have waited for one rank.
struct Lateness {
  int64_t n_last = 0;     // how often it came last
  double waited_s = 0.0;  // by each of the others, on average
};

// Who has joined waits in two places, and only its engine knows whether the others move in either.
inline constexpr const char* kJoin = "join()";

class StallDetector {
 public:
  static size_t memory_bytes(int size);

  // Ranks are numbered as in the world, and `names[r]` is how messages call them. `memory` is zeroed when it is created
  // and shared by the ranks of this host, which are those with the same number in `hosts`. `pids[r]` is 0 for threads
  // of this process.
  StallDetector(uint8_t* memory, int rank, std::vector<int> hosts, std::vector<int> pids,
                std::vector<std::string> names);

  int rank() const { return rank_; }
  int size() const { return static_cast<int>(names_.size()); }

  // How long one rank may wait before there is a report, and before every rank raises Stalled. 0: for ever.
  void set_limits(double warn_s, double abort_s);
  double warn_s() const { return 1e-9 * static_cast<double>(warn_ns_); }
  double abort_s() const { return 1e-9 * static_cast<double>(abort_ns_); }
  // On `signal`, this process writes its stacks to the end of its file `fd`, an anonymous one.
  void give_stacks(int fd, int signal);
  // For so long, this rank is not reported as late. "": that is over.
  void announce(int rank, const std::string& what, double expect_s);

  // Nanoseconds, on one clock for all processes of a host.
  static int64_t clock_ns();
  // What this rank does now; a store, and no more.
  void doing(const std::string& what, int64_t now_ns);
  // " of ranks 0, 2", for a part of the world.
  std::string scope(const std::vector<int>& ranks) const;

  // This rank has waited so long for `rank`, which came last.
  void waited_for(int rank, int64_t ns);
  // For how much of this time this process was not stopped, as far as its waits have noticed.
  int64_t running_ns(int64_t since_ns, int64_t until_ns) const;
  // Of every rank, as the ranks of this host have seen it.
  std::vector<Lateness> lateness() const;

  // Throws if the ranks have stalled.
  void check() const;
  // From now on, check() throws this on every rank of this host.
  void stall(const std::string& reason);

  // What one thread waits for: on the board from the first report_if_due() on, for as long as this lives.
  class Wait {
   public:
    explicit Wait(std::shared_ptr<StallDetector> detector, int64_t since_ns = clock_ns());
    ~Wait();
    Wait(const Wait&) = delete;
    Wait& operator=(const Wait&) = delete;

    // To be called a few times a second. Some ranks are `late`, the others, of which this one knows some, have
    // `arrived`. Reports where it is time for that, and somebody else will not. Throws Stalled.
    void report_if_due(const std::string& what, const std::vector<int>& arrived, const std::vector<int>& late);
    // It has ended well: if the stall was reported, so is its end.
    void over();
    // Notices whether this rank was stopped since it looked last.
    void look();

   private:
    std::shared_ptr<StallDetector> detector_;
    int64_t since_ns_;
    int64_t seen_ns_;  // when this rank looked last
    int slot_ = -1;
  };

 private:
  struct Board;
  struct Row;
  struct Slot;
  struct Waiting;  // one wait, read from the board

  Board& board() const;
  Row& row(int rank) const;
  // For each other rank: how often this one waited for it, and how long.
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
  void report_or_stall(int64_t since_ns, bool is_reporter);
  bool all_excused(const std::vector<int>& late, int64_t now) const;
  void was_stopped(int64_t since_ns, int64_t until_ns);

  uint8_t* memory_;
  int rank_;
  std::vector<int> hosts_;
  std::vector<int> pids_;
  std::vector<std::string> names_;
  std::atomic<int64_t> warn_ns_{0};
  std::atomic<int64_t> abort_ns_{0};
  mutable std::mutex mutex_;
  std::vector<std::pair<int64_t, int64_t>> stops_;  // of this process, one after the other
};

}  // namespace horo
