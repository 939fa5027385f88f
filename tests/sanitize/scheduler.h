// Runs the threads of this process one at a time, in an order that follows from a seed.
//
// A thread may lose its turn before every operation by which threads affect each other: an atomic access, a lock, a
// wait, a wake-up, the start or end of a thread. scheduler.cpp defines the functions for these: what -fsanitize=thread
// calls, without TSan's library, and pthread_mutex_lock(), syscall() and so on in place of the C library's. So what is
// tested does not know of it.
//
// The order is a random walk, or follows random priorities that change a few times (PCT, Burckhardt et al. 2010: if it
// takes d such changes to expose an error, each schedule exposes it with a probability of at least 1/(n k^(d-1))).
// Memory is sequentially consistent, and accesses that are relaxed or count references cannot lose the turn.
//
// The clock is virtual. If all threads wait, it advances to the next time-out, which is a finding unless `may_time_out`
// says otherwise: in reality, a lost wake-up would pass for slowness.
#pragma once

#include <cstdint>
#include <functional>
#include <string>

namespace schedule {

// A small generator (SplitMix64), since each schedule needs several.
struct Dice {
  using result_type = uint64_t;
  static constexpr uint64_t min() { return 0; }
  static constexpr uint64_t max() { return UINT64_MAX; }
  uint64_t operator()() {
    uint64_t z = state += 0x9E3779B97F4A7C15;
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9;
    z = (z ^ z >> 27) * 0x94D049BB133111EB;
    return z ^ z >> 31;
  }
  bool one_in(uint64_t n) { return (*this)() % n == 0; }
  uint64_t state;
};

// Runs `body` and the threads that it starts. Returns once all of them have ended.
void run(uint64_t seed, const std::function<void()>& body);
// Whether a time-out may end a wait although no other thread can run.
inline std::function<bool()> may_time_out;
// Lets more time pass than a thread waits before it counts as blocked.
void take_time();
// The rank of this thread, and of those that it starts from now on.
void set_rank(int rank);
// A process ID for the rank, as its peers see it; they notice its end like that of a process.
int pid_of(int rank);
void end_process(int rank);
bool has_ended(int rank);
// The rank's threads stop at its nth operation from now on, as if its process was killed.
void kill_after(int rank, uint64_t n);
// Faults: drops the nth wake-up of a futex for which a thread waits, if that is not 0; shows no process as ended.
inline uint64_t drop_wake_up = 0;
inline bool hides_ends = false;

// Prints the seed, where each thread is, and the latest operations, and ends the process. With `is_quiet`, it only
// ends.
[[noreturn]] void finding(const std::string& what);
inline bool is_quiet = false;
inline constexpr int kFound = 3;  // the exit code

// In all runs so far.
struct Totals {
  uint64_t operations = 0, switches = 0, threads = 0;
  uint64_t hash = 0;  // of all operations
};
inline Totals totals;

}  // namespace schedule
