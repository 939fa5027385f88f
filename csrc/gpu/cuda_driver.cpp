#include "gpu/cuda_driver.h"

#include <dlfcn.h>

namespace horo {

CudaDriver cuda_driver() {
  CudaDriver found;
  void* library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    found.problem = "this machine has no NVIDIA driver (libcuda.so.1 was not found)";
    return found;
  }
  const auto initialise = reinterpret_cast<int (*)(unsigned)>(dlsym(library, "cuInit"));
  const auto version = reinterpret_cast<int (*)(int*)>(dlsym(library, "cuDriverGetVersion"));
  const auto count = reinterpret_cast<int (*)(int*)>(dlsym(library, "cuDeviceGetCount"));
  const auto bus_id = reinterpret_cast<int (*)(char*, int, int)>(dlsym(library, "cuDeviceGetPCIBusId"));
  const auto describe = reinterpret_cast<int (*)(int, const char**)>(dlsym(library, "cuGetErrorString"));
  if (initialise == nullptr || version == nullptr || count == nullptr || bus_id == nullptr || describe == nullptr) {
    found.problem = "libcuda.so.1 is not NVIDIA's driver, or is too old";
    return found;
  }
  version(&found.version);
  int n = 0;
  int result = initialise(0);
  if (result == 0) result = count(&n);
  for (int index = 0; result == 0 && index < n; ++index) {
    char text[32] = "";
    result = bus_id(text, sizeof(text), index);  // a device's handle is its number
    found.bus_ids.push_back(text);
  }
  if (result != 0) {
    const char* text = nullptr;
    describe(result, &text);
    found.bus_ids.clear();
    found.problem = std::string("the NVIDIA driver found no GPU to use (") + (text != nullptr ? text : "?") + ")";
  } else if (found.bus_ids.empty()) {
    found.problem = "the NVIDIA driver is installed, but shows no GPU";
  }
  return found;
}

}  // namespace horo
