// How many GPUs this process may use, asked of the driver that is found at run time, if any.
#include "cuda_device.h"

#include <dlfcn.h>

namespace horo {

int cuda_device_count() {
  void* driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (driver == nullptr) return 0;
  const auto initialise = reinterpret_cast<int (*)(unsigned)>(dlsym(driver, "cuInit"));
  const auto get_count = reinterpret_cast<int (*)(int*)>(dlsym(driver, "cuDeviceGetCount"));
  int count = 0;
  if (initialise == nullptr || get_count == nullptr || initialise(0) != 0 || get_count(&count) != 0) return 0;
  return count;
}

}  // namespace horo
