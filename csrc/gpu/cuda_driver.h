#pragma once

#include <string>
#include <vector>

namespace horo {

// What the CUDA driver reports, if one is found at run time; it is not linked.
struct CudaDriver {
  int version = 0;  // as in 13000 for CUDA 13.0; 0: there is no driver
  // Where the GPUs that this process may use are on the PCI bus (the driver honours CUDA_VISIBLE_DEVICES). NCCL tells
  // them apart in this way, so the parts of a GPU divided by MIG are one.
  std::vector<std::string> bus_ids;
  std::string problem;  // why there are none
};

CudaDriver cuda_driver();

}  // namespace horo
