// The kernels' machine code compiled by NVRTC: bytes in this library, passed to CUDA at the first launch.
#include <cuda_runtime_api.h>

#include <array>
#include <stdexcept>
#include <string>

#include "gpu/launches.h"

// The section in which cuobjdump looks.
asm(R"(
  .pushsection .nv_fatbin, "a", @progbits
  .balign 64
  .hidden horo_fatbin
  .globl horo_fatbin
horo_fatbin:
  .incbin ")" HORO_LITE_FATBIN R"("
  .popsection
)");
extern "C" const char horo_fatbin[];

namespace horo {
namespace {

#define HORO_NAMES(Step, G, W) \
  "horo_" #Step "_" #G "_" #W "_few", "horo_" #Step "_" #G "_" #W "_some", "horo_" #Step "_" #G "_" #W "_many",
constexpr const char* kNames[] = {HORO_KERNELS(HORO_NAMES)};

void check(cudaError_t result) {
  if (result != cudaSuccess) {
    throw std::runtime_error(std::string("CUDA could not load horo_lite's kernels: ") + cudaGetErrorString(result) +
                             " (" + cudaGetErrorName(result) + ")");
  }
}

}  // namespace

const void* kernel_symbol(size_t index) {
  // The handles of a library are valid on every device.
  static const auto symbols = [] {
    cudaLibrary_t library;
    check(cudaLibraryLoadData(&library, horo_fatbin, nullptr, nullptr, 0, nullptr, nullptr, 0));
    std::array<cudaKernel_t, std::size(kNames)> found;
    for (size_t i = 0; i < found.size(); ++i) check(cudaLibraryGetKernel(&found[i], library, kNames[i]));
    return found;
  }();
  return symbols[index];
}

}  // namespace horo
