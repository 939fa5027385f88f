// Copies tensors to and from a wire buffer, and reduces what is there.
//
// A tensor is cut into blocks of kBlockElements, counted from its own start, so that neither the layout of the buffer
// nor the other tensors in it can change a bit of the result. Every function here works on a run of whole blocks of one
// tensor.
//
// Sums are in rank order within a host, then in host order, in float32 or wider, rounded once per hop. The owner of a
// share rounds its own contribution through the wire dtype too, and keeps the values that the others decode: so results
// do not depend on who owns what. Weights and the prescale factor multiply in float32 (float64, if they are no normal
// numbers of float32) where contributions are added, so no product has to fit the array's dtype. Without compression,
// float16 is sent as float32 between hosts, since a host's sum may exceed its range. Averages of integers are sent as
// 128 bits, and divided once. tests/collectives/test_laws.py tests the error bound of fp16 that `Compression` states.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "pack/dtype.h"

namespace horo {

inline constexpr size_t kBlockElements = 1024;
inline constexpr size_t kWireAlignment = 64;

enum class Op : uint8_t { kSum, kAverage, kWeightedAverage, kMin, kMax, kProduct };

// The format that the caller asks for on the wire. Which one a tensor gets depends on its dtype: see select_kernels().
// kBetweenHosts is kNone for data that may be sums of several ranks on their way to other hosts. With kInt8 and kInt4,
// images in memory hold float32, and only the messages between hosts are quantized: see Quantization.
enum class Wire : uint8_t { kNone, kBetweenHosts, kFloat16, kBFloat16, kInt8, kInt4 };
inline Wire between_hosts(Wire asked) { return asked == Wire::kNone ? Wire::kBetweenHosts : asked; }
inline Wire within_host(Wire asked) { return asked == Wire::kInt8 || asked == Wire::kInt4 ? Wire::kNone : asked; }

// How a wire image is written. Streaming (non-temporal) stores bypass the caches: this is right for memory whose lines
// are in a distant cache, since they need not be fetched to be overwritten. Same as kCached if the CPU has none.
enum class Stores : uint8_t { kCached, kStreaming };
#if defined(__x86_64__)
inline constexpr bool kCanStream = true;
#else
inline constexpr bool kCanStream = false;
#endif
// Call this after streaming stores, before signalling them to another rank: they are not ordered with other stores.
void finish_stores(Stores stores);

// result = (reduced * scale) / divisor. The divisor is kept apart so that an average that is exact stays exact.
struct Factor {
  double scale = 1.0;
  double divisor = 1.0;
};

// What each rank's contribution is multiplied by (empty: nothing), and what the sum is divided by.
struct Weighting {
  std::vector<double> weights;
  double divisor = 1.0;
};

// Weights of integers are rounded to whole numbers of 2^-52, so that a double holds their sum exactly: numbers of
// samples stay exact, and equal values have that value as their average, whatever the weights are.
inline constexpr double kWeightUnits = 0x1p52;
inline double in_weight_units(double weight) { return std::nearbyint(weight * kWeightUnits); }

// For `op` over ranks with these weights, which only count in a weighted average. They are scaled by a power of two,
// which changes no bit of the average, so that they add up to a number in [0.5, 1): then no product overflows, however
// large the numbers of samples are. The divisor is the sum of the weights in whole units. Throws std::invalid_argument
// if all weights are 0.
Weighting weighting(Op op, const std::vector<double>& weights);

struct ReduceArgs {
  const uint8_t* const* wires;  // one wire image per contributor, in rank order; ignored at index `own`
  int n_contributors;
  int own;                // whose contribution is in `source` instead of on a wire; -1: no rank's
  const void* source;     // this rank's elements
  const double* weights;  // factors of the contributions; 0: it counts as zeros, whatever it is. Null: no factors
  size_t n_elements;      // starts at a block boundary of its tensor
  Factor factor;
  uint8_t* wire;                    // out: the result in its wire format
  void* destination;                // out: the same result, decoded; null: not needed here. May be `source`.
  Stores stores = Stores::kCached;  // to `wire`
};

// A number of floats on their way between hosts.
struct QuantizeArgs {
  float* values;  // in: what to send
  size_t n_elements;
  uint8_t* message;  // out; may be where the values begin
  bool decodes;      // out: `values` are what the receivers decode; not if the message is there
  // What previous messages lacked of the final results, which is added here; out: what this one lacks. Null: it is
  // forgotten. Blocks that are not finite leave it as it is.
  float* residual;
  double share;  // how much 1.0 in `values` adds to the final result
};

// Integers of 8 or 4 bits with a float32 scale for each block of kQuantizedBlock elements, from its largest magnitude.
// A block with inf or nan arrives as nan. `n_elements` always counts from a block boundary.
struct Quantization {
  size_t (*message_bytes)(size_t n_elements);  // at most 4 * n_elements + 1
  void (*quantize)(const QuantizeArgs& args);
  void (*dequantize)(const uint8_t* message, size_t n_elements, float* values);
};
inline constexpr size_t kQuantizedBlock = 256;

// The three steps for one (dtype, wire, op). `n_elements` always counts from a block boundary.
struct Kernels {
  size_t item_bytes;
  size_t block_bytes;  // size of a full block on the wire
  size_t (*wire_bytes)(size_t n_elements);
  void (*encode)(const void* source, size_t n_elements, uint8_t* wire, Stores stores);
  void (*reduce)(const ReduceArgs& args);
  void (*decode)(const uint8_t* wire, size_t n_elements, void* destination);
  const Quantization* quantization;  // of the wire's floats in messages between hosts; null: they travel as they are
};

// The kernels for this machine's best instruction set; every set gives the same bits. Throws std::invalid_argument
// for a combination that has no meaning (the average of booleans).
const Kernels& select_kernels(DType dtype, Wire wire, Op op);

// memcpy for memory that other ranks read next, at the speed of these kernels.
void copy_bytes(void* to, const void* from, size_t n_bytes, Stores stores);

// For tests and for information: "avx512", "avx2" or "portable".
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
