// The GPU kernels: packing many tensors into a wire buffer and back, in one launch.
//
// What a thread does is written once, as __host__ __device__ templates below; kernels.cu launches them on a GPU,
// kernels_host.cpp runs them thread by thread on the CPU, with the same bits.
#pragma once

#include <cstddef>
#include <cstdint>

#include "pack.h"

namespace horo {

// A run of one tensor's elements, and where it lies in the wire buffer.
struct GpuPiece {
  void* address;         // of the first element; aligned to the item and perhaps to no more
  uint32_t n_elements;   // 1 or more
  uint32_t first_block;  // for the launcher, who fills it in: thread blocks that work on earlier pieces
  uint32_t wire_offset;  // in units of kWireAlignment bytes
  uint32_t tensor;       // index into `exponents` and `stats`
};

// Of what one tensor looks like on the wire. Zeroed by the caller beforehand.
struct WireStats {
  uint32_t amax_bits;    // largest finite magnitude, as the bits of a float32
  uint32_t n_nonfinite;  // how many elements are inf or nan
};

// Of a tensor without a finite element other than 0. Its bytes are equal, so that a plain fill of memory makes it.
inline constexpr int32_t kNoExponent = static_cast<int32_t>(0x80808080u);

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
  const double* divisor = nullptr;  // device memory; where given, it takes the place of factor.divisor (0 counts as 1)
  // Device memory, one per tensor. Null: k is 0. Otherwise k = 15 - headroom - exponent, 0 for kNoExponent.
  int32_t* exponents = nullptr;
  int headroom = 0;            // so many more bits must be free: ceil(log2(ranks))
  WireStats* stats = nullptr;  // device memory, one per tensor, or null; kPack only
};

// Throws std::invalid_argument for a pair of dtypes that has no kernel.
void run_on_host(const KernelCall& call);
// The same, queued on a CUDA stream.
void launch_kernels(const KernelCall& call, void* stream);

}  // namespace horo
