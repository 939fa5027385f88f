// A GPU in host memory. Every stream is a thread that executes a queue, so streams are only ordered where a caller
// orders them, as on a GPU.
#pragma once

#include "gpu/device.h"

namespace horo {

// HORO_LITE_TEST_GPUS lists the names of its GPUs, as in "a,b". Every call returns the same object.
const FakeGpus& fake_gpus();

// The beginning of every stream of the fake device, with which others (a stand-in for NCCL) queue work on it.
struct FakeStreamHead {
  void (*enqueue)(FakeStreamHead* stream, void (*work)(void*), void* argument);
};

}  // namespace horo
