// Divides a call into launches; the same for the GPU and for the host.
#pragma once

#include <functional>

#include "gpu/kernel_body.h"
#include "gpu/kernels.h"

namespace horo {

#define HORO_ENUMERATE(Step, G, W) k##Step##_##G##_##W,
enum class Kernel : size_t { HORO_KERNELS(HORO_ENUMERATE) };
#undef HORO_ENUMERATE
#define HORO_COUNT(Step, G, W) +1
inline constexpr size_t kKernels = 0 HORO_KERNELS(HORO_COUNT);
#undef HORO_COUNT

inline constexpr size_t kSizes = 3;

struct Launch {
  Kernel kernel;
  size_t size;  // the table ends after 0: body::kFew pieces, 1: body::kSome, 2: body::kMany
  uint32_t n_blocks;
  const body::Table<body::kMany>& table;
};

// Calls `launch` once for every table full of pieces, in order. Throws std::invalid_argument for a
// pair of dtypes that has no kernel, and for a factor that integers cannot have.
void for_each_launch(const KernelCall& call, const std::function<void(const Launch&)>& launch);

// The handle with which CUDA launches kernel `index`: every Kernel has kSizes in a row, by Launch::size.
// Defined in kernels.cu or kernels_embedded.cpp.
const void* kernel_symbol(size_t index);

}  // namespace horo
