// The GPU kernels, thread by thread on the CPU.
#pragma once

#include "gpu/kernels.h"

namespace horo {

// Throws as for_each_launch() does.
void run_on_host(const KernelCall& call);

}  // namespace horo
