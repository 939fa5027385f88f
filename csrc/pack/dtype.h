// Element types that can be reduced, and the bit-level conversions of the two 16-bit floats.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <stdexcept>

namespace horo {

// Functions here are static: this header is compiled for several instruction sets, and a linker that merged their
// copies could hand an AVX-512 one to a machine that has none.

enum class DType : uint8_t {
  kBool,
  kInt8,
  kUInt8,
  kInt16,
  kUInt16,
  kInt32,
  kUInt32,
  kInt64,
  kUInt64,
  kFloat16,
  kBFloat16,
  kFloat32,
  kFloat64,
  kLongDouble,
  kLast = kLongDouble,
};

// The two formats that C++ has no type for; they are only converted, never computed with.
struct Half {
  uint16_t bits;
};
struct BFloat16 {
  uint16_t bits;
};

// An element of a caller's array, which may be at any address (a field of a packed record in NumPy): in accesses
// through this type, the compiler assumes no alignment. Vector loads and stores assume none either, so it costs
// nothing.
template <class T>
struct [[gnu::packed, gnu::may_alias]] Packed {
  T value;
};

// Calls `function` with a value of the type of such elements. Those of kBool are bytes.
template <class Function>
static inline auto with_type(DType dtype, Function function) {
  switch (dtype) {
    case DType::kBool:
    case DType::kUInt8:
      return function(uint8_t{});
    case DType::kInt8:
      return function(int8_t{});
    case DType::kInt16:
      return function(int16_t{});
    case DType::kUInt16:
      return function(uint16_t{});
    case DType::kInt32:
      return function(int32_t{});
    case DType::kUInt32:
      return function(uint32_t{});
    case DType::kInt64:
      return function(int64_t{});
    case DType::kUInt64:
      return function(uint64_t{});
    case DType::kFloat16:
      return function(Half{});
    case DType::kBFloat16:
      return function(BFloat16{});
    case DType::kFloat32:
      return function(float{});
    case DType::kFloat64:
      return function(double{});
    case DType::kLongDouble:
      return function(0.0L);
  }
  throw std::logic_error("unknown dtype");
}

static inline size_t item_bytes(DType dtype) {
  return with_type(dtype, [](auto element) { return sizeof(element); });
}

static inline const char* dtype_name(DType dtype) {
  static const char* const names[] = {"bool",  "int8",   "uint8",   "int16",    "uint16",  "int32",   "uint32",
                                      "int64", "uint64", "float16", "bfloat16", "float32", "float64", "longdouble"};
  return names[static_cast<int>(dtype)];
}

template <class To, class From>
static inline To bit_cast(const From& from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof(To));
  return to;
}

// IEEE 754 binary16, rounded to nearest even; NaNs become quiet and keep the upper bits of their payload. F16C does the
// same, so every instruction set gives the same bits.
static inline uint16_t half_bits(float value) {
  const uint32_t bits = bit_cast<uint32_t>(value);
  const uint16_t sign = static_cast<uint16_t>((bits >> 16) & 0x8000u);
  const uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) {
    return static_cast<uint16_t>(sign | 0x7e00u | ((magnitude >> 13) & 0x3ffu));
  }
  if (magnitude >= 0x477ff000u) return static_cast<uint16_t>(sign | 0x7c00u);
  if (magnitude < 0x38800000u) {
    // Adding 0.5 lines the subnormal's last bit up with the last bit of a float32: the adder rounds for us.
    const float shifted = bit_cast<float>(magnitude) + 0.5f;
    return static_cast<uint16_t>(sign | (bit_cast<uint32_t>(shifted) - 0x3f000000u));
  }
  const uint32_t odd = (magnitude >> 13) & 1u;
  return static_cast<uint16_t>(sign | ((magnitude - 0x38000000u + 0x0fffu + odd) >> 13));
}

static inline float float_of_half(uint16_t half) {
  const uint32_t sign = static_cast<uint32_t>(half & 0x8000u) << 16;
  const uint32_t magnitude = half & 0x7fffu;
  if (magnitude >= 0x7c00u) {
    const uint32_t quiet = magnitude > 0x7c00u ? 0x00400000u : 0u;
    return bit_cast<float>(sign | 0x7f800000u | quiet | ((magnitude & 0x3ffu) << 13));
  }
  if (magnitude < 0x0400u) {
    const float value = static_cast<float>(magnitude) * 0x1p-24f;
    return bit_cast<float>(sign | bit_cast<uint32_t>(value));
  }
  return bit_cast<float>(sign | ((magnitude << 13) + 0x38000000u));
}

static inline uint16_t bfloat16_bits(float value) {
  const uint32_t bits = bit_cast<uint32_t>(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>((bits >> 16) | 0x40u);
  return static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

static inline float float_of_bfloat16(uint16_t bits) { return bit_cast<float>(static_cast<uint32_t>(bits) << 16); }

}  // namespace horo
