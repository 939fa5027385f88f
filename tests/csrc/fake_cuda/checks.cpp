// csrc/gpu/device_cuda.cpp, device_queue.cpp and nccl_group.cpp against strict stand-ins for CUDA and NCCL.
//
//   checks contexts   every call, each in a thread that never chose a GPU, leaves the first GPU alone
//   checks current    a thread that works on the first GPU is still there after every call
//   checks abort      fail() gets a thread out of a call of NCCL's that does not return
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <mutex>
#include <thread>

#include "cuda_runtime_api.h"
#include "gpu/device_queue.h"
#include "gpu/nccl_group.h"

// The kernels, which are defined in another file.
namespace horo {
void launch_kernels(const KernelCall&, void*) { fake_use_current(); }
void load_kernels() { fake_use_current(); }
}  // namespace horo

using namespace horo;

namespace {

constexpr int kMine = 1;  // this rank's GPU

void expect(bool fact, const char* what) {
  if (fact) return;
  std::fprintf(stderr, "not so: %s\n", what);
  std::abort();
}

std::mutex mutex;
std::condition_variable changed;
bool stuck = false;    // a reduction shall hang
bool inside = false;   // a reduction hangs
bool aborted = false;  // until this is set
int n_aborts = 0;

// Called by any NCCL call that may use the GPU.
NcclResult on_my_gpu() {
  int current = -1;
  cudaGetDevice(&current);
  expect(current == kMine, "NCCL is called with this rank's GPU as the current one");
  fake_use_current();
  return kNcclSuccess;
}

NcclResult reduce(const void*, void*, size_t, NcclType, NcclOp, NcclComm, NcclStream) {
  std::unique_lock lock(mutex);
  if (stuck) {
    inside = true;
    changed.notify_all();
    changed.wait(lock, [] { return aborted; });
    return kNcclInternalError;
  }
  return on_my_gpu();
}

NcclResult abort_comm(NcclComm) {
  const std::lock_guard lock(mutex);
  aborted = true;
  ++n_aborts;
  changed.notify_all();
  return on_my_gpu();
}

NcclLibrary library() {
  NcclLibrary nccl{};
  nccl.CommInitRankConfig = [](NcclComm* comm, int, NcclUniqueId, int, NcclConfig*) {
    *comm = reinterpret_cast<NcclComm>(comm);
    return on_my_gpu();
  };
  nccl.CommSplit = [](NcclComm comm, int, int, NcclComm* part, NcclConfig*) {
    *part = comm;
    return on_my_gpu();
  };
  nccl.CommFinalize = [](NcclComm) { return on_my_gpu(); };
  nccl.CommDestroy = [](NcclComm) { return on_my_gpu(); };
  nccl.CommAbort = abort_comm;
  nccl.CommGetAsyncError = [](NcclComm comm, NcclResult* error) {
    expect(comm != nullptr, "nobody asks for a communicator that is gone");
    *error = kNcclSuccess;
    return on_my_gpu();
  };
  nccl.GetErrorString = [](NcclResult) { return "an error of the fake's"; };
  nccl.GetLastError = [](NcclComm) { return ""; };
  nccl.AllReduce = reduce;
  nccl.ReduceScatter = reduce;
  nccl.Broadcast = [](const void*, void*, size_t, NcclType, int, NcclComm, NcclStream) { return on_my_gpu(); };
  nccl.Send = [](const void*, size_t, NcclType, int, NcclComm, NcclStream) { return on_my_gpu(); };
  nccl.Recv = [](void*, size_t, NcclType, int, NcclComm, NcclStream) { return on_my_gpu(); };
  nccl.GroupStart = [] { return on_my_gpu(); };
  nccl.GroupEnd = [] { return on_my_gpu(); };
  nccl.MemAlloc = [](void** memory, size_t n_bytes) {
    *memory = std::malloc(n_bytes);
    return on_my_gpu();
  };
  nccl.MemFree = [](void* memory) {
    std::free(memory);
    return on_my_gpu();
  };
  nccl.CommRegister = [](NcclComm, void* memory, size_t, void** handle) {
    *handle = memory;
    return on_my_gpu();
  };
  nccl.CommDeregister = [](NcclComm, void*) { return on_my_gpu(); };
  nccl.CommWindowRegister = [](NcclComm, void* memory, size_t, NcclWindow* window, int) {
    *window = memory;
    return on_my_gpu();
  };
  nccl.CommWindowDeregister = [](NcclComm, NcclWindow) { return on_my_gpu(); };
  return nccl;
}

// Each call in its own thread, which is on the first GPU, as threads are that never chose one.
struct Threads {
  void operator()(const char* what, const std::function<void()>& call) const {
    std::thread([&] {
      try {
        call();
      } catch (const std::exception& error) {
        std::fprintf(stderr, "%s: %s\n", what, error.what());
        std::abort();
      }
      if (fake_has_context(0) != works_there) {
        std::fprintf(stderr, "%s made a context on the first GPU\n", what);
        std::abort();
      }
      int current = -1;
      cudaGetDevice(&current);
      expect(!works_there || current == 0, "a thread that works on the first GPU is there after the call");
    }).join();
  }
  bool works_there;
};

void every_call(const Threads& thread) {
  Device& device = *cuda_device(nullptr);
  const NcclLibrary nccl = library();
  void* memory = nullptr;
  void* pinned = nullptr;
  Stream stream = nullptr;
  Event event = nullptr;
  thread("allocate", [&] { memory = device.allocate(kMine, 4096); });
  thread("allocate_pinned", [&] { pinned = device.allocate_pinned(kMine, 4096); });
  thread("new_stream", [&] { stream = device.new_stream(kMine); });
  thread("is_capturing", [&] { expect(!device.is_capturing(kMine, stream), "nothing is captured"); });
  thread("new_event", [&] { event = device.new_event(kMine); });
  thread("record", [&] { device.record(kMine, event, stream); });
  thread("wait", [&] { device.wait(kMine, stream, event); });
  thread("is_done", [&] { expect(device.is_done(kMine, event), "the event has come"); });
  thread("synchronize", [&] { device.synchronize(kMine, event); });
  thread("copy", [&] { device.copy(kMine, memory, pinned, 64, stream); });
  thread("fill", [&] { device.fill(kMine, memory, 0, 64, stream); });
  thread("load_kernels", [&] { device.load_kernels(kMine); });

  std::shared_ptr<DeviceQueue> queue;
  thread("a queue", [&] { queue = std::make_shared<DeviceQueue>(device, kMine); });
  thread("follow", [&] { queue->follow(stream); });
  thread("lead", [&] { queue->lead(stream); });
  thread("hold", [&] { queue->hold(std::make_shared<int>(1), stream); });
  thread("hold again", [&] { queue->hold(std::make_shared<int>(2), stream); });

  const TensorRef tensor{memory, 16, DType::kFloat32};
  const Buffer buffer{static_cast<uint8_t*>(memory), 64};
  for (const bool windows : {true, false}) {
    std::unique_ptr<NcclGroup> group, part;
    thread("connect", [&] { group.reset(new NcclGroup(queue, nccl, NcclUniqueId{}, 0, 2, 4096, 5.0)); });
    thread("register", [&] { group->register_bucket(windows); });
    thread("split", [&] { part = group->split(0, 0, 2); });
    thread("allreduce", [&] { group->reduce({{tensor}}, Op::kSum, Wire::kFloat16, 1.0, {}, 2.0); });
    thread("reduce-scatter", [&] { group->reduce({{tensor}, {tensor}}, Op::kSum, Wire::kFloat16, 1.0, {}, 2.0); });
    thread("broadcast", [&] { group->broadcast({{buffer}, {}}); });
    thread("allgather", [&] { group->broadcast({{buffer}, {buffer}}); });
    thread("alltoall", [&] { group->alltoall({buffer, buffer}, {buffer, buffer}); });
    thread("check", [&] { group->check(); });
    thread("fail", [&] { part->fail("for a test"); });
    thread("drop what has failed", [&] { part.reset(); });
    thread("close", [&] { group->close(); });
    thread("drop", [&] { group.reset(); });
  }
  expect(n_aborts == 2, "what failed was aborted, and nothing else");

  thread("drop the queue", [&] { queue.reset(); });
  thread("delete_event", [&] { device.delete_event(kMine, event); });
  thread("delete_stream", [&] { device.delete_stream(kMine, stream); });
  thread("release_pinned", [&] { device.release_pinned(kMine, pinned); });
  thread("release", [&] { device.release(kMine, memory); });
  expect(fake_has_context(kMine), "something was done");
}

void abort_reaches_a_call_that_does_not_return() {
  Device& device = *cuda_device(nullptr);
  const NcclLibrary nccl = library();
  const auto queue = std::make_shared<DeviceQueue>(device, kMine);
  NcclGroup group(queue, nccl, NcclUniqueId{}, 0, 2, 4096, 5.0);
  void* memory = device.allocate(kMine, 4096);
  stuck = true;
  std::string error;
  std::thread trainer([&] {
    try {
      group.reduce({{TensorRef{memory, 16, DType::kFloat32}}}, Op::kSum, Wire::kNone, 1.0, {}, std::nullopt);
    } catch (const DeviceError& failed) {
      error = failed.what();
    }
  });
  {
    std::unique_lock lock(mutex);
    changed.wait(lock, [] { return inside; });
  }
  group.fail("a peer is gone");  // would wait forever for the mutex that the other thread holds
  trainer.join();
  expect(error == "a peer is gone", "the call ends with the reason");
  expect(n_aborts == 1, "the communicator is aborted once");
  device.release(kMine, memory);
}

}  // namespace

void an_earlier_kernel_fails() {
  std::string why;
  Device& device = *cuda_device(&why);
  const Stream stream = device.new_stream(kMine);
  for (const auto& [error, words] : {std::pair{700, "a kernel that this process ran"}, {1, "CUDA could not fill"}}) {
    fake_fail(error);
    std::string text;
    try {
      device.fill(kMine, nullptr, 0, 0, stream);
    } catch (const DeviceError& found) {
      text = found.what();
    }
    fake_fail(0);
    expect(text.find(words) == 0, text.c_str());
  }
  device.delete_stream(kMine, stream);
}

int main(int, char** arguments) {
  const std::string job = arguments[1];
  if (job == "contexts") every_call({false});
  if (job == "current") {
    cudaSetDevice(0);
    every_call({true});
  }
  if (job == "kernels") an_earlier_kernel_fails();
  if (job == "abort") abort_reaches_a_call_that_does_not_return();
  std::printf("%s: all is well\n", job.c_str());
}
