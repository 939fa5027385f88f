// Device implemented with the CUDA runtime.
#include <cuda_runtime_api.h>
#include <dlfcn.h>

#include "gpu/device.h"

namespace horo {
namespace {

// Errors of a kernel, which every later call reports, whatever it does.
bool is_of_a_kernel(int error) {
  for (const int each : {700, 702, 710, 714, 715, 716, 717, 718, 719}) {
    if (error == each) return true;
  }
  return false;
}

void check(cudaError_t result, const char* what) {
  if (result == cudaSuccess) return;
  cudaGetLastError();  // clears it: the next call must not report it again
  const std::string error = std::string(cudaGetErrorString(result)) + " (" + cudaGetErrorName(result) + ")";
  if (is_of_a_kernel(result)) {
    throw DeviceError(
        "a kernel that this process ran on the GPU, of the program or of a library, has failed: " + error +
        ". The GPU cannot be used any more by this process. CUDA_LAUNCH_BLOCKING=1 shows which kernel it "
        "was, and compute-sanitizer why");
  }
  throw DeviceError(std::string("CUDA could not ") + what + ": " + error);
}

bool is_ready(cudaError_t result, const char* what) {
  if (result == cudaErrorNotReady) {
    cudaGetLastError();
    return false;
  }
  check(result, what);
  return true;
}

// The files of the kernels do not use DeviceError.
template <class Call>
void with_kernels(const Call& call) {
  try {
    call();
  } catch (const std::runtime_error& error) {
    throw DeviceError(error.what());
  }
}

class CudaDevice : public Device {
 public:
  void* allocate(int index, size_t n_bytes) override {
    const Current current(*this, index);
    void* memory = nullptr;
    check(cudaMalloc(&memory, n_bytes), ("allocate " + std::to_string(n_bytes) + " bytes on the GPU").c_str());
    return memory;
  }
  void release(int index, void* memory) override {
    const Current current(*this, index);
    cudaFree(memory);
  }
  void* allocate_pinned(int index, size_t n_bytes) override {
    const Current current(*this, index);
    void* memory = nullptr;
    check(cudaHostAlloc(&memory, n_bytes, cudaHostAllocPortable), "allocate pinned host memory");
    return memory;
  }
  void release_pinned(int index, void* memory) override {
    const Current current(*this, index);
    cudaFreeHost(memory);
  }

  Stream new_stream(int index) override {
    const Current current(*this, index);
    int lowest = 0;
    int highest = 0;
    check(cudaDeviceGetStreamPriorityRange(&lowest, &highest), "query the priorities of streams");
    cudaStream_t stream = nullptr;
    check(cudaStreamCreateWithPriority(&stream, cudaStreamNonBlocking, highest), "create a stream");
    return stream;
  }
  void delete_stream(int index, Stream stream) override {
    const Current current(*this, index);
    cudaStreamDestroy(of(stream));
  }
  bool is_capturing(int index, Stream stream) override {
    const Current current(*this, index);
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    check(cudaStreamIsCapturing(of(stream), &status), "query whether a graph is being captured");
    return status != cudaStreamCaptureStatusNone;
  }

  bool is_idle(int index, Stream stream) override {
    const Current current(*this, index);
    return is_ready(cudaStreamQuery(of(stream)), "complete the work of a stream");
  }

  Event new_event(int index) override {
    const Current current(*this, index);
    cudaEvent_t event = nullptr;
    check(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "create an event");
    return event;
  }
  void delete_event(int index, Event event) override {
    const Current current(*this, index);
    cudaEventDestroy(static_cast<cudaEvent_t>(event));
  }
  void record(int index, Event event, Stream stream) override {
    const Current current(*this, index);
    check(cudaEventRecord(static_cast<cudaEvent_t>(event), of(stream)), "record an event");
  }
  void wait(int index, Stream stream, Event event) override {
    const Current current(*this, index);
    check(cudaStreamWaitEvent(of(stream), static_cast<cudaEvent_t>(event), 0), "let a stream wait for an event");
  }
  bool is_done(int index, Event event) override {
    const Current current(*this, index);
    return is_ready(cudaEventQuery(static_cast<cudaEvent_t>(event)), "complete the work before an event");
  }
  void synchronize(int index, Event event) override {
    const Current current(*this, index);
    check(cudaEventSynchronize(static_cast<cudaEvent_t>(event)), "complete the work before an event");
  }

  void copy(int index, void* to, const void* from, size_t n_bytes, Stream stream) override {
    if (n_bytes == 0) return;  // the address may be null
    const Current current(*this, index);
    check(cudaMemcpyAsync(to, from, n_bytes, cudaMemcpyDefault, of(stream)), "copy memory");
  }
  void fill(int index, void* memory, uint8_t byte, size_t n_bytes, Stream stream) override {
    const Current current(*this, index);
    check(cudaMemsetAsync(memory, byte, n_bytes, of(stream)), "fill memory");
  }
  void run(int index, const KernelCall& call, Stream stream) override {
    const Current current(*this, index);
    with_kernels([&] { launch_kernels(call, stream); });
  }
  void load_kernels(int index) override {
    const Current current(*this, index);
    with_kernels([] { horo::load_kernels(); });
  }

 protected:
  int exchange_current(int index) override {
    int previous = 0;
    check(cudaGetDevice(&previous), "query the current GPU");
    if (previous != index) check(cudaSetDevice(index), "select the GPU");
    return previous;
  }
  // Selecting a GPU creates a context there, of hundreds of MiB (from CUDA 12 on), and a thread that never selected one
  // reports the first: all ranks of a host would take memory there. Such a thread stays on the GPU used here.
  void restore_current(int previous) override {
    using GetState = int (*)(int device, unsigned* flags, int* active);
    static const auto get_state =
        reinterpret_cast<GetState>(dlsym(dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL), "cuDevicePrimaryCtxGetState"));
    int current = 0;
    check(cudaGetDevice(&current), "query the current GPU");
    if (previous == current) return;
    unsigned flags = 0;
    int active = 0;
    if (get_state == nullptr || get_state(previous, &flags, &active) != 0 || active != 0) {
      check(cudaSetDevice(previous), "select the GPU");
    }
  }

 private:
  static cudaStream_t of(Stream stream) { return static_cast<cudaStream_t>(stream); }
};

}  // namespace

Device* cuda_device(std::string*) {
  static CudaDevice device;
  return &device;
}

int cuda_runtime_version() { return CUDART_VERSION; }

}  // namespace horo
