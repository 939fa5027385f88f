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

using HeaderTuple = std::tuple<uint64_t, int64_t, double>;

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

// These lay the tensors out on the wire for the call.
void all_reduce(ShmGroup& group, const std::vector<TensorRef>& refs, Op op, Wire wire,
                const std::vector<double>& weights, Factor factor) {
  const Layout layout(refs, op, wire, group.chunk_bytes(total_bytes(refs)), group.size());
  group.allreduce(layout, weights, factor);
}

void reduce_scatter(ShmGroup& group, const std::vector<std::vector<TensorRef>>& parts, Op op, Wire wire,
                    const std::vector<double>& weights, Factor factor) {
  size_t total = 0;
  for (const std::vector<TensorRef>& part : parts) total += total_bytes(part);
  const Layout layout(parts, op, wire, group.chunk_bytes(total));
  group.reduce_scatter(layout, weights, factor);
}

void reduce_in_place(ShmGroup& group, const std::vector<TensorRef>& refs, Op op, Factor factor,
                     const std::vector<ptrdiff_t>& distances) {
  const Layout layout(refs, op, Wire::kNone, std::numeric_limits<size_t>::max(), group.size());
  group.reduce_in_place(layout, distances, factor);
}

}  // namespace

std::unique_ptr<Channel> PyShmGroup::engine_channel(const std::shared_ptr<EngineGroup>& self) {
  return std::make_unique<ShmChannel>(std::shared_ptr<ShmGroup>(self, &shm));
}

void PyShmGroup::reduce(const std::vector<TensorRef>& tensors, Op op, Wire wire, const std::vector<double>& weights,
                        Factor factor, const std::vector<ptrdiff_t>& distances) {
  if (distances.empty()) all_reduce(shm, tensors, op, wire, weights, factor);
  else reduce_in_place(shm, tensors, op, factor, distances);
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
  nb::class_<EngineGroup>(m, "EngineGroup", "What an engine needs from a group of ranks.");
  nb::class_<PyShmGroup, EngineGroup>(m, "ShmGroup", "The ranks of one host, in shared memory.")
      .def(nb::init<std::shared_ptr<Segment>, size_t, int, int, std::vector<int>, std::vector<std::string>>(),
           "segment"_a, "offset"_a, "rank"_a, "size"_a, "pids"_a, "names"_a)
      .def_static("memory_bytes", &ShmGroup::memory_bytes, "size"_a)
      .def_prop_ro("rank", [](const PyShmGroup& g) { return g.shm.rank(); })
      .def_prop_ro("size", [](const PyShmGroup& g) { return g.shm.size(); })
      .def_prop_ro("label", [](const PyShmGroup& g) { return g.shm.label(); })
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
          "agree",
          [](PyShmGroup& g, const std::string& label, uint64_t digest, int64_t count, double weight) {
            std::vector<Header> headers;
            {
              const WithoutGil release;
              headers = g.shm.agree(label, {digest, count, weight, 0, 0});
            }
            std::vector<HeaderTuple> result;
            result.reserve(headers.size());
            for (const Header& h : headers) result.emplace_back(h.digest, h.count, h.weight);
            return result;
          },
          "label"_a, "digest"_a, "count"_a = 0, "weight"_a = 1.0)
      .def(
          "allreduce",
          [](PyShmGroup& g, const Tensors& tensors, const std::string& op, const std::string& wire, double prescale,
             double scale, double divisor, const std::vector<double>& weights) {
            const WithoutGil release;
            const auto multipliers = multiplied(weights, prescale, g.shm.size());
            all_reduce(g.shm, tensors.refs(), op_of(op), wire_of(wire), multipliers, {scale, divisor});
          },
          "tensors"_a, "op"_a, "wire"_a, "prescale"_a = 1.0, "scale"_a = 1.0, "divisor"_a = 1.0,
          "weights"_a = std::vector<double>())
      .def(
          "reduce_in_place",
          [](PyShmGroup& g, const Tensors& tensors, const std::string& op, double scale, double divisor,
             const std::vector<ptrdiff_t>& distances) {
            const WithoutGil release;
            reduce_in_place(g.shm, tensors.refs(), op_of(op), {scale, divisor}, distances);
          },
          "tensors"_a, "op"_a, "scale"_a, "divisor"_a, "distances"_a,
          "Reduce tensors in memory that all ranks share, rank r's at distances[r] bytes from these.")
      .def(
          "reduce_scatter",
          [](PyShmGroup& g, ListOf<PyTensors> parts, const Tensors& result, const std::string& op,
             const std::string& wire, double prescale, double scale, double divisor,
             const std::vector<double>& weights) {
            const auto refs = parts_with_result(parts, g.shm.size(), g.shm.rank(), result);
            const WithoutGil release;
            reduce_scatter(g.shm, refs, op_of(op), wire_of(wire), multiplied(weights, prescale, g.shm.size()),
                           {scale, divisor});
          },
          "parts"_a, "result"_a, "op"_a, "wire"_a, "prescale"_a = 1.0, "scale"_a = 1.0, "divisor"_a = 1.0,
          "weights"_a = std::vector<double>(),
          "Leave the reduction of parts[rank] in `result`; each part has the same sizes on all ranks.")
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
          "check_peers",
          [](PyShmGroup& g, const std::string& label, int awaited) { g.shm.check_peers(awaited, label); }, "label"_a,
          "awaited"_a = -1, "Raises PeerLostError if a peer has died or given up, or if `awaited` has left.")
      .def(
          "has_left", [](const PyShmGroup& g, int rank) { return g.shm.has_left(rank); }, "rank"_a)
      .def(
          "abandon", [](PyShmGroup& g, const std::string& reason) { g.shm.abandon(reason); }, "reason"_a)
      .def(
          "leave", [](PyShmGroup& g, const std::string& reason) { g.shm.leave(reason); }, "reason"_a)
      .def(
          "peer_pids", [](const PyShmGroup& g, bool silent) { return g.shm.peer_pids(silent); }, "silent"_a,
          "The process IDs of peers that have not left; with `silent`, also have not given up.")
      .def(
          "claim_report", [](PyShmGroup& g) { return g.shm.claim_report(); },
          "Return True on one rank of the host, the first that calls it.")
      .def(
          "peer_reports", [](PyShmGroup& g) { return g.shm.peer_reports(); },
          "Return whether another rank has claimed the report, and is alive.")
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
