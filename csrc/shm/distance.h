// How far the cores of a host's ranks are from each other, and so how memory is written that the others read.
//
// A line in the cache of a core that shares an L3 with this one is here in about 100 ns, from another L3 in three times
// that. Virtual CPUs move between the two within seconds, and no table says so: it is measured, by sending a flag to
// and fro.
#pragma once

#include <atomic>
#include <cstdint>
#include <vector>

#include "pack/pack.h"

namespace horo {

// What the user wants of the stores into memory that other ranks read.
enum class SlotStores : uint8_t { kAuto, kCached, kStreaming };

class Distance {
 public:
  // One rank's, in memory that all see; zeroed when it is created.
  struct Shared {
    alignas(64) std::atomic<uint32_t> ping;  // for the next rank
    alignas(64) std::atomic<uint32_t> echo;  // of the previous rank's
    alignas(64) std::atomic<uint32_t> is_far;
  };

  Distance(std::vector<Shared*> ranks, int rank);

  // Exchanges a flag with the next rank a few times, and with the previous one. To be called by all ranks at about the
  // same time and equally often. Takes 20 µs at most: a rank that has no answer by then, since another does not run
  // just now, keeps what it knew.
  void measure();

  // The fastest exchange when last there was an answer; 0 before.
  double round_trip_ns() const { return round_trip_ns_; }
  // How to write, given the last measurements: past the caches where some neighbours are far from each other, since
  // what a rank writes is read by all.
  Stores stores(SlotStores wanted) const;

 private:
  std::vector<Shared*> ranks_;
  int rank_;
  uint32_t n_measurements_ = 0;
  std::atomic<double> round_trip_ns_{0.0};
};

}  // namespace horo
