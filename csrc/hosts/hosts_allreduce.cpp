#include "hosts/hosts_allreduce.h"

#include <algorithm>
#include <array>

#include "recorder/recorder.h"

namespace horo {
namespace {

// While one window is summed and sent, the previous one is received and the one before that is gathered.
constexpr size_t kSumsUnderWay = 1;
constexpr size_t kResultsUnderWay = 1;
// A window's memory is free again one window after the step in which it is decoded.
constexpr size_t kSlots = kSumsUnderWay + kResultsUnderWay + 2;

constexpr size_t kSmallestWindow = 1 << 20;
constexpr size_t kLargestWindow = 4 << 20;
constexpr size_t kShareBytes = 256 << 10;
// For a host with many ranks, unless the smallest windows need more.
constexpr size_t kLargestMemory = 128 << 20;

}  // namespace

int Hosts::n_parts() const {
  size_t largest = 0;
  for (const auto& host : ranks) largest = std::max(largest, host.size());
  return static_cast<int>(largest);
}

std::vector<int> Hosts::parts_of(int i) const {
  std::vector<int> parts;
  for (int part = i; part < n_parts(); part += static_cast<int>(ranks[here].size())) parts.push_back(part);
  return parts;
}

std::vector<int> Hosts::other_hosts() const {
  std::vector<int> others;
  for (int i = 1; i < size(); ++i) others.push_back((here + i) % size());
  return others;
}

std::vector<std::vector<TensorRef>> Hosts::shares(const std::vector<std::vector<TensorRef>>& parts) const {
  std::vector<std::vector<TensorRef>> shares(n_shares());
  for (int host = 0; host < size(); ++host) {
    for (size_t i = 0; i < ranks[host].size(); ++i) shares[share(host, static_cast<int>(i))] = parts[ranks[host][i]];
  }
  return shares;
}

size_t Hosts::window_bytes() const {
  // All hosts must compute the same result, however many ranks they have.
  const size_t n_images = kSlots * (static_cast<size_t>(n_parts()) + 2);
  const size_t room = kLargestMemory / n_images / kWireAlignment * kWireAlignment;
  const size_t wanted = std::max(kShareBytes * n_shares(), least_window);
  return std::clamp(wanted, kSmallestWindow, std::clamp(room, kSmallestWindow, kLargestWindow));
}

size_t Hosts::memory_bytes() const {
  return kSlots * (ranks[here].size() + 2) * window_bytes();  // each rank's image, their sum, and the sum of all hosts
}

HostsAllreduce::HostsAllreduce(ShmGroup& group, std::shared_ptr<PointToPoint> messages, Hosts hosts, uint8_t* memory)
    : group_(group),
      messages_(std::move(messages)),
      hosts_(std::move(hosts)),
      memory_(memory),
      window_bytes_(hosts_.window_bytes()),
      parts_(hosts_.parts_of(group_.rank())),
      others_(hosts_.other_hosts()) {}

uint8_t* HostsAllreduce::slot(size_t window) const {
  return memory_ + window % kSlots * (group_.size() + 2) * window_bytes_;
}

// The steps of one all-reduce; or, unless it `gathers`, of one reduce-scatter.
struct HostsAllreduce::Exchange {
  HostsAllreduce& all;
  const Layout& layout;
  const std::vector<double>& weights;
  Factor factor;
  const std::string& label;
  bool gathers;
  size_t room = 0;  // bytes received of one share
  // Indexed by the window's slot.
  std::array<std::unique_ptr<Transfer>, kSlots> sums = {}, received_results = {}, sent_results = {};

  // With a single rank on a host, its contribution is the host's sum.
  uint8_t* sum(size_t window) const {
    return all.group_.size() == 1 && weights.empty() ? all.image(window, 0) : all.sum(window);
  }

  uint8_t* received(size_t window, size_t host, size_t part) const {
    return all.received_.data() + ((window % kSlots * all.hosts_.size() + host) * all.parts_.size() + part) * room;
  }

  uint8_t* result(size_t window, int share) const { return all.total(window) + layout.share_begin(window, share); }

  // Adds the message that has a share of a window.
  void add(std::vector<Message>& messages, size_t window, int host, int part, int share, int tag, uint8_t* data) const {
    add_in_pieces(messages, {all.hosts_.owner(host, part), tag, data, layout.message_bytes(window, share)},
                  all.messages_->largest_message());
  }

  void encode(size_t window) const {
    for (int s = 0; s < layout.n_shares(); ++s) layout.encode(window, s, all.image(window, all.group_.rank()));
  }

  // Called when all ranks of the host have encoded the window.
  void send_sums(size_t window) {
    std::vector<const uint8_t*> images;
    for (int r = 0; r < all.group_.size(); ++r) images.push_back(all.image(window, r));
    const bool is_sum = sum(window) == images[0];
    std::vector<Message> receive, send, receive_results;
    for (size_t i = 0; i < all.parts_.size(); ++i) {
      const int part = all.parts_[i];
      const int own = all.hosts_.share(all.hosts_.here, part);
      for (int host = 0; !is_sum && host < all.hosts_.size(); ++host) {
        layout.reduce(window, all.hosts_.share(host, part), images, -1, weights, {}, sum(window), false);
      }
      for (int host : all.others_) {
        const int theirs = all.hosts_.share(host, part);
        add(receive, window, host, part, own, kSumTag, layout.message(window, own, received(window, host, i)));
        uint8_t* const image = sum(window);
        add(send, window, host, part, theirs, kSumTag,
            layout.quantize(window, theirs, image, factor.scale / factor.divisor, image));
        if (!gathers) continue;
        add(receive_results, window, host, part, theirs, kResultTag,
            layout.message(window, theirs, result(window, theirs)));
      }
    }
    sums[window % kSlots] = all.messages_->start(receive, send);
    if (gathers) received_results[window % kSlots] = all.messages_->start(receive_results, {});
  }

  // Called when all hosts' sums of the window have arrived.
  void add_up(size_t window) {
    std::vector<Message> send;
    for (size_t i = 0; i < all.parts_.size(); ++i) {
      const int part = all.parts_[i];
      const int own = all.hosts_.share(all.hosts_.here, part);
      std::vector<const uint8_t*> images;  // where each host's image of the complete window would begin
      for (int host = 0; host < all.hosts_.size(); ++host) {
        if (host != all.hosts_.here) layout.dequantize(window, own, received(window, host, i));
        // As a number, since there may be no memory if nothing is received.
        const auto at = reinterpret_cast<uintptr_t>(received(window, host, i)) - layout.share_begin(window, own);
        images.push_back(host == all.hosts_.here ? sum(window) : reinterpret_cast<const uint8_t*>(at));
      }
      layout.reduce(window, own, images, -1, {}, factor, all.total(window), !gathers);
      if (!gathers) continue;
      // The host's own sum is no longer needed: its memory holds the message.
      uint8_t* const message = layout.quantize(window, own, all.total(window), 1.0, sum(window));
      for (int host : all.others_) add(send, window, host, part, own, kResultTag, message);
    }
    if (gathers) sent_results[window % kSlots] = all.messages_->start({}, send);
  }

  // Called when the other hosts' results have arrived.
  void complete(size_t window) const {
    for (int part : all.parts_) {
      for (int host : all.others_) {
        const int theirs = all.hosts_.share(host, part);
        layout.dequantize(window, theirs, result(window, theirs));
      }
    }
  }

  void decode(size_t window) const {
    for (int s = 0; s < layout.n_shares(); ++s) layout.decode(window, s, all.total(window));
  }

  void run() {
    for (size_t w = 0; w < layout.n_chunks(); ++w) {
      for (int part : all.parts_) {
        const int own = all.hosts_.share(all.hosts_.here, part);
        room = std::max(room, layout.share_end(w, own) - layout.share_begin(w, own));
      }
    }
    const size_t n_bytes = kSlots * all.hosts_.size() * all.parts_.size() * room;
    if (all.received_.size() < n_bytes) all.received_.resize(n_bytes);
    const size_t n = layout.n_chunks();
    PhaseClock clock;
    const size_t n_steps = n + kSumsUnderWay + (gathers ? kResultsUnderWay + 1 : 0);
    for (size_t step = 0; step < n_steps; ++step) {
      // Windows in the order of their progress: `at(k)` says whether one was encoded k steps ago.
      const auto at = [&](size_t k) { return step >= k && step - k < n; };
      if (at(0)) encode(step);
      clock.ends(Phase::kPack);
      // After this, all ranks of the host have encoded this window, and received the results of the one to decode.
      if (all.group_.size() > 1) all.group_.agree(label, {});
      clock.ends(Phase::kWait);
      if (at(0)) send_sums(step);
      clock.ends(Phase::kReduce);
      if (gathers && at(kSumsUnderWay + kResultsUnderWay + 1)) decode(step - kSumsUnderWay - kResultsUnderWay - 1);
      clock.ends(Phase::kUnpack);
      if (at(kSumsUnderWay)) sums[(step - kSumsUnderWay) % kSlots]->wait(all.on_idle);
      clock.ends(Phase::kWait);
      if (at(kSumsUnderWay)) add_up(step - kSumsUnderWay);
      clock.ends(Phase::kReduce);
      if (gathers && at(kSumsUnderWay + kResultsUnderWay)) {
        const size_t slot = (step - kSumsUnderWay - kResultsUnderWay) % kSlots;
        received_results[slot]->wait(all.on_idle);
        sent_results[slot]->wait(all.on_idle);
        clock.ends(Phase::kWait);
        complete(step - kSumsUnderWay - kResultsUnderWay);
        clock.ends(Phase::kUnpack);
      }
    }
  }
};

void HostsAllreduce::allreduce(const Layout& layout, const std::vector<double>& weights, Factor factor,
                               const std::string& label) {
  Exchange{*this, layout, weights, factor, label, true}.run();
}

void HostsAllreduce::reduce_scatter(const Layout& layout, const std::vector<double>& weights, Factor factor,
                                    const std::string& label) {
  Exchange{*this, layout, weights, factor, label, false}.run();
}

}  // namespace horo
