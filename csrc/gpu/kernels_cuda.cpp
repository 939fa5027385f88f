// Launches the kernels on a GPU.
#include "gpu/launches.h"

#include <cuda_runtime_api.h>

#include <stdexcept>
#include <string>

namespace horo {

namespace {

void check(cudaError_t result, const char* what) {
  if (result == cudaSuccess) return;
  cudaGetLastError();  // clears it: the next call must not report it again
  throw std::runtime_error(std::string("CUDA could not ") + what + ": " + cudaGetErrorString(result) + " (" +
                           cudaGetErrorName(result) + ")");
}

}  // namespace

void launch_kernels(const KernelCall& call, void* stream) {
  for_each_launch(call, [&](const Launch& launch) {
    const void* symbol = kernel_symbol(kSizes * static_cast<size_t>(launch.kernel) + launch.size);
    void* arguments[] = {const_cast<body::Table<body::kMany>*>(&launch.table)};
    check(cudaLaunchKernel(symbol, dim3(launch.n_blocks), dim3(body::kThreads), arguments, 0,
                           static_cast<cudaStream_t>(stream)),
          "launch a kernel");
  });
}

void load_kernels() {
  for (size_t i = 0; i < kSizes * kKernels; ++i) {
    cudaFuncAttributes attributes;
    check(cudaFuncGetAttributes(&attributes, kernel_symbol(i)), "load horo_lite's kernels");
  }
}

}  // namespace horo
