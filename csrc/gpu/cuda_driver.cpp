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
  // The second version distinguishes the parts of a GPU divided by MIG.
  const auto uuid = reinterpret_cast<int (*)(unsigned char*, int)>(dlsym(library, "cuDeviceGetUuid_v2"));
  const auto describe = reinterpret_cast<int (*)(int, const char**)>(dlsym(library, "cuGetErrorString"));
  if (initialise == nullptr || version == nullptr || count == nullptr || uuid == nullptr || describe == nullptr) {
    found.problem = "libcuda.so.1 is not NVIDIA's driver, or is too old";
    return found;
  }
  version(&found.version);
  int n = 0;
  int result = initialise(0);
  if (result == 0) result = count(&n);
  for (int index = 0; result == 0 && index < n; ++index) {
    unsigned char bytes[16];
    result = uuid(bytes, index);  // a device's handle is its number
    std::string text;
    for (const unsigned char byte : bytes) {
      text += "0123456789abcdef"[byte >> 4];
      text += "0123456789abcdef"[byte & 15];
    }
    found.uuids.push_back(text);
  }
  if (result != 0) {
    const char* text = nullptr;
    describe(result, &text);
    found.uuids.clear();
    found.problem = std::string("the NVIDIA driver found no GPU to use (") + (text != nullptr ? text : "?") + ")";
  } else if (found.uuids.empty()) {
    found.problem = "the NVIDIA driver is installed, but shows no GPU";
  }
  return found;
}

}  // namespace horo
