// The GPU kernels and their twin one call at a time, for tests from Python.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <stdexcept>
#include <tuple>

#include "bindings.h"
#include "device_queue.h"
#include "kernels.h"

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

using PieceTuple = std::tuple<uintptr_t, uint32_t, uint32_t, uint32_t>;

void run_kernel(DeviceQueue* queue, const std::string& step, const std::string& grad_dtype,
                const std::string& wire_dtype, const std::vector<PieceTuple>& tuples, uintptr_t wire, double prescale,
                double scale, double divisor, uintptr_t divisor_at, uintptr_t exponents, int headroom,
                uintptr_t stats) {
  std::vector<GpuPiece> pieces;
  for (const auto& [address, n_elements, wire_offset, tensor] : tuples) {
    if (n_elements == 0) throw std::invalid_argument("a piece has an element at least");
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
  const nb::gil_scoped_release release;
  if (queue == nullptr) run_on_host(call);
  else queue->device().run(queue->index(), call, queue->stream());
}

}  // namespace

void bind_kernels(nb::module_& m) {
  m.def("run_kernel", &run_kernel, "queue"_a.none(), "step"_a, "grad_dtype"_a, "wire_dtype"_a, "pieces"_a, "wire"_a = 0,
        "prescale"_a = 1.0, "scale"_a = 1.0, "divisor"_a = 1.0, "divisor_at"_a = 0, "exponents"_a = 0, "headroom"_a = 0,
        "stats"_a = 0,
        "Queues it on a GPU, whose memory all addresses are of. A piece is (address, n_elements, wire offset in units "
        "of 64 bytes, tensor).");
  // What a GPU would do, on the CPU.
  m.attr("run_kernel_on_host") = nb::module_::import_("functools").attr("partial")(m.attr("run_kernel"), nb::none());
}

}  // namespace horo
