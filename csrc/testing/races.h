// Finds accesses to the same memory that nothing orders, whenever they happen to run: a race detector for the fake
// device, with vector clocks (Fidge and Mattern 1988).
//
// The order of work is known when it is queued: a stream runs its work in the order of the calls, and a wait for an
// event refers to the event's latest recording at that time. So each stream has a clock, with one component per stream:
// how much of that stream's work comes before what is queued next. The host has a clock, too, of the work that it has
// seen to be done: what it queues afterwards, on any stream, comes later.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <vector>

namespace horo {

class Races {
 public:
  using Clock = std::vector<uint64_t>;

  int new_stream();
  // Work that reads or writes this memory is queued. If earlier accesses that concern it are not ordered before, prints
  // both and aborts the process.
  void touch(int stream, const void* address, size_t n_bytes, bool writes, const char* what);
  // What is queued on the stream so far.
  Clock queued(int stream);
  // What is queued on the stream from now on comes after that.
  void wait(int stream, const Clock& work);
  // The host has seen that this is done.
  void seen(const Clock& work);
  // The memory is free, and may be used by others.
  void forget(const void* address, size_t n_bytes);

 private:
  struct Access {
    int stream;
    uint64_t time;
    const char* what;
  };
  struct Range {
    uintptr_t end;
    std::vector<Access> writes, reads;  // at most one write, and for each stream its latest read since
  };

  Clock& clock(int stream);
  void check(const Clock& now, const std::vector<Access>& earlier, const Access& mine, const char* how, uintptr_t at);
  std::map<uintptr_t, Range>::iterator cut(uintptr_t at);

  std::mutex mutex_;
  std::vector<Clock> clocks_;
  Clock host_;
  std::map<uintptr_t, Range> ranges_;  // by their first byte
};

}  // namespace horo
