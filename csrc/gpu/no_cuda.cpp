// Replaces device_cuda.cpp and kernels.cu if no CUDA toolkit was found when the core was built.
#include "gpu/device.h"

namespace horo {

Device* cuda_device(std::string* why) {
  *why =
      "this build of horo_lite has no CUDA part: no CUDA toolkit was found when it was built. Set CUDA_HOME to one "
      "(12.1 or newer) and install horo_lite again";
  return nullptr;
}

int cuda_runtime_version() { return 0; }

}  // namespace horo
