// The recorder for Python: functions of the process's only one.
#include "bindings/recorder.h"

#include <nanobind/nanobind.h>
#include <nanobind/stl/string_view.h>

#include <algorithm>
#include <memory>
#include <string_view>

#include "bindings/python.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace horo {

Operation operation_of(uint32_t channel, uint32_t kind, uint32_t names, const Tensors* tensors) {
  Operation what{};
  what.channel = channel;
  what.kind = kind;
  what.names = names;
  if (tensors == nullptr || tensors->refs().empty()) return what;
  what.n_tensors = static_cast<uint32_t>(tensors->refs().size());
  what.n_bytes = tensors->n_bytes();
  what.dtype = static_cast<uint8_t>(tensors->refs()[0].dtype);
  const Axes shape = tensors->shape(0);
  what.n_axes = static_cast<uint8_t>(std::min<size_t>(shape.size(), UINT8_MAX));
  std::copy_n(shape.begin(), std::min(shape.size(), Operation::kAxes), what.shape);
  return what;
}

void bind_recorder(nb::module_& m) {
  nb::class_<Operation>(m, "Operation", "An operation as the recorder describes it.")
      .def(
          "__init__",
          [](Operation* what, uint32_t channel, uint32_t kind, uint32_t names, const Tensors* tensors) {
            new (what) Operation(operation_of(channel, kind, names, tensors));
          },
          "channel"_a, "kind"_a, "names"_a, "tensors"_a.none());

  nb::class_<Recorder>(m, "Recorder", "The last operations of this process.")
      .def_static("memory_bytes", &Recorder::memory_bytes, "capacity"_a)
      .def_static(
          "use",
          [](nb::object memory, bool anew) {
            auto view = std::shared_ptr<Py_buffer>(new Py_buffer, [](Py_buffer* held) {
              if (Py_IsInitialized()) {
                const WithGil gil;
                PyBuffer_Release(held);
              }
              delete held;
            });
            if (PyObject_GetBuffer(memory.ptr(), view.get(), PyBUF_WRITABLE) != 0) throw nb::python_error();
            Recorder::of_process().use(static_cast<uint8_t*>(view->buf), static_cast<size_t>(view->len), view, anew);
          },
          "memory"_a, "anew"_a = false,
          "Record in this zeroed memory from now on. Earlier operations are dropped if all ranks restart counting "
          "(`anew`).")
      .def_static(
          "n_operations", [] { return Recorder::of_process().n_operations(); },
          "The number of operations recorded so far.")
      .def_static(
          "text", [](std::string_view text) { return Recorder::of_process().add_text(text); }, "text"_a,
          "Return the position of a text in the memory; 0 if it is full.")
      .def_static(
          "time_phases", [](bool on) { PhaseClock::is_on = on; }, "on"_a)
      .def_static(
          "step", [] { Recorder::of_process().step(); }, "Count an optimizer's step.")
      .def_static(
          "enter", [](uint32_t channel) { Recorder::of_process().enter(channel); }, "channel"_a,
          "Record that this thread makes a blocking call.")
      .def_static(
          "operation",
          [](std::string_view label, uint32_t kind, uint32_t names, const Tensors* tensors) {
            Recorder::of_process().operation(label, operation_of(0, kind, names, tensors));
          },
          "label"_a, "kind"_a = 0, "names"_a = 0, "tensors"_a = nb::none(),
          "Describe the blocking call; with kind 0, its kind is the beginning of its label.")
      .def_static(
          "begin", [] { Recorder::of_process().begin(); }, "Record that all ranks have reached the blocking call.")
      .def_static("leave", [](bool failed) { Recorder::of_process().leave(failed); }, "failed"_a);
}

}  // namespace horo
