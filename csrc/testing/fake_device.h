// A GPU in host memory. Every stream is a thread that works off a queue, so that order between streams exists only
// where it was asked for, as on a GPU.
#pragma once

#include "gpu/device.h"

namespace horo {

// HORO_LITE_TEST_GPUS gives the names of its GPUs, as in "a,b". The same object in every call.
const FakeGpus& fake_gpus();

// The beginning of every stream of the fake device: how others (a stand-in for NCCL) queue work on it.
struct FakeStreamHead {
  void (*enqueue)(FakeStreamHead* stream, void (*work)(void*), void* argument);
};

}  // namespace horo
