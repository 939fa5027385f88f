// What the callers of the GPU kernels and the kernels themselves speak of. Read by NVRTC too, which has no headers.
#pragma once

#ifdef __CUDACC_RTC__
using uint8_t = unsigned char;
using uint16_t = unsigned short;
using uint32_t = unsigned int;
using uint64_t = unsigned long long;
using int32_t = int;
using uintptr_t = unsigned long long;
#else
#include <cstddef>
#include <cstdint>
#endif

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
  uint32_t amax_bits;    // largest finite magnitude, as the bits of a float32 (float64: rounded, at most FLT_MAX)
  uint32_t n_nonfinite;  // how many elements are inf or nan
};

// Of a tensor without a finite element other than 0. Its bytes are equal, so that a plain fill of memory makes it.
inline constexpr int32_t kNoExponent = static_cast<int32_t>(0x80808080u);

}  // namespace horo
