// The ranks of one host, for Python.
#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <limits>
#include <tuple>

#include "bindings/shm_group.h"
#include "bindings/stall_detector.h"
#include "engine/shm_channel.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace horo {
namespace {

constexpr const char* kSlotStores[] = {"auto", "cached", "streaming"};

SlotStores slot_stores_of(const std::string& how) {
  for (int i = 0; i < 3; ++i) {
    if (how == kSlotStores[i]) return static_cast<SlotStores>(i);
  }
  throw std::invalid_argument("slot stores must be 'auto', 'cached' or 'streaming', not '" + how + "'");
}

size_t total_bytes(const std::vector<TensorRef>& refs) {
  size_t total = 0;
  for (const TensorRef& ref : refs) total += ref.n_elements * item_bytes(ref.dtype);
  return total;
}

Layout in_place(const std::vector<TensorRef>& tensors, Op op, int n_shares) {
  return Layout(tensors, op, Wire::kNone, std::numeric_limits<size_t>::max(), n_shares);
}

}  // namespace

std::unique_ptr<Channel> PyShmGroup::engine_channel(const std::shared_ptr<RankGroup>& self) {
  return std::make_unique<ShmChannel>(std::shared_ptr<ShmGroup>(self, &shm));
}

// These lay the tensors out on the wire for the call.
void PyShmGroup::allreduce(const std::vector<TensorRef>& tensors, Op op, Wire wire, const std::vector<double>& weights,
                           Factor factor, const std::vector<ptrdiff_t>& distances) {
  if (distances.empty()) {
    shm.allreduce(Layout(tensors, op, within_host(wire), shm.chunk_bytes(total_bytes(tensors)), size()), weights,
                  factor);
  } else {
    shm.reduce_in_place(in_place(tensors, op, size()), distances, factor);
  }
}

void PyShmGroup::reduce_scatter(const std::vector<std::vector<TensorRef>>& parts, Op op, Wire wire,
                                const std::vector<double>& weights, Factor factor,
                                const std::vector<ptrdiff_t>& distances) {
  if (!distances.empty()) {
    shm.reduce_in_place(in_place(parts[static_cast<size_t>(rank())], op, 1), distances, factor);
    return;
  }
  size_t total = 0;
  for (const std::vector<TensorRef>& part : parts) total += total_bytes(part);
  shm.reduce_scatter(Layout(parts, op, within_host(wire), shm.chunk_bytes(total)), weights, factor);
}

std::vector<Buffer> buffers_of(ListOf<PyTensors> stream) {
  std::vector<Buffer> buffers;
  for (nb::handle tensors : stream) {
    for (const Buffer& buffer : nb::cast<Tensors&>(tensors).buffers()) buffers.push_back(buffer);
  }
  return buffers;
}

std::vector<Wanted> wanted_of(ListOf<WantedTuple> wanted) {
  std::vector<Wanted> parts;
  for (nb::handle one : wanted) {
    const auto [source, begin, into] = nb::cast<std::tuple<int, size_t, nb::object>>(one);
    parts.push_back({source, begin, nb::cast<Tensors&>(into).buffers()});
  }
  return parts;
}

void bind_shm_group(nb::module_& m) {
  nb::class_<PyShmGroup, RankGroup>(m, "ShmGroup", "The ranks of one host, in shared memory.")
      .def(nb::init<std::shared_ptr<Segment>, size_t, int, int, std::vector<int>, std::vector<std::string>>(),
           "segment"_a, "offset"_a, "rank"_a, "size"_a, "pids"_a, "names"_a)
      .def_static("memory_bytes", &ShmGroup::memory_bytes, "size"_a)
      .def_prop_ro("slot_stores",
                   [](const PyShmGroup& g) { return kSlotStores[static_cast<int>(g.shm.slot_stores.load())]; })
      .def(
          "write_slots", [](PyShmGroup& g, const std::string& how) { g.shm.slot_stores = slot_stores_of(how); },
          "how"_a)
      .def_prop_ro("stores", [](const PyShmGroup& g) { return kSlotStores[1 + static_cast<int>(g.shm.stores())]; })
      .def_prop_ro("round_trip_ns", [](const PyShmGroup& g) { return g.shm.round_trip_ns(); })
      .def(
          "watched_by",
          [](PyShmGroup& g, std::shared_ptr<PyStallDetector> detector, std::vector<int> ranks) {
            g.shm.watched_by(std::move(detector), std::move(ranks));
          },
          "detector"_a, "ranks"_a, "`ranks` are the group's ranks in the world.")
      .def(
          "exchange",
          [](PyShmGroup& g, ListOf<PyTensors> stream, const std::vector<size_t>& stream_bytes,
             ListOf<WantedTuple> wanted) {
            const auto out = buffers_of(stream);
            const auto parts = wanted_of(wanted);
            const WithoutGil release;
            g.shm.exchange(out, stream_bytes, parts);
          },
          "stream"_a, "stream_bytes"_a, "wanted"_a)
      .def(
          "report_at_sigterm", [](PyShmGroup& g) { g.shm.report_at_sigterm(); },
          "If SIGTERM ends this process after a peer was killed, report which peer.");

  m.def(
      "thread_group",
      [](int size) {
        auto memory = std::make_shared<Segment>(Segment::local(ShmGroup::memory_bytes(size)));
        std::vector<std::string> names;
        for (int r = 0; r < size; ++r) names.push_back("rank " + std::to_string(r));
        std::vector<std::shared_ptr<PyShmGroup>> groups;
        for (int r = 0; r < size; ++r) {
          groups.push_back(std::make_shared<PyShmGroup>(memory, 0, r, size, std::vector<int>(size, 0), names));
        }
        return groups;
      },
      "size"_a, "Return ranks as threads of this process, for tests.");
}

}  // namespace horo
