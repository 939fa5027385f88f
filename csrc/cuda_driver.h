#pragma once

#include <string>

namespace horo {

// What the CUDA driver says, if one is found at run time: nothing links it.
struct CudaDriver {
  int version = 0;      // as in 13000 for CUDA 13.0; 0: there is no driver
  int n_devices = 0;    // CUDA_VISIBLE_DEVICES is honoured by the driver itself
  std::string problem;  // why there are none
};

CudaDriver cuda_driver();

}  // namespace horo
