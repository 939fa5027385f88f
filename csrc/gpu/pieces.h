// Types that the GPU kernels share with their callers. NVRTC compiles this, too, which has no standard headers.
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

// A run of one tensor's elements, and where it is in the wire buffer.
struct GpuPiece {
  void* address;         // of the first element; aligned to the item, perhaps not to more
  uint32_t n_elements;   // 1 or more
  uint32_t first_block;  // filled in by the launcher: how many thread blocks work on earlier pieces
  uint32_t wire_offset;  // in units of kWireAlignment bytes
  uint32_t tensor;       // index into `exponents` and `stats`
};

// Statistics of one tensor on the wire. The caller sets them to zero beforehand.
struct WireStats {
  uint32_t amax_bits;    // largest finite magnitude, as the bits of a float32 (float64: rounded, at most FLT_MAX)
  uint32_t n_nonfinite;  // how many elements are inf or nan
};

// The exponent of a tensor without finite elements other than 0. Its bytes are equal, so memory can be filled with it.
inline constexpr int32_t kNoExponent = static_cast<int32_t>(0x80808080u);

}  // namespace horo
