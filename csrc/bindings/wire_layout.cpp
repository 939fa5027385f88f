// The layout of tensors on the wire, for tests and measurements of its kernels.
#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <new>

#include "bindings/python.h"
#include "bindings/tensors.h"
#include "pack/layout.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace horo {

void bind_wire_layout(nb::module_& m) {
  nb::class_<Layout>(m, "WireLayout", "The layout of a list of tensors on the wire, with the kernels for it.")
      .def(
          "__init__",
          [](Layout* self, const Tensors& tensors, const std::string& op, const std::string& wire, size_t chunk_bytes,
             int n_shares) {
            new (self) Layout(tensors.refs(), op_of(op), between_hosts(wire_of(wire)), chunk_bytes, n_shares);
          },
          "tensors"_a, "op"_a, "wire"_a, "chunk_bytes"_a, "n_shares"_a, nb::keep_alive<1, 2>())
      .def_prop_ro("n_chunks", &Layout::n_chunks)
      .def_prop_ro("largest_chunk", &Layout::largest_chunk)
      .def(
          "shares",
          [](const Layout& layout, size_t chunk) {
            std::vector<std::pair<size_t, size_t>> bounds;
            for (int s = 0; s < layout.n_shares(); ++s)
              bounds.emplace_back(layout.share_begin(chunk, s), layout.share_end(chunk, s));
            return bounds;
          },
          "chunk"_a)
      .def(
          "encode",
          [](const Layout& layout, size_t chunk, uintptr_t image) {
            const WithoutGil release;
            for (int s = 0; s < layout.n_shares(); ++s) layout.encode(chunk, s, reinterpret_cast<uint8_t*>(image));
          },
          "chunk"_a, "image"_a)
      .def(
          "reduce",
          [](const Layout& layout, size_t chunk, int share, const std::vector<uintptr_t>& images, double prescale,
             const std::vector<double>& weights, double scale, double divisor, uintptr_t image) {
            const WithoutGil release;
            std::vector<const uint8_t*> from;
            for (uintptr_t address : images) from.push_back(reinterpret_cast<const uint8_t*>(address));
            layout.reduce(chunk, share, from, -1, multiplied(weights, prescale, from.size()), {scale, divisor},
                          reinterpret_cast<uint8_t*>(image), false);
          },
          "chunk"_a, "share"_a, "images"_a, "prescale"_a, "weights"_a, "scale"_a, "divisor"_a, "image"_a)
      .def(
          "decode",
          [](const Layout& layout, size_t chunk, uintptr_t image) {
            const WithoutGil release;
            for (int s = 0; s < layout.n_shares(); ++s)
              layout.decode(chunk, s, reinterpret_cast<const uint8_t*>(image));
          },
          "chunk"_a, "image"_a);
}

}  // namespace horo
