// The interface of a GPU: the two dozen calls that the transport makes.
//
// It has two implementations: the CUDA runtime (device_cuda.cpp; no_cuda.cpp if no toolkit was found), and in tests a
// fake device (testing/fake_device.h), with which everything but the kernels' machine code is tested without a GPU.
#pragma once

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

#include "gpu/kernels.h"

namespace horo {

// A call of the GPU, its driver or NCCL failed; the message says which.
struct DeviceError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

using Stream = void*;  // CUDA's own handle, which frameworks pass as an integer
using Event = void*;

class Device {
 public:
  virtual ~Device() = default;

  // All the following concern the GPU `index` and leave the calling thread's current device as it was. Events and
  // pinned memory need `index`, too: CUDA creates a context on the thread's current device, whatever the call is about.
  virtual void* allocate(int index, size_t n_bytes) = 0;
  virtual void release(int index, void* memory) = 0;
  virtual void* allocate_pinned(int index, size_t n_bytes) = 0;
  virtual void release_pinned(int index, void* memory) = 0;

  // A stream of the highest priority, without implicit synchronization with the legacy default stream.
  virtual Stream new_stream(int index) = 0;
  virtual void delete_stream(int index, Stream stream) = 0;
  virtual bool is_capturing(int index, Stream stream) = 0;
  virtual bool is_idle(int index, Stream stream) = 0;  // whether all its work is done; must not be capturing

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
  // Loads the kernels, so that their first launch does not wait for what the GPU is doing: CUDA loads kernels when they
  // are first used, which may wait for all running ones, such as an NCCL kernel that waits for a peer.
  virtual void load_kernels(int index) = 0;

  // Makes `index` the calling thread's current device (NCCL needs that) until it is destroyed.
  class Current {
   public:
    Current(Device& device, int index) : device_(device), previous_(device.exchange_current(index)) {}
    ~Current() {
      try {
        device_.restore_current(previous_);
      } catch (const DeviceError&) {  // the next use of the GPU reports it again
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

// The CUDA runtime that was built in. Null if there is none, with the reason in `why`.
Device* cuda_device(std::string* why);
// The version of that runtime, as in 13000 for CUDA 13.0: drivers of that version and later support it. 0: none.
int cuda_runtime_version();

// GPUs that tests use in place of this machine's; horo_lite._testing passes them.
struct FakeGpus {
  Device* device;
  std::vector<std::string> names;  // ranks that have a GPU of the same name share it
};

}  // namespace horo
