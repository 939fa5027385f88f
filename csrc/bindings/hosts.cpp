// The all-reduce among several hosts, for Python.
#include <nanobind/nanobind.h>
#include <nanobind/stl/array.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <tuple>

#include "bindings/shm_group.h"
#include "hosts/hosts_allreduce.h"
#include "hosts/mpi.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace horo {
namespace {

using MessageTuple = std::tuple<int, int, uintptr_t, size_t>;

std::vector<MessageTuple> tuples(const std::vector<Message>& messages) {
  std::vector<MessageTuple> result;
  for (const Message& m : messages) {
    result.emplace_back(m.peer, m.tag, reinterpret_cast<uintptr_t>(m.data), m.n_bytes);
  }
  return result;
}

std::vector<Message> messages(const std::vector<MessageTuple>& tuples) {
  std::vector<Message> result;
  for (const auto& [peer, tag, address, n_bytes] : tuples) {
    result.push_back({peer, tag, reinterpret_cast<uint8_t*>(address), n_bytes});
  }
  return result;
}

class PythonTransfer : public Transfer {
 public:
  explicit PythonTransfer(Shared done) : done_(std::move(done)) {}
  bool done() override {
    return in_python([&] { return nb::cast<bool>(nb::handle(done_.get())()); });
  }

 private:
  Shared done_;
};

class PythonPointToPoint : public PointToPoint {
 public:
  PythonPointToPoint(nb::callable start, size_t largest_message)
      : start_(shared(start)), largest_message_(largest_message) {}
  size_t largest_message() const override { return largest_message_; }
  std::unique_ptr<Transfer> start(const std::vector<Message>& receive, const std::vector<Message>& send) override {
    return in_python([&] {
      const nb::object done = nb::handle(start_.get())(tuples(receive), tuples(send));
      return std::make_unique<PythonTransfer>(shared(done));
    });
  }

 private:
  Shared start_;
  size_t largest_message_;
};

std::vector<uint8_t> contents(const nb::bytes& bytes) {
  const auto* data = static_cast<const uint8_t*>(bytes.data());
  return {data, data + bytes.size()};
}

void* pointer(uintptr_t address) { return reinterpret_cast<void*>(address); }

// Both keep what they work on.
struct PyTransfer {
  std::shared_ptr<PointToPoint> messages;
  Shared owner;
  std::unique_ptr<Transfer> transfer;
};

struct PyHostsAllreduce {
  std::shared_ptr<PyShmGroup> group;
  HostsAllreduce hosts;

  PyHostsAllreduce(std::shared_ptr<PyShmGroup> host, std::shared_ptr<PointToPoint> messages,
                   std::vector<std::vector<int>> ranks, int here, uintptr_t memory)
      : group(std::move(host)),
        hosts(group->shm, std::move(messages), {std::move(ranks), here}, reinterpret_cast<uint8_t*>(memory)) {}
};

}  // namespace

void bind_hosts(nb::module_& m) {
  nb::class_<PyTransfer>(m, "Transfer", "What is under way to and from other hosts.")
      .def(
          // With the GIL in hand: to have it back takes longer where Python is busy.
          "__call__", [](PyTransfer& self) { return self.transfer->done(); },
          "Whether all of it is complete. Never waits; bytes may move only in these calls.")
      .def(
          "wait",
          [](PyTransfer& self, nb::callable on_idle) {
            const Shared idle = shared(on_idle);
            const WithoutGil release;
            self.transfer->wait([&] { in_python([&] { nb::handle(idle.get())(); }); });
          },
          "on_idle"_a);

  nb::class_<PointToPoint>(m, "PointToPoint", "Messages between ranks of different hosts.")
      .def_static(
          "calling",
          [](nb::callable start, std::optional<size_t> largest_message) {
            return std::shared_ptr<PointToPoint>(
                std::make_shared<PythonPointToPoint>(start, largest_message.value_or(SIZE_MAX)));
          },
          "start"_a, "largest_message"_a = nb::none());

  nb::class_<MpiPointToPoint, PointToPoint>(m, "MpiPointToPoint", "Over MPI, without the GIL.")
      .def_static(
          "over",
          [](const std::array<uintptr_t, 5>& functions, const nb::bytes& communicator, const nb::bytes& byte,
             size_t status_bytes, std::optional<size_t> largest_message) {
            const auto [isend, irecv, iallgather, testall, error_string] = functions;
            return std::shared_ptr<MpiPointToPoint>(mpi_point_to_point(
                {pointer(isend), pointer(irecv), pointer(iallgather), pointer(testall), pointer(error_string)},
                {contents(communicator), contents(byte), status_bytes}, largest_message.value_or(SIZE_MAX)));
          },
          "functions"_a, "communicator"_a, "byte"_a, "status_bytes"_a, "largest_message"_a = nb::none())
      .def(
          "start",
          [](std::shared_ptr<MpiPointToPoint> self, const std::vector<MessageTuple>& receive,
             const std::vector<MessageTuple>& send, nb::object owner) {
            return std::make_shared<PyTransfer>(self, shared(owner), self->start(messages(receive), messages(send)));
          },
          "receive"_a, "send"_a, "owner"_a)
      .def(
          "allgather",
          [](std::shared_ptr<MpiPointToPoint> self, uintptr_t mine, size_t n_bytes, uintptr_t everyone,
             nb::object owner) {
            auto transfer = self->allgather(static_cast<const uint8_t*>(pointer(mine)), n_bytes,
                                            static_cast<uint8_t*>(pointer(everyone)));
            return std::make_shared<PyTransfer>(self, shared(owner), std::move(transfer));
          },
          "mine"_a, "n_bytes"_a, "everyone"_a, "owner"_a)
      .def(
          "started",
          [](std::shared_ptr<MpiPointToPoint> self, const std::vector<uintptr_t>& requests, nb::object owner) {
            std::vector<void*> at;
            for (const uintptr_t address : requests) at.push_back(pointer(address));
            return std::make_shared<PyTransfer>(self, shared(owner), self->started(at));
          },
          "requests"_a, "owner"_a);

  nb::class_<PyHostsAllreduce>(m, "HostsAllreduce", "The all-reduce among several hosts.")
      .def(nb::init<std::shared_ptr<PyShmGroup>, std::shared_ptr<PointToPoint>, std::vector<std::vector<int>>, int,
                    uintptr_t>(),
           "group"_a, "messages"_a, "ranks"_a, "here"_a, "memory"_a)
      .def_static(
          "memory_bytes",
          [](std::vector<std::vector<int>> ranks, int here) { return Hosts{std::move(ranks), here}.memory_bytes(); },
          "ranks"_a, "here"_a)
      .def_prop_ro("window_bytes", [](const PyHostsAllreduce& self) { return self.hosts.hosts().window_bytes(); })
      .def_prop_ro("n_shares", [](const PyHostsAllreduce& self) { return self.hosts.hosts().n_shares(); })
      .def(
          "allreduce",
          [](PyHostsAllreduce& self, const Layout& layout, double prescale, double scale, double divisor,
             const std::vector<double>& weights, const std::string& label, nb::callable on_idle) {
            const Shared idle = shared(on_idle);
            const WithoutGil release;
            self.hosts.on_idle = [&] { in_python([&] { nb::handle(idle.get())(); }); };
            const auto multipliers = multiplied(weights, prescale, self.group->shm.size());
            self.hosts.allreduce(layout, multipliers, {scale, divisor}, label);
          },
          "layout"_a, "prescale"_a, "scale"_a, "divisor"_a, "weights"_a, "label"_a, "on_idle"_a);
}

}  // namespace horo
