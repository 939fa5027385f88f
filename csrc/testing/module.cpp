// horo_lite._testing: GPUs in host memory, and the GPU kernels one call at a time. Built beside horo_lite._native for
// development, and left out of wheels.
#include <nanobind/nanobind.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <functional>
#include <memory>
#include <stdexcept>
#include <tuple>
#include <utility>

#include "bindings/python.h"
#include "gpu/device_queue.h"
#include "gpu/kernels.h"
#include "testing/fake_device.h"
#include "testing/kernels_host.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace horo {
namespace {

DType dtype_of(const std::string& name) {
  for (int i = 0; i <= static_cast<int>(DType::kLongDouble); ++i) {
    if (name == dtype_name(static_cast<DType>(i))) return static_cast<DType>(i);
  }
  throw std::invalid_argument("unknown dtype '" + name + "'");
}

KernelCall::Step step_of(const std::string& name) {
  if (name == "measure") return KernelCall::kMeasure;
  if (name == "pack") return KernelCall::kPack;
  if (name == "unpack") return KernelCall::kUnpack;
  if (name == "scale") return KernelCall::kScale;
  throw std::invalid_argument("unknown step '" + name + "'");
}

// An address and a number of bytes.
using Memory = std::vector<std::tuple<uintptr_t, size_t>>;

using PieceTuple = std::tuple<uintptr_t, uint32_t, uint32_t, uint32_t>;

void run_kernel(DeviceQueue* queue, const std::string& step, const std::string& grad_dtype,
                const std::string& wire_dtype, const std::vector<PieceTuple>& tuples, uintptr_t wire, double prescale,
                double scale, double divisor, uintptr_t divisor_at, uintptr_t exponents, int headroom,
                uintptr_t stats) {
  std::vector<GpuPiece> pieces;
  for (const auto& [address, n_elements, wire_offset, tensor] : tuples) {
    if (n_elements == 0) throw std::invalid_argument("a piece must have at least one element");
    pieces.push_back({reinterpret_cast<void*>(address), n_elements, 0, wire_offset, tensor});
  }
  KernelCall call{step_of(step), dtype_of(grad_dtype), dtype_of(wire_dtype), pieces.data(), pieces.size()};
  call.wire = reinterpret_cast<uint8_t*>(wire);
  call.prescale = prescale;
  call.factor = {scale, divisor};
  call.divisor = reinterpret_cast<const double*>(divisor_at);
  call.exponents = reinterpret_cast<int32_t*>(exponents);
  call.headroom = headroom;
  call.stats = reinterpret_cast<WireStats*>(stats);
  const WithoutGil release;
  if (queue == nullptr) run_on_host(call);
  else queue->device().run(queue->index(), call, queue->stream());
}

Device& device() { return *fake_gpus().device; }

// Stands in for a framework's stream.
struct FakeStream {
  Stream stream = device().new_stream(0);
  ~FakeStream() { close(); }
  void close() {
    if (stream != nullptr) device().delete_stream(0, std::exchange(stream, nullptr));
  }
};

}  // namespace
}  // namespace horo

using namespace horo;

NB_MODULE(_testing, m) {
  nb::module_::import_("horo_lite._native");  // for the classes in the signatures

  m.def("run_kernel", &run_kernel, "queue"_a.none(), "step"_a, "grad_dtype"_a, "wire_dtype"_a, "pieces"_a, "wire"_a = 0,
        "prescale"_a = 1.0, "scale"_a = 1.0, "divisor"_a = 1.0, "divisor_at"_a = 0, "exponents"_a = 0, "headroom"_a = 0,
        "stats"_a = 0,
        "Queues the step on a GPU, in whose memory all addresses are; None: runs it on the CPU. A piece is (address, "
        "n_elements, wire offset in units of 64 bytes, tensor).");

  m.def(
      "fake_gpus", [] { return nb::capsule(&fake_gpus()); },
      "Returns GPUs in host memory, for _native, with the names in HORO_LITE_TEST_GPUS. Their streams are threads.");

  m.def(
      "forget", [](uintptr_t address, size_t n_bytes) { forget(reinterpret_cast<void*>(address), n_bytes); },
      "address"_a, "n_bytes"_a, "This memory is free.");

  nb::class_<FakeGraph>(m, "FakeGraph", "What was captured.")
      .def(
          "replay",
          [](FakeGraph& self, uintptr_t stream) {
            const WithoutGil release;
            for (const auto& call : self.calls) call(reinterpret_cast<FakeStreamHead*>(stream));
          },
          "stream"_a, "Queues it on a stream.");

  nb::class_<FakeStream>(m, "FakeStream", "A stream of the fake GPUs.")
      .def(nb::new_([] { return unlocked(new FakeStream); }))
      .def_prop_ro("handle", [](const FakeStream& self) { return reinterpret_cast<uintptr_t>(self.stream); })
      .def(
          "call",
          [](FakeStream& self, Function<nb::object()> function, const Memory& reads, const Memory& writes) {
            using Call = std::function<void(FakeStreamHead*)>;
            auto call = std::make_unique<Call>([held = shared(function), reads, writes](FakeStreamHead* head) {
              for (const auto& [address, n_bytes] : reads) {
                head->touch(head, reinterpret_cast<void*>(address), n_bytes, false, "a kernel of the caller");
              }
              for (const auto& [address, n_bytes] : writes) {
                head->touch(head, reinterpret_cast<void*>(address), n_bytes, true, "a kernel of the caller");
              }
              const auto work = [](void* argument) {
                const std::unique_ptr<Shared> function(static_cast<Shared*>(argument));
                const WithGil gil;
                nb::handle(function->get())();
              };
              head->enqueue(head, work, new Shared(held));
            });
            auto* head = static_cast<FakeStreamHead*>(self.stream);
            const auto again = [](void* held, FakeStreamHead* stream) { (*static_cast<Call*>(held))(stream); };
            if (head->capture(head, again, call.get())) call.release();  // for as long as the program runs
            else (*call)(head);
          },
          "function"_a, "reads"_a = Memory(), "writes"_a = Memory(),
          "Queues a call, which reads and writes memory given as addresses and numbers of bytes.")
      .def(
          "close",
          [](FakeStream& self) {
            const WithoutGil release;
            self.close();
          },
          "Waits for all work, and ends the thread, which may be in Python: before the interpreter ends.")
      .def("begin_capture", [](FakeStream& self) { begin_capture(self.stream); })
      .def("end_capture", [](FakeStream& self) { return end_capture(self.stream); })
      .def(
          "see_done", [](FakeStream& self) { see_done(self.stream); },
          "The host has seen that all work queued here so far is done.")
      .def(
          "lead",
          [](FakeStream& self, uintptr_t consumer) {
            const WithoutGil release;  // a full stream blocks, and its work may be Python's
            const Event event = device().new_event(0);
            device().record(0, event, self.stream);
            device().wait(0, reinterpret_cast<Stream>(consumer), event);
            device().delete_event(0, event);
          },
          "consumer"_a, "Later work of the consumer runs after the work queued here.");
}
