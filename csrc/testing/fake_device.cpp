#include "testing/fake_device.h"

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <new>
#include <sstream>
#include <thread>

#include "testing/kernels_host.h"
#include "testing/races.h"

namespace horo {
namespace {

constexpr size_t kMostPending = 1000;

// Never destroyed, since threads may outlive main().
Races& races() {
  static Races& only = *new Races;
  return only;
}

std::atomic<int> n_captures{0};

void must_not_capture(const char* what) {
  if (n_captures != 0) throw DeviceError(std::string("CUDA could not ") + what + ": a graph is being captured");
}

struct FakeStream : FakeStreamHead {
  std::shared_ptr<FakeGraph> graph;  // that is being captured
  std::mutex mutex;
  std::condition_variable changed;
  std::deque<std::function<void()>> queue;
  bool stopping = false;
  bool working = false;
  const int number = races().new_stream();
  std::thread thread;

  FakeStream() {
    touch = [](FakeStreamHead* stream, const void* address, size_t n_bytes, bool writes, const char* what) {
      races().touch(static_cast<FakeStream*>(stream)->number, address, n_bytes, writes, what);
    };
    enqueue = [](FakeStreamHead* stream, void (*work)(void*), void* argument) {
      static_cast<FakeStream*>(stream)->add([work, argument] { work(argument); });
    };
    capture = [](FakeStreamHead* stream, void (*call)(void*, FakeStreamHead*), void* argument) {
      return static_cast<FakeStream*>(stream)->captures([=](FakeStreamHead* on) { call(argument, on); });
    };
    thread = std::thread([this] { loop(); });
  }

  ~FakeStream() {
    {
      const std::lock_guard lock(mutex);
      stopping = true;
    }
    changed.notify_all();
    thread.join();
  }

  bool captures(std::function<void(FakeStreamHead*)> call) {
    if (graph == nullptr) return false;
    graph->is_joined[this] = false;
    graph->calls.push_back(std::move(call));
    return true;
  }

  // Makes a call that queues work, here or at each replay.
  template <class Call>
  void issue(const Call& call) {
    if (!captures([call](FakeStreamHead* on) { call(*static_cast<FakeStream*>(on)); })) call(*this);
  }

  // What a test or the stand-in for NCCL queues; does not wait.
  void add(std::function<void()> work) { add(std::move(work), SIZE_MAX); }

  // A command; blocks while as many are pending as CUDA takes.
  void command(std::function<void()> work) { add(std::move(work), kMostPending); }

  void add(std::function<void()> work, size_t limit) {
    {
      std::unique_lock lock(mutex);
      changed.wait(lock, [this, limit] { return queue.size() < limit; });
      queue.push_back(std::move(work));
    }
    changed.notify_all();
  }

  bool is_idle() {
    must_not_capture("complete the work of a stream");
    const Races::Clock queued = races().queued(number);
    const std::lock_guard lock(mutex);
    if (!queue.empty() || working) return false;
    races().seen(queued);
    return true;
  }

  void reads(const void* address, size_t n_bytes, const char* what) { touch(this, address, n_bytes, false, what); }
  void writes(void* address, size_t n_bytes, const char* what) { touch(this, address, n_bytes, true, what); }

  void loop() {
    for (;;) {
      std::function<void()> work;
      {
        std::unique_lock lock(mutex);
        working = false;
        changed.wait(lock, [this] { return stopping || !queue.empty(); });
        if (queue.empty()) return;  // only after all queued work
        work = std::move(queue.front());
        queue.pop_front();
        working = true;
      }
      changed.notify_all();
      work();
    }
  }
};

// Work that waits for an event waits for the latest recording at the time of the call, as in CUDA.
struct FakeEvent {
  std::mutex mutex;
  std::condition_variable changed;
  uint64_t recorded = 0;
  uint64_t reached = 0;
  Races::Clock work;                 // that precedes the latest recording
  std::shared_ptr<FakeGraph> graph;  // if that was captured, and of which stream
  FakeStreamHead* stream = nullptr;
};
using SharedEvent = std::shared_ptr<FakeEvent>;  // work that waits in a queue may outlive the handle

class FakeDevice : public Device {
 public:
  void* allocate(int, size_t n_bytes) override {
    must_not_capture("allocate memory");
    return ::operator new(n_bytes, std::align_val_t{256});
  }
  void release(int, void* memory) override {
    must_not_capture("free memory");
    ::operator delete(memory, std::align_val_t{256});
  }
  void* allocate_pinned(int index, size_t n_bytes) override { return allocate(index, n_bytes); }
  void release_pinned(int index, void* memory) override { release(index, memory); }

  Stream new_stream(int) override { return static_cast<FakeStreamHead*>(new FakeStream); }
  void delete_stream(int, Stream stream) override { delete of(stream); }
  bool is_capturing(int, Stream stream) override { return of(stream)->graph != nullptr; }
  bool is_idle(int, Stream stream) override { return of(stream)->is_idle(); }

  Event new_event(int) override { return new SharedEvent(std::make_shared<FakeEvent>()); }
  void delete_event(int, Event event) override { delete static_cast<SharedEvent*>(event); }

  void record(int, Event event, Stream stream) override {
    const SharedEvent shared = *static_cast<SharedEvent*>(event);
    uint64_t number;
    {
      const std::lock_guard lock(shared->mutex);
      shared->stream = of(stream);
      shared->graph = of(stream)->graph;
      if (shared->graph != nullptr) return;
      number = ++shared->recorded;
      shared->work = races().queued(of(stream)->number);
    }
    of(stream)->command([shared, number] {
      {
        const std::lock_guard lock(shared->mutex);
        shared->reached = std::max(shared->reached, number);
      }
      shared->changed.notify_all();
    });
  }

  void wait(int, Stream stream, Event event) override {
    const SharedEvent shared = *static_cast<SharedEvent*>(event);
    const auto [number, work] = latest(*shared);
    if (shared->graph != nullptr) {
      of(stream)->graph = shared->graph;
      shared->graph->is_joined[shared->stream] = true;
      return;
    }
    if (of(stream)->graph != nullptr) throw DeviceError("captured work cannot wait for work outside of its graph");
    races().wait(of(stream)->number, work);
    of(stream)->command([shared, number = number] { wait_for(*shared, number); });
  }

  bool is_done(int, Event event) override {
    must_not_capture("query an event");
    FakeEvent& shared = **static_cast<SharedEvent*>(event);
    const std::lock_guard lock(shared.mutex);
    if (shared.reached != shared.recorded) return false;
    races().seen(shared.work);
    return true;
  }

  void synchronize(int, Event event) override {
    must_not_capture("wait for an event");
    const SharedEvent shared = *static_cast<SharedEvent*>(event);
    const auto [number, work] = latest(*shared);
    wait_for(*shared, number);
    races().seen(work);
  }

  void copy(int, void* to, const void* from, size_t n_bytes, Stream stream) override {
    of(stream)->issue([=](FakeStream& on) {
      on.reads(from, n_bytes, "a copy");
      on.writes(to, n_bytes, "a copy");
      on.command([=] { std::memcpy(to, from, n_bytes); });
    });
  }
  void fill(int, void* memory, uint8_t byte, size_t n_bytes, Stream stream) override {
    of(stream)->issue([=](FakeStream& on) {
      on.writes(memory, n_bytes, "a fill");
      on.command([=] { std::memset(memory, byte, n_bytes); });
    });
  }
  void run(int, const KernelCall& call, Stream stream) override {
    auto pieces = std::make_shared<std::vector<GpuPiece>>(call.pieces, call.pieces + call.n_pieces);
    KernelCall later = call;
    later.pieces = pieces->data();
    of(stream)->issue([later, pieces](FakeStream& on) {
      touch(on, later);
      on.command([later, pieces] { run_on_host(later); });
    });
  }
  void load_kernels(int) override {}

 protected:
  int exchange_current(int) override { return 0; }
  void restore_current(int) override {}

 private:
  static std::pair<uint64_t, Races::Clock> latest(FakeEvent& event) {
    const std::lock_guard lock(event.mutex);
    return {event.recorded, event.work};
  }
  // The memory that a kernel uses.
  static void touch(FakeStream& stream, const KernelCall& call) {
    const bool packs = call.step == KernelCall::kMeasure || call.step == KernelCall::kPack;
    const char* const names[] = {"the kernel that measures", "the kernel that packs", "the kernel that unpacks",
                                 "the kernel that scales"};
    const char* const what = names[call.step];
    size_t n_tensors = 0;
    for (size_t i = 0; i < call.n_pieces; ++i) {
      const GpuPiece& piece = call.pieces[i];
      n_tensors = std::max<size_t>(n_tensors, piece.tensor + 1);
      stream.touch(&stream, piece.address, piece.n_elements * item_bytes(call.grad_dtype), !packs, what);
      if (call.step != KernelCall::kPack && call.step != KernelCall::kUnpack) continue;
      stream.touch(&stream, call.wire + piece.wire_offset * kWireAlignment,
                   piece.n_elements * item_bytes(call.wire_dtype), packs, what);
    }
    if (call.exponents != nullptr) {
      const bool measures = call.step == KernelCall::kMeasure;
      stream.touch(&stream, call.exponents, n_tensors * sizeof(int32_t), measures, what);
    }
    if (call.divisor != nullptr) stream.reads(call.divisor, sizeof(double), what);
  }
  static void wait_for(FakeEvent& event, uint64_t number) {
    std::unique_lock lock(event.mutex);
    event.changed.wait(lock, [&] { return event.reached >= number; });
  }
  // CUDA's handles of the legacy default stream are 0 and 1, of the per-thread one 2.
  static FakeStream* of(Stream stream) {
    if (reinterpret_cast<uintptr_t>(stream) > 2) return static_cast<FakeStream*>(static_cast<FakeStreamHead*>(stream));
    static FakeStream* const legacy = new FakeStream;
    return legacy;
  }

  friend void horo::see_done(Stream stream);
  friend void horo::begin_capture(Stream stream);
  friend std::shared_ptr<FakeGraph> horo::end_capture(Stream stream);
};

std::vector<std::string> names() {
  const char* given = std::getenv("HORO_LITE_TEST_GPUS");
  std::vector<std::string> names;
  std::istringstream list(given == nullptr ? "" : given);
  for (std::string name; std::getline(list, name, ',');) names.push_back(name);
  return names;
}

}  // namespace

void see_done(Stream stream) { races().seen(races().queued(FakeDevice::of(stream)->number)); }

void begin_capture(Stream stream) {
  FakeDevice::of(stream)->graph = std::make_shared<FakeGraph>();
  ++n_captures;
}

std::shared_ptr<FakeGraph> end_capture(Stream stream) {
  FakeStream* const first = FakeDevice::of(stream);
  const std::shared_ptr<FakeGraph> graph = first->graph;
  --n_captures;
  first->graph = nullptr;
  for (const auto& [head, is_joined] : graph->is_joined) {
    static_cast<FakeStream*>(head)->graph = nullptr;
    if (head != first && !is_joined) throw DeviceError("the capture ends before a stream that took part is joined");
  }
  return graph;
}

void forget(const void* address, size_t n_bytes) { races().forget(address, n_bytes); }

const FakeGpus& fake_gpus() {
  static const FakeGpus* const gpus = new FakeGpus{new FakeDevice, names()};
  return *gpus;
}

}  // namespace horo
