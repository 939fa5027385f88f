#include "hosts/hosts_group.h"

#include <algorithm>
#include <optional>

namespace horo {
namespace {

constexpr size_t kLargestPiece = 1 << 20;

Message message(int peer, std::string& text) {
  return {peer, kGatherTag, reinterpret_cast<uint8_t*>(text.data()), text.size()};
}

// Does something else, too, between polls.
class Polled : public Transfer {
 public:
  Polled(Transfer& transfer, const std::function<void()>& on_poll) : transfer_(transfer), on_poll_(on_poll) {}
  bool done() override {
    if (transfer_.done()) return true;
    on_poll_();
    return false;
  }

 private:
  Transfer& transfer_;
  const std::function<void()>& on_poll_;
};

}  // namespace

HostsGroup::HostsGroup(ShmGroup& host, std::shared_ptr<Carrier> carrier, std::shared_ptr<ControlChannel> control,
                       Hosts hosts, uint8_t* memory, std::shared_ptr<StallDetector> detector, std::vector<int> ranks,
                       std::vector<std::string> names)
    : host_(host),
      carrier_(std::move(carrier)),
      detector_(std::move(detector)),
      ranks_(std::move(ranks)),
      rank_(hosts.ranks[hosts.here][host.rank()]),
      allreduce_(host, carrier_, hosts, memory),
      broadcast_(host, carrier_, std::move(hosts), memory),
      peers_(std::move(control), host, detector_, rank_, ranks_, std::move(names)),
      arrivals_(ranks_.size()),
      incoming_(ranks_.size()) {}

// --- operations ---

void HostsGroup::check_usable() const {
  const std::lock_guard lock(mutex_);
  if (broken_.empty()) return;
  throw PeerLost("an operation failed, and this group of ranks can no longer be used (" + broken_ +
                 "): to continue, call shutdown() and then init() on every rank");
}

std::vector<Header> HostsGroup::agree(const std::string& label, const Header& mine, const Round* round) {
  check_usable();
  detector_->check();
  const bool is_round = round != nullptr;
  arrival_ = {mine, is_round ? waited_s_ : -1.0};
  peers_.begin(label, mine.flags);
  giving_up_on_error([&] {
    const std::unique_ptr<Transfer> all = carrier_->allgather(
        reinterpret_cast<const uint8_t*>(&arrival_), sizeof(arrival_), reinterpret_cast<uint8_t*>(arrivals_.data()));
    wait(*all, round);
  });
  std::vector<Header> headers;
  bool all_call = true;
  for (const Arrival& arrival : arrivals_) {
    headers.push_back(arrival.header);
    all_call = all_call && (arrival.header.flags & kCalls) != 0;
  }
  if (!is_round) return headers;
  record_last_rank();
  waited_s_ = -1.0;
  if (all_call) {
    waited_s_ = 1e-9 * static_cast<double>(detector_->running_ns(peers_.began_ns(), StallDetector::clock_ns()));
  }
  return headers;
}

// Hosts have different clocks: the last rank of the previous handshake is the one that waited least in it.
void HostsGroup::record_last_rank() {
  const auto last = std::min_element(arrivals_.begin(), arrivals_.end(), [](const Arrival& one, const Arrival& other) {
    return one.waited_s < other.waited_s;
  });
  const auto number = last - arrivals_.begin();
  if (number == rank_ || waited_s_ <= 0 || last->waited_s < 0) return;
  detector_->waited_for(ranks_[number], static_cast<int64_t>(1e9 * (waited_s_ - last->waited_s)));
}

std::vector<std::string> HostsGroup::gather(const std::string& mine, const std::vector<Header>& headers) {
  const size_t largest = std::min(carrier_->largest_message(), kLargestPiece);
  std::vector<Message> receive, send;
  outgoing_ = mine;
  for (int i = 1; i < size(); ++i) {
    const int peer = (rank_ + i) % size();  // so that not all send to 0 first
    incoming_[peer].resize(headers[peer].n_more);
    add_in_pieces(receive, message(peer, incoming_[peer]), largest);
    add_in_pieces(send, message(peer, outgoing_), largest);
  }
  giving_up_on_error([&] { wait(*carrier_->begin(receive, send)); });
  std::vector<std::string> everyone = incoming_;
  everyone[rank_] = mine;
  return everyone;
}

void HostsGroup::allreduce(const std::vector<TensorRef>& tensors, Op op, Wire wire, const std::vector<double>& weights,
                           Factor factor) {
  const Hosts& hosts = allreduce_.hosts();
  const Layout layout(tensors, op, between_hosts(wire), hosts.window_bytes(), hosts.n_shares());
  reduce(&HostsAllreduce::allreduce, layout, weights, factor);
}

void HostsGroup::reduce_scatter(const std::vector<std::vector<TensorRef>>& parts, Op op, Wire wire,
                                const std::vector<double>& weights, Factor factor) {
  const Hosts& hosts = allreduce_.hosts();
  const Layout layout(hosts.shares(parts), op, between_hosts(wire), hosts.window_bytes());
  reduce(&HostsAllreduce::reduce_scatter, layout, weights, factor);
}

void HostsGroup::reduce(HostsAllreduce::Reduce how, const Layout& layout, const std::vector<double>& weights,
                        Factor factor) {
  const Hosts& hosts = allreduce_.hosts();
  std::vector<double> here;
  for (const int r : hosts.ranks[hosts.here]) {
    if (!weights.empty()) here.push_back(weights[r]);
  }
  reporting_waits([&](const std::function<void()>& on_idle) {
    allreduce_.on_idle = on_idle;
    (allreduce_.*how)(layout, here, factor, peers_.label());
  });
}

void HostsGroup::broadcast(const std::vector<Buffer>& buffers, int root) {
  reporting_waits(
      [&](const std::function<void()>& on_idle) { broadcast_.broadcast(buffers, root, peers_.label(), on_idle); });
}

void HostsGroup::exchange_on_host(const std::vector<Buffer>& stream, const std::vector<size_t>& stream_bytes,
                                  const std::vector<Wanted>& wanted) {
  giving_up_on_error([&] {
    host_.agree(peers_.label(), {});
    host_.exchange(stream, stream_bytes, wanted);
  });
}

// --- waiting and ending ---

void HostsGroup::wait(Transfer& transfer, const Round* round) {
  StallDetector::Wait wait(detector_);
  giving_up_on_error([&] {
    std::optional<Polled> polled;
    if (round != nullptr && round->on_poll) polled.emplace(transfer, round->on_poll);
    (polled ? *polled : transfer).wait([&] { idle(wait, round); });
  });
  wait.over();
}

void HostsGroup::idle(StallDetector::Wait& wait, const Round* round) {
  peers_.check_all();
  if (round != nullptr) {
    check_usable();  // another thread may have given up
    wait.look();
    round->on_wait(peers_.entered());
  } else {
    peers_.report_wait(wait);
  }
  if (on_idle_) on_idle_();
}

// An operation that ends early leaves the group unusable, which is reported to the others.
template <class Operation>
void HostsGroup::giving_up_on_error(Operation operation) {
  try {
    operation();
  } catch (const PeerLost& lost) {
    pass_on(lost);
    throw;
  } catch (const Stalled& stalled) {
    fail(stalled.what(), stalled.what());
    throw;
  } catch (const std::exception& error) {
    const std::string why = in_one_line(error);
    fail("this rank was interrupted in the middle of an operation: " + why, "it was interrupted: " + why);
    throw;
  } catch (...) {  // Python ends threads in this way if they request the GIL after the program has ended
    fail("this rank was interrupted in the middle of an operation", "it was interrupted");
    throw;
  }
}

template <class Operation>
void HostsGroup::reporting_waits(Operation operation) {
  StallDetector::Wait wait(detector_);
  giving_up_on_error([&] { operation([&] { idle(wait); }); });
  wait.over();
}

void HostsGroup::fail(const std::string& broken, const std::string& reason) {
  note_broken(broken);
  peers_.abandon(reason);
}

void HostsGroup::note_broken(const std::string& broken) {
  const std::lock_guard lock(mutex_);
  if (broken_.empty()) broken_ = broken;
}

void HostsGroup::abandon(const std::string& reason) { fail("this rank gave up: " + reason, reason); }

void HostsGroup::pass_on(const PeerLost& lost) {
  note_broken(lost.what());
  if (lost.cause.empty()) peers_.abandon(lost.what());
  else peers_.pass_on(lost.cause);
}

bool HostsGroup::given_up() const {
  const std::lock_guard lock(mutex_);
  return !broken_.empty();
}

}  // namespace horo
