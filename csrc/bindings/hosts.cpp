// The ranks of several hosts, for Python.
#include <nanobind/nanobind.h>
#include <nanobind/stl/array.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <array>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <tuple>

#include "bindings/shm_group.h"
#include "bindings/stall_detector.h"
#include "bindings/tensors.h"
#include "engine/hosts_channel.h"
#include "hosts/hosts_group.h"
#include "hosts/mpi.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace horo {
namespace {

using MessageTuple = std::tuple<int, int, uintptr_t, size_t>;
using Done = Function<bool()>;
using Start = Function<Done(std::vector<MessageTuple>, std::vector<MessageTuple>)>;
using AllGather = Function<Done(uintptr_t, size_t, uintptr_t)>;

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

// A Python object with the methods of carrier.py's Carrier.
class PythonCarrier : public Carrier {
 public:
  PythonCarrier(Start start, AllGather allgather, size_t largest_message)
      : start_(shared(start)), allgather_(shared(allgather)), largest_message_(largest_message) {}
  size_t largest_message() const override { return largest_message_; }
  std::unique_ptr<Transfer> begin(const std::vector<Message>& receive, const std::vector<Message>& send) override {
    return in_python([&] {
      const nb::object done = nb::handle(start_.get())(tuples(receive), tuples(send));
      return std::make_unique<PythonTransfer>(shared(done));
    });
  }
  std::unique_ptr<Transfer> allgather(const uint8_t* mine, size_t n_bytes, uint8_t* everyone) override {
    return in_python([&] {
      const nb::object done = nb::handle(allgather_.get())(reinterpret_cast<uintptr_t>(mine), n_bytes,
                                                           reinterpret_cast<uintptr_t>(everyone));
      return std::make_unique<PythonTransfer>(shared(done));
    });
  }

 private:
  Shared start_;
  Shared allgather_;
  size_t largest_message_;
};

// A Python object with the methods of carrier.py's Channel.
class PythonControlChannel : public ControlChannel {
 public:
  explicit PythonControlChannel(nb::object channel) : channel_(shared(channel)) {}
  void send(const std::map<int, std::string>& texts, int tag) override {
    in_python([&] {
      nb::dict given;
      for (const auto& [peer, text] : texts) given[nb::int_(peer)] = nb::bytes(text.data(), text.size());
      method("send")(given, tag);
    });
  }
  std::vector<ShortMessage> receive() override {
    return in_python([&] {
      std::vector<ShortMessage> received;
      for (nb::handle one : method("receive")()) {
        const auto [peer, tag, text] = nb::cast<std::tuple<int, int, nb::bytes>>(one);
        received.push_back({peer, tag, std::string(text.c_str(), text.size())});
      }
      return received;
    });
  }
  std::vector<int> ended() override {
    return in_python([&] {
      std::vector<int> ended;
      for (nb::handle one : method("ended")()) ended.push_back(nb::cast<int>(one));
      return ended;
    });
  }

 private:
  nb::object method(const char* name) const { return nb::getattr(nb::handle(channel_.get()), name); }
  Shared channel_;
};

std::vector<uint8_t> contents(const nb::bytes& bytes) {
  const auto* data = static_cast<const uint8_t*>(bytes.data());
  return {data, data + bytes.size()};
}

void* pointer(uintptr_t address) { return reinterpret_cast<void*>(address); }

// For calls that hold the GIL: getting it back takes long if Python is busy. It is released only while another thread
// is in MPI, which may need it: mpi4py's reductions may be Python functions.
std::unique_lock<std::recursive_mutex> wait_for_mpi_turn() {
  std::unique_lock turn(mpi_turn, std::defer_lock);
  while (!turn.try_lock()) {
    const WithoutGil release;
    const std::lock_guard until_free(mpi_turn);
  }
  return turn;
}

// Keeps the objects that it works on.
struct PyTransfer {
  std::shared_ptr<PointToPoint> messages;
  Shared owner;
  std::unique_ptr<Transfer> transfer;
};

// A group of ranks on several hosts, and the objects that it works on.
struct PyHostsGroup : RankGroup {
  std::shared_ptr<PyShmGroup> host;
  std::shared_ptr<ControlChannel> wake_ups;  // of the engines' group
  HostsGroup hosts;

  PyHostsGroup(std::shared_ptr<PyShmGroup> host, const std::shared_ptr<Carrier>& carrier,
               const std::shared_ptr<ControlChannel>& control, std::vector<std::vector<int>> all, int here,
               size_t least_window, uintptr_t memory, std::shared_ptr<PyStallDetector> detector, std::vector<int> ranks,
               std::vector<std::string> names)
      : host(host),
        hosts(host->shm, carrier, control, {std::move(all), here, least_window}, static_cast<uint8_t*>(pointer(memory)),
              std::move(detector), std::move(ranks), std::move(names)) {
    hosts.set_on_idle(check_signals);
  }

  int rank() const override { return hosts.rank(); }
  int size() const override { return hosts.size(); }
  std::string label() const override { return hosts.peers().label(); }
  std::vector<Header> agree(const std::string& label, const Header& mine) override { return hosts.agree(label, mine); }
  void allreduce(const std::vector<TensorRef>& tensors, Op op, Wire wire, const std::vector<double>& weights,
                 Factor factor, const std::vector<ptrdiff_t>&) override {
    hosts.allreduce(tensors, op, wire, weights, factor);
  }
  void reduce_scatter(const std::vector<std::vector<TensorRef>>& parts, Op op, Wire wire,
                      const std::vector<double>& weights, Factor factor, const std::vector<ptrdiff_t>&) override {
    hosts.reduce_scatter(parts, op, wire, weights, factor);
  }
  std::unique_ptr<Channel> engine_channel(const std::shared_ptr<RankGroup>& self) override {
    return std::make_unique<HostsChannel>(std::shared_ptr<HostsGroup>(self, &hosts), wake_ups);
  }
  void check_peers(int awaited, const std::string& name) override { hosts.peers().check_one(awaited, name); }
  bool has_left(int rank, int64_t n_records) override { return hosts.peers().has_left(rank, n_records); }
  void abandon(const std::string& reason) override { hosts.abandon(reason); }
  void leave(const std::string& reason) override { hosts.peers().leave(reason); }
  bool given_up() const override { return hosts.given_up(); }
  void announce(const std::string& what, double expect_s) override { hosts.peers().announce(what, expect_s); }
  std::vector<int> peer_pids(bool silent) const override { return host->peer_pids(silent); }
  bool claim_report() override { return host->claim_report(); }
  bool peer_reports() override { return host->peer_reports(); }
};

}  // namespace

void bind_hosts(nb::module_& m) {
  m.def("bytes_sent", [] { return bytes_sent.load(); }, "Return how many bytes carriers were given for other ranks.");
  m.def(
      "count_sent", [](size_t n_bytes) { bytes_sent += n_bytes; }, "n_bytes"_a,
      "Add bytes that a carrier was given without C++.");

  nb::class_<PyTransfer>(m, "Transfer", "Messages in flight to and from other hosts.")
      .def(
          "__call__",
          [](PyTransfer& self) {
            const auto turn = wait_for_mpi_turn();
            return self.transfer->done();
          },
          "Return whether all of it is complete, without waiting; bytes may move only in these calls.");

  nb::class_<Carrier>(m, "Carrier", "Carries bytes between ranks of different hosts.")
      .def_static(
          "made_of",
          [](Start start, AllGather allgather, std::optional<size_t> largest_message) {
            return std::shared_ptr<Carrier>(
                std::make_shared<PythonCarrier>(start, allgather, largest_message.value_or(SIZE_MAX)));
          },
          "start"_a, "allgather"_a, "largest_message"_a = nb::none());

  nb::class_<ControlChannel>(m, "ControlChannel", "Short messages between ranks of different hosts.")
      .def_static(
          "calling",
          [](nb::object channel) {
            return std::shared_ptr<ControlChannel>(std::make_shared<PythonControlChannel>(channel));
          },
          "channel"_a);

  nb::class_<MpiControlChannel, ControlChannel>(m, "MpiControlChannel", "Over MPI, without the GIL.")
      .def(
          "send",
          [](MpiControlChannel& self, const std::map<int, nb::bytes>& texts, int tag) {
            std::map<int, std::string> given;
            for (const auto& [peer, text] : texts) given[peer] = {text.c_str(), text.size()};
            const WithoutGil release;
            self.send(given, tag);
          },
          "texts"_a, "tag"_a)
      .def("receive",
           [](MpiControlChannel& self) {
             std::vector<ShortMessage> received;
             {
               const WithoutGil release;
               received = self.receive();
             }
             std::vector<std::tuple<int, int, nb::bytes>> result;
             for (const ShortMessage& m : received) {
               result.emplace_back(m.peer, m.tag, nb::bytes(m.text.data(), m.text.size()));
             }
             return result;
           })
      .def("n_sent", &MpiControlChannel::n_sent, "peer"_a)
      .def("drained", &MpiControlChannel::drained, "n_sent"_a, nb::call_guard<WithoutGil>());

  nb::class_<MpiPointToPoint, Carrier>(m, "MpiPointToPoint", "Over MPI, without the GIL.")
      .def_static(
          "over",
          [](const std::array<uintptr_t, 9>& functions, const nb::bytes& communicator, const nb::bytes& byte,
             int any_source, int any_tag, size_t status_bytes, size_t status_source, size_t status_tag,
             std::optional<size_t> largest_message) {
            const auto [isend, irecv, iallgather, testall, iprobe, recv, get_count, finalized, error_string] =
                functions;
            return std::shared_ptr<MpiPointToPoint>(mpi_point_to_point(
                {pointer(isend), pointer(irecv), pointer(iallgather), pointer(testall), pointer(iprobe), pointer(recv),
                 pointer(get_count), pointer(finalized), pointer(error_string)},
                {contents(communicator), contents(byte), any_source, any_tag, status_bytes, status_source, status_tag},
                largest_message.value_or(SIZE_MAX)));
          },
          "functions"_a, "communicator"_a, "byte"_a, "any_source"_a, "any_tag"_a, "status_bytes"_a, "status_source"_a,
          "status_tag"_a, "largest_message"_a = nb::none())
      .def("control_channel", &MpiPointToPoint::control_channel, "tag"_a = nb::none())
      .def(
          "start",
          [](std::shared_ptr<MpiPointToPoint> self, const std::vector<MessageTuple>& receive,
             const std::vector<MessageTuple>& send, nb::object owner) {
            const auto turn = wait_for_mpi_turn();
            return std::make_shared<PyTransfer>(self, shared(owner), self->start(messages(receive), messages(send)));
          },
          "receive"_a, "send"_a, "owner"_a);

  nb::class_<PyHostsGroup, RankGroup>(m, "HostsGroup", "The ranks of several hosts.")
      .def(nb::init<std::shared_ptr<PyShmGroup>, const std::shared_ptr<Carrier>&,
                    const std::shared_ptr<ControlChannel>&, std::vector<std::vector<int>>, int, size_t, uintptr_t,
                    std::shared_ptr<PyStallDetector>, std::vector<int>, std::vector<std::string>>(),
           "host"_a, "carrier"_a, "control"_a, "hosts"_a, "here"_a, "least_window"_a, "memory"_a, "detector"_a,
           "ranks"_a, "names"_a)
      .def_static(
          "memory_bytes",
          [](std::vector<std::vector<int>> hosts, int here, size_t least_window) {
            return Hosts{std::move(hosts), here, least_window}.memory_bytes();
          },
          "hosts"_a, "here"_a, "least_window"_a)
      .def(
          "for_engine",
          [](PyHostsGroup& g, std::shared_ptr<ControlChannel> wake_ups) { g.wake_ups = std::move(wake_ups); },
          "wake_ups"_a)
      .def(
          "broadcast",
          [](PyHostsGroup& g, const Tensors& tensors, int root) {
            const WithoutGil release;
            g.hosts.broadcast(tensors.buffers(), root);
          },
          "tensors"_a, "root"_a)
      .def(
          "exchange_on_host",
          [](PyHostsGroup& g, ListOf<PyTensors> stream, const std::vector<size_t>& stream_bytes,
             ListOf<WantedTuple> wanted) {
            const auto out = buffers_of(stream);
            const auto parts = wanted_of(wanted);
            const WithoutGil release;
            g.hosts.exchange_on_host(out, stream_bytes, parts);
          },
          "stream"_a, "stream_bytes"_a, "wanted"_a, "Like ShmGroup.exchange, between the ranks of this host.")
      .def(
          "wait",
          [](PyHostsGroup& g, nb::object transfer) {
            if (PyTransfer* native = nullptr; nb::try_cast(transfer, native)) {
              const WithoutGil release;
              g.hosts.wait(*native->transfer);
              return;
            }
            PythonTransfer called(shared(transfer));
            const WithoutGil release;
            g.hosts.wait(called);
          },
          "transfer"_a, nb::sig("def wait(self, transfer: Transfer | collections.abc.Callable[[], bool]) -> None"))
      .def("count_record", [](PyHostsGroup& g, int peer) { g.hosts.peers().count_record(peer); }, "peer"_a);
}

}  // namespace horo
