// How far the cores of a host's ranks are from each other, which decides how to write memory that others read.
//
// Fetching a cache line from a core that shares an L3 cache with this one takes about 100 ns, from another L3 three
// times as long. Virtual CPUs move between the two within seconds, and no table shows it, so it is measured by sending
// a flag back and forth.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <vector>

#include "pack/pack.h"

namespace horo {

// The user's choice of stores into memory that other ranks read.
enum class SlotStores : uint8_t { kAuto, kCached, kStreaming };

class Distance {
 public:
  // One rank's flags, in memory that all ranks share; zeroed when it is created.
  struct Shared {
    alignas(64) std::atomic<uint32_t> ping;  // for the next rank
    alignas(64) std::atomic<uint32_t> echo;  // of the previous rank's ping
    alignas(64) std::atomic<uint32_t> is_far;
  };

  Distance(std::vector<Shared*> ranks, int rank);

  // Exchanges a flag with the next rank a few times, and with the previous one. All ranks must call it at about the
  // same time, and the same number of times. Takes `limit` at most: a rank without an answer by then, because another
  // is not running at the moment, keeps its previous result.
  void measure(std::chrono::microseconds limit = std::chrono::microseconds(20));

  // The fastest exchange of the last measurement with an answer; 0 before.
  double round_trip_ns() const { return round_trip_ns_; }
  // How to write, given the last measurements: bypassing the caches if some neighbours are far from each other, since
  // all ranks read what a rank writes.
  Stores stores(SlotStores wanted) const;

 private:
  std::vector<Shared*> ranks_;
  int rank_;
  uint32_t n_measurements_ = 0;
  std::atomic<double> round_trip_ns_{0.0};
};

}  // namespace horo
