// The kernels as a GPU runs them: each finds its piece, does the work of kernel_body.h and adds up a block's
// statistics.
//
// Compiled by nvcc or by NVRTC (compile_kernels.py), so only kernel_body.h is included.
#include "gpu/kernel_body.h"

namespace horo {
namespace {

using namespace body;

// The largest and the sum over the block, for thread 0.
template <class T>
__device__ void reduce_block(T& largest, uint32_t& sum) {
  __shared__ T largest_of[kThreads / kWarp];
  __shared__ uint32_t sum_of[kThreads / kWarp];
  const auto reduce_warp = [&] {
    _Pragma("unroll") for (int distance = kWarp / 2; distance > 0; distance /= 2) {
      const T other = __shfl_xor_sync(0xffffffffu, largest, distance);
      largest = other > largest ? other : largest;
      sum += __shfl_xor_sync(0xffffffffu, sum, distance);
    }
  };
  reduce_warp();
  if (threadIdx.x % kWarp == 0) {
    largest_of[threadIdx.x / kWarp] = largest;
    sum_of[threadIdx.x / kWarp] = sum;
  }
  __syncthreads();
  if (threadIdx.x < kWarp) {
    const int warp = threadIdx.x % (kThreads / kWarp);  // each value four times, which does not change the largest
    largest = largest_of[warp];
    sum = threadIdx.x < kThreads / kWarp ? sum_of[warp] : 0;
    reduce_warp();
  }
}

// Adds a block's statistics to its tensor's: a maximum and a sum of integers, so the order of blocks does not matter.
template <class G, class W>
__device__ void report(Measure<G, W>, const Arguments& a, uint32_t tensor, const typename Measure<G, W>::Result& seen) {
  int32_t exponent = seen.exponent();
  uint32_t unused = 0;
  reduce_block(exponent, unused);
  if (threadIdx.x == 0 && exponent != kNoExponent) atomicMax(a.exponents + tensor, exponent);
}
template <class G, class W>
__device__ void report(Pack<G, W>, const Arguments& a, uint32_t tensor, const Seen<W>& seen) {
  if (a.stats == nullptr) return;
  uint32_t amax = seen.amax_bits();
  uint32_t n_nonfinite = seen.n_nonfinite;
  reduce_block(amax, n_nonfinite);
  if (threadIdx.x != 0) return;
  if (amax != 0) atomicMax(&a.stats[tensor].amax_bits, amax);
  if (n_nonfinite != 0) atomicAdd(&a.stats[tensor].n_nonfinite, n_nonfinite);
}
template <class Step>
__device__ void report(Step, const Arguments&, uint32_t, const Nothing&) {}

template <class Step, int kPieces>
__device__ __forceinline__ void run_block(const Table<kPieces>& table) {
  const Arguments& a = table.arguments;
  const GpuPiece& piece = table.pieces[find_piece(table.pieces, a.n_pieces, blockIdx.x, gridDim.x)];
  typename Step::Result seen[1] = {};
  Step::run(a, piece, blockIdx.x - piece.first_block, threadIdx.x, seen);
  report(Step{}, a, piece.tensor, seen[0]);
}

}  // namespace

#define HORO_SIZED(Step, G, W, size, kPieces)                                                \
  extern "C" __global__ void __launch_bounds__(body::kThreads)                               \
      horo_##Step##_##G##_##W##_##size(const __grid_constant__ body::Table<kPieces> table) { \
    run_block<body::Step<body::G, body::W>>(table);                                          \
  }
#define HORO_KERNEL(Step, G, W)             \
  HORO_SIZED(Step, G, W, few, body::kFew)   \
  HORO_SIZED(Step, G, W, some, body::kSome) \
  HORO_SIZED(Step, G, W, many, body::kMany)
HORO_KERNELS(HORO_KERNEL)

#ifndef __CUDACC_RTC__
#define HORO_SYMBOLS(Step, G, W)                                     \
  reinterpret_cast<const void*>(horo_##Step##_##G##_##W##_few),      \
      reinterpret_cast<const void*>(horo_##Step##_##G##_##W##_some), \
      reinterpret_cast<const void*>(horo_##Step##_##G##_##W##_many),
// As declared in kernels_launch.h.
const void* kernel_symbol(size_t index) {
  static const void* const symbols[] = {HORO_KERNELS(HORO_SYMBOLS)};
  return symbols[index];
}
#endif

}  // namespace horo
