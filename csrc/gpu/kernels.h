// The GPU kernels: they pack many tensors into a wire buffer and unpack them, in one launch.
//
// What a thread does is written once, in kernel_body.h; kernels.cu compiles it for GPUs,
// testing/kernels_host.cpp runs it thread by thread on the CPU, with the same bits.
//
// Numbers. Arithmetic is float32 (float64 if grad_dtype is), every operation rounds to nearest even, and their order is
// the one written at each step below. 2^k is exact: only a result too small for a normal number is rounded. A factor
// whose value as float32 (float64) is 1 changes nothing. A float64 that is narrowed to 16 bits is rounded to float32
// first. Every NaN becomes the NaN with all bits but the sign set.
//
// Integers and bool are copied as they are: `prescale` 1 (or 0), no other factor, divisor or exponents.
#pragma once

#include <cstddef>
#include <cstdint>

#include "gpu/pieces.h"
#include "pack/pack.h"

namespace horo {

struct KernelCall {
  enum Step {
    kMeasure,  // exponents[tensor] = max(itself, smallest e with |prescale * x| < 2^e over finite elements)
    kPack,     // wire = cast(prescale * x * 2^k)
    kUnpack,   // x = cast(wire * 2^-k * scale / divisor)
    kScale,    // x = cast(x * scale / divisor), no wire
  };
  Step step;
  DType grad_dtype;
  DType wire_dtype;         // grad_dtype, or narrower for float32 and float64
  const GpuPiece* pieces;   // in host memory, needed during the call only
  size_t n_pieces;          // any number: several launches, if one cannot hold them
  uint8_t* wire = nullptr;  // device memory, aligned to kWireAlignment
  double prescale = 1.0;    // 0: the elements count as zeros, whatever they are
  Factor factor{};
  const double* divisor = nullptr;  // device memory; if given, it replaces factor.divisor (0 counts as 1)
  // Device memory, one per tensor. Null: k is 0. Otherwise k = 15 - headroom - exponent, 0 for kNoExponent.
  int32_t* exponents = nullptr;
  int headroom = 0;            // how many more bits must be free: ceil(log2(ranks))
  WireStats* stats = nullptr;  // device memory, one per tensor, or null; kPack only
};

// Queues the launches on a CUDA stream of the current device. Throws std::invalid_argument for a pair of dtypes that
// has no kernel and for a factor that integers cannot have, std::runtime_error if CUDA fails.
void launch_kernels(const KernelCall& call, void* stream);
// Loads all kernels on the current device.
void load_kernels();

}  // namespace horo
