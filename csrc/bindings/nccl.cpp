// NCCL for Python.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <cstring>
#include <optional>
#include <tuple>

#include "bindings/python.h"
#include "bindings/tensors.h"
#include "gpu/nccl_dl.h"
#include "gpu/nccl_group.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace horo {
namespace {

using Unlocked = nb::call_guard<WithoutGil>;

std::vector<Buffer> each(ListOf<PyTensors> tensors) {
  std::vector<Buffer> buffers;
  for (nb::handle one : tensors) buffers.push_back(only(nb::cast<const Tensors&>(one).buffers()));
  return buffers;
}

}  // namespace

void bind_nccl(nb::module_& m) {
  m.def(
      "nccl_library",
      [](const std::vector<std::string>& candidates) {
        const NcclLibrary& nccl = nccl_library(candidates);
        return std::make_tuple(nccl.path, nccl.version);
      },
      "candidates"_a, "Path and version (22105 is 2.21.5) of the NCCL in use. Raises DeviceError if there is none.");
  m.def(
      "nccl_unique_id",
      [] {
        NcclUniqueId id{};
        if (nccl_library({}).GetUniqueId(&id) != kNcclSuccess) {
          throw DeviceError("NCCL could not open a socket for its ranks to connect to: NCCL_DEBUG=INFO shows more");
        }
        return nb::bytes(id.bytes, sizeof(id.bytes));
      },
      "A unique ID, which rank 0 sends to the others so that they find each other.");

  nb::class_<NcclGroup>(m, "NcclGroup", "The ranks of a world, each with its own GPU, connected by NCCL.")
      .def(nb::new_([](std::shared_ptr<DeviceQueue> queue, nb::bytes id, int rank, int size, size_t bucket_bytes,
                       double timeout_s) {
             NcclUniqueId unique{};
             if (id.size() != sizeof(unique.bytes)) throw std::invalid_argument("a unique ID has 128 bytes");
             std::memcpy(unique.bytes, id.data(), sizeof(unique.bytes));
             const WithoutGil release;  // while all ranks connect
             return unlocked(new NcclGroup(std::move(queue), nccl_library({}), unique, rank, size, bucket_bytes,
                                           timeout_s, check_signals));
           }),
           "queue"_a, "id"_a, "rank"_a, "size"_a, "bucket_bytes"_a, "timeout_s"_a)
      .def(
          "split",
          [](NcclGroup& group, int color, int rank, int size) {
            const WithoutGil release;
            auto part = group.split(color, rank, size);
            return part ? std::optional(unlocked(part.release())) : std::nullopt;
          },
          "color"_a, "rank"_a, "size"_a)
      .def_prop_ro("rank", &NcclGroup::rank)
      .def_prop_ro("size", &NcclGroup::size)
      .def_prop_ro("can_use_windows", &NcclGroup::can_use_windows)
      .def_prop_ro("registered", &NcclGroup::registered)
      .def("register_bucket", &NcclGroup::register_bucket, "windows"_a, Unlocked())
      .def_static(
          "can_reduce",
          [](const Tensors& tensors, const std::string& op, double prescale, double scale, double divisor) {
            return NcclGroup::can_reduce(tensors.refs(), op_of(op), prescale, {scale, divisor});
          },
          "tensors"_a, "op"_a, "prescale"_a, "scale"_a, "divisor"_a)
      .def(
          "reduce",
          [](NcclGroup& group, ListOf<PyTensors> parts, const std::string& op, const std::string& wire, double prescale,
             double scale, double divisor, std::optional<double> weight) {
            const std::vector<std::vector<TensorRef>> refs = refs_of(parts);
            const WithoutGil release;
            group.reduce(refs, op_of(op), wire_of(wire), prescale, {scale, divisor}, weight);
          },
          "parts"_a, "op"_a, "wire"_a, "prescale"_a, "scale"_a, "divisor"_a, "weight"_a = nb::none(),
          "Reduce in place; rank r receives parts[r], or every rank the only part.")
      .def(
          "broadcast",
          [](NcclGroup& group, ListOf<PyTensors> of_rank) {
            std::vector<std::vector<Buffer>> buffers;
            for (nb::handle one : of_rank) buffers.push_back(nb::cast<const Tensors&>(one).buffers());
            const WithoutGil release;
            group.broadcast(buffers);
          },
          "of_rank"_a, "All ranks receive in of_rank[r] what rank r has there.")
      .def(
          "alltoall",
          [](NcclGroup& group, ListOf<PyTensors> send, ListOf<PyTensors> receive) {
            const std::vector<Buffer> from = each(send);
            const std::vector<Buffer> into = each(receive);
            const WithoutGil release;
            group.alltoall(from, into);
          },
          "send"_a, "receive"_a)
      .def("close", &NcclGroup::close, Unlocked())
      .def("fail", &NcclGroup::fail, "reason"_a, Unlocked())
      .def("check", &NcclGroup::check, Unlocked());
}

}  // namespace horo
