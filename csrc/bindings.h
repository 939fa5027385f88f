// What the files of the bindings share.
#pragma once

#include <nanobind/nanobind.h>

#include <memory>
#include <stdexcept>
#include <string>

#include "pack.h"

namespace horo {

inline Op op_of(const std::string& name) {
  if (name == "sum") return Op::kSum;
  if (name == "average") return Op::kAverage;
  if (name == "min") return Op::kMin;
  if (name == "max") return Op::kMax;
  if (name == "product") return Op::kProduct;
  throw std::invalid_argument("unknown op '" + name + "'");
}

inline Wire wire_of(const std::string& name) {
  if (name == "none") return Wire::kNone;
  if (name == "fp16") return Wire::kFloat16;
  if (name == "bf16") return Wire::kBFloat16;
  throw std::invalid_argument("unknown wire dtype '" + name + "'");
}

// A reference to a Python object that may be dropped by any thread, with or without the GIL.
using Shared = std::shared_ptr<PyObject>;
inline Shared shared(nanobind::handle object) {
  return Shared(object.inc_ref().ptr(), [](PyObject* held) {
    if (!Py_IsInitialized()) return;
    const nanobind::gil_scoped_acquire gil;
    Py_DECREF(held);
  });
}

void bind_device(nanobind::module_& m);
void bind_kernels(nanobind::module_& m);
void bind_xla(nanobind::module_& m);

}  // namespace horo
