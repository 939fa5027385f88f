// A GPU in host memory. Every stream is a thread that executes a queue, so streams are only ordered where a caller
// orders them, as on a GPU. Accesses to memory that are not ordered abort the process, in whichever order they run
// (races.h).
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <vector>

#include "gpu/device.h"

namespace horo {

// HORO_LITE_TEST_GPUS lists the names of its GPUs, as in "a,b". Every call returns the same object.
const FakeGpus& fake_gpus();
// The host has seen that all work that is queued on the stream so far is done.
void see_done(Stream stream);
// This memory is free.
void forget(const void* address, size_t n_bytes);

// The beginning of every stream of the fake device, with which others (a stand-in for NCCL) queue work on it.
struct FakeStreamHead {
  void (*enqueue)(FakeStreamHead* stream, void (*work)(void*), void* argument);
  // Declares, before it is queued, that work called `what` reads or writes this memory.
  void (*touch)(FakeStreamHead* stream, const void* address, size_t n_bytes, bool writes, const char* what);
  // While a graph is being captured, keeps the call in it, and returns true: every replay makes it, with its stream.
  bool (*capture)(FakeStreamHead* stream, void (*call)(void* argument, FakeStreamHead* stream), void* argument);
};

// What was captured, to be queued again. Replays are in the order of the calls, on one stream.
struct FakeGraph {
  std::vector<std::function<void(FakeStreamHead*)>> calls;
  std::map<FakeStreamHead*, bool> is_joined;  // the streams with captured work: whether the first one waits for it
};

// As in CUDA: streams that wait for the captured ones take part, and whatever could wait for the GPU is an error until
// the end, in any thread.
void begin_capture(Stream stream);
std::shared_ptr<FakeGraph> end_capture(Stream stream);

}  // namespace horo
