#include "hosts/hosts_broadcast.h"

#include <algorithm>
#include <array>

namespace horo {
namespace {

// While a window is sent to its owners, they pass on the previous one; when a host has all of the one before that, its
// ranks copy it.
constexpr size_t kStepsToCopy = 3;
constexpr size_t kSlots = kStepsToCopy + 1;
// Shares consist of such blocks: few bytes are one message to a host, rather than one to each of its ranks.
constexpr size_t kBlockBytes = 1024;

}  // namespace

HostsBroadcast::HostsBroadcast(ShmGroup& group, std::shared_ptr<PointToPoint> messages, Hosts hosts, uint8_t* memory)
    : group_(group),
      messages_(std::move(messages)),
      hosts_(std::move(hosts)),
      memory_(memory),
      window_bytes_(hosts_.window_bytes()),
      parts_(hosts_.parts_of(group_.rank())),
      others_(hosts_.other_hosts()) {}

// The messages of one broadcast.
struct HostsBroadcast::Exchange {
  HostsBroadcast& all;
  size_t total_bytes;
  int from;  // the root's host
  // Indexed by the window's slot.
  std::array<std::unique_ptr<Transfer>, kSlots> shares = {}, copies = {}, passed_on = {};

  uint8_t* slot(size_t window) const { return all.memory_ + window % kSlots * all.window_bytes_; }
  size_t n_bytes(size_t window) const { return std::min(all.window_bytes_, total_bytes - window * all.window_bytes_); }

  // Adds a part of the share of host `owner`, to or from that host.
  void add(std::vector<Message>& messages, size_t window, int host, int owner, int part, Tag tag) const {
    const int n_hosts = all.hosts_.size(), n_parts = all.hosts_.n_parts();
    const size_t place = static_cast<size_t>((owner - from - 1 + n_hosts) % n_hosts * n_parts + part);
    const size_t block_of_each = static_cast<size_t>((n_hosts - 1) * n_parts) * kBlockBytes;
    const size_t part_bytes = (n_bytes(window) + block_of_each - 1) / block_of_each * kBlockBytes;
    const size_t begin = std::min(n_bytes(window), place * part_bytes);
    const size_t end = std::min(n_bytes(window), begin + part_bytes);
    add_in_pieces(messages, {all.hosts_.owner(host, part), tag, slot(window) + begin, end - begin},
                  all.messages_->largest_message());
  }

  // Called when the ranks of the root's host see the window, and those of other hosts have copied its slot's previous
  // contents.
  void start(size_t window) {
    std::vector<Message> receive, send, receive_copies;
    for (const int part : all.parts_) {
      for (const int host : all.others_) {
        if (all.hosts_.here == from) add(send, window, host, host, part, kShareTag);
        else if (host == from) add(receive, window, host, all.hosts_.here, part, kShareTag);
        else add(receive_copies, window, host, host, part, kCopyTag);
      }
    }
    shares[window % kSlots] = all.messages_->start(receive, send);
    copies[window % kSlots] = all.messages_->start(receive_copies, {});
  }

  // Called when this rank's part of the window has arrived.
  void pass_on(size_t window) {
    std::vector<Message> send;
    for (const int part : all.parts_) {
      for (const int host : all.others_) {
        if (all.hosts_.here != from && host != from) add(send, window, host, all.hosts_.here, part, kCopyTag);
      }
    }
    passed_on[window % kSlots] = all.messages_->start({}, send);
  }
};

void HostsBroadcast::broadcast(const std::vector<Buffer>& buffers, int root, const std::string& label,
                               const std::function<void()>& on_idle) {
  const auto has_root = [&](const std::vector<int>& ranks) { return std::ranges::find(ranks, root) != ranks.end(); };
  const auto from = std::ranges::find_if(hosts_.ranks, has_root) - hosts_.ranks.begin();
  const bool is_root = hosts_.ranks[hosts_.here][group_.rank()] == root;
  size_t total_bytes = 0;
  for (const Buffer& buffer : buffers) total_bytes += buffer.n_bytes;
  Exchange exchange{*this, total_bytes, static_cast<int>(from)};
  Cursor cursor(buffers);
  const size_t n = (total_bytes + window_bytes_ - 1) / window_bytes_;
  // The ranks of the root's host copy a window when they send it.
  const size_t steps_to_copy = from == hosts_.here ? 0 : kStepsToCopy;
  const auto wait_for_host = [&] {
    if (group_.size() > 1) group_.agree(label, {});
  };
  wait_for_host();  // no rank reads data of the previous operation in this memory any more
  for (size_t step = 0; step < n + kStepsToCopy; ++step) {
    // Windows in the order of their progress: `at(k)` says whether one was started k steps ago.
    const auto at = [&](size_t k) { return step >= k && step - k < n; };
    if (is_root && at(0)) {
      uint8_t* slot = exchange.slot(step);
      cursor.step(exchange.n_bytes(step), [&](const uint8_t* data, size_t i, size_t n_bytes) {
        copy_bytes(slot + i, data, n_bytes, Stores::kCached);
      });
    }
    // After this, the root's host sees this window, and all ranks have received the one to copy.
    wait_for_host();
    if (at(0)) exchange.start(step);
    if (!is_root && at(steps_to_copy)) {
      const uint8_t* slot = exchange.slot(step - steps_to_copy);
      cursor.step(exchange.n_bytes(step - steps_to_copy), [&](uint8_t* data, size_t i, size_t n_bytes) {
        copy_bytes(data, slot + i, n_bytes, Stores::kCached);
      });
    }
    if (at(1)) {
      exchange.shares[(step - 1) % kSlots]->wait(on_idle);
      exchange.pass_on(step - 1);
    }
    if (at(2)) {
      exchange.copies[(step - 2) % kSlots]->wait(on_idle);
      exchange.passed_on[(step - 2) % kSlots]->wait(on_idle);
    }
  }
  wait_for_host();  // all have copied everything: the next operation need not begin with a handshake
}

}  // namespace horo
