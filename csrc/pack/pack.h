// Getting tensors into and out of a wire buffer, and reducing what lies there.
//
// A tensor is cut into blocks of kBlockElements counted from its own start, so that neither the layout of the
// buffer nor the company a tensor travels in can change a bit of the result. A run of whole blocks of one tensor
// is what every function here works on.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "pack/dtype.h"

namespace horo {

inline constexpr size_t kBlockElements = 1024;
inline constexpr size_t kWireAlignment = 64;

enum class Op : uint8_t { kSum, kAverage, kWeightedAverage, kMin, kMax, kProduct };

// What the caller would like on the wire. What a tensor gets depends on its dtype: see select_kernels().
// kBetweenHosts is kNone for what may hold sums of several ranks on its way to others.
enum class Wire : uint8_t { kNone, kBetweenHosts, kFloat16, kBFloat16 };
inline Wire between_hosts(Wire asked) { return asked == Wire::kNone ? Wire::kBetweenHosts : asked; }

// How a wire image is written. Streaming stores go past the caches (non-temporal): right for memory whose lines lie in
// a cache far away, since nobody then fetches them to overwrite them. The same as kCached where the CPU has none.
enum class Stores : uint8_t { kCached, kStreaming };
#if defined(__x86_64__)
inline constexpr bool kCanStream = true;
#else
inline constexpr bool kCanStream = false;
#endif
// To be called after streaming stores, before anybody is told of them: they are not ordered with other stores.
void finish_stores(Stores stores);

// result = (reduced * scale) / divisor. The divisor is kept apart so that an average that is exact stays exact.
struct Factor {
  double scale = 1.0;
  double divisor = 1.0;
};

// What multiplies each rank's contribution (none: nothing does), and what divides the sum.
struct Weighting {
  std::vector<double> weights;
  double divisor = 1.0;
};

// For `op` over ranks with these weights, which count in a weighted average only. There they are scaled by a power of
// two, which changes no bit of the average, so that they add up to a number in [0.5, 1): no product overflows then,
// however large the numbers of samples are.
Weighting weighting(Op op, const std::vector<double>& weights);

struct ReduceArgs {
  const uint8_t* const* wires;  // one wire image per contributor, in rank order; ignored at index `own`
  int n_contributors;
  int own;             // whose contribution lies in `source` instead of on a wire; -1: nobody's
  const void* source;  // this rank's elements
  const double*
      weights;        // what multiplies each contribution; 0: it counts as zeros, whatever it is. Null: nothing does
  size_t n_elements;  // starts at a block boundary of its tensor
  Factor factor;
  uint8_t* wire;                    // out: the result as it travels on
  void* destination;                // out: the same result, decoded; null: not wanted here. May be `source`.
  Stores stores = Stores::kCached;  // to `wire`
};

// The three steps for one (dtype, wire, op). `n_elements` always counts from a block boundary.
struct Kernels {
  size_t item_bytes;
  size_t block_bytes;  // of a full block on the wire
  size_t (*wire_bytes)(size_t n_elements);
  void (*encode)(const void* source, size_t n_elements, uint8_t* wire, Stores stores);
  void (*reduce)(const ReduceArgs& args);
  void (*decode)(const uint8_t* wire, size_t n_elements, void* destination);
};

// The kernels for this machine's best instruction set; every set gives the same bits. Throws std::invalid_argument
// for a combination that has no meaning (the average of booleans).
const Kernels& select_kernels(DType dtype, Wire wire, Op op);

// memcpy for memory that others read next, at the speed of these kernels.
void copy_bytes(void* to, const void* from, size_t n_bytes, Stores stores);

// For tests and for the curious: "avx512", "avx2" or "portable".
const char* instruction_set();
void use_instruction_set(const char* name);

using SelectKernels = const Kernels* (*)(DType, Wire, Op);
using CopyBytes = void (*)(void*, const void*, size_t, Stores);
namespace portable {
const Kernels* select(DType dtype, Wire wire, Op op);
void copy_bytes(void* to, const void* from, size_t n_bytes, Stores stores);
}  // namespace portable
namespace avx2 {
const Kernels* select(DType dtype, Wire wire, Op op);
void copy_bytes(void* to, const void* from, size_t n_bytes, Stores stores);
}  // namespace avx2
namespace avx512 {
const Kernels* select(DType dtype, Wire wire, Op op);
void copy_bytes(void* to, const void* from, size_t n_bytes, Stores stores);
}  // namespace avx512

}  // namespace horo
