// The stall detector for Python.
#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <memory>
#include <optional>

#include "bindings/python.h"
#include "bindings/stall_detector.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace horo {
namespace {

// A wait in Python.
struct PyWait {
  std::optional<StallDetector::Wait> wait;
};

}  // namespace

void bind_stall_detector(nb::module_& m) {
  nb::class_<PyWait>(m, "Wait", "What one thread of this rank waits for.")
      .def(
          "report_if_due",
          [](PyWait& self, const std::string& what, const std::vector<int>& arrived, const std::vector<int>& late) {
            const WithoutGil release;
            self.wait.value().report_if_due(what, arrived, late);
          },
          "what"_a, "arrived"_a, "late"_a, "Must be called a few times per second. Raises StallError.")
      .def(
          "close",
          [](PyWait& self, bool went_well) {
            if (self.wait && went_well) self.wait->over();
            self.wait.reset();
          },
          "went_well"_a);

  nb::class_<PyStallDetector>(m, "StallDetector", "Tracks which ranks of a host wait for which, and which are late.")
      .def(nb::init<std::shared_ptr<Segment>, size_t, int, std::vector<int>, std::vector<int>,
                    std::vector<std::string>>(),
           "segment"_a, "offset"_a, "rank"_a, "hosts"_a, "pids"_a, "names"_a)
      .def_static("memory_bytes", &StallDetector::memory_bytes, "size"_a)
      .def_prop_ro("rank", [](const PyStallDetector& l) { return l.rank(); })
      .def(
          "set_limits", [](PyStallDetector& l, double warn_s, double abort_s) { l.set_limits(warn_s, abort_s); },
          "warn_s"_a, "abort_s"_a)
      .def_prop_ro("warn_s", [](const PyStallDetector& l) { return l.warn_s(); })
      .def_prop_ro("abort_s", [](const PyStallDetector& l) { return l.abort_s(); })
      .def(
          "give_stacks", [](PyStallDetector& l, int fd, int signal) { l.give_stacks(fd, signal); }, "fd"_a, "signal"_a)
      .def(
          "announce",
          [](PyStallDetector& l, int rank, const std::string& what, double expect_s) {
            l.announce(rank, what, expect_s);
          },
          "rank"_a, "what"_a, "expect_s"_a)
      .def(
          "doing", [](PyStallDetector& l, const std::string& what) { l.doing(what, StallDetector::clock_ns()); },
          "what"_a)
      .def(
          "wait",
          [](const std::shared_ptr<PyStallDetector>& l) {
            auto wait = std::make_unique<PyWait>();
            wait->wait.emplace(l);
            return wait.release();
          },
          nb::rv_policy::take_ownership)
      .def(
          "lateness",
          [](const PyStallDetector& l) {
            std::vector<std::pair<int64_t, double>> all;
            for (const Lateness& each : l.lateness()) all.emplace_back(each.n_last, each.waited_s);
            return all;
          },
          "For every rank: how often it was last, and how long each of the others waited for it on average.")
      .def(
          "stall", [](PyStallDetector& l, const std::string& reason) { l.stall(reason); }, "reason"_a,
          "Make all ranks of this host raise StallError, now or in their next call.")
      .def("check", [](const PyStallDetector& l) { l.check(); })
      .def_static(
          "limit_thread",
          [](double abort_s) {
            const double former_s = 1e-9 * static_cast<double>(StallDetector::thread_abort_ns);
            StallDetector::thread_abort_ns = static_cast<int64_t>(1e9 * abort_s);
            return former_s;
          },
          "abort_s"_a, "Limit how long this thread may wait, 0 for no limit of its own; return the former limit.");
}

}  // namespace horo
