// The host kernels. Compiled once per instruction set, each time into the namespace HORO_LITE_ISA.
//
// Arithmetic on floats narrower than 64 bits is float32, never contracted to FMA, so that all builds agree to the
// bit. Builds differ only in how many elements an instruction handles.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <type_traits>
#include <vector>

#include "pack/pack.h"

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace horo {
namespace HORO_LITE_ISA {
namespace {

// --- vectors: the one place where instruction sets differ ---

#if defined(__AVX512F__)
constexpr size_t kVectorBytes = 64;
#elif defined(__AVX2__)
constexpr size_t kVectorBytes = 32;
#else
constexpr size_t kVectorBytes = 16;
#endif

template <class A>
constexpr bool kHasVectors = std::is_arithmetic_v<A> && !std::is_same_v<A, long double>;

// A vector of as many elements of type A as an instruction handles, which may be one. Unaligned<A> is the same at any
// address.
template <class A, bool = kHasVectors<A>>
struct VectorOf {
  typedef A Type;
  typedef A Unaligned __attribute__((aligned(1), may_alias));
};
template <class A>
struct VectorOf<A, true> {
  typedef A Type __attribute__((vector_size(kVectorBytes)));
  typedef A Unaligned __attribute__((vector_size(kVectorBytes), aligned(1), may_alias));
};
template <class A>
using Vector = typename VectorOf<A>::Type;
template <class A>
using Unaligned = typename VectorOf<A>::Unaligned;
template <class A>
constexpr size_t kLanes = sizeof(Vector<A>) / sizeof(A);

// As many 16-bit elements as a vector has 32-bit elements.
typedef uint16_t NarrowVector __attribute__((vector_size(kVectorBytes / 2), aligned(1), may_alias));

#if defined(__AVX512F__)
inline Vector<float> load_halves(const Packed<Half>* from) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
}
inline void store_halves(Packed<Half>* to, Vector<float> x) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
}
#elif defined(__AVX2__)
inline Vector<float> load_halves(const Packed<Half>* from) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
}
inline void store_halves(Packed<Half>* to, Vector<float> x) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
}
#elif defined(__aarch64__)
inline Vector<float> load_halves(const Packed<Half>* from) {
  return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(reinterpret_cast<const uint16_t*>(from))));
}
inline void store_halves(Packed<Half>* to, Vector<float> x) {
  vst1_u16(reinterpret_cast<uint16_t*>(to), vreinterpret_u16_f16(vcvt_f16_f32(x)));
}
#else
inline Vector<float> load_halves(const Packed<Half>* from) {
  Vector<float> x;
  for (size_t i = 0; i < kLanes<float>; ++i) x[i] = float_of_half(from[i].value.bits);
  return x;
}
inline void store_halves(Packed<Half>* to, Vector<float> x) {
  for (size_t i = 0; i < kLanes<float>; ++i) to[i].value = Half{half_bits(x[i])};
}
#endif

inline Vector<float> load_bfloat16s(const Packed<BFloat16>* from) {
  const auto bits = *reinterpret_cast<const NarrowVector*>(from);
  return reinterpret_cast<Vector<float>>(__builtin_convertvector(bits, Vector<uint32_t>) << 16);
}

// float_of_bfloat16() of bfloat16_bits(): x rounded to bfloat16, in the upper halves.
inline Vector<uint32_t> bfloat16_rounded(Vector<float> x) {
  const auto bits = reinterpret_cast<Vector<uint32_t>>(x);
  const Vector<uint32_t> rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) & 0xffff0000u;
  const Vector<uint32_t> quiet = (bits & 0xffff0000u) | 0x400000u;
  return x != x ? quiet : rounded;
}

inline void store_bfloat16s(Packed<BFloat16>* to, Vector<uint32_t> rounded) {
  *reinterpret_cast<NarrowVector*>(to) = __builtin_convertvector(rounded >> 16, NarrowVector);
}

#if defined(__x86_64__)
// Bypasses the caches. `to` is aligned to the vector.
template <class V>
inline void stream(void* to, V x) {
  static_assert(sizeof(V) == kVectorBytes);
#if defined(__AVX512F__)
  _mm512_stream_ps(static_cast<float*>(to), reinterpret_cast<__m512>(x));
#elif defined(__AVX2__)
  _mm256_stream_ps(static_cast<float*>(to), reinterpret_cast<__m256>(x));
#else
  _mm_stream_ps(static_cast<float*>(to), reinterpret_cast<__m128>(x));
#endif
}
#endif

// --- scalars ---

// 128 bits are for sums of 64-bit integers in an average.
template <class A>
constexpr bool kIsInteger =
    std::is_integral_v<A> || std::is_same_v<A, __int128> || std::is_same_v<A, unsigned __int128>;

// The type in which integers wrap round, as NumPy's do, without undefined behaviour.
template <class A>
using Wrapping = std::conditional_t<(sizeof(A) > 8), unsigned __int128, uint64_t>;

template <class A, class T>
inline A widen(T value) {
  if constexpr (std::is_same_v<T, Half>) {
    return static_cast<A>(float_of_half(value.bits));
  } else if constexpr (std::is_same_v<T, BFloat16>) {
    return static_cast<A>(float_of_bfloat16(value.bits));
  } else {
    return static_cast<A>(value);
  }
}

template <class T, class A>
inline T narrow(A value) {
  if constexpr (std::is_same_v<T, Half>) {
    return Half{half_bits(static_cast<float>(value))};
  } else if constexpr (std::is_same_v<T, BFloat16>) {
    return BFloat16{bfloat16_bits(static_cast<float>(value))};
  } else {
    return static_cast<T>(value);
  }
}

// Truncates towards zero, and wraps round as all integers here do; NaN and infinities give 0, as do the multiples of
// 2^75 from 2^127 on. A plain cast of a number that does not fit is undefined, and instruction sets differ in it.
template <class A>
inline A cut(double x) {
  return std::fabs(x) < 0x1p127 ? static_cast<A>(static_cast<__int128>(x)) : A{0};
}

// An operation that is compiled into a loop. Only sums are: the others share a loop that tests for each tile which one
// it is, since a loop for each of them takes two thirds more time to compile.
template <Op op>
struct Constant {
  constexpr Constant(Op) {}
};
template <Op op>
using ConstantIfSum = std::conditional_t<op == Op::kSum || op == Op::kWeightedAverage, Constant<op>, Op>;
template <class AnOp>
constexpr bool kIsWeighted = std::is_same_v<AnOp, Constant<Op::kWeightedAverage>>;

// What an integer is multiplied by: a weight as a whole number, or a user's factor.
template <class AnOp, class A>
inline auto multiplier(double weight) {
  if constexpr (kIsWeighted<AnOp>) return cut<A>(in_weight_units(weight));
  else return weight;
}

// The product. That of integers and a user's factor is truncated towards zero.
template <class A, class M>
inline A multiplied(A value, M multiplier) {
  if constexpr (kIsInteger<A> && std::is_same_v<M, double>) {
    return cut<A>(static_cast<double>(value) * multiplier);
  } else if constexpr (kIsInteger<A>) {
    return static_cast<A>(static_cast<Wrapping<A>>(value) * static_cast<Wrapping<A>>(multiplier));
  } else {
    return value * multiplier;
  }
}

bool is_power_of_two(double x) {
  int exponent;
  return std::frexp(std::fabs(x), &exponent) == 0.5;
}

// For floats, divisions by powers of two are exact multiplications.
template <class A>
Factor simplified(Factor factor) {
  if (!kIsInteger<A> && is_power_of_two(factor.divisor)) return {factor.scale / factor.divisor, 1.0};
  return factor;
}

// An integer times the scale, over the divisor; exact if there is no scale.
template <class A>
inline A finished(A value, const Factor& factor) {
  if (factor.scale == 1.0) {
    const auto divisor = cut<A>(factor.divisor);
    if (static_cast<double>(divisor) == factor.divisor) return divisor == 1 ? value : value / divisor;
  }
  return cut<A>(static_cast<double>(value) * factor.scale / factor.divisor);
}

constexpr size_t rounded_up(size_t n, size_t unit) { return (n + unit - 1) / unit * unit; }

// --- tiles: what a loop reads before it writes ---
//
// A processor compares a load with the stores before it by the lowest 12 bits of their addresses, and if these overlap
// without being equal, the load waits for the store ("4K aliasing"). NumPy's large arrays begin 16 bytes into a page,
// slots at the start of a page: loops that read one vector and write one would wait at every step. These loops read
// eight vectors before they write the first.

// Tiles must stay in registers: without this, the compiler calls functions that pass them through memory.
#define HORO_INLINE [[gnu::always_inline]] inline

constexpr size_t kTileVectors = kVectorBytes == 64 ? 4 : 8;  // with AVX2 and AVX-512 256 bytes: measured best

template <class A>
struct Tile {
  Vector<A> vectors[kTileVectors];
};
template <class A>
constexpr size_t kTileElements = kTileVectors * kLanes<A>;

// How many elements a tile has: all, which the compiler knows, or fewer at the end of an array.
struct Whole {};
struct Part {
  size_t n;
};

// body(first element, Whole or Part) for all tiles of n elements.
template <class A, class Body>
HORO_INLINE void for_tiles(size_t n, Body body) {
  size_t first = 0;
  for (; first + kTileElements<A> <= n; first += kTileElements<A>) body(first, Whole{});
  if (first < n) body(first, Part{n - first});
}

template <class A, class W>
HORO_INLINE Tile<A> load(const Packed<W>* from, Whole) {
  Tile<A> tile;
  if constexpr (std::is_same_v<A, W>) {
    for (size_t v = 0; v < kTileVectors; ++v) tile.vectors[v] = reinterpret_cast<const Unaligned<A>*>(from)[v];
  } else if constexpr (std::is_same_v<A, float> && std::is_same_v<W, Half>) {
    for (size_t v = 0; v < kTileVectors; ++v) tile.vectors[v] = load_halves(from + v * kLanes<A>);
  } else if constexpr (std::is_same_v<A, float> && std::is_same_v<W, BFloat16>) {
    for (size_t v = 0; v < kTileVectors; ++v) tile.vectors[v] = load_bfloat16s(from + v * kLanes<A>);
  } else {
    alignas(64) A values[kTileElements<A>];
    for (size_t i = 0; i < kTileElements<A>; ++i) values[i] = widen<A>(from[i].value);
    std::memcpy(&tile, values, sizeof(tile));
  }
  return tile;
}

template <class T, class A>
HORO_INLINE void store(Packed<T>* to, const Tile<A>& tile, Whole) {
  if constexpr (std::is_same_v<A, T>) {
    for (size_t v = 0; v < kTileVectors; ++v) reinterpret_cast<Unaligned<A>*>(to)[v] = tile.vectors[v];
  } else if constexpr (std::is_same_v<A, float> && std::is_same_v<T, Half>) {
    for (size_t v = 0; v < kTileVectors; ++v) store_halves(to + v * kLanes<A>, tile.vectors[v]);
  } else if constexpr (std::is_same_v<A, float> && std::is_same_v<T, BFloat16>) {
    for (size_t v = 0; v < kTileVectors; ++v) store_bfloat16s(to + v * kLanes<A>, bfloat16_rounded(tile.vectors[v]));
  } else {
    alignas(64) A values[kTileElements<A>];
    std::memcpy(values, &tile, sizeof(tile));
    for (size_t i = 0; i < kTileElements<A>; ++i) to[i].value = narrow<T>(values[i]);
  }
}

template <class A, class W>
HORO_INLINE Tile<A> load(const Packed<W>* from, Part part) {
  Packed<W> padded[kTileElements<A>] = {};
  std::memcpy(padded, from, part.n * sizeof(W));
  return load<A>(padded, Whole{});
}

template <class T, class A>
HORO_INLINE void store(Packed<T>* to, const Tile<A>& tile, Part part) {
  Packed<T> padded[kTileElements<A>];
  store(padded, tile, Whole{});
  std::memcpy(to, padded, part.n * sizeof(T));
}

// Values after a conversion to W and back.
template <class W, class A>
HORO_INLINE void round_to(Tile<A>& tile) {
  if constexpr (std::is_same_v<W, BFloat16>) {
    for (auto& x : tile.vectors) x = reinterpret_cast<Vector<float>>(bfloat16_rounded(x));
  }
}

// Integers wrap round, as NumPy's do, without undefined behaviour.
template <class A, class V, class F>
HORO_INLINE V wrapping(V a, V b, F f) {
  if constexpr (!kIsInteger<A>) return f(a, b);
  else if constexpr (kHasVectors<A>) {
    using Bits = Vector<std::make_unsigned_t<A>>;
    return reinterpret_cast<V>(f(reinterpret_cast<Bits>(a), reinterpret_cast<Bits>(b)));
  } else {
    return static_cast<V>(f(static_cast<Wrapping<A>>(a), static_cast<Wrapping<A>>(b)));
  }
}

// NaN wins in Min and Max, as in NumPy.
template <Op op, class A>
HORO_INLINE void combine(Tile<A>& sum, const Tile<A>& next) {
  for (size_t v = 0; v < kTileVectors; ++v) {
    const Vector<A> a = sum.vectors[v], b = next.vectors[v];
    if constexpr (op == Op::kMin) sum.vectors[v] = ((b < a) | (b != b)) ? b : a;
    else if constexpr (op == Op::kMax) sum.vectors[v] = ((b > a) | (b != b)) ? b : a;
    else if constexpr (op == Op::kProduct) sum.vectors[v] = wrapping<A>(a, b, [](auto x, auto y) { return x * y; });
    else sum.vectors[v] = wrapping<A>(a, b, [](auto x, auto y) { return x + y; });
  }
}

template <class A, Op op>
HORO_INLINE void combine(Constant<op>, Tile<A>& sum, const Tile<A>& next) {
  combine<op>(sum, next);
}
template <class A>
HORO_INLINE void combine(Op op, Tile<A>& sum, const Tile<A>& next) {
  if (op == Op::kMin) combine<Op::kMin>(sum, next);
  else if (op == Op::kMax) combine<Op::kMax>(sum, next);
  else combine<Op::kProduct>(sum, next);
}

// For operations that instructions do on one element at a time. These loops are long and seldom run, so each is one
// function for all kernels: inlined, they were half of all code, and of the time to compile it.
template <class A, class F>
[[gnu::noinline]] void for_each(A* values, F f) {
  for (size_t i = 0; i < kTileElements<A>; ++i) values[i] = f(values[i]);
}
template <class A, class F>
HORO_INLINE void for_each(Tile<A>& tile, F f) {
  // With AVX-512 the copy is one load of what was stored element by element, and waits for these stores.
  if constexpr (!kHasVectors<A> && kVectorBytes == 64) return for_each(tile.vectors, f);
  alignas(64) A values[kTileElements<A>];
  std::memcpy(values, &tile, sizeof(tile));
  for_each(values, f);
  std::memcpy(&tile, values, sizeof(tile));
}
template <class A, class M>
HORO_INLINE void multiply_integers(Tile<A>& tile, M multiplier) {
  for_each(tile, [multiplier](A value) { return multiplied(value, multiplier); });
}
template <class A>
HORO_INLINE void finish_integers(Tile<A>& tile, Factor factor) {
  for_each(tile, [factor](A value) { return finished(value, factor); });
}

template <class A>
HORO_INLINE void multiply(Tile<A>& tile, A factor) {
  for (auto& x : tile.vectors) x *= factor;
}

// For factors and weights, which may be smaller or larger than any normal number of type A: those are applied in
// double.
template <class A>
HORO_INLINE void scale(Tile<A>& tile, double factor) {
  const double magnitude = std::fabs(factor);
  if (magnitude >= std::numeric_limits<A>::min() && magnitude <= std::numeric_limits<A>::max()) {
    multiply(tile, static_cast<A>(factor));
  } else {
    for_each(tile, [factor](A value) { return static_cast<A>(static_cast<double>(value) * factor); });
  }
}

template <class A>
HORO_INLINE void divide(Tile<A>& tile, A divisor) {
  for (auto& x : tile.vectors) x /= divisor;
}

// The first access to a page looks it up in the TLB and restarts the prefetcher: done two pages ahead, both are ready
// in time. Called for every tile of n_bytes; one call per page has an effect.
constexpr size_t kPageBytes = 4096;

HORO_INLINE void touch_ahead(const void* tile, size_t n_bytes) {
  if (reinterpret_cast<uintptr_t>(tile) % kPageBytes < n_bytes)
    __builtin_prefetch(static_cast<const uint8_t*>(tile) + 2 * kPageBytes);
}

// --- bytes ---

using Bytes = Packed<uint8_t>;

void copy(void* to, const void* from, size_t n) {
  auto* target = static_cast<Bytes*>(to);
  const auto* source = static_cast<const Bytes*>(from);
  const size_t whole = n - n % kTileElements<uint8_t>;
  for (size_t i = 0; i < whole; i += kTileElements<uint8_t>) {
    touch_ahead(target + i, kTileElements<uint8_t>);
    touch_ahead(source + i, kTileElements<uint8_t>);
    store(target + i, load<uint8_t>(source + i, Whole{}), Whole{});
  }
  std::memcpy(target + whole, source + whole, n - whole);
}

#if defined(__x86_64__)

// The same with stores that bypass the caches, except for the bytes before and after lines of 16.
void copy_streaming(void* to, const void* from, size_t n) {
  auto* target = static_cast<Bytes*>(to);
  const auto* source = static_cast<const Bytes*>(from);
  const auto* const end = target + n;
  const auto is_aligned = [&](size_t unit) { return reinterpret_cast<uintptr_t>(target) % unit == 0; };
  const auto left = [&] { return static_cast<size_t>(end - target); };
  const auto advance = [&](size_t bytes) {
    target += bytes;
    source += bytes;
  };
  for (; left() > 0 && !is_aligned(16); advance(1)) *target = *source;
  const auto by_sixteen = [&] {
    _mm_stream_si128(reinterpret_cast<__m128i*>(target), _mm_loadu_si128(reinterpret_cast<const __m128i*>(source)));
    advance(16);
  };
  while (left() >= 16 && !is_aligned(64)) by_sixteen();
  for (; left() >= kTileElements<uint8_t>; advance(kTileElements<uint8_t>)) {
    touch_ahead(target, kTileElements<uint8_t>);
    touch_ahead(source, kTileElements<uint8_t>);
    const auto tile = load<uint8_t>(source, Whole{});
    for (size_t v = 0; v < kTileVectors; ++v) stream(target + v * kVectorBytes, tile.vectors[v]);
  }
  while (left() >= 16) by_sixteen();
  for (; left() > 0; advance(1)) *target = *source;
}
#else
void copy_streaming(void* to, const void* from, size_t n) { copy(to, from, n); }
#endif

void write(void* to, const void* from, size_t n, Stores stores) {
  if (stores == Stores::kStreaming) copy_streaming(to, from, n);
  else copy(to, from, n);
}

// --- Plain: the wire holds elements of type W, sums are kept in A ---

template <class T, class W, class A>
struct PlainFormat {
  static constexpr size_t kItemBytes = sizeof(T);
  static constexpr size_t kBlockBytes = kBlockElements * sizeof(W);
  static constexpr bool kIdentity = std::is_same_v<T, W>;

  static size_t wire_bytes(size_t n) { return rounded_up(n * sizeof(W), kWireAlignment); }

  static void encode(const void* source, size_t n, uint8_t* wire, Stores stores) {
    if constexpr (kIdentity) {
      write(wire, source, n * sizeof(W), stores);
    } else {
      const auto* in = static_cast<const Packed<T>*>(source);
      auto* out = reinterpret_cast<Packed<W>*>(wire);
      for_tiles<A>(n, [&](size_t first, auto extent) __attribute__((always_inline)) {
        store_to_wire(out + first, load<A>(in + first, extent), extent, stores);
      });
    }
  }

  static void decode(const uint8_t* wire, size_t n, void* destination) {
    if constexpr (kIdentity) {
      copy(destination, wire, n * sizeof(T));
    } else {
      const auto* in = reinterpret_cast<const Packed<W>*>(wire);
      auto* out = static_cast<Packed<T>*>(destination);
      for_tiles<A>(n, [&](size_t first, auto extent)
                          __attribute__((always_inline)) { store(out + first, load<A>(in + first, extent), extent); });
    }
  }

  template <class Extent>
  HORO_INLINE static void store_to_wire(Packed<W>* to, const Tile<A>& tile, Extent extent, Stores stores) {
    if (stores == Stores::kCached || std::is_same_v<Extent, Part>) {
      store(to, tile, extent);
    } else {
      alignas(64) Packed<W> values[kTileElements<A>];
      store(values, tile, Whole{});
      copy_streaming(to, values, sizeof(values));
    }
  }

  // `op` is a Constant or an Op.
  template <class AnOp>
  static void reduce(const ReduceArgs& args, AnOp op) {
    const Factor factor = simplified<A>(args.factor);
    const auto* source = static_cast<const Packed<T>*>(args.source);
    auto* destination = static_cast<Packed<T>*>(args.destination);
    auto* wire = reinterpret_cast<Packed<W>*>(args.wire);
    for_tiles<A>(args.n_elements, [&](size_t first, auto extent) __attribute__((always_inline)) {
      touch_ahead(source + first, kTileElements<A> * sizeof(T));
      const auto contribution = [&](int r) __attribute__((always_inline)) {
        if (args.weights != nullptr && args.weights[r] == 0.0) return Tile<A>{};
        const auto* image = reinterpret_cast<const Packed<W>*>(args.wires[r]);
        if constexpr (kIdentity) {
          return load<A>((r == args.own ? source : image) + first, extent);
        } else {
          if (r != args.own) return load<A>(image + first, extent);
          auto own = load<A>(source + first, extent);
          round_to<W>(own);
          return own;
        }
      };
      Tile<A> sum = contribution(0);
      weigh<AnOp>(sum, args, 0);
      for (int r = 1; r < args.n_contributors; ++r) {
        Tile<A> next = contribution(r);
        weigh<AnOp>(next, args, r);
        combine(op, sum, next);
      }
      finish<AnOp>(sum, factor);
      store_to_wire(wire + first, sum, extent, args.stores);
      if (destination == nullptr) return;
      if constexpr (!kIdentity) round_to<W>(sum);
      store(destination + first, sum, extent);
    });
  }

 private:
  template <class AnOp>
  HORO_INLINE static void weigh(Tile<A>& tile, const ReduceArgs& args, int r) {
    if (args.weights == nullptr || args.weights[r] == 0.0) return;
    if constexpr (kIsInteger<A>) multiply_integers(tile, multiplier<AnOp, A>(args.weights[r]));
    else scale(tile, args.weights[r]);
  }

  template <class AnOp>
  HORO_INLINE static void finish(Tile<A>& tile, const Factor& factor) {
    if constexpr (kIsInteger<A>) {
      if (factor.scale == 1.0 && factor.divisor == 1.0) return;  // not the last hop
      finish_integers(tile, {factor.scale, kIsWeighted<AnOp> ? in_weight_units(factor.divisor) : factor.divisor});
    } else {
      if (factor.scale != 1.0) scale(tile, factor.scale);
      if (factor.divisor != 1.0) divide(tile, static_cast<A>(factor.divisor));
    }
  }
};

template <class T, class W, class A, Op op>
struct Plain : PlainFormat<T, W, A> {
  static void reduce(const ReduceArgs& args) { PlainFormat<T, W, A>::reduce(args, ConstantIfSum<op>{op}); }
};

// Averages of integers: divided once, at the last hop, since until then the sum needs more room than T may have. They
// are added up by one function for all T, block by block.
template <class T, Op op>
struct IntegerAverage : PlainFormat<T, __int128, __int128> {
  using Wide = __int128;
  using Format = PlainFormat<T, Wide, Wide>;

  static void reduce(const ReduceArgs& args) {
    alignas(64) uint8_t own[Format::kBlockBytes];
    std::vector<const uint8_t*> wires(args.wires, args.wires + args.n_contributors);
    ReduceArgs block = args;
    block.wires = wires.data();
    block.source = own;
    block.destination = nullptr;
    for (size_t first = 0; first < args.n_elements; first += kBlockElements) {
      block.n_elements = std::min(kBlockElements, args.n_elements - first);
      if (args.own >= 0) {
        Format::encode(static_cast<const Packed<T>*>(args.source) + first, block.n_elements, own, Stores::kCached);
      }
      PlainFormat<Wide, Wide, Wide>::reduce(block, Constant<op>{op});
      if (args.destination != nullptr) {
        Format::decode(block.wire, block.n_elements, static_cast<Packed<T>*>(args.destination) + first);
      }
      block.wire += Format::kBlockBytes;
      for (int r = 0; r < args.n_contributors; ++r) {
        if (r != args.own) wires[r] += Format::kBlockBytes;
      }
    }
  }
};

// --- ScaledHalf: float16 with a power-of-two scale per block ---
//
// On the wire, a block is a header that holds k, then round(x * 2^k) in binary16, with k chosen so that the largest
// finite magnitude is in [2^14, 2^15]. Elements down to 2^-28 of it keep all 11 bits; below, the error stays under
// 2^-39 of it. Sums are formed in units of the smallest k of all contributors, weights included, so nothing can
// overflow, and the largest possible result decides the scale on the way back: the sums are not read a second time to
// find it.

struct BlockHeader {
  int32_t exponent;  // k
  int32_t unused[3];
};

struct Contribution {
  const Packed<Half>* elements;
  float factor;
};

// One block of a result, in units of its largest possible element.
template <class AnOp>
void combine_blocks(AnOp op, const std::vector<Contribution>& contributions, size_t n, const Factor& factor,
                    Packed<Half>* result) {
  const auto scale = static_cast<float>(factor.scale);
  const auto divisor = static_cast<float>(factor.divisor);
  for_tiles<float>(n, [&](size_t first, auto extent) __attribute__((always_inline)) {
    Tile<float> sum = load<float>(contributions[0].elements + first, extent);
    multiply(sum, contributions[0].factor);
    for (size_t r = 1; r < contributions.size(); ++r) {
      Tile<float> next = load<float>(contributions[r].elements + first, extent);
      multiply(next, contributions[r].factor);
      combine(op, sum, next);
    }
    multiply(sum, scale);
    if (divisor != 1.0f) divide(sum, divisor);
    store(result + first, sum, extent);
  });
}

template <class T>
struct ScaledHalfFormat {
  // float16 and float32 values are scaled in float32, float64 values in float64.
  using Real = std::conditional_t<std::is_same_v<T, double>, double, float>;
  static constexpr int kTopExponent = 14;
  static constexpr int kMaxScale = std::is_same_v<T, double> ? 1022 : 126;  // 2^k must be a normal number

  static constexpr size_t kItemBytes = sizeof(T);
  static constexpr size_t kBlockBytes = sizeof(BlockHeader) + kBlockElements * sizeof(Half);

  static size_t block_wire_bytes(size_t n) {
    return sizeof(BlockHeader) + rounded_up(n * sizeof(Half), sizeof(BlockHeader));
  }
  static size_t wire_bytes(size_t n) {
    const size_t tail = n % kBlockElements;
    return n / kBlockElements * kBlockBytes + (tail != 0 ? block_wire_bytes(tail) : 0);
  }

  static Packed<Half>* elements(uint8_t* block) { return reinterpret_cast<Packed<Half>*>(block + sizeof(BlockHeader)); }
  static const Packed<Half>* elements(const uint8_t* block) {
    return reinterpret_cast<const Packed<Half>*>(block + sizeof(BlockHeader));
  }
  static int exponent(const uint8_t* block) { return reinterpret_cast<const BlockHeader*>(block)->exponent; }
  static void set_exponent(uint8_t* block, int k) { *reinterpret_cast<BlockHeader*>(block) = {k, {0, 0, 0}}; }

  // The k for a block: from its largest finite magnitude, whose exponent field is all that matters.
  static int scale_exponent(const Packed<Real>* x, size_t n) {
    using Integer = std::conditional_t<std::is_same_v<Real, double>, int64_t, int32_t>;
    constexpr int kMantissa = std::is_same_v<Real, double> ? 52 : 23;
    constexpr int kBias = std::is_same_v<Real, double> ? 1023 : 127;
    constexpr Integer kInfinity = Integer{2 * kBias + 1} << kMantissa;
    const auto* raw = reinterpret_cast<const Packed<Integer>*>(x);
    const auto magnitude = [raw](size_t i) { return raw[i].value & std::numeric_limits<Integer>::max(); };
    Integer largest = 0;
    for (size_t i = 0; i < n; ++i) largest = std::max(largest, magnitude(i));
    if (largest >= kInfinity) {  // again, without the values that are not finite
      largest = 0;
      for (size_t i = 0; i < n; ++i) largest = std::max(largest, magnitude(i) < kInfinity ? magnitude(i) : 0);
    }
    if (largest == 0) return kMaxScale;  // zeros fit any scale: the other ranks' values decide
    return std::min(kMaxScale, kTopExponent - (static_cast<int>(largest >> kMantissa) - kBias));
  }

  static void encode_block(const Packed<T>* source, size_t n, uint8_t* block) {
    alignas(64) Packed<Real> converted[kBlockElements];
    const Packed<Real>* x = converted;
    if constexpr (std::is_same_v<T, Real>) {
      x = source;
    } else {
      for_tiles<Real>(n, [&](size_t first, auto extent) __attribute__((always_inline)) {
        store(converted + first, load<Real>(source + first, extent), extent);
      });
    }
    const int k = scale_exponent(x, n);
    set_exponent(block, k);
    const Real scale = std::ldexp(Real{1}, k);
    Packed<Half>* out = elements(block);
    for_tiles<Real>(n, [&](size_t first, auto extent) __attribute__((always_inline)) {
      auto tile = load<Real>(x + first, extent);
      multiply(tile, scale);
      store(out + first, tile, extent);
    });
  }

  static void decode_block(const uint8_t* block, size_t n, Packed<T>* destination) {
    const int k = exponent(block);
    const Packed<Half>* in = elements(block);
    if (std::is_same_v<Real, double> || k > 126 || k < -127) {
      // Two factors, each a normal number, reach every possible scale.
      const double half_way = std::ldexp(1.0, -k / 2);
      const double rest = std::ldexp(1.0, -k - (-k / 2));
      for_tiles<double>(n, [&](size_t first, auto extent) __attribute__((always_inline)) {
        auto tile = load<double>(in + first, extent);
        multiply(tile, half_way);
        multiply(tile, rest);
        store(destination + first, tile, extent);
      });
      return;
    }
    const float scale = std::ldexp(1.0f, -k);
    for_tiles<float>(n, [&](size_t first, auto extent) __attribute__((always_inline)) {
      auto tile = load<float>(in + first, extent);
      multiply(tile, scale);
      store(destination + first, tile, extent);
    });
  }

  static void encode(const void* source, size_t n_elements, uint8_t* wire, Stores stores) {
    alignas(64) uint8_t block[kBlockBytes];
    for (size_t first = 0; first < n_elements; first += kBlockElements, wire += kBlockBytes) {
      const size_t n = std::min(kBlockElements, n_elements - first);
      encode_block(static_cast<const Packed<T>*>(source) + first, n, stores == Stores::kCached ? wire : block);
      if (stores == Stores::kStreaming) copy_streaming(wire, block, sizeof(BlockHeader) + n * sizeof(Half));
    }
  }

  static void decode(const uint8_t* wire, size_t n_elements, void* destination) {
    for (size_t first = 0; first < n_elements; first += kBlockElements, wire += kBlockBytes) {
      decode_block(wire, std::min(kBlockElements, n_elements - first), static_cast<Packed<T>*>(destination) + first);
    }
  }

  // Only a weight of 0 turns a contribution into zeros: inf stays inf, however small its weight is.
  static float at_least_normal(double weight) {
    constexpr double kLeast = std::numeric_limits<float>::min();
    return static_cast<float>(std::fabs(weight) >= kLeast ? weight : std::copysign(kLeast, weight));
  }

  static void reduce(const ReduceArgs& args, Op op) {
    alignas(64) uint8_t own_block[kBlockBytes];
    alignas(64) uint8_t result[kBlockBytes];
    alignas(64) static const Packed<Half> zeros[kBlockElements] = {};
    const auto weight_of = [&](int r) { return args.weights == nullptr ? 1.0 : args.weights[r]; };
    std::vector<Contribution> contributions(args.n_contributors);
    for (size_t first = 0, offset = 0; first < args.n_elements; first += kBlockElements, offset += kBlockBytes) {
      const size_t n = std::min(kBlockElements, args.n_elements - first);
      if (args.own >= 0) encode_block(static_cast<const Packed<T>*>(args.source) + first, n, own_block);
      const auto block = [&](int r) -> const uint8_t* { return r == args.own ? own_block : args.wires[r] + offset; };
      int unit = std::numeric_limits<int>::max();
      for (int r = 0; r < args.n_contributors; ++r) {
        if (const double weight = weight_of(r); weight != 0.0) {
          unit = std::min(unit, exponent(block(r)) - std::ilogb(weight));
        }
      }
      if (unit == std::numeric_limits<int>::max()) unit = kMaxScale;  // no rank contributes
      double largest = 0.0;  // bound of a result before `factor`, in units of the largest element of a block
      for (int r = 0; r < args.n_contributors; ++r) {
        const double weight = std::ldexp(weight_of(r), unit - exponent(block(r)));
        largest = op == Op::kSum ? largest + std::fabs(weight) : std::max(largest, std::fabs(weight));
        contributions[r] =
            weight_of(r) == 0.0 ? Contribution{zeros, 0.0f} : Contribution{elements(block(r)), at_least_normal(weight)};
      }
      const double growth = largest * std::fabs(args.factor.scale / args.factor.divisor);
      int shift = 0;  // ceil(log2(growth)): how much larger than the largest contribution the result may be
      if (growth > 0.0 && std::isfinite(growth)) {
        if (std::frexp(growth, &shift) == 0.5) --shift;
      }
      set_exponent(result, unit - shift);
      const auto factor = simplified<float>({std::ldexp(args.factor.scale, -shift), args.factor.divisor});
      if (op == Op::kSum) combine_blocks(Constant<Op::kSum>{op}, contributions, n, factor, elements(result));
      else combine_blocks(op, contributions, n, factor, elements(result));
      // From the nearest cache: the lines of the wire may be in another core's cache.
      if (args.destination != nullptr) decode_block(result, n, static_cast<Packed<T>*>(args.destination) + first);
      write(args.wire + offset, result, sizeof(BlockHeader) + n * sizeof(Half), args.stores);
    }
  }
};

template <class T, Op op>
struct ScaledHalf : ScaledHalfFormat<T> {
  static void reduce(const ReduceArgs& args) { ScaledHalfFormat<T>::reduce(args, op); }
};

// --- Quantized: integers of a few bits, with a scale for each block ---

// A block is its scale, then its integers; of 4 bits, the second half of a block is in the upper halves of the bytes.
template <int kBits>
struct Quantized {
  static constexpr float kLevels = (1 << (kBits - 1)) - 1;
  // Smaller blocks count as zeros: the inverse of the scale would not be a number.
  static constexpr float kLeast = 0x1p-100f;

  static size_t integers_bytes(size_t n) { return kBits == 8 ? n : (n + 1) / 2; }
  static constexpr size_t kBlockBytes = sizeof(float) + kQuantizedBlock * kBits / 8;
  static size_t message_bytes(size_t n) {
    const size_t tail = n % kQuantizedBlock;
    return n / kQuantizedBlock * kBlockBytes + (tail != 0 ? sizeof(float) + integers_bytes(tail) : 0);
  }

  struct Block {
    alignas(64) float values[kQuantizedBlock];
    alignas(64) int8_t integers[kQuantizedBlock];
  };

  // The scale of a block: 0 if all its values count as zeros, nan if one is not finite.
  static float scale_of(const float* x) {
    constexpr int32_t kInfinity = 0x7f800000;
    int32_t largest = 0;
    for (size_t i = 0; i < kQuantizedBlock; ++i) largest = std::max(largest, bit_cast<int32_t>(x[i]) & 0x7fffffff);
    if (largest >= kInfinity) return std::numeric_limits<float>::quiet_NaN();
    const auto most = bit_cast<float>(largest);
    if (most < kLeast) return 0.0f;
    const float scale = most / kLevels;
    return std::isfinite(scale * kLevels) ? scale : std::nextafter(scale, 0.0f);
  }

  static void quantize(const QuantizeArgs& args) {
    constexpr float kRounds = 0x1.8p23f;  // added to small numbers, leaves the nearest integer in the lowest bits
    const auto share = static_cast<float>(args.share);
    const auto per_share = static_cast<float>(1.0 / args.share);
    const bool keeps = args.residual != nullptr && std::isfinite(share) && std::isfinite(per_share);
    uint8_t* message = args.message;
    Block block = {};
    float* const x = block.values;
    for (size_t first = 0; first < args.n_elements; first += kQuantizedBlock) {
      const size_t n = std::min(kQuantizedBlock, args.n_elements - first);
      alignas(64) float residual[kQuantizedBlock] = {};
      std::memcpy(x, args.values + first, n * sizeof(float));
      std::fill(x + n, x + kQuantizedBlock, 0.0f);
      if (keeps) {
        std::memcpy(residual, args.residual + first, n * sizeof(float));
        for (size_t i = 0; i < kQuantizedBlock; ++i) x[i] += residual[i] * per_share;
      }
      const float scale = scale_of(x);
      const float inverse = scale > 0.0f ? 1.0f / scale : 0.0f;
      for (size_t i = 0; i < kQuantizedBlock; ++i) {
        const float rounded = x[i] * inverse + kRounds;
        block.integers[i] = static_cast<int8_t>(bit_cast<int32_t>(rounded) - bit_cast<int32_t>(kRounds));
        const float decoded = static_cast<float>(block.integers[i]) * scale;
        residual[i] = (x[i] - decoded) * share;
        x[i] = decoded;
      }
      if (keeps && !std::isnan(scale)) std::memcpy(args.residual + first, residual, n * sizeof(float));
      if (args.decodes) std::memcpy(args.values + first, x, n * sizeof(float));
      std::memcpy(message, &scale, sizeof(scale));
      write_integers(block.integers, n, message + sizeof(scale));
      message += sizeof(scale) + integers_bytes(n);
    }
  }

  static void dequantize(const uint8_t* message, size_t n_elements, float* values) {
    Block block = {};
    for (size_t first = 0; first < n_elements; first += kQuantizedBlock) {
      const size_t n = std::min(kQuantizedBlock, n_elements - first);
      float scale;
      std::memcpy(&scale, message, sizeof(scale));
      read_integers(message + sizeof(scale), n, block.integers);
      message += sizeof(scale) + integers_bytes(n);
      for (size_t i = 0; i < kQuantizedBlock; ++i) block.values[i] = static_cast<float>(block.integers[i]) * scale;
      std::memcpy(values + first, block.values, n * sizeof(float));
    }
  }

 private:
  static void write_integers(const int8_t* integers, size_t n, uint8_t* to) {
    if constexpr (kBits == 8) {
      std::memcpy(to, integers, n);
    } else {
      const size_t half = integers_bytes(n);
      uint8_t bytes[kQuantizedBlock / 2];
      for (size_t i = 0; i < kQuantizedBlock / 2; ++i) {
        bytes[i] = static_cast<uint8_t>((integers[i] & 0xf) | integers[(i + half) % kQuantizedBlock] << 4);
      }
      std::memcpy(to, bytes, half);
    }
  }

  static void read_integers(const uint8_t* from, size_t n, int8_t* integers) {
    if constexpr (kBits == 8) {
      std::memcpy(integers, from, n);
    } else {
      const size_t half = integers_bytes(n);
      int8_t bytes[kQuantizedBlock / 2] = {};
      std::memcpy(bytes, from, half);
      for (size_t i = 0; i < kQuantizedBlock / 2; ++i) {
        integers[i] = static_cast<int8_t>(static_cast<int8_t>(bytes[i] << 4) >> 4);
      }
      int8_t upper[kQuantizedBlock / 2];
      for (size_t i = 0; i < kQuantizedBlock / 2; ++i) upper[i] = static_cast<int8_t>(bytes[i] >> 4);
      std::memcpy(integers + half, upper, half);
    }
  }
};

template <int kBits>
const Quantization* quantization_of() {
  using Format = Quantized<kBits>;
  static const Quantization quantization = {Format::message_bytes, Format::quantize, Format::dequantize};
  return &quantization;
}

// --- tables ---

template <class Codec>
const Kernels* kernels_of() {
  static const Kernels kernels = {
      Codec::kItemBytes, Codec::kBlockBytes, Codec::wire_bytes, Codec::encode, Codec::reduce, Codec::decode, nullptr};
  return &kernels;
}

// Sums of T whose images are float32, and whose messages between hosts are quantized.
template <class T>
const Kernels* quantized(Wire wire) {
  using Codec = Plain<T, float, float, Op::kSum>;
  const auto with = [](const Quantization* quantization) {
    return Kernels{Codec::kItemBytes, Codec::kBlockBytes, Codec::wire_bytes, Codec::encode,
                   Codec::reduce,     Codec::decode,      quantization};
  };
  static const Kernels int8 = with(quantization_of<8>()), int4 = with(quantization_of<4>());
  return wire == Wire::kInt8 ? &int8 : &int4;
}

// For `op`, which is one of `ops`: combinations that are never selected are not compiled.
template <class T, class W, class A, Op... ops>
const Kernels* plain(Op op) {
  const Kernels* found = nullptr;
  ((op == ops ? void(found = kernels_of<Plain<T, W, A, ops>>()) : void()), ...);
  return found;
}

template <class T>
const Kernels* scaled_half(Op op) {
  switch (op) {
    case Op::kMin:
      return kernels_of<ScaledHalf<T, Op::kMin>>();
    case Op::kMax:
      return kernels_of<ScaledHalf<T, Op::kMax>>();
    default:
      return kernels_of<ScaledHalf<T, Op::kSum>>();
  }
}

template <class T>
const Kernels* integer(Op op) {
  if (op == Op::kAverage) return kernels_of<IntegerAverage<T, Op::kSum>>();
  if (op == Op::kWeightedAverage) return kernels_of<IntegerAverage<T, Op::kWeightedAverage>>();
  return plain<T, T, T, Op::kSum, Op::kMin, Op::kMax, Op::kProduct>(op);
}

// Until the last hop, averages of floats are sums, with or without weights.
Op summed(Op op) { return op == Op::kAverage || op == Op::kWeightedAverage ? Op::kSum : op; }

template <class T, class A>
const Kernels* uncompressed(Op op) {
  return plain<T, T, A, Op::kSum, Op::kMin, Op::kMax, Op::kProduct>(summed(op));
}

template <class T>
const Kernels* real(Wire wire, Op op) {
  const bool compressible = op != Op::kProduct;  // a product's size is not bounded by its factors'
  if (wire == Wire::kFloat16 && compressible) return scaled_half<T>(op);
  if (wire == Wire::kBFloat16 && compressible) {
    return plain<T, BFloat16, float, Op::kSum, Op::kMin, Op::kMax>(summed(op));
  }
  return uncompressed<T, T>(op);
}

template <class T>
const Kernels* kernels_for(Wire wire, Op op) {
  if constexpr (std::is_integral_v<T>) return integer<T>(op);
  else return real<T>(wire, op);
}

// What is sent between hosts are sums, which may be larger than binary16 can hold.
template <>
const Kernels* kernels_for<Half>(Wire wire, Op op) {
  if (wire == Wire::kBetweenHosts) {
    return plain<Half, float, float, Op::kSum, Op::kMin, Op::kMax, Op::kProduct>(summed(op));
  }
  return wire == Wire::kNone || op == Op::kProduct ? uncompressed<Half, float>(op) : scaled_half<Half>(op);
}

template <>
const Kernels* kernels_for<BFloat16>(Wire, Op op) {
  return uncompressed<BFloat16, float>(op);
}

template <>
const Kernels* kernels_for<long double>(Wire, Op op) {
  return uncompressed<long double, long double>(op);
}

}  // namespace

const Kernels* select(DType dtype, Wire wire, Op op) {
  if (wire == Wire::kInt8 || wire == Wire::kInt4) {
    if (summed(op) == Op::kSum && dtype == DType::kFloat16) return quantized<Half>(wire);
    if (summed(op) == Op::kSum && dtype == DType::kBFloat16) return quantized<BFloat16>(wire);
    if (summed(op) == Op::kSum && dtype == DType::kFloat32) return quantized<float>(wire);
    if (summed(op) == Op::kSum && dtype == DType::kFloat64) return quantized<double>(wire);
    wire = Wire::kBetweenHosts;
  }
  if (dtype == DType::kBool) {
    if (op == Op::kAverage || op == Op::kWeightedAverage) return nullptr;
    if (op == Op::kSum) op = Op::kMax;
    if (op == Op::kProduct) op = Op::kMin;
  }
  return with_type(dtype, [&](auto element) { return kernels_for<decltype(element)>(wire, op); });
}

void copy_bytes(void* to, const void* from, size_t n_bytes, Stores stores) { write(to, from, n_bytes, stores); }

}  // namespace HORO_LITE_ISA
}  // namespace horo
