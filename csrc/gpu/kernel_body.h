// What one thread of a kernel does, for the GPU and for the host.
//
// A block of 256 threads works on a stretch of one piece, 16 KiB of the tensor. A warp moves one tile at a time: 32
// vectors of 16 bytes on the wire, and `kRatio` times as many in the tensor, read or written in `kRatio` turns. In
// every turn, consecutive lanes access consecutive vectors. If the tensor's items are wider than the wire's, a lane's
// loads belong to several wire vectors: kRatio neighbouring lanes exchange their parts. The rest after the last whole
// tile, and tensors that do not begin at a multiple of 16 bytes, are processed element by element, again with
// consecutive lanes on consecutive elements.
//
// The functions of the steps do the work of kTogether threads that exchange with each other: of one thread on the GPU,
// where all run at once and exchange by shuffles; of kRatio threads on the host.
#pragma once

#include "gpu/pieces.h"

#ifndef __CUDACC_RTC__
#include <cstring>
#include <stdexcept>

#include "pack/dtype.h"
#endif

#ifdef __CUDACC__
#define HORO_BOTH __host__ __device__ __forceinline__
#define HORO_UNROLL _Pragma("unroll")
#else
#define HORO_BOTH inline
#define HORO_UNROLL
#endif

namespace horo {
namespace body {

// --- formats: how elements are stored, and the number that each represents ---

#ifdef __CUDA_ARCH__
HORO_BOTH float value_of_f16(uint16_t bits) {
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
  return value;
}
HORO_BOTH uint32_t f16_pair(float low, float high) {
#if __CUDA_ARCH__ >= 800
  uint32_t pair;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
#else
  uint16_t bits[2];
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits[0]) : "f"(low));
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits[1]) : "f"(high));
  return bits[0] | static_cast<uint32_t>(bits[1]) << 16;
#endif
}
HORO_BOTH uint32_t bf16_pair(float low, float high) {
#if __CUDA_ARCH__ >= 800
  uint32_t pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
#else
  uint32_t pair = 0;
  for (int i = 1; i >= 0; --i) {
    const float value = i == 0 ? low : high;
    const uint32_t bits = __builtin_bit_cast(uint32_t, value);
    const uint32_t rounded = value != value ? 0x7fffu : (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
    pair = pair << 16 | rounded;
  }
  return pair;
#endif
}
#else
HORO_BOTH float value_of_f16(uint16_t bits) { return float_of_half(bits); }
HORO_BOTH uint32_t f16_pair(float low, float high) {
  const uint32_t first = low != low ? 0x7fffu : half_bits(low);
  const uint32_t second = high != high ? 0x7fffu : half_bits(high);
  return first | second << 16;
}
HORO_BOTH uint32_t bf16_pair(float low, float high) {
  const uint32_t first = low != low ? 0x7fffu : bfloat16_bits(low);
  const uint32_t second = high != high ? 0x7fffu : bfloat16_bits(high);
  return first | second << 16;
}
#endif

// kInfinity: the bits of inf. Magnitudes (bits without the sign) below it are finite, and ordered as the numbers are.
struct F16 {
  using Bits = uint16_t;
  using Value = float;
  static constexpr Bits kInfinity = 0x7c00;
  static HORO_BOTH Value value(Bits bits) { return value_of_f16(bits); }
  static HORO_BOTH uint32_t pair(Value low, Value high) { return f16_pair(low, high); }
};
struct BF16 {
  using Bits = uint16_t;
  using Value = float;
  static constexpr Bits kInfinity = 0x7f80;
  static HORO_BOTH Value value(Bits bits) { return __builtin_bit_cast(float, static_cast<uint32_t>(bits) << 16); }
  static HORO_BOTH uint32_t pair(Value low, Value high) { return bf16_pair(low, high); }
};
struct F32 {
  using Bits = uint32_t;
  using Value = float;
  static constexpr int kMantissa = 23, kMaxExponent = 127;
  static constexpr Bits kInfinity = 0x7f800000u;
  static HORO_BOTH Value value(Bits bits) { return __builtin_bit_cast(float, bits); }
  static HORO_BOTH Bits bits(Value value) { return value != value ? 0x7fffffffu : __builtin_bit_cast(Bits, value); }
};
struct F64 {
  using Bits = uint64_t;
  using Value = double;
  static constexpr int kMantissa = 52, kMaxExponent = 1023;
  static constexpr Bits kInfinity = 0x7ff0000000000000u;
  static HORO_BOTH Value value(Bits bits) { return __builtin_bit_cast(double, bits); }
  static HORO_BOTH Bits bits(Value value) {
    return value != value ? 0x7fffffffffffffffu : __builtin_bit_cast(Bits, value);
  }
};
// Elements that are copied, whatever they are.
template <class T>
struct Raw {
  using Bits = T;
};
using Raw8 = Raw<uint8_t>;
using Raw16 = Raw<uint16_t>;
using Raw32 = Raw<uint32_t>;
using Raw64 = Raw<uint64_t>;

// The type in which a tensor's elements are computed.
template <class G>
struct RealOf {
  using Type = float;
  using Format = F32;
};
template <>
struct RealOf<F64> {
  using Type = double;
  using Format = F64;
};
template <class G>
using Real = typename RealOf<G>::Type;

// --- arithmetic ---
//
// No product is ever added to anything here, so there is nothing to contract to fmaf. The only other operations are
// comparisons and casts, so the results of the two compilers are equal.

// x * 2^k, in two factors, which are needed if 2^k itself is not a normal number. With the rest first, the rounding
// error of the first product is too small to matter after the second.
template <class R>
struct PowerOfTwo {
  R rest, most;
  HORO_BOTH R times(R x) const { return x * rest * most; }
};

template <class G>
HORO_BOTH PowerOfTwo<Real<G>> power_of_two(int k) {
  using Format = typename RealOf<G>::Format;
  constexpr int kMax = Format::kMaxExponent, kMin = 1 - kMax;
  k = k < 2 * kMin ? 2 * kMin : k > 2 * kMax ? 2 * kMax : k;
  const int most = k < kMin ? kMin : k > kMax ? kMax : k;
  using Bits = typename Format::Bits;
  const auto normal = [](int exponent) {
    return Format::value(static_cast<Bits>(exponent + Format::kMaxExponent) << Format::kMantissa);
  };
  return {normal(k - most), normal(most)};
}

// x / divisor. For a power of two it is a multiplication, as exact as the division.
template <class R>
struct Quotient {
  R divisor, reciprocal;
  bool divide;
  HORO_BOTH R of(R x) const { return divide ? x / divisor : x * reciprocal; }
};

template <class G>
HORO_BOTH Quotient<Real<G>> divided_by(double divisor) {
  using Format = typename RealOf<G>::Format;
  using Bits = typename Format::Bits;
  const auto d = static_cast<Real<G>>(divisor);
  // Subnormal powers of two have such bits as well: for them, this divides.
  const bool divide = (__builtin_bit_cast(Bits, d) & ((Bits{1} << Format::kMantissa) - 1)) != 0;
  return {d, 1 / d, divide};
}

// --- arguments ---

// A launch's arguments except its pieces; as in KernelCall.
struct Arguments {
  uint8_t* wire;
  int32_t* exponents;
  WireStats* stats;
  const double* divisor_at;
  double prescale;
  double scale;
  double divisor;
  int32_t headroom;
  uint32_t n_pieces;
  bool zeros;     // prescale is 0
  bool in_place;  // kScale: the tensor is its own wire
};

// k of a tensor.
HORO_BOTH int scale_exponent(const Arguments& a, uint32_t tensor) {
  if (a.exponents == nullptr || a.exponents[tensor] == kNoExponent) return 0;
  return 15 - a.headroom - a.exponents[tensor];
}

// --- memory ---

struct alignas(16) Vector {
  uint32_t words[4];
};

#ifdef __CUDA_ARCH__
HORO_BOTH Vector load_vector(const void* from) { return __builtin_bit_cast(Vector, *static_cast<const uint4*>(from)); }
HORO_BOTH void store_vector(void* to, const Vector& v) { *static_cast<uint4*>(to) = __builtin_bit_cast(uint4, v); }
template <class Bits>
HORO_BOTH Bits load_item(const void* from, uint32_t i) {
  return static_cast<const Bits*>(from)[i];
}
template <class Bits>
HORO_BOTH void store_item(void* to, uint32_t i, Bits bits) {
  static_cast<Bits*>(to)[i] = bits;
}
#else
// Throws where a GPU would stop with an error.
HORO_BOTH void check_alignment(const void* address) {
  if (reinterpret_cast<uintptr_t>(address) % 16 != 0) throw std::logic_error("16 bytes accessed at an odd address");
}
HORO_BOTH Vector load_vector(const void* from) {
  check_alignment(from);
  Vector v;
  std::memcpy(&v, from, sizeof(v));
  return v;
}
HORO_BOTH void store_vector(void* to, const Vector& v) {
  check_alignment(to);
  std::memcpy(to, &v, sizeof(v));
}
template <class Bits>
HORO_BOTH Bits load_item(const void* from, uint32_t i) {
  Bits bits;
  std::memcpy(&bits, static_cast<const char*>(from) + i * sizeof(Bits), sizeof(Bits));
  return bits;
}
template <class Bits>
HORO_BOTH void store_item(void* to, uint32_t i, Bits bits) {
  std::memcpy(static_cast<char*>(to) + i * sizeof(Bits), &bits, sizeof(Bits));
}
#endif

// Element i of the elements that begin at words[0].
template <class F>
HORO_BOTH typename F::Bits item(const uint32_t* words, int i) {
  using Bits = typename F::Bits;
  if constexpr (sizeof(Bits) == 2) return static_cast<Bits>(words[i / 2] >> (i % 2 * 16));
  else if constexpr (sizeof(Bits) == 4) return words[i];
  else return words[2 * i] | static_cast<Bits>(words[2 * i + 1]) << 32;
}

// Stores n numbers in words; n is a multiple of 2.
template <class F, class R, int n>
HORO_BOTH void put_items(uint32_t* words, const R (&x)[n]) {
  using Value = typename F::Value;
  HORO_UNROLL
  for (int i = 0; i < n; i += 2) {
    const auto low = static_cast<Value>(x[i]), high = static_cast<Value>(x[i + 1]);
    if constexpr (sizeof(Value) == 8) {
      const uint64_t bits[2] = {F::bits(low), F::bits(high)};
      HORO_UNROLL
      for (int j = 0; j < 4; ++j) words[2 * i + j] = static_cast<uint32_t>(bits[j / 2] >> (j % 2 * 32));
    } else if constexpr (sizeof(typename F::Bits) == 4) {
      words[i] = F::bits(low);
      words[i + 1] = F::bits(high);
    } else {
      words[i / 2] = F::pair(low, high);
    }
  }
}

// One number.
template <class F, class R>
HORO_BOTH typename F::Bits item_of(R x) {
  const auto value = static_cast<typename F::Value>(x);
  if constexpr (sizeof(typename F::Bits) == 2) return static_cast<uint16_t>(F::pair(value, 0.0f));
  else return F::bits(value);
}

// --- geometry ---

inline constexpr int kThreads = 256;
inline constexpr int kWarp = 32;
inline constexpr uint32_t kWireUnit = 64;  // of GpuPiece::wire_offset: kWireAlignment

// For a tensor of format G and a wire of format W, which is not wider.
template <class G, class W>
struct Geometry {
  static constexpr int kRatio = sizeof(typename G::Bits) / sizeof(typename W::Bits);
  static constexpr int kVectorItems = 16 / sizeof(typename G::Bits);  // in a vector of the tensor
  static constexpr int kSlotWords = 4 / kRatio;                       // that they take on the wire
  static constexpr int kTileItems = kWarp * kRatio * kVectorItems;
  static constexpr int kTurns = 4 / kRatio;         // tiles a warp moves: 64 bytes of the tensor a thread
  static constexpr int kStride = kThreads / kWarp;  // tiles that a block moves at once
  static constexpr uint32_t kBlockItems = kTileItems * kStride * kTurns;
};

// The stretch of a piece that one block works on.
template <class G, class W>
struct Stretch {
  uint8_t* tensor;
  uint8_t* wire;
  uint32_t n_items;
  uint32_t n_tiles;  // whole ones, for tensors with an aligned address

  HORO_BOTH Stretch(const Arguments& a, const GpuPiece& piece, uint32_t block) {
    using Shape = Geometry<G, W>;
    const uint32_t first = block * Shape::kBlockItems;
    const uint32_t rest = piece.n_elements - first;
    tensor = static_cast<uint8_t*>(piece.address) + static_cast<uint64_t>(first) * sizeof(typename G::Bits);
    wire = a.in_place ? tensor
                      : a.wire + static_cast<uint64_t>(piece.wire_offset) * kWireUnit +
                            static_cast<uint64_t>(first) * sizeof(typename W::Bits);
    n_items = rest < Shape::kBlockItems ? rest : Shape::kBlockItems;
    const bool aligned = reinterpret_cast<uintptr_t>(piece.address) % 16 == 0;
    n_tiles = aligned ? n_items / Shape::kTileItems : 0;
  }

  // Vector `turn` of `lane` in a tile.
  HORO_BOTH uint8_t* tensor_vector(uint32_t tile, int turn, int lane) const {
    return tensor + (tile * Geometry<G, W>::kRatio * kWarp + turn * kWarp + lane) * 16;
  }
  // The wire vector that `lane` has after the exchange.
  HORO_BOTH uint8_t* wire_vector(uint32_t tile, int lane) const {
    constexpr int kRatio = Geometry<G, W>::kRatio;
    return wire + (tile * kWarp + lane % kRatio * (kWarp / kRatio) + lane / kRatio) * 16;
  }
};

// --- exchange between neighbouring lanes ---
//
// Lane s of kRatio neighbours has a slot for each r; afterwards its slot r holds what was in slot s of lane r. It is
// its own inverse, so it serves both directions.

#ifdef __CUDA_ARCH__
template <int kRatio>
inline constexpr int kTogether = 1;

template <int kRatio>
HORO_BOTH void exchange(Vector (&v)[1]) {
  constexpr int kSlotWords = 4 / kRatio;
  const int me = threadIdx.x % kRatio;
  HORO_UNROLL
  for (int distance = 1; distance < kRatio; ++distance) {
    const int slot = me ^ distance;
    HORO_UNROLL
    for (int w = 0; w < kSlotWords; ++w) {
      uint32_t word = 0;
      HORO_UNROLL
      for (int r = 0; r < kRatio; ++r) word = slot == r ? v[0].words[r * kSlotWords + w] : word;
      word = __shfl_xor_sync(0xffffffffu, word, distance);
      HORO_UNROLL
      for (int r = 0; r < kRatio; ++r) {
        uint32_t& mine = v[0].words[r * kSlotWords + w];
        mine = slot == r ? word : mine;
      }
    }
  }
}
#else
template <int kRatio>
inline constexpr int kTogether = kRatio;

template <int kRatio>
HORO_BOTH void exchange(Vector (&v)[kRatio]) {
  constexpr int kSlotWords = 4 / kRatio;
  for (int r = 1; r < kRatio; ++r) {
    for (int s = 0; s < r; ++s) {
      for (int w = 0; w < kSlotWords; ++w) {
        uint32_t& one = v[r].words[s * kSlotWords + w];
        uint32_t& other = v[s].words[r * kSlotWords + w];
        const uint32_t word = one;
        one = other;
        other = word;
      }
    }
  }
}
#endif

// --- statistics: the largest finite magnitude, and how many elements are not finite
// -------------------------------------

// For elements that are only copied.
struct Nothing {
  template <class Bits>
  HORO_BOTH void add(Bits) {}
  HORO_BOTH void add(const Vector&) {}
};

template <class F>
struct Seen {
  using Magnitude = decltype(typename F::Bits{} + 0u);
  Magnitude largest = 0;
  uint32_t n_nonfinite = 0;

  HORO_BOTH void add(typename F::Bits bits) {
    const Magnitude magnitude = bits & static_cast<typename F::Bits>(static_cast<typename F::Bits>(-1) >> 1);
    const bool finite = magnitude < F::kInfinity;
    largest = finite && magnitude > largest ? magnitude : largest;
    n_nonfinite += !finite;
  }
  HORO_BOTH void add(const Vector& v) {
    HORO_UNROLL
    for (int i = 0; i < static_cast<int>(16 / sizeof(typename F::Bits)); ++i) add(item<F>(v.words, i));
  }
  // For WireStats.
  HORO_BOTH uint32_t amax_bits() const {
    const auto amax = static_cast<float>(F::value(static_cast<typename F::Bits>(largest)));
    const uint32_t bits = __builtin_bit_cast(uint32_t, amax);
    return bits < F32::kInfinity ? bits : F32::kInfinity - 1;
  }
  // The smallest e with largest < 2^e; for float32 and float64.
  HORO_BOTH int32_t exponent() const {
    if (largest == 0) return kNoExponent;
    constexpr int kMantissa = F::kMantissa;
    const bool normal = largest >> kMantissa != 0;
    const auto value = F::value(largest) * (normal ? 1 : static_cast<typename F::Value>(uint64_t{1} << kMantissa));
    const int field = static_cast<int>(__builtin_bit_cast(typename F::Bits, value) >> kMantissa);
    return field - F::kMaxExponent + 1 - (normal ? 0 : kMantissa);
  }
};

template <class F>
struct SeenOf {
  using Type = Seen<F>;
};
template <class T>
struct SeenOf<Raw<T>> {
  using Type = Nothing;
};

// --- from the tensor's numbers to the wire's, and back ---

template <class G, class W>
struct ToWire {
  Real<G> prescale;
  PowerOfTwo<Real<G>> power;

  HORO_BOTH ToWire(const Arguments& a, uint32_t tensor)
      : prescale(static_cast<Real<G>>(a.prescale)), power(power_of_two<G>(scale_exponent(a, tensor))) {}
  HORO_BOTH Real<G> number(typename G::Bits bits) const { return power.times(G::value(bits) * prescale); }
  HORO_BOTH typename W::Bits element(typename G::Bits bits) const { return item_of<W>(number(bits)); }
  // From a vector of the tensor to its slot on the wire.
  HORO_BOTH void vector(const Vector& from, uint32_t* slot) const {
    constexpr int kItems = Geometry<G, W>::kVectorItems;
    Real<G> x[kItems];
    HORO_UNROLL
    for (int i = 0; i < kItems; ++i) x[i] = number(item<G>(from.words, i));
    put_items<W>(slot, x);
  }
};

template <class G, class W>
struct FromWire {
  PowerOfTwo<Real<G>> power;
  Real<G> scale;
  Quotient<Real<G>> quotient;

  HORO_BOTH FromWire(const Arguments& a, uint32_t tensor)
      : power(power_of_two<G>(-scale_exponent(a, tensor))),
        scale(static_cast<Real<G>>(a.scale)),
        quotient(divided_by<G>(divisor(a))) {}
  static HORO_BOTH double divisor(const Arguments& a) {
    if (a.divisor_at == nullptr) return a.divisor;
    return *a.divisor_at == 0.0 ? 1.0 : *a.divisor_at;
  }
  HORO_BOTH Real<G> number(typename W::Bits bits) const {
    return quotient.of(power.times(static_cast<Real<G>>(W::value(bits))) * scale);
  }
  HORO_BOTH typename G::Bits element(typename W::Bits bits) const { return item_of<G>(number(bits)); }
  // From a slot on the wire to a vector of the tensor.
  HORO_BOTH Vector vector(const uint32_t* slot) const {
    constexpr int kItems = Geometry<G, W>::kVectorItems;
    Real<G> x[kItems];
    HORO_UNROLL
    for (int i = 0; i < kItems; ++i) x[i] = number(item<W>(slot, i));
    Vector to;
    put_items<G>(to.words, x);
    return to;
  }
};

// Integers and bool.
struct Copy {
  HORO_BOTH Copy(const Arguments&, uint32_t) {}
  template <class Bits>
  HORO_BOTH Bits element(Bits bits) const {
    return bits;
  }
  HORO_BOTH void vector(const Vector& from, uint32_t* slot) const {
    HORO_UNROLL
    for (int w = 0; w < 4; ++w) slot[w] = from.words[w];
  }
  HORO_BOTH Vector vector(const uint32_t* slot) const { return {{slot[0], slot[1], slot[2], slot[3]}}; }
};
template <class T>
struct ToWire<Raw<T>, Raw<T>> : Copy {
  using Copy::Copy;
};
template <class T>
struct FromWire<Raw<T>, Raw<T>> : Copy {
  using Copy::Copy;
};

// --- the steps ---

// Elements in flight per thread if they are processed one by one.
inline constexpr int kBatch = 8;

template <class G, class = G>
struct Measure {
  using Shape = Geometry<G, G>;
  using Result = Seen<typename RealOf<G>::Format>;
  static constexpr int kRatio = 1;

  static HORO_BOTH void run(const Arguments& a, const GpuPiece& piece, uint32_t block, int thread,
                            Result (&seen)[kTogether<kRatio>]) {
    using Format = typename RealOf<G>::Format;
    const Stretch<G, G> stretch(a, piece, block);
    const int warp = thread / kWarp, lane = thread % kWarp;
    const auto prescale = static_cast<Real<G>>(a.prescale);
    const auto see = [&](typename G::Bits bits) { seen[0].add(Format::bits(G::value(bits) * prescale)); };

    Vector in[Shape::kTurns];
    HORO_UNROLL
    for (int turn = 0; turn < Shape::kTurns; ++turn) {
      const uint32_t tile = turn * Shape::kStride + warp;
      in[turn] = tile < stretch.n_tiles ? load_vector(stretch.tensor_vector(tile, 0, lane)) : Vector{};
    }
    HORO_UNROLL
    for (int turn = 0; turn < Shape::kTurns; ++turn) {
      HORO_UNROLL
      for (int i = 0; i < Shape::kVectorItems; ++i) see(item<G>(in[turn].words, i));
    }
    for (uint32_t i = stretch.n_tiles * Shape::kTileItems + thread; i < stretch.n_items; i += kBatch * kThreads) {
      typename G::Bits batch[kBatch];
      HORO_UNROLL
      for (int j = 0; j < kBatch; ++j) {
        const uint32_t at = i + j * kThreads;
        batch[j] = at < stretch.n_items ? load_item<typename G::Bits>(stretch.tensor, at) : 0;
      }
      HORO_UNROLL
      for (int j = 0; j < kBatch; ++j) see(batch[j]);
    }
  }
};

template <class G, class W>
struct Pack {
  using Shape = Geometry<G, W>;
  using Result = typename SeenOf<W>::Type;
  static constexpr int kRatio = Shape::kRatio;

  static HORO_BOTH void run(const Arguments& a, const GpuPiece& piece, uint32_t block, int thread,
                            Result (&seen)[kTogether<kRatio>]) {
    constexpr int kLanes = kTogether<kRatio>;
    const Stretch<G, W> stretch(a, piece, block);
    const int warp = thread / kWarp, lane = thread % kWarp;
    const bool count = a.stats != nullptr;

    Vector in[Shape::kTurns][kLanes][kRatio];
    HORO_UNROLL
    for (int turn = 0; turn < Shape::kTurns; ++turn) {
      const uint32_t tile = turn * Shape::kStride + warp;
      HORO_UNROLL
      for (int l = 0; l < kLanes; ++l) {
        HORO_UNROLL
        for (int r = 0; r < kRatio; ++r) {
          const bool load = tile < stretch.n_tiles && !a.zeros;
          in[turn][l][r] = load ? load_vector(stretch.tensor_vector(tile, r, lane + l)) : Vector{};
        }
      }
    }
    const ToWire<G, W> cast(a, piece.tensor);  // after the loads were issued: it may have to wait for an exponent
    HORO_UNROLL
    for (int turn = 0; turn < Shape::kTurns; ++turn) {
      const uint32_t tile = turn * Shape::kStride + warp;
      if (tile >= stretch.n_tiles) break;
      Vector out[kLanes];
      HORO_UNROLL
      for (int l = 0; l < kLanes; ++l) {
        HORO_UNROLL
        for (int r = 0; r < kRatio; ++r) cast.vector(in[turn][l][r], out[l].words + r * Shape::kSlotWords);
      }
      exchange<kRatio>(out);
      HORO_UNROLL
      for (int l = 0; l < kLanes; ++l) {
        store_vector(stretch.wire_vector(tile, lane + l), out[l]);
        if (count) seen[l].add(out[l]);
      }
    }
    HORO_UNROLL
    for (int l = 0; l < kLanes; ++l) {
      const uint32_t first = stretch.n_tiles * Shape::kTileItems + thread + l;
      for (uint32_t i = first; i < stretch.n_items; i += kBatch * kThreads) {
        typename G::Bits batch[kBatch];
        HORO_UNROLL
        for (int j = 0; j < kBatch; ++j) {
          const uint32_t at = i + j * kThreads;
          const bool load = at < stretch.n_items && !a.zeros;
          batch[j] = load ? load_item<typename G::Bits>(stretch.tensor, at) : 0;
        }
        HORO_UNROLL
        for (int j = 0; j < kBatch; ++j) {
          const uint32_t at = i + j * kThreads;
          if (at >= stretch.n_items) break;
          const auto bits = cast.element(batch[j]);
          store_item(stretch.wire, at, bits);
          if (count) seen[l].add(bits);
        }
      }
    }
  }
};

template <class G, class W>
struct Unpack {
  using Shape = Geometry<G, W>;
  using Result = Nothing;
  static constexpr int kRatio = Shape::kRatio;

  static HORO_BOTH void run(const Arguments& a, const GpuPiece& piece, uint32_t block, int thread,
                            Result (&)[kTogether<kRatio>]) {
    constexpr int kLanes = kTogether<kRatio>;
    const Stretch<G, W> stretch(a, piece, block);
    const int warp = thread / kWarp, lane = thread % kWarp;

    Vector in[Shape::kTurns][kLanes];
    HORO_UNROLL
    for (int turn = 0; turn < Shape::kTurns; ++turn) {
      const uint32_t tile = turn * Shape::kStride + warp;
      HORO_UNROLL
      for (int l = 0; l < kLanes; ++l) {
        in[turn][l] = tile < stretch.n_tiles ? load_vector(stretch.wire_vector(tile, lane + l)) : Vector{};
      }
    }
    const FromWire<G, W> cast(a, piece.tensor);
    HORO_UNROLL
    for (int turn = 0; turn < Shape::kTurns; ++turn) {
      const uint32_t tile = turn * Shape::kStride + warp;
      if (tile >= stretch.n_tiles) break;
      exchange<kRatio>(in[turn]);
      HORO_UNROLL
      for (int l = 0; l < kLanes; ++l) {
        HORO_UNROLL
        for (int r = 0; r < kRatio; ++r) {
          store_vector(stretch.tensor_vector(tile, r, lane + l),
                       cast.vector(in[turn][l].words + r * Shape::kSlotWords));
        }
      }
    }
    HORO_UNROLL
    for (int l = 0; l < kLanes; ++l) {
      const uint32_t first = stretch.n_tiles * Shape::kTileItems + thread + l;
      for (uint32_t i = first; i < stretch.n_items; i += kBatch * kThreads) {
        typename W::Bits batch[kBatch];
        HORO_UNROLL
        for (int j = 0; j < kBatch; ++j) {
          const uint32_t at = i + j * kThreads;
          batch[j] = at < stretch.n_items ? load_item<typename W::Bits>(stretch.wire, at) : 0;
        }
        HORO_UNROLL
        for (int j = 0; j < kBatch; ++j) {
          const uint32_t at = i + j * kThreads;
          if (at < stretch.n_items) store_item(stretch.tensor, at, cast.element(batch[j]));
        }
      }
    }
  }
};

// --- the launch ---

// What a launch gets, as the kernel's own parameters: they reach the GPU with the launch, so no copy must be ordered
// before it. Each byte costs time, so every kernel exists with three tables: for few pieces, for some, with the 4,096
// bytes that all GPUs and drivers allow, and for many, with the 32,764 of CUDA 12.1.
template <int kPieces>
struct Table {
  Arguments arguments;
  GpuPiece pieces[kPieces];
};
inline constexpr int kFew = 32;
inline constexpr int kSome = 167;
inline constexpr int kMany = 1360;
static_assert(sizeof(Table<kSome>) <= 4096 && sizeof(Table<kMany>) <= 32764);

// The piece that a block of a launch works on. Every piece has at least one block: with many pieces of one block each,
// the first guess finds it.
HORO_BOTH uint32_t find_piece(const GpuPiece* pieces, uint32_t n_pieces, uint32_t block, uint32_t n_blocks) {
  const uint32_t blocks_after = n_blocks - 1 - block;
  uint32_t low = n_pieces - 1 > blocks_after ? n_pieces - 1 - blocks_after : 0;
  uint32_t high = block < n_pieces - 1 ? block : n_pieces - 1;
  while (low < high) {
    const uint32_t middle = (low + high + 1) / 2;
    if (pieces[middle].first_block <= block) low = middle;
    else high = middle - 1;
  }
  return low;
}

}  // namespace body

// Every kernel: X(step, format of the tensor, format on the wire).
#define HORO_KERNELS(X)                   \
  X(Measure, F16, F16)                    \
  X(Measure, BF16, BF16)                  \
  X(Measure, F32, F32)                    \
  X(Measure, F64, F64)                    \
  HORO_KERNELS_BOTH_WAYS(X, F16, F16)     \
  HORO_KERNELS_BOTH_WAYS(X, BF16, BF16)   \
  HORO_KERNELS_BOTH_WAYS(X, F32, F32)     \
  HORO_KERNELS_BOTH_WAYS(X, F32, F16)     \
  HORO_KERNELS_BOTH_WAYS(X, F32, BF16)    \
  HORO_KERNELS_BOTH_WAYS(X, F64, F64)     \
  HORO_KERNELS_BOTH_WAYS(X, F64, F16)     \
  HORO_KERNELS_BOTH_WAYS(X, F64, BF16)    \
  HORO_KERNELS_BOTH_WAYS(X, Raw8, Raw8)   \
  HORO_KERNELS_BOTH_WAYS(X, Raw16, Raw16) \
  HORO_KERNELS_BOTH_WAYS(X, Raw32, Raw32) \
  HORO_KERNELS_BOTH_WAYS(X, Raw64, Raw64)
#define HORO_KERNELS_BOTH_WAYS(X, G, W) X(Pack, G, W) X(Unpack, G, W)

}  // namespace horo
