#pragma once

#include <string>
#include <vector>

namespace horo {

// What the CUDA driver reports, if one is found at run time; it is not linked.
struct CudaDriver {
  int version = 0;                 // as in 13000 for CUDA 13.0; 0: there is no driver
  std::vector<std::string> uuids;  // of the GPUs this process may use: the driver honours CUDA_VISIBLE_DEVICES
  std::string problem;             // why there are none
};

CudaDriver cuda_driver();

}  // namespace horo
