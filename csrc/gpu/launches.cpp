#include "gpu/launches.h"

#include <algorithm>
#include <stdexcept>
#include <string>

namespace horo {
namespace {

using namespace body;

[[noreturn]] void refuse(const KernelCall& call, const std::string& why) {
  static const char* const steps[] = {"measure", "pack", "unpack", "scale"};
  throw std::invalid_argument(std::string("no GPU kernel can ") + steps[call.step] + " " + dtype_name(call.grad_dtype) +
                              " as " + dtype_name(call.wire_dtype) + why);
}

#define HORO_BOTH_WAYS(G, W) (call.step == KernelCall::kPack ? Kernel::kPack_##G##_##W : Kernel::kUnpack_##G##_##W)
Kernel kernel_of(const KernelCall& call) {
  const DType grad = call.grad_dtype;
  if (call.step == KernelCall::kMeasure) {
    if (grad == DType::kFloat16) return Kernel::kMeasure_F16_F16;
    if (grad == DType::kBFloat16) return Kernel::kMeasure_BF16_BF16;
    if (grad == DType::kFloat32) return Kernel::kMeasure_F32_F32;
    if (grad == DType::kFloat64) return Kernel::kMeasure_F64_F64;
    refuse(call, "");
  }
  const DType wire = call.step == KernelCall::kScale ? grad : call.wire_dtype;
  if (grad == DType::kFloat32 && wire == DType::kFloat16) return HORO_BOTH_WAYS(F32, F16);
  if (grad == DType::kFloat32 && wire == DType::kBFloat16) return HORO_BOTH_WAYS(F32, BF16);
  if (grad == DType::kFloat64 && wire == DType::kFloat16) return HORO_BOTH_WAYS(F64, F16);
  if (grad == DType::kFloat64 && wire == DType::kBFloat16) return HORO_BOTH_WAYS(F64, BF16);
  if (grad != wire || grad == DType::kLongDouble) refuse(call, "");
  if (grad == DType::kFloat16) return HORO_BOTH_WAYS(F16, F16);
  if (grad == DType::kBFloat16) return HORO_BOTH_WAYS(BF16, BF16);
  if (grad == DType::kFloat32) return HORO_BOTH_WAYS(F32, F32);
  if (grad == DType::kFloat64) return HORO_BOTH_WAYS(F64, F64);

  const bool packs = call.step == KernelCall::kPack;
  const bool has_factor = packs ? call.prescale != 1.0 && call.prescale != 0.0
                                : call.factor.scale != 1.0 || call.factor.divisor != 1.0 || call.divisor != nullptr;
  if (has_factor || call.exponents != nullptr) refuse(call, " with a factor: integers are only copied");
  switch (item_bytes(grad)) {
    case 1:
      return HORO_BOTH_WAYS(Raw8, Raw8);
    case 2:
      return HORO_BOTH_WAYS(Raw16, Raw16);
    case 4:
      return HORO_BOTH_WAYS(Raw32, Raw32);
    default:
      return HORO_BOTH_WAYS(Raw64, Raw64);
  }
}

#define HORO_BLOCK_ITEMS(Step, G, W) Geometry<G, W>::kBlockItems,
constexpr uint32_t kBlockItems[] = {HORO_KERNELS(HORO_BLOCK_ITEMS)};

}  // namespace

void for_each_launch(const KernelCall& call, const std::function<void(const Launch&)>& launch) {
  const Kernel kernel = kernel_of(call);
  const uint32_t block_items = kBlockItems[static_cast<size_t>(kernel)];
  const bool scales = call.step == KernelCall::kScale;
  Table<kMany> table;  // only as many pieces as there are get written
  table.arguments = {.wire = call.wire,
                     .exponents = scales ? nullptr : call.exponents,
                     .stats = call.stats,
                     .divisor_at = call.divisor,
                     .prescale = call.prescale,
                     .scale = call.factor.scale,
                     .divisor = call.factor.divisor,
                     .headroom = call.headroom,
                     .n_pieces = 0,
                     .zeros = call.prescale == 0.0,
                     .in_place = scales};
  for (size_t first = 0; first < call.n_pieces; first += kMany) {
    const size_t n = std::min<size_t>(kMany, call.n_pieces - first);
    uint32_t n_blocks = 0;
    for (size_t i = 0; i < n; ++i) {
      GpuPiece& piece = table.pieces[i];
      piece = call.pieces[first + i];
      piece.first_block = n_blocks;
      n_blocks += (piece.n_elements - 1) / block_items + 1;
    }
    table.arguments.n_pieces = static_cast<uint32_t>(n);
    launch({kernel, n <= kFew ? 0u : n <= kSome ? 1u : 2u, n_blocks, table});
  }
}

}  // namespace horo
