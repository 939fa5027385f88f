// Lists of arrays for Python, and functions of the bits of their elements.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include <cstring>
#include <stdexcept>

#include "bindings/python.h"
#include "bindings/tensors.h"
#include "pack/fingerprint.h"
#include "pack/layout.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace horo {
namespace {

void check_in_host_memory(const Tensors& tensors, bool in_c_order) {
  if (tensors.device() != kCpu || !tensors.strided().empty() || (in_c_order && tensors.layout() != 0)) {
    throw std::invalid_argument("arrays must be in host memory, dense and in C order, to be inspected");
  }
}

// The arrays, seen as bytes unless their elements are numbers to the core.
TensorRef comparable(const Tensors& tensors) {
  TensorRef ref = tensors.refs()[0];
  if (tensors.type(0) == nullptr) return ref;
  ref.n_elements *= item_bytes(ref.dtype);
  ref.dtype = DType::kUInt8;
  return ref;
}

}  // namespace

void bind_tensors(nb::module_& m) {
  nb::class_<Tensors>(m, "Tensors", "Addresses of a list of arrays, which are kept alive by this object.")
      .def(nb::init<nb::typed<nb::sequence, nb::object>, bool, std::optional<intptr_t>>(), "arrays"_a,
           "writable"_a = true, "stream"_a = nb::none())
      .def_prop_ro("device", &Tensors::device)
      .def(
          "rows",
          [](nb::object self, const std::vector<std::pair<int64_t, int64_t>>& ranges) {
            return new Tensors(nb::cast<const Tensors&>(self), self, ranges, false);
          },
          "ranges"_a, nb::rv_policy::take_ownership, "Return the rows from `begin` to `end` of each array.")
      .def(
          "elements",
          [](nb::object self, const std::vector<std::pair<int64_t, int64_t>>& ranges) {
            return new Tensors(nb::cast<const Tensors&>(self), self, ranges, true);
          },
          "ranges"_a, nb::rv_policy::take_ownership,
          "Return the elements from `begin` to `end` of each array, in C order.")
      .def("__len__", [](const Tensors& t) { return t.refs().size(); })
      .def_prop_ro("nbytes", &Tensors::n_bytes)
      .def_prop_ro("signature", &Tensors::signature)
      .def_prop_ro("dtypes", &Tensors::dtypes)
      .def_prop_ro("layout", &Tensors::layout)
      .def_prop_ro("reordered", &Tensors::reordered)
      .def_prop_ro("strided", &Tensors::strided)
      .def_prop_ro("addresses", &Tensors::addresses)
      .def(
          "buffers",
          [](const Tensors& tensors) {
            std::vector<std::pair<uintptr_t, size_t>> buffers;
            for (const Buffer& b : tensors.buffers())
              buffers.emplace_back(reinterpret_cast<uintptr_t>(b.data), b.n_bytes);
            return buffers;
          },
          "The address and size in bytes of each array.")
      .def(
          "overlaps",
          [](const Tensors& tensors, const Tensors* other) {
            std::vector<std::tuple<size_t, size_t, ptrdiff_t, bool>> found;
            for (const Overlap& o : tensors.overlaps(other)) found.emplace_back(o.first, o.second, o.distance, o.same);
            return found;
          },
          "other"_a = nb::none(),
          "Return (first, second, distance in bytes, whether they are one tensor) for each pair with common elements: "
          "among these, or of these and `other`. With the same index twice, its own elements share memory.")
      .def("dtype", &Tensors::dtype, "index"_a)
      .def("describe", &Tensors::describe, "index"_a)
      .def(
          "outline", [](const Tensors& t) { return std::make_unique<Tensors>(t, 0, t.refs().size()); },
          "Return a copy for descriptions only, which does not keep the memory alive.")
      .def(
          "shape",
          [](const Tensors& t, size_t index) {
            const Axes shape = t.shape(index);
            return std::vector<int64_t>(shape.begin(), shape.end());
          },
          "index"_a)
      .def(
          "itemsize", [](const Tensors& t, size_t index) { return t.item_size(index); }, "index"_a)
      .def(
          "is_number", [](const Tensors& t, size_t index) { return t.type(index) == nullptr; }, "index"_a,
          "Whether the core itself has a type for its elements: complex numbers are pairs, others bytes.")
      .def(
          "read_from", [](Tensors& t, const Tensors& sources) { t.read_from(sources); }, "sources"_a,
          nb::keep_alive<1, 2>(),
          "Let an all-reduce of these read the contributions from `sources`, and write the results here.")
      .def(
          "keep_residuals", [](Tensors& t, const Tensors& residuals) { t.keep_residuals(residuals); }, "residuals"_a,
          nb::keep_alive<1, 2>(),
          "Let an all-reduce of these with quantized messages keep in `residuals`, which are float32 of the same "
          "sizes, or empty, what the messages of this rank lack, and add it to the next.")
      .def(
          "is_float", [](const Tensors& t, size_t index) { return t.refs().at(index).dtype >= DType::kFloat16; },
          "index"_a, "Whether its elements are floating point or complex numbers.")
      .def(
          "n_reals", [](const Tensors& t, size_t index) { return t.refs().at(index).n_elements; }, "index"_a,
          "Its number of elements; for complex numbers, twice that.")
      .def(
          "copy_to",
          [](const Tensors& from, const Tensors& to, bool streaming) {
            const WithoutGil release;
            const Stores stores = streaming ? Stores::kStreaming : Stores::kCached;
            const std::vector<Buffer> source = from.buffers();
            const std::vector<Buffer> target = to.buffers();
            for (size_t i = 0; i < source.size(); ++i) {
              if (source[i].n_bytes != target.at(i).n_bytes) throw std::invalid_argument("the sizes differ");
              if (target[i].data == source[i].data) continue;  // a part of the result, as in FSDP's gathers
              copy_bytes(target[i].data, source[i].data, source[i].n_bytes, stores);
            }
            finish_stores(stores);
          },
          "other"_a, "streaming"_a = false, "For host memory only. With `streaming`, bypass the caches.");

  m.def(
      "dtypes",
      [] {
        std::vector<std::string> names;
        for (int i = 0; i <= static_cast<int>(DType::kLast); ++i) names.push_back(dtype_name(static_cast<DType>(i)));
        return names;
      },
      "Return the names of all dtypes; `Tensors.dtypes` has a bit for each, in this order.");

  m.def(
      "fingerprints",
      [](const Tensors& tensors) {
        check_in_host_memory(tensors, true);
        const WithoutGil release;
        std::vector<uint64_t> hashes;
        for (const TensorRef& ref : tensors.refs()) hashes.push_back(fingerprint(ref));
        return hashes;
      },
      "tensors"_a, "Return a 64-bit hash of the bits of each array, which must be in C order.");

  m.def(
      "count_non_finite",
      [](const Tensors& tensors) {
        check_in_host_memory(tensors, false);
        const WithoutGil release;
        std::vector<std::pair<size_t, size_t>> counts;
        for (const TensorRef& ref : tensors.refs()) {
          const NonFinite found = count_non_finite(ref);
          counts.emplace_back(found.n_nan, found.n_inf);
        }
        return counts;
      },
      "tensors"_a, "Return how many elements of each array are NaN, and how many are infinite.");

  m.def(
      "difference",
      [](const Tensors& mine, const Tensors& theirs) {
        check_in_host_memory(mine, true);
        if (mine.refs().size() != 1 || theirs.refs().size() != 1 || mine.n_bytes() != theirs.n_bytes()) {
          throw std::invalid_argument("a difference needs two arrays of the same size");
        }
        const WithoutGil release;
        const Difference found = difference(comparable(mine), comparable(theirs));
        return std::make_tuple(found.n_elements, found.largest, found.magnitude);
      },
      "mine"_a, "theirs"_a,
      "(elements whose bits differ, the largest difference, the largest element of `mine`); the dtype is that of "
      "`mine`.");
}

}  // namespace horo
