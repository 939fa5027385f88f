// Shared by the files of the bindings.
#pragma once

#include <nanobind/nanobind.h>
#include <unistd.h>

#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "group.h"
#include "pack/pack.h"

namespace horo {

// For signatures, from which the module's stub is made.
template <class T>
using ListOf = nanobind::typed<nanobind::list, T>;
template <class Signature>
using Function = nanobind::typed<nanobind::callable, Signature>;

// While Python shuts down, it ends a thread that requests the GIL by unwinding its stack, which neither destructors nor
// nanobind survive. So such a (daemon) thread sleeps until the process has ended, as it does from Python 3.14 on.
template <class Call>
auto or_sleep_at_exit(Call call) noexcept {
  try {
    return call();
  } catch (...) {
    while (true) pause();
  }
}

// Like nanobind's gil_scoped_release.
class WithoutGil {
 public:
  WithoutGil() : state_(PyEval_SaveThread()) {}
  ~WithoutGil() {
    or_sleep_at_exit([this] { PyEval_RestoreThread(state_); });
  }
  WithoutGil(const WithoutGil&) = delete;
  WithoutGil& operator=(const WithoutGil&) = delete;

 private:
  PyThreadState* state_;
};

// Like nanobind's gil_scoped_acquire.
class WithGil {
 public:
  WithGil() : state_(or_sleep_at_exit([] { return PyGILState_Ensure(); })) {}
  ~WithGil() { PyGILState_Release(state_); }
  WithGil(const WithGil&) = delete;
  WithGil& operator=(const WithGil&) = delete;

 private:
  PyGILState_STATE state_;
};

// Python destroys objects while it holds the GIL, but waiting for a stream must not hold it: the stream may be the fake
// device's, in the middle of a Python call.
template <class T>
std::shared_ptr<T> unlocked(T* object) {
  return std::shared_ptr<T>(object, [](T* dropped) {
    const WithoutGil release;
    delete dropped;
  });
}

inline Op op_of(const std::string& name) {
  if (name == "sum") return Op::kSum;
  if (name == "average") return Op::kAverage;
  if (name == "weighted average") return Op::kWeightedAverage;
  if (name == "min") return Op::kMin;
  if (name == "max") return Op::kMax;
  if (name == "product") return Op::kProduct;
  throw std::invalid_argument("unknown op '" + name + "'");
}

inline Wire wire_of(const std::string& name) {
  if (name == "none") return Wire::kNone;
  if (name == "fp16") return Wire::kFloat16;
  if (name == "bf16") return Wire::kBFloat16;
  if (name == "int8") return Wire::kInt8;
  if (name == "int4") return Wire::kInt4;
  throw std::invalid_argument("unknown wire dtype '" + name + "'");
}

// A reference to a Python object that may be dropped by any thread, with or without the GIL.
using Shared = std::shared_ptr<PyObject>;
inline Shared shared(nanobind::handle object) {
  return Shared(object.inc_ref().ptr(), [](PyObject* held) {
    if (!Py_IsInitialized()) return;
    const WithGil gil;
    Py_DECREF(held);
  });
}

// An exception raised by Python that any thread can copy, keep, drop and throw again as often as needed: nanobind's own
// exception is empty once it has been translated, and its reference counts need the GIL.
class PythonError : public std::runtime_error {
 public:
  // Needs the GIL.
  explicit PythonError(const nanobind::python_error& error)
      : std::runtime_error(text_of(error)),
        error_(shared(error.value())),
        traceback_(error.traceback().is_valid() ? shared(error.traceback()) : nullptr) {}
  // Raises the same exception object in this thread, with its first traceback: each `raise` adds its frames to the
  // traceback, and those of earlier ones do not belong there. Needs the GIL.
  void restore() const {
    PyException_SetTraceback(error_.get(), traceback_ ? traceback_.get() : Py_None);
    PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(error_.get())), error_.get());
  }

 private:
  static std::string text_of(const nanobind::python_error& error) {
    const auto type = nanobind::cast<std::string>(error.type().attr("__name__"));
    PyObject* text = PyObject_Str(error.value().ptr());
    if (text == nullptr) {  // a broken __str__ must not cause a failure here
      PyErr_Clear();
      return type;
    }
    return type + ": " + nanobind::cast<std::string>(nanobind::steal(text));
  }
  Shared error_;
  Shared traceback_;
};

inline void check_signals() {
  const WithGil gil;
  if (PyErr_CheckSignals() != 0) throw nanobind::python_error();
}

inline nanobind::object error_class(const char* name) {
  return nanobind::module_::import_("horo_lite.errors").attr(name);
}

// Returns the result of `call`, with the GIL; errors that it raises can be thrown again on any thread.
template <class Call>
auto in_python(Call call) {
  const WithGil gil;
  try {
    return call();
  } catch (const nanobind::python_error& error) {
    const auto text = [&] { return nanobind::cast<std::string>(nanobind::str(error.value())); };
    if (error.matches(error_class("PeerLostError"))) throw PeerLost(text());
    if (error.matches(error_class("StallError"))) throw Stalled(text());
    throw PythonError(error);
  }
}

// The factors of the contributions of `n` ranks: their weights, if they have any, times a common factor.
inline std::vector<double> multiplied(std::vector<double> weights, double prescale, size_t n) {
  if (weights.empty() && prescale != 1.0) weights.assign(n, 1.0);
  for (double& weight : weights) weight *= prescale;
  return weights;
}

void bind_tensors(nanobind::module_& m);
void bind_segment(nanobind::module_& m);
void bind_stall_detector(nanobind::module_& m);
void bind_rank_group(nanobind::module_& m);
void bind_shm_group(nanobind::module_& m);
void bind_wire_layout(nanobind::module_& m);
void bind_engine(nanobind::module_& m);
void bind_hosts(nanobind::module_& m);
void bind_device(nanobind::module_& m);
void bind_nccl(nanobind::module_& m);
void bind_xla(nanobind::module_& m);
void bind_reused_memory(nanobind::module_& m);
void bind_recorder(nanobind::module_& m);

}  // namespace horo
