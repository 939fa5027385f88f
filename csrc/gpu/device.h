// A GPU as the transport sees it: the two dozen calls it makes, and nothing else.
//
// There are two: the CUDA runtime (device_cuda.cpp; no_cuda.cpp where no toolkit was found), and in tests a fake device
// (testing/fake_device.h), with which everything but the kernels' machine code is tested without a GPU.
#pragma once

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

#include "gpu/kernels.h"

namespace horo {

// The GPU, its driver or NCCL refused; the message says what was asked of it.
struct DeviceError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

using Stream = void*;  // CUDA's own handle, as frameworks pass it on as an integer
using Event = void*;

class Device {
 public:
  virtual ~Device() = default;

  // What follows concerns the GPU `index`; the calling thread's current device is as before. Events and pinned memory
  // need it, too: CUDA makes a context on the thread's current device, whatever the call is about.
  virtual void* allocate(int index, size_t n_bytes) = 0;
  virtual void release(int index, void* memory) = 0;
  virtual void* allocate_pinned(int index, size_t n_bytes) = 0;
  virtual void release_pinned(int index, void* memory) = 0;

  // Of the highest priority, and in no implied order with the legacy default stream.
  virtual Stream new_stream(int index) = 0;
  virtual void delete_stream(int index, Stream stream) = 0;
  virtual bool is_capturing(int index, Stream stream) = 0;

  virtual Event new_event(int index) = 0;
  virtual void delete_event(int index, Event event) = 0;
  virtual void record(int index, Event event, Stream stream) = 0;
  virtual void wait(int index, Stream stream, Event event) = 0;  // later work of `stream` comes after `event`
  virtual bool is_done(int index, Event event) = 0;
  virtual void synchronize(int index, Event event) = 0;  // the only call that waits

  // Either side may be device or pinned host memory.
  virtual void copy(int index, void* to, const void* from, size_t n_bytes, Stream stream) = 0;
  virtual void fill(int index, void* memory, uint8_t byte, size_t n_bytes, Stream stream) = 0;
  virtual void run(int index, const KernelCall& call, Stream stream) = 0;
  // The first launch of a kernel will not wait for what the GPU is doing: CUDA loads kernels when they are first used,
  // which may wait for all that runs, such as a kernel of NCCL's that waits for a peer.
  virtual void load_kernels(int index) = 0;

  // Makes the calling thread's current device `index` (NCCL wants that) until it is destroyed.
  class Current {
   public:
    Current(Device& device, int index) : device_(device), previous_(device.exchange_current(index)) {}
    ~Current() {
      try {
        device_.restore_current(previous_);
      } catch (const DeviceError&) {  // whoever uses the GPU next gets it again
      }
    }
    Current(const Current&) = delete;
    Current& operator=(const Current&) = delete;

   private:
    Device& device_;
    int previous_;
  };

 protected:
  virtual int exchange_current(int index) = 0;
  virtual void restore_current(int previous) = 0;
};

// The CUDA runtime that was built in. Null where none was, with the reason in `why`.
Device* cuda_device(std::string* why);
// Its version, as in 13000 for CUDA 13.0, whose drivers and later ones serve it; 0 where none was built in.
int cuda_runtime_version();

// GPUs in place of this machine's, in tests: what horo_lite._testing hands over.
struct FakeGpus {
  Device* device;
  std::vector<std::string> names;  // two ranks that have one with the same name share it
};

}  // namespace horo
