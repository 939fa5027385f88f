// The host kernels. Compiled once per instruction set, each time into the namespace HORO_LITE_ISA.
//
// Arithmetic on floats narrower than 64 bits is float32, never contracted to FMA, so that all builds agree to the
// bit. What changes between builds is only how many elements an instruction handles.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <type_traits>

#include "pack/pack.h"

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace horo {
namespace HORO_LITE_ISA {
namespace {

// --- float lanes: the one place where instruction sets differ -------------------------------------------------

#if defined(__AVX512F__)
using Lanes = __m512;
constexpr size_t kLanes = 16;
inline Lanes lanes_of(float x) { return _mm512_set1_ps(x); }
inline Lanes load(const void* p) { return _mm512_loadu_ps(p); }
inline void store(void* p, Lanes x) { _mm512_storeu_ps(p, x); }
inline Lanes mul(Lanes a, Lanes b) { return _mm512_mul_ps(a, b); }
inline Lanes add(Lanes a, Lanes b) { return _mm512_add_ps(a, b); }
inline Lanes div(Lanes a, Lanes b) { return _mm512_div_ps(a, b); }
inline Lanes load_half(const uint16_t* p) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
inline void store_half(uint16_t* p, Lanes x) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
}
#elif defined(__AVX2__)
using Lanes = __m256;
constexpr size_t kLanes = 8;
inline Lanes lanes_of(float x) { return _mm256_set1_ps(x); }
inline Lanes load(const void* p) { return _mm256_loadu_ps(static_cast<const float*>(p)); }
inline void store(void* p, Lanes x) { _mm256_storeu_ps(static_cast<float*>(p), x); }
inline Lanes mul(Lanes a, Lanes b) { return _mm256_mul_ps(a, b); }
inline Lanes add(Lanes a, Lanes b) { return _mm256_add_ps(a, b); }
inline Lanes div(Lanes a, Lanes b) { return _mm256_div_ps(a, b); }
inline Lanes load_half(const uint16_t* p) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
inline void store_half(uint16_t* p, Lanes x) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
}
#else
using Lanes = float;
constexpr size_t kLanes = 1;
inline Lanes lanes_of(float x) { return x; }
inline Lanes load(const void* p) { return static_cast<const Packed<float>*>(p)->value; }
inline void store(void* p, Lanes x) { static_cast<Packed<float>*>(p)->value = x; }
inline Lanes mul(Lanes a, Lanes b) { return a * b; }
inline Lanes add(Lanes a, Lanes b) { return a + b; }
inline Lanes div(Lanes a, Lanes b) { return a / b; }
inline Lanes load_half(const uint16_t* p) { return float_of_half(*p); }
inline void store_half(uint16_t* p, Lanes x) { *p = half_bits(x); }
#endif

// --- scalars ----------------------------------------------------------------------------------------------------

// 128 bits are for sums of 64-bit integers on their way to an average.
template <class A>
constexpr bool kIsInteger =
    std::is_integral_v<A> || std::is_same_v<A, __int128> || std::is_same_v<A, unsigned __int128>;

// Where integers wrap round, as NumPy's do, without undefined behaviour.
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

// NaN wins in Min and Max, as in NumPy.
template <Op op, class A>
inline A combine(A a, A b) {
  if constexpr (op == Op::kMin) {
    return (b < a || b != b) ? b : a;
  } else if constexpr (op == Op::kMax) {
    return (b > a || b != b) ? b : a;
  } else if constexpr (op == Op::kProduct) {
    if constexpr (kIsInteger<A>) {
      return static_cast<A>(static_cast<Wrapping<A>>(a) * static_cast<Wrapping<A>>(b));
    } else {
      return a * b;
    }
  } else if constexpr (kIsInteger<A>) {
    return static_cast<A>(static_cast<Wrapping<A>>(a) + static_cast<Wrapping<A>>(b));
  } else {
    return a + b;
  }
}

// Cut towards zero, and wrapped round as all integers here are; NaN and infinities give 0, as do the multiples of 2^75
// from 2^127 on. The plain cast of a number that does not fit is undefined, and instruction sets differ in it.
template <class A>
inline A cut(double x) {
  return std::fabs(x) < 0x1p127 ? static_cast<A>(static_cast<__int128>(x)) : A{0};
}

// Weighted averages of integers are exact where numbers of samples are: weights below 1 count in units of 2^-30, for
// which the sum has room.
constexpr double kFixedPoint = 1 << 30;

// What multiplies a contribution of numbers computed in A. Only 0 makes nothing of it: inf stays inf, however little it
// weighs.
template <Op op, class A>
inline auto multiplier(double weight) {
  if constexpr (!kIsInteger<A>) {
    const auto least = static_cast<double>(std::numeric_limits<A>::min());
    return static_cast<A>(weight == 0.0 || std::fabs(weight) >= least ? weight : std::copysign(least, weight));
  } else if constexpr (op == Op::kWeightedAverage) {
    return cut<A>(std::nearbyint(weight * kFixedPoint));
  } else {
    return weight;
  }
}

// The product: of integers with a user's factor it is cut towards zero.
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

// Divisions by powers of two are exact multiplications, of floats.
template <class A>
Factor simplified(Factor factor) {
  if (!kIsInteger<A> && is_power_of_two(factor.divisor)) return {factor.scale / factor.divisor, 1.0};
  return factor;
}

template <Op op, class A>
inline A finished(A value, const Factor& factor) {
  if constexpr (op == Op::kWeightedAverage && kIsInteger<A>) {
    return finished<Op::kSum>(value, {factor.scale, std::nearbyint(factor.divisor * kFixedPoint)});
  } else if constexpr (kIsInteger<A>) {
    if (factor.scale == 1.0) {
      const auto divisor = cut<A>(factor.divisor);
      if (static_cast<double>(divisor) == factor.divisor) return divisor == 1 ? value : value / divisor;
    }
    return cut<A>(static_cast<double>(value) * factor.scale / factor.divisor);
  } else {
    return value * static_cast<A>(factor.scale) / static_cast<A>(factor.divisor);
  }
}

constexpr size_t rounded_up(size_t n, size_t unit) { return (n + unit - 1) / unit * unit; }

// --- Plain: the wire holds elements of type W, sums are kept in A ----------------------------------------------------

template <class T, class W, class A, Op op>
struct Plain {
  static constexpr size_t kItemBytes = sizeof(T);
  static constexpr size_t kBlockBytes = kBlockElements * sizeof(W);
  static constexpr bool kIdentity = std::is_same_v<T, W>;

  static size_t wire_bytes(size_t n) { return rounded_up(n * sizeof(W), kWireAlignment); }

  static void encode(const void* source, size_t n, uint8_t* wire) {
    if constexpr (kIdentity) {
      std::memcpy(wire, source, n * sizeof(W));
    } else {
      auto* out = reinterpret_cast<W*>(wire);
      const auto* in = static_cast<const Packed<T>*>(source);
      for (size_t i = 0; i < n; ++i) out[i] = narrow<W>(widen<A>(in[i].value));
    }
  }

  static void decode(const uint8_t* wire, size_t n, void* destination) {
    if constexpr (kIdentity) {
      std::memcpy(destination, wire, n * sizeof(T));
    } else {
      const auto* in = reinterpret_cast<const W*>(wire);
      auto* out = static_cast<Packed<T>*>(destination);
      for (size_t i = 0; i < n; ++i) out[i].value = narrow<T>(widen<A>(in[i]));
    }
  }

  // Two contributors, nothing to convert: the usual case on one host, in one pass over the bytes.
  static void reduce_pair(const Packed<W>* a, const Packed<W>* b, size_t n, const Factor& factor, Packed<W>* wire,
                          Packed<T>* destination) {
    if constexpr (kIdentity && std::is_same_v<W, A>) {
      Packed<T>* second = destination == nullptr ? reinterpret_cast<Packed<T>*>(wire) : destination;
      if (factor.divisor == 1.0 && !kIsInteger<A>) {
        const A scale = static_cast<A>(factor.scale);
#pragma GCC ivdep
        for (size_t i = 0; i < n; ++i) {
          const A value = combine<op>(a[i].value, b[i].value) * scale;
          wire[i].value = value;
          second[i].value = value;
        }
      } else {
#pragma GCC ivdep
        for (size_t i = 0; i < n; ++i) {
          const A value = finished<op>(combine<op>(a[i].value, b[i].value), factor);
          wire[i].value = value;
          second[i].value = value;
        }
      }
    }
  }

  static void reduce(const ReduceArgs& args) {
    alignas(64) A sum[kBlockElements];
    alignas(64) W own_wire[kBlockElements];
    alignas(64) static const W zeros[kBlockElements] = {};
    const Factor factor = simplified<A>(args.factor);
    for (size_t first = 0; first < args.n_elements; first += kBlockElements) {
      const size_t n = std::min(kBlockElements, args.n_elements - first);
      const auto* source = static_cast<const Packed<T>*>(args.source) + first;
      auto* destination = static_cast<Packed<T>*>(args.destination);
      if (destination != nullptr) destination += first;
      auto* wire = reinterpret_cast<Packed<W>*>(args.wire) + first;
      if (args.own >= 0 && !kIdentity) encode(source, n, reinterpret_cast<uint8_t*>(own_wire));
      auto contribution = [&](int r) {
        const void* from = kIdentity ? static_cast<const void*>(source) : own_wire;
        if (args.weights != nullptr && args.weights[r] == 0.0) from = zeros;
        else if (r != args.own) from = reinterpret_cast<const Packed<W>*>(args.wires[r]) + first;
        return static_cast<const Packed<W>*>(from);
      };
      if (kIdentity && std::is_same_v<W, A> && args.n_contributors == 2 && args.weights == nullptr) {
        reduce_pair(contribution(0), contribution(1), n, factor, wire, destination);
        continue;
      }
      for (int r = 0; r < args.n_contributors; ++r) {
        const Packed<W>* next = contribution(r);
        if (args.weights == nullptr) {
          accumulate(next, n, r == 0, sum, [](A value) { return value; });
        } else {
          const auto weight = multiplier<op, A>(args.weights[r]);
          accumulate(next, n, r == 0, sum, [weight](A value) { return multiplied(value, weight); });
        }
      }
      if (factor.scale == 1.0 && factor.divisor == 1.0) {
        for (size_t i = 0; i < n; ++i) wire[i].value = narrow<W>(sum[i]);
      } else {
        for (size_t i = 0; i < n; ++i) wire[i].value = narrow<W>(finished<op>(sum[i], factor));
      }
      if (destination != nullptr) decode(reinterpret_cast<const uint8_t*>(wire), n, destination);
    }
  }

  template <class Weigh>
  static void accumulate(const Packed<W>* in, size_t n, bool is_first, A* sum, Weigh weigh) {
    if (is_first) {
      for (size_t i = 0; i < n; ++i) sum[i] = weigh(widen<A>(in[i].value));
    } else {
      for (size_t i = 0; i < n; ++i) sum[i] = combine<op>(sum[i], weigh(widen<A>(in[i].value)));
    }
  }
};

// --- ScaledHalf: float16 with a power-of-two scale per block --------------------------------------------------------
//
// A block travels as a header holding k, then round(x * 2^k) in binary16, with k chosen so that the largest finite
// magnitude lands in [2^14, 2^15]. Elements down to 2^-28 of it keep all 11 bits; below, the error stays under 2^-39
// of it. Sums are formed in units of the smallest k of all contributors, weights included, so nothing can overflow, and
// the largest possible result decides the scale on the way back: nobody reads the sums a second time to find it.

struct BlockHeader {
  int32_t exponent;  // k
  int32_t unused[3];
};

template <class T, Op op>
struct ScaledHalf {
  // float16 and float32 values are scaled in float32, float64 values in float64.
  using Real = std::conditional_t<std::is_same_v<T, double>, double, float>;
  static constexpr int kTopExponent = 14;
  static constexpr int kMaxScale = std::is_same_v<T, double> ? 1022 : 126;  // 2^k must be a normal number

  static constexpr size_t kItemBytes = sizeof(T);
  static constexpr size_t kBlockBytes = sizeof(BlockHeader) + kBlockElements * sizeof(uint16_t);

  static size_t block_wire_bytes(size_t n) {
    return sizeof(BlockHeader) + rounded_up(n * sizeof(uint16_t), sizeof(BlockHeader));
  }
  static size_t wire_bytes(size_t n) {
    const size_t tail = n % kBlockElements;
    return n / kBlockElements * kBlockBytes + (tail != 0 ? block_wire_bytes(tail) : 0);
  }

  static uint16_t* elements(uint8_t* block) { return reinterpret_cast<uint16_t*>(block + sizeof(BlockHeader)); }
  static const uint16_t* elements(const uint8_t* block) {
    return reinterpret_cast<const uint16_t*>(block + sizeof(BlockHeader));
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
    Integer largest = 0;
    for (size_t i = 0; i < n; ++i) {
      Integer finite = raw[i].value & std::numeric_limits<Integer>::max();
      finite &= -static_cast<Integer>(finite < kInfinity);  // this way round the compiler vectorises it
      largest = finite > largest ? finite : largest;
    }
    if (largest == 0) return kMaxScale;  // zeros fit any scale: let the other ranks' decide
    return std::min(kMaxScale, kTopExponent - (static_cast<int>(largest >> kMantissa) - kBias));
  }

  static void encode_block(const void* source, size_t n, uint8_t* block) {
    alignas(64) Packed<Real> tile[kBlockElements];
    const Packed<Real>* x = tile;
    if constexpr (std::is_same_v<T, Real>) {
      x = static_cast<const Packed<Real>*>(source);
    } else {
      const auto* in = static_cast<const Packed<T>*>(source);
      for (size_t i = 0; i < n; ++i) tile[i].value = widen<Real>(in[i].value);
    }
    const int k = scale_exponent(x, n);
    set_exponent(block, k);
    const Real scale = std::ldexp(Real{1}, k);
    uint16_t* out = elements(block);
    size_t i = 0;
    if constexpr (std::is_same_v<Real, float>) {
      for (; i + kLanes <= n; i += kLanes) store_half(out + i, mul(load(x + i), lanes_of(scale)));
    }
    for (; i < n; ++i) out[i] = half_bits(static_cast<float>(x[i].value * scale));
  }

  static void decode_block(const uint8_t* block, size_t n, Packed<T>* destination) {
    const int k = exponent(block);
    const uint16_t* in = elements(block);
    if (std::is_same_v<Real, double> || k > 126 || k < -127) {
      // Two factors, each a normal number, reach every scale there is.
      const double half_way = std::ldexp(1.0, -k / 2);
      const double rest = std::ldexp(1.0, -k - (-k / 2));
      for (size_t i = 0; i < n; ++i) {
        destination[i].value = narrow<T>(static_cast<double>(float_of_half(in[i])) * half_way * rest);
      }
      return;
    }
    const float scale = std::ldexp(1.0f, -k);
    if constexpr (std::is_same_v<T, float>) {
      size_t i = 0;
      for (; i + kLanes <= n; i += kLanes) store(destination + i, mul(load_half(in + i), lanes_of(scale)));
      for (; i < n; ++i) destination[i].value = float_of_half(in[i]) * scale;
    } else {
      for (size_t i = 0; i < n; ++i) destination[i].value = narrow<T>(float_of_half(in[i]) * scale);
    }
  }

  static void encode(const void* source, size_t n_elements, uint8_t* wire) {
    for (size_t first = 0; first < n_elements; first += kBlockElements, wire += kBlockBytes) {
      const auto* x = static_cast<const Packed<T>*>(source) + first;
      encode_block(x, std::min(kBlockElements, n_elements - first), wire);
    }
  }

  static void decode(const uint8_t* wire, size_t n_elements, void* destination) {
    for (size_t first = 0; first < n_elements; first += kBlockElements, wire += kBlockBytes) {
      decode_block(wire, std::min(kBlockElements, n_elements - first), static_cast<Packed<T>*>(destination) + first);
    }
  }

  static void reduce(const ReduceArgs& args) {
    alignas(64) float sum[kBlockElements];
    alignas(64) uint8_t own_block[kBlockBytes];
    alignas(64) static const uint16_t zeros[kBlockElements] = {};
    const Factor factor = simplified<float>(args.factor);
    const auto weight_of = [&](int r) { return args.weights == nullptr ? 1.0 : args.weights[r]; };
    for (size_t first = 0, offset = 0; first < args.n_elements; first += kBlockElements, offset += kBlockBytes) {
      const size_t n = std::min(kBlockElements, args.n_elements - first);
      const auto* source = static_cast<const Packed<T>*>(args.source) + first;
      if (args.own >= 0) encode_block(source, n, own_block);
      auto contribution = [&](int r) -> const uint8_t* { return r == args.own ? own_block : args.wires[r] + offset; };
      int unit = kMaxScale;
      for (int r = 0; r < args.n_contributors; ++r) {
        if (const double weight = weight_of(r); weight != 0.0) {
          unit = std::min(unit, exponent(contribution(r)) - std::ilogb(weight));
        }
      }
      double largest = 0.0;  // that a result may be before `factor`, where the largest of a block is 1
      for (int r = 0; r < args.n_contributors; ++r) {
        const double weight = std::ldexp(weight_of(r), unit - exponent(contribution(r)));
        largest = op == Op::kSum ? largest + std::fabs(weight) : std::max(largest, std::fabs(weight));
        const uint16_t* in = weight_of(r) == 0.0 ? zeros : elements(contribution(r));
        accumulate(in, n, multiplier<op, float>(weight_of(r) == 0.0 ? 0.0 : weight), r == 0, sum);
      }
      const double growth = largest * std::fabs(args.factor.scale / args.factor.divisor);
      int shift = 0;  // ceil(log2(growth)): by how much the result may be larger than the largest contribution
      if (growth > 0.0 && std::isfinite(growth)) {
        if (std::frexp(growth, &shift) == 0.5) --shift;
      }
      uint8_t* wire = args.wire + offset;
      set_exponent(wire, unit - shift);
      const auto scale = static_cast<float>(std::ldexp(factor.scale, -shift));
      const auto divisor = static_cast<float>(factor.divisor);
      uint16_t* out = elements(wire);
      size_t i = 0;
      for (; i + kLanes <= n; i += kLanes) {
        Lanes value = mul(load(sum + i), lanes_of(scale));
        if (divisor != 1.0f) value = div(value, lanes_of(divisor));
        store_half(out + i, value);
      }
      for (; i < n; ++i) {
        const float value = sum[i] * scale;
        out[i] = half_bits(divisor != 1.0f ? value / divisor : value);
      }
      if (args.destination != nullptr) decode_block(wire, n, static_cast<Packed<T>*>(args.destination) + first);
    }
  }

  static void accumulate(const uint16_t* in, size_t n, float scale, bool is_first, float* sum) {
    size_t i = 0;
    if (is_first) {
      for (; i + kLanes <= n; i += kLanes) store(sum + i, mul(load_half(in + i), lanes_of(scale)));
      for (; i < n; ++i) sum[i] = float_of_half(in[i]) * scale;
    } else if constexpr (op == Op::kSum) {
      for (; i + kLanes <= n; i += kLanes) {
        store(sum + i, add(load(sum + i), mul(load_half(in + i), lanes_of(scale))));
      }
      for (; i < n; ++i) sum[i] = sum[i] + float_of_half(in[i]) * scale;
    } else {
      for (; i < n; ++i) sum[i] = combine<op>(sum[i], float_of_half(in[i]) * scale);
    }
  }
};

// --- tables ---------------------------------------------------------------------------------------------------------

template <class Codec>
const Kernels* kernels_of() {
  static const Kernels kernels = {Codec::kItemBytes, Codec::kBlockBytes, Codec::wire_bytes,
                                  Codec::encode,     Codec::reduce,      Codec::decode};
  return &kernels;
}

template <class T, class W, class A>
const Kernels* plain(Op op) {
  switch (op) {
    case Op::kSum:
    case Op::kAverage:
      return kernels_of<Plain<T, W, A, Op::kSum>>();
    case Op::kWeightedAverage:
      return kernels_of<Plain<T, W, A, kIsInteger<A> ? Op::kWeightedAverage : Op::kSum>>();
    case Op::kMin:
      return kernels_of<Plain<T, W, A, Op::kMin>>();
    case Op::kMax:
      return kernels_of<Plain<T, W, A, Op::kMax>>();
    case Op::kProduct:
      return kernels_of<Plain<T, W, A, Op::kProduct>>();
  }
  return nullptr;
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

// Averages are divided once, at the last hop: on the way there the sum needs more room than the type may have.
template <class T>
const Kernels* integer(Op op) {
  using Wide = std::conditional_t<(sizeof(T) > 4), __int128, int64_t>;
  return op == Op::kAverage || op == Op::kWeightedAverage ? plain<T, Wide, Wide>(op) : plain<T, T, T>(op);
}

template <class T>
const Kernels* real(Wire wire, Op op) {
  const bool compressible = op != Op::kProduct;  // a product's size is not bounded by its factors'
  if (wire == Wire::kFloat16 && compressible) return scaled_half<T>(op);
  if (wire == Wire::kBFloat16 && compressible) return plain<T, BFloat16, float>(op);
  return plain<T, T, T>(op);
}

}  // namespace

const Kernels* select(DType dtype, Wire wire, Op op) {
  switch (dtype) {
    case DType::kBool:
      if (op == Op::kAverage || op == Op::kWeightedAverage) return nullptr;
      if (op == Op::kSum) op = Op::kMax;
      if (op == Op::kProduct) op = Op::kMin;
      return plain<uint8_t, uint8_t, uint8_t>(op);
    case DType::kInt8:
      return integer<int8_t>(op);
    case DType::kUInt8:
      return integer<uint8_t>(op);
    case DType::kInt16:
      return integer<int16_t>(op);
    case DType::kUInt16:
      return integer<uint16_t>(op);
    case DType::kInt32:
      return integer<int32_t>(op);
    case DType::kUInt32:
      return integer<uint32_t>(op);
    case DType::kInt64:
      return integer<int64_t>(op);
    case DType::kUInt64:
      return integer<uint64_t>(op);
    case DType::kFloat16:
      // Between hosts travel sums, which may be larger than binary16 can hold.
      return wire == Wire::kNone || op == Op::kProduct ? plain<Half, Half, float>(op) : scaled_half<Half>(op);
    case DType::kBFloat16:
      return plain<BFloat16, BFloat16, float>(op);
    case DType::kFloat32:
      return real<float>(wire, op);
    case DType::kFloat64:
      return real<double>(wire, op);
    case DType::kLongDouble:
      return plain<long double, long double, long double>(op);
  }
  return nullptr;
}

}  // namespace HORO_LITE_ISA
}  // namespace horo
