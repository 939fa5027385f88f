#include "testing/kernels_host.h"

#include <algorithm>

#include "gpu/launches.h"

namespace horo {
namespace {

using namespace body;

// For one thread, what kernels.cu adds up for a block.
template <class G, class W>
void report(Measure<G, W>, const Arguments& a, uint32_t tensor, const typename Measure<G, W>::Result& seen) {
  a.exponents[tensor] = std::max(a.exponents[tensor], seen.exponent());
}
template <class G, class W>
void report(Pack<G, W>, const Arguments& a, uint32_t tensor, const Seen<W>& seen) {
  if (a.stats == nullptr) return;
  a.stats[tensor].amax_bits = std::max(a.stats[tensor].amax_bits, seen.amax_bits());
  a.stats[tensor].n_nonfinite += seen.n_nonfinite;
}
template <class Step>
void report(Step, const Arguments&, uint32_t, const Nothing&) {}

template <class Step>
void run_blocks(const Launch& launch) {
  const Arguments& a = launch.table.arguments;
  for (uint32_t block = 0; block < launch.n_blocks; ++block) {
    const GpuPiece& piece = launch.table.pieces[find_piece(launch.table.pieces, a.n_pieces, block, launch.n_blocks)];
    for (int thread = 0; thread < kThreads; thread += Step::kRatio) {
      typename Step::Result seen[Step::kRatio];
      Step::run(a, piece, block - piece.first_block, thread, seen);
      for (const auto& one : seen) report(Step{}, a, piece.tensor, one);
    }
  }
}

}  // namespace

void run_on_host(const KernelCall& call) {
#define HORO_RUN(Step, G, W) &run_blocks<Step<G, W>>,
  static constexpr void (*runs[])(const Launch&) = {HORO_KERNELS(HORO_RUN)};
  for_each_launch(call, [](const Launch& launch) { runs[static_cast<size_t>(launch.kernel)](launch); });
}

}  // namespace horo
