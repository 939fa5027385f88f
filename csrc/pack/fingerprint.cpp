#include "pack/fingerprint.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <type_traits>

namespace horo {
namespace {

constexpr uint64_t kFactor = 0x9e3779b97f4a7c15u;

// Both halves of a product: the lower one alone would leave a sign bit where it is, and there are pairs of bits in
// different words that would then cancel out.
inline uint64_t step(uint64_t hash, uint64_t word) {
  const unsigned __int128 product = static_cast<unsigned __int128>(hash ^ word) * kFactor;
  return static_cast<uint64_t>(product) ^ static_cast<uint64_t>(product >> 64);
}

inline uint64_t word_at(const uint8_t* bytes) {
  uint64_t word;
  std::memcpy(&word, bytes, sizeof(word));
  return word;
}

// Four hashes side by side, word k going to hash k % 4: with one hash, each product would wait for the one before.
struct Hashes {
  uint64_t a = kFactor, b = 2 * kFactor, c = 3 * kFactor, d = 4 * kFactor;
};
constexpr size_t kStripe = sizeof(Hashes);

void absorb(Hashes& hashes, const uint8_t* bytes, size_t n_stripes) {
  auto [a, b, c, d] = hashes;
  for (; n_stripes > 0; --n_stripes, bytes += kStripe) {
    a = step(a, word_at(bytes));
    b = step(b, word_at(bytes + 8));
    c = step(c, word_at(bytes + 16));
    d = step(d, word_at(bytes + 24));
  }
  hashes = {a, b, c, d};
}

uint64_t hash_of(const uint8_t* bytes, size_t n_bytes) {
  Hashes hashes;
  absorb(hashes, bytes, n_bytes / kStripe);
  if (const size_t rest = n_bytes % kStripe; rest != 0) {
    uint8_t last[kStripe] = {};
    std::memcpy(last, bytes + n_bytes - rest, rest);
    absorb(hashes, last, 1);
  }
  uint64_t hash = n_bytes;
  for (uint64_t one : {hashes.a, hashes.b, hashes.c, hashes.d}) hash = step(hash, one);
  return hash;
}

// x86's long double is 10 bytes, followed by 6 bytes of padding with any content.
uint64_t hash_of_long_doubles(const uint8_t* bytes, size_t n_elements) {
  constexpr size_t kItem = sizeof(long double);
  constexpr size_t kMeant = std::numeric_limits<long double>::digits == 64 ? 10 : kItem;
  uint64_t hash = n_elements;
  for (size_t i = 0; i < n_elements; ++i) {
    uint8_t item[kItem] = {};
    std::memcpy(item, bytes + i * kItem, kMeant);
    for (size_t k = 0; k < kItem; k += 8) hash = step(hash, word_at(item + k));
  }
  return hash;
}

// The floats that are not finite are those whose exponent has all bits set.
template <class Bits, int kMantissaBits>
NonFinite non_finite(const void* memory, size_t n_elements) {
  constexpr Bits kSign = Bits{1} << (8 * sizeof(Bits) - 1);
  constexpr Bits kOne = Bits{1} << kMantissaBits;
  constexpr Bits kExponent = kSign - kOne;
  const auto* bits = static_cast<const Packed<Bits>*>(memory);
  Bits carried = 0;
  // Adding one to the largest exponent carries into the sign bit.
  for (size_t i = 0; i < n_elements; ++i) carried |= static_cast<Bits>((bits[i].value & kExponent) + kOne);
  NonFinite found;
  if ((carried & kSign) == 0) return found;
  for (size_t i = 0; i < n_elements; ++i) {
    const Bits magnitude = bits[i].value & static_cast<Bits>(~kSign);
    found.n_nan += magnitude > kExponent;
    found.n_inf += magnitude == kExponent;
  }
  return found;
}

inline double value_of(Half x) { return float_of_half(x.bits); }
inline double value_of(BFloat16 x) { return float_of_bfloat16(x.bits); }
template <class T>
double value_of(T x) {
  return static_cast<double>(x);
}

template <class T>
Difference between(const void* mine, const void* theirs, size_t n_elements) {
  const auto* a = static_cast<const Packed<T>*>(mine);
  const auto* b = static_cast<const Packed<T>*>(theirs);
  constexpr size_t kMeant = std::is_same_v<T, long double> && std::numeric_limits<T>::digits == 64 ? 10 : sizeof(T);
  Difference found;
  for (size_t i = 0; i < n_elements; ++i) {
    const double x = value_of(a[i].value);
    if (std::isfinite(x)) found.magnitude = std::max(found.magnitude, std::fabs(x));
    if (std::memcmp(&a[i], &b[i], kMeant) == 0) continue;
    ++found.n_elements;
    const double apart = std::fabs(x - value_of(b[i].value));
    if (std::isfinite(apart)) found.largest = std::max(found.largest, apart);
  }
  return found;
}

}  // namespace

uint64_t fingerprint(const TensorRef& tensor) {
  const auto* bytes = static_cast<const uint8_t*>(tensor.address);
  if (tensor.dtype == DType::kLongDouble) return hash_of_long_doubles(bytes, tensor.n_elements);
  return hash_of(bytes, tensor.n_elements * item_bytes(tensor.dtype));
}

NonFinite count_non_finite(const TensorRef& tensor) {
  switch (tensor.dtype) {
    case DType::kFloat16:
      return non_finite<uint16_t, 10>(tensor.address, tensor.n_elements);
    case DType::kBFloat16:
      return non_finite<uint16_t, 7>(tensor.address, tensor.n_elements);
    case DType::kFloat32:
      return non_finite<uint32_t, 23>(tensor.address, tensor.n_elements);
    case DType::kFloat64:
      return non_finite<uint64_t, 52>(tensor.address, tensor.n_elements);
    case DType::kLongDouble: {
      NonFinite found;
      const auto* values = static_cast<const Packed<long double>*>(tensor.address);
      for (size_t i = 0; i < tensor.n_elements; ++i) {
        found.n_nan += std::isnan(values[i].value);
        found.n_inf += std::isinf(values[i].value);
      }
      return found;
    }
    default:
      return {};
  }
}

Difference difference(const TensorRef& mine, const TensorRef& theirs) {
  return with_type(mine.dtype, [&](auto element) {
    return between<decltype(element)>(mine.address, theirs.address, mine.n_elements);
  });
}

}  // namespace horo
