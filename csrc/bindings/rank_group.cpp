// A group of ranks, for Python: what groups on one host and on several have in common.
#include "engine/rank_group.h"

#include <nanobind/nanobind.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <tuple>

#include "bindings/python.h"
#include "bindings/tensors.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace horo {

void bind_rank_group(nb::module_& m) {
  nb::class_<RankGroup>(m, "RankGroup", "A group of ranks, whatever carries bytes between them.")
      .def_prop_ro("rank", &RankGroup::rank)
      .def_prop_ro("size", &RankGroup::size)
      .def_prop_ro("label", &RankGroup::label, "The name of the operation that began last.")
      .def(
          "agree",
          [](RankGroup& g, const std::string& label, uint64_t digest, int64_t count, double weight) {
            std::vector<Header> headers;
            {
              const WithoutGil release;
              headers = g.agree(label, {digest, count, weight, 0, 0});
            }
            std::vector<std::tuple<uint64_t, int64_t, double>> result;
            result.reserve(headers.size());
            for (const Header& h : headers) result.emplace_back(h.digest, h.count, h.weight);
            return result;
          },
          "label"_a, "digest"_a, "count"_a = 0, "weight"_a = 1.0,
          "Wait until all ranks are in this call; return everyone's digest, count and weight in rank order.")
      .def(
          "allreduce",
          [](RankGroup& g, const Tensors& tensors, const std::string& op, const std::string& wire, double prescale,
             double scale, double divisor, const std::vector<double>& weights,
             const std::vector<ptrdiff_t>& distances) {
            const WithoutGil release;
            g.allreduce(tensors.refs(), op_of(op), wire_of(wire), multiplied(weights, prescale, g.size()),
                        {scale, divisor}, distances);
          },
          "tensors"_a, "op"_a, "wire"_a, "prescale"_a = 1.0, "scale"_a = 1.0, "divisor"_a = 1.0,
          "weights"_a = std::vector<double>(), "distances"_a = std::vector<ptrdiff_t>(),
          "Reduce in place. With `distances`, the tensors are in memory that all ranks share: rank r's are at "
          "distances[r] bytes from these.")
      .def(
          "reduce_scatter",
          [](RankGroup& g, ListOf<PyTensors> parts, const Tensors& result, const std::string& op,
             const std::string& wire, double prescale, double scale, double divisor, const std::vector<double>& weights,
             const std::vector<ptrdiff_t>& distances) {
            const auto refs = parts_with_result(parts, g.size(), g.rank(), result);
            const WithoutGil release;
            g.reduce_scatter(refs, op_of(op), wire_of(wire), multiplied(weights, prescale, g.size()), {scale, divisor},
                             distances);
          },
          "parts"_a, "result"_a, "op"_a, "wire"_a, "prescale"_a = 1.0, "scale"_a = 1.0, "divisor"_a = 1.0,
          "weights"_a = std::vector<double>(), "distances"_a = std::vector<ptrdiff_t>(),
          "Leave the reduction of parts[rank] in `result`; each part has the same sizes on all ranks. With "
          "`distances`, the parts are in memory that all ranks share, as above.")
      .def(
          "check_peers", [](RankGroup& g, const std::string& name, int awaited) { g.check_peers(awaited, name); },
          "name"_a, "awaited"_a = -1, nb::call_guard<WithoutGil>(),
          "Raise PeerLostError if a peer has died or given up, or if `awaited`, which `name` needs, has left.")
      .def("has_left", &RankGroup::has_left, "rank"_a, "n_records"_a, nb::call_guard<WithoutGil>(),
           "Return whether that rank has left after sending this one at most n_records messages.")
      .def("abandon", &RankGroup::abandon, "reason"_a, nb::call_guard<WithoutGil>(),
           "Make peers that wait for this rank, now or later, raise PeerLostError. Never blocks.")
      .def("leave", &RankGroup::leave, "reason"_a, nb::call_guard<WithoutGil>(),
           "Leave the group; peers that wait for this rank raise PeerLostError. Never blocks.")
      .def("given_up", &RankGroup::given_up,
           "Return whether this rank has given up the group, or an operation has failed on it.")
      .def("announce", &RankGroup::announce, "what"_a, "expect_s"_a, nb::call_guard<WithoutGil>(),
           "Tell peers on other hosts how late this rank will be; \"\": no longer.")
      .def("peer_pids", &RankGroup::peer_pids, "silent"_a,
           "Return the process IDs of this host's other ranks, alive or dead, that have not left; with `silent`, "
           "without those that have given up.")
      .def("claim_report", &RankGroup::claim_report,
           "Return True to the first rank of the host that asks: it reports for all of them.")
      .def("peer_reports", &RankGroup::peer_reports,
           "Return whether another rank of the host, which is alive, has claimed the report.");
}

}  // namespace horo
