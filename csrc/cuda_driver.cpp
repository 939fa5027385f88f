#include "cuda_driver.h"

#include <dlfcn.h>

namespace horo {

CudaDriver cuda_driver() {
  CudaDriver found;
  void* library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    found.problem = "there is no NVIDIA driver here (libcuda.so.1 was not found)";
    return found;
  }
  const auto initialise = reinterpret_cast<int (*)(unsigned)>(dlsym(library, "cuInit"));
  const auto version = reinterpret_cast<int (*)(int*)>(dlsym(library, "cuDriverGetVersion"));
  const auto count = reinterpret_cast<int (*)(int*)>(dlsym(library, "cuDeviceGetCount"));
  const auto describe = reinterpret_cast<int (*)(int, const char**)>(dlsym(library, "cuGetErrorString"));
  if (initialise == nullptr || version == nullptr || count == nullptr || describe == nullptr) {
    found.problem = "libcuda.so.1 is not NVIDIA's driver, or damaged";
    return found;
  }
  version(&found.version);
  int result = initialise(0);
  if (result == 0) result = count(&found.n_devices);
  if (result != 0) {
    const char* text = nullptr;
    describe(result, &text);
    found.n_devices = 0;
    found.problem = std::string("the NVIDIA driver found no GPU to use (") + (text != nullptr ? text : "?") + ")";
  } else if (found.n_devices == 0) {
    found.problem = "the NVIDIA driver is there, but shows no GPU";
  }
  return found;
}

}  // namespace horo
