// Shared by the checks: reductions drawn at random, and ranks as threads of this process.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "engine/engine.h"
#include "engine/shm_channel.h"
#include "oracle.h"
#include "pack/fingerprint.h"
#include "pack/layout.h"
#include "shm/segment.h"
#include "shm/shm_group.h"
#include "shm/stall_detector.h"

namespace horo {

using Random = std::mt19937;

// The checks, each with a seed.
void kernels(unsigned seed);
void replicas(unsigned seed);
void collectives(unsigned seed);
void distances(unsigned seed);
void several_hosts(unsigned seed);
void engines_of_several_hosts(unsigned seed);
void causes(unsigned seed);
void losses(unsigned seed);
void asynchronous(unsigned seed);
void blocking_calls(unsigned seed);
void differing_calls(unsigned seed);
void progress(unsigned seed);
void priority(unsigned seed);
void broken_calls(unsigned seed);
void mismatches(unsigned seed);
void joins(unsigned seed);
void broken_engines(unsigned seed);

inline const char* check_name = "";
inline unsigned check_seed = 0;

inline void expect(bool fact, const std::string& what) {
  if (fact) return;
  std::fprintf(stderr, "%s, seed %u: not so: %s\n", check_name, check_seed, what.c_str());
  std::abort();
}

template <class Error, class Call>
std::string thrown_by(Call call) {
  try {
    call();
  } catch (const Error& error) {
    return error.what();
  }
  expect(false, "an exception was expected");
  return "";
}

inline void sleep_ms(int milliseconds) { std::this_thread::sleep_for(std::chrono::milliseconds(milliseconds)); }

inline bool contains(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

// --- reductions -------------------------------------------------------------------------------------------------

inline constexpr DType kDTypes[] = {DType::kBool,    DType::kInt8,      DType::kUInt8,    DType::kInt16,
                                    DType::kUInt16,  DType::kInt32,     DType::kUInt32,   DType::kInt64,
                                    DType::kUInt64,  DType::kFloat16,   DType::kBFloat16, DType::kFloat32,
                                    DType::kFloat64, DType::kLongDouble};
inline constexpr Op kOps[] = {Op::kSum, Op::kAverage, Op::kWeightedAverage, Op::kMin, Op::kMax, Op::kProduct};
inline constexpr Wire kWires[] = {Wire::kNone, Wire::kBetweenHosts, Wire::kFloat16, Wire::kBFloat16};

inline bool is_average(Op op) { return op == Op::kAverage || op == Op::kWeightedAverage; }

// The arguments, the same on all ranks. A rank's numbers follow from the seed, so that each can compute all results.
struct Reduction {
  Op op = Op::kSum;
  Wire wire = Wire::kNone;
  std::vector<DType> dtypes;
  std::vector<size_t> sizes;
  std::vector<double> weights;  // of every rank
  unsigned seed = 0;

  static Reduction draw(Random& random, int n_ranks, size_t most_elements) {
    Reduction what;
    what.op = kOps[random() % std::size(kOps)];
    what.wire = kWires[random() % std::size(kWires)];
    for (size_t n_tensors = random() % 5; n_tensors > 0; --n_tensors) {
      what.dtypes.push_back(kDTypes[is_average(what.op) + random() % (std::size(kDTypes) - is_average(what.op))]);
      const size_t least[] = {0, 1, 15, 17, 1023, 1024, 1025};
      what.sizes.push_back(random() % 3 == 0 ? random() % (most_elements + 1) : least[random() % std::size(least)]);
    }
    what.draw_weights(random, n_ranks);
    return what;
  }
  void draw_weights(Random& random, int n_ranks) {
    for (int r = 0; r < n_ranks; ++r) weights.push_back(r == 0 ? 1 + random() % 3 : random() % 4);
    seed = random();
  }
};

// One rank's tensors. Each ends where its memory ends, and begins at any address.
class Tensors {
 public:
  Tensors(const Reduction& what, int rank) {
    for (size_t t = 0; t < what.sizes.size(); ++t) {
      const size_t n_bytes = what.sizes[t] * item_bytes(what.dtypes[t]);
      const size_t shift = (what.seed + rank) % 17;
      memory_.push_back(std::make_unique<uint8_t[]>(shift + n_bytes));
      refs.push_back({memory_.back().get() + shift, what.sizes[t], what.dtypes[t]});
      total_bytes += n_bytes;
    }
    fill(what, rank);
  }
  // In memory of the caller.
  Tensors(const Reduction& what, int rank, uint8_t* memory) {
    for (size_t t = 0; t < what.sizes.size(); ++t) {
      refs.push_back({memory + total_bytes, what.sizes[t], what.dtypes[t]});
      total_bytes += what.sizes[t] * item_bytes(what.dtypes[t]);
    }
    fill(what, rank);
  }
  uint8_t* at(size_t tensor, size_t element) const {
    return static_cast<uint8_t*>(refs[tensor].address) + element * item_bytes(refs[tensor].dtype);
  }
  void set_zero() {
    for (const TensorRef& ref : refs) std::memset(ref.address, 0, ref.n_elements * item_bytes(ref.dtype));
  }
  std::vector<Buffer> buffers() const {
    std::vector<Buffer> all;
    for (const TensorRef& ref : refs) {
      all.push_back({static_cast<uint8_t*>(ref.address), ref.n_elements * item_bytes(ref.dtype)});
    }
    return all;
  }
  uint64_t hash() const {
    uint64_t all = 0;
    for (const TensorRef& ref : refs) all = all * 31 + fingerprint(ref);
    return all;
  }

  std::vector<TensorRef> refs;
  size_t total_bytes = 0;

 private:
  void fill(const Reduction& what, int rank) {
    Random random(what.seed + static_cast<unsigned>(rank));
    for (size_t t = 0; t < refs.size(); ++t) {
      for (size_t i = 0; i < refs[t].n_elements; ++i) put_random(refs[t].dtype, what.op, random, at(t, i));
    }
  }
  std::vector<std::unique_ptr<uint8_t[]>> memory_;
};

// `n_ranks` contributed, those from `n_with_data` on only zeros. Checks the tensors from `first` to `last`.
inline void check_result(const Reduction& what, const Tensors& got, int n_ranks, int n_with_data, size_t first = 0,
                         size_t last = SIZE_MAX) {
  std::vector<Tensors> inputs;
  for (int r = 0; r < n_ranks; ++r) {
    inputs.emplace_back(what, r);
    if (r >= n_with_data) inputs.back().set_zero();
  }
  std::vector<Number> all(static_cast<size_t>(n_ranks));
  for (size_t t = first; t < std::min(last, what.sizes.size()); ++t) {
    const DType dtype = what.dtypes[t];
    for (size_t i = 0; i < what.sizes[t]; ++i) {
      for (size_t r = 0; r < all.size(); ++r) all[r] = number_at(dtype, inputs[r].at(t, i));
      if (is_reduction(dtype, what.op, what.wire, all, what.weights, number_at(dtype, got.at(t, i)))) continue;
      expect(false, std::string("the reduction of element ") + std::to_string(i) + " of " + dtype_name(dtype) +
                        ", op " + std::to_string(static_cast<int>(what.op)) + ", wire " +
                        std::to_string(static_cast<int>(what.wire)));
    }
  }
}

// Returns the first tensor that a reduce-scatter leaves on a rank; the next rank's comes after the last.
inline size_t first_of_part(size_t n_tensors, int rank, int n_ranks) {
  return n_tensors * static_cast<size_t>(rank) / static_cast<size_t>(n_ranks);
}

inline std::vector<std::vector<TensorRef>> parts_of(const std::vector<TensorRef>& refs, int n_ranks) {
  std::vector<std::vector<TensorRef>> parts(static_cast<size_t>(n_ranks));
  for (int r = 0; r < n_ranks; ++r) {
    const size_t end = first_of_part(refs.size(), r + 1, n_ranks);
    for (size_t t = first_of_part(refs.size(), r, n_ranks); t < end; ++t) {
      parts[static_cast<size_t>(r)].push_back(refs[t]);
    }
  }
  return parts;
}

// --- ranks ------------------------------------------------------------------------------------------------------

// The state shared by the ranks of one host.
struct Host {
  explicit Host(int n_ranks)
      : size(n_ranks),
        direct(Segment::local(ShmGroup::memory_bytes(size))),
        asynchronous(Segment::local(ShmGroup::memory_bytes(size))),
        board(Segment::local(StallDetector::memory_bytes(size))),
        gradients(static_cast<size_t>(size) * kGradientBytes),
        pids(static_cast<size_t>(size), 0) {
    for (int r = 0; r < size; ++r) names.push_back("rank " + std::to_string(r));
    for (int r = 0; r < size; ++r) ranks.push_back(r);
  }
  static constexpr size_t kGradientBytes = 1 << 16;
  int size;
  Segment direct, asynchronous, board;
  std::vector<uint8_t> gradients;  // of every rank
  std::vector<int> pids, ranks;
  std::vector<std::string> names;
};

// One of them, made by its thread, as session.py makes its transports.
struct Rank {
  Rank(Host& host, int number)
      : rank(number),
        size(host.size),
        host(host),
        detector(std::make_shared<StallDetector>(host.board.data(), rank, std::vector<int>(host.ranks.size(), 0),
                                                 host.pids, host.names)),
        direct(host.direct.data(), rank, size, host.pids, host.names),
        group(std::make_shared<ShmGroup>(host.asynchronous.data(), rank, size, host.pids, host.names)) {
    direct.watched_by(detector, host.ranks);
    group->watched_by(detector, host.ranks);
    const auto explain = [](const std::string& name, const std::vector<std::string>& said, const std::vector<int>&) {
      return name + " differs: " + said.front() + ", " + said.back();
    };
    engine = std::make_unique<Engine>(std::make_unique<ShmChannel>(group), host.ranks, explain);
    engine->watched_by(detector);
  }
  void leave() {
    direct.leave("its program has ended");
    group->leave("its program has ended");
  }

  int rank, size;
  Host& host;
  std::shared_ptr<StallDetector> detector;
  ShmGroup direct;
  std::shared_ptr<ShmGroup> group;
  std::unique_ptr<Engine> engine;
};

template <class Body>  // Body(Rank&)
void as_ranks(Host& host, Body body) {
  std::vector<std::jthread> threads;
  for (int r = 0; r < host.size; ++r) {
    threads.emplace_back([&host, &body, r] {
      try {
        Rank me(host, r);
        body(me);
      } catch (const std::exception& error) {
        expect(false, "rank " + std::to_string(r) + " raised " + error.what());
      }
    });
  }
}

inline void all_reduce(ShmGroup& group, const Reduction& what, Tensors& tensors) {
  const Layout layout(tensors.refs, what.op, what.wire, group.chunk_bytes(tensors.total_bytes), group.size());
  const Weighting weights = weighting(what.op, what.weights);
  group.allreduce(layout, weights.weights, {1.0, weights.divisor});
}

}  // namespace horo
