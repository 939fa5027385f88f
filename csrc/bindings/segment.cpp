// Shared memory for Python.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/shared_ptr.h>

#include <memory>

#include "bindings/python.h"
#include "shm/segment.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace horo {

void bind_segment(nb::module_& m) {
  nb::class_<Segment>(m, "Segment", nb::is_weak_referenceable())
      .def_static(
          "create", [](size_t n_bytes) { return std::make_shared<Segment>(Segment::create(n_bytes)); }, "n_bytes"_a)
      .def_static(
          "adopt", [](int fd, size_t n_bytes) { return std::make_shared<Segment>(Segment::adopt(fd, n_bytes)); },
          "fd"_a, "n_bytes"_a, "Memory of another library, as a file that no longer has a name.")
      .def_static(
          "open",
          [](int pid, int fd, size_t n_bytes, uint64_t token) {
            return std::make_shared<Segment>(Segment::open(pid, fd, n_bytes, token));
          },
          "pid"_a, "fd"_a, "n_bytes"_a, "token"_a)
      .def("close_descriptor", &Segment::close_descriptor)
      .def("make_private", &Segment::make_private, "For forked children: their writes become private.")
      .def(
          "array",
          [](nb::object self, size_t begin, size_t n_bytes) {
            const auto& segment = nb::cast<const Segment&>(self);
            return nb::ndarray<nb::numpy, uint8_t, nb::ndim<1>>(segment.data() + begin, {n_bytes}, self);
          },
          "begin"_a, "n_bytes"_a, "Return a part of the segment, which keeps it alive.")
      .def_prop_ro("fd", &Segment::fd)
      .def_prop_ro("token", &Segment::token)
      .def_prop_ro("address", [](const Segment& segment) { return reinterpret_cast<uintptr_t>(segment.data()); });
}

}  // namespace horo
