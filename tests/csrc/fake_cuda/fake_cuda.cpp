// A stand-in for the CUDA runtime and driver that tracks each thread's current GPU, of two, and which have a context.
//
// As in CUDA 12 and later, cudaSetDevice creates a context, and so does every call except the few that only query: on
// the calling thread's current device, which is 0 in a thread that never chose one. All work is done immediately.
//
// Built as libcuda.so.1, the name that csrc/gpu/device_cuda.cpp looks for.
#include <cstdlib>
#include <cstring>

#include <atomic>

#include "cuda_runtime_api.h"

namespace {

thread_local int current = 0;
std::atomic<int> failure{0};
std::atomic<bool> contexts[2];

cudaError_t used() {
  contexts[current] = true;
  return static_cast<cudaError_t>(failure.load());
}

}  // namespace

struct FakeStream {
  int device = current;
};
struct FakeEvent {
  int device = current;
};

extern "C" {

bool fake_has_context(int device) { return contexts[device]; }
void fake_use_current() { used(); }
void fake_fail(int error) { failure = error; }

int cuDevicePrimaryCtxGetState(int device, unsigned* flags, int* active) {
  *flags = 0;
  *active = contexts[device] ? 1 : 0;
  return 0;
}

cudaError_t cudaGetLastError() { return cudaSuccess; }
const char* cudaGetErrorString(cudaError_t) { return "a fake error"; }
const char* cudaGetErrorName(cudaError_t) { return "fake"; }
cudaError_t cudaGetDevice(int* device) {
  *device = current;
  return cudaSuccess;
}
cudaError_t cudaSetDevice(int device) {
  if (device < 0 || device > 1) return cudaErrorInvalidValue;
  current = device;
  return used();
}

cudaError_t cudaMalloc(void** memory, size_t n_bytes) {
  *memory = std::aligned_alloc(256, (n_bytes + 255) / 256 * 256);
  return used();
}
cudaError_t cudaFree(void* memory) {
  std::free(memory);
  return used();
}
cudaError_t cudaHostAlloc(void** memory, size_t n_bytes, unsigned) { return cudaMalloc(memory, n_bytes); }
cudaError_t cudaFreeHost(void* memory) { return cudaFree(memory); }

cudaError_t cudaDeviceGetStreamPriorityRange(int* lowest, int* highest) {
  *lowest = 0;
  *highest = -1;
  return used();
}
cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned, int) {
  *stream = new FakeStream;
  return used();
}
cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  delete stream;
  return used();
}
cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* status) {
  *status = cudaStreamCaptureStatusNone;
  return used();
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
  *event = new FakeEvent;
  return used();
}
cudaError_t cudaEventDestroy(cudaEvent_t event) {
  delete event;
  return used();
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  used();
  return event->device == stream->device ? cudaSuccess : cudaErrorInvalidValue;
}
cudaError_t cudaStreamWaitEvent(cudaStream_t, cudaEvent_t, unsigned) { return used(); }
cudaError_t cudaEventQuery(cudaEvent_t) { return used(); }
cudaError_t cudaStreamQuery(cudaStream_t) { return used(); }
cudaError_t cudaEventSynchronize(cudaEvent_t) { return used(); }

cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t n_bytes, cudaMemcpyKind, cudaStream_t) {
  std::memcpy(to, from, n_bytes);
  return used();
}
cudaError_t cudaMemsetAsync(void* memory, int byte, size_t n_bytes, cudaStream_t) {
  std::memset(memory, byte, n_bytes);
  return used();
}
}
