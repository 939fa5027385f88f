// The expected result of an all-reduce, one element after the other in wide arithmetic. Only the conversions of single
// halves and bfloat16s are the kernels' own (dtype.h); test_kernels.py compares those with NumPy's.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <random>
#include <type_traits>
#include <vector>

#include "pack/pack.h"

namespace horo {

// One of these is used, depending on the dtype.
struct Number {
  __int128 integer = 0;
  long double real = 0;
};

// Elements may be at any address.
inline Number number_at(DType dtype, const uint8_t* at) {
  return with_type(dtype, [at](auto value) -> Number {
    std::memcpy(&value, at, sizeof(value));
    if constexpr (std::is_same_v<decltype(value), Half>) return {0, float_of_half(value.bits)};
    else if constexpr (std::is_same_v<decltype(value), BFloat16>) return {0, float_of_bfloat16(value.bits)};
    else if constexpr (std::is_floating_point_v<decltype(value)>) return {0, value};
    else return {value, 0};
  });
}

// Floats are small whole numbers, so that their sums and products are exact even in bfloat16; integers are any.
inline void put_random(DType dtype, Op op, std::mt19937& random, uint8_t* at) {
  with_type(dtype, [&](auto value) {
    using T = decltype(value);
    const int range = op == Op::kProduct ? 3 : 40;
    const int whole = static_cast<int>(random() % (2 * range + 1)) - range;
    if constexpr (std::is_same_v<T, Half>) value.bits = half_bits(static_cast<float>(whole));
    else if constexpr (std::is_same_v<T, BFloat16>) value.bits = bfloat16_bits(static_cast<float>(whole));
    else if constexpr (std::is_floating_point_v<T>) value = static_cast<T>(whole);
    else if (dtype == DType::kBool) value = random() % 2;
    else value = static_cast<T>(uint64_t{random()} << 32 | random());
    std::memcpy(at, &value, sizeof(value));
  });
}

// Returns whether `got` is the reduction of one element of every rank. Weights are whole numbers of samples.
inline bool is_reduction(DType dtype, Op op, Wire wire, const std::vector<Number>& all,
                         const std::vector<double>& weights, Number got) {
  return with_type(dtype, [&](auto type) {
    using T = decltype(type);
    constexpr bool kInteger = std::is_integral_v<T>;
    using Wide = std::conditional_t<kInteger, __int128, long double>;
    const bool weighted = op == Op::kWeightedAverage;
    Wide value = 0, divisor = 0;
    for (size_t r = 0; r < all.size(); ++r) {
      Wide next;
      if constexpr (kInteger) next = all[r].integer;
      else next = all[r].real;
      const auto weight = static_cast<Wide>(weighted ? weights[r] : 1.0);
      divisor += weight;
      if (op == Op::kMin) value = r == 0 ? next : std::min(value, next);
      else if (op == Op::kMax) value = r == 0 ? next : std::max(value, next);
      else if (op == Op::kProduct) {
        // Wraps around, as unsigned numbers do.
        if constexpr (kInteger) next = static_cast<T>(static_cast<uint64_t>(value) * static_cast<uint64_t>(next));
        else next = value * next;
        value = r == 0 ? (kInteger ? static_cast<Wide>(all[r].integer) : static_cast<Wide>(all[r].real)) : next;
      } else value += weight * next;
    }
    if (dtype == DType::kBool) return (got.integer != 0) == (value != 0);
    const bool average = weighted || op == Op::kAverage;
    if (average) value /= divisor;
    if constexpr (kInteger) return static_cast<T>(got.integer) == static_cast<T>(value);
    if (!average) return got.real == static_cast<long double>(value);
    // A quotient is rounded once or twice: to the dtype, and before that to the dtype on the wire.
    int bits = sizeof(T) > 4 ? 50 : 21;
    if (std::is_same_v<T, Half> || wire == Wire::kFloat16) bits = 9;
    if (std::is_same_v<T, BFloat16> || wire == Wire::kBFloat16) bits = 6;
    const auto wanted = static_cast<long double>(value);
    return std::fabs(got.real - wanted) <= std::ldexp(std::fabs(wanted), -bits);
  });
}

}  // namespace horo
