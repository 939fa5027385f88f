// The channel between engines on several hosts.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "engine/engine.h"
#include "hosts/hosts_group.h"
#include "shm/futex.h"

namespace horo {

// A rank that demands a round sends the others a wake-up, so engines need not exchange messages all the time. Nothing
// can wake a thread that waits for a message, so an idle engine checks for one now and then.
class HostsChannel : public Channel {
 public:
  HostsChannel(std::shared_ptr<HostsGroup> group, std::shared_ptr<ControlChannel> wake_ups)
      : group_(std::move(group)), wake_ups_(std::move(wake_ups)) {}
  int rank() const override { return group_->rank(); }
  int size() const override { return group_->size(); }
  uint64_t next_handshake() const override { return n_handshakes_ + 1; }
  std::vector<Header> agree(const std::string& label, const Header& mine, const Round* round) override {
    const uint64_t number = ++n_handshakes_;
    if (round == nullptr) return group_->agree(label, mine);
    if (round->demands) send_wake_ups(number);
    // Another thread cannot send them: it may hold the GIL, which another one needs to leave MPI.
    const Round polled = {round->demands, round->on_wait, [&, is_sent = round->demands]() mutable {
                            if (is_sent || wanted_ < number) return;
                            is_sent = true;
                            send_wake_ups(number);
                          }};
    return group_->agree(label, mine, &polled);
  }
  std::vector<std::string> gather(const std::string& mine, const std::vector<Header>& headers) override {
    return group_->gather(mine, headers);
  }
  void set_label(const std::string& label) override { group_->peers().set_label(label); }
  bool needs_handshakes() const override { return false; }
  void demand(uint64_t handshake) override { raise(wanted_, handshake); }
  bool is_demanded() override {
    for (const ShortMessage& message : wake_ups_->receive()) {
      uint64_t handshake = 0;
      std::memcpy(&handshake, message.text.data(), std::min(sizeof(handshake), message.text.size()));
      raise(demanded_, handshake);
    }
    return demanded_ > n_handshakes_;
  }
  uint32_t n_wake_ups() override { return n_wake_ups_; }
  void wait(uint32_t n_wake_ups, double timeout_s) override {
    const auto until = Clock::now() + std::chrono::duration<double>(timeout_s);
    for (double pause_s = kShortestPauseSeconds; n_wake_ups_ == n_wake_ups && !is_demanded() && Clock::now() < until;
         pause_s = std::min(kLongestPauseSeconds, 1.5 * pause_s)) {
      futex_wait(n_wake_ups_, n_wake_ups, pause_s);
    }
  }
  void wake() override {
    ++n_wake_ups_;
    futex_wake(n_wake_ups_);
  }
  void set_on_idle(std::function<void()> on_idle) override { group_->set_on_idle(on_idle); }
  void check_usable() override { group_->check_usable(); }
  void check(int rank, const std::string& name) override { group_->peers().check_one(rank, name); }
  void abandon(const std::string& reason) override { group_->abandon(reason); }
  void pass_on(const PeerLost& lost) override { group_->pass_on(lost); }

 private:
  using Clock = std::chrono::steady_clock;
  static constexpr int kWakeUp = 1;
  static constexpr double kShortestPauseSeconds = 50e-6;
  static constexpr double kLongestPauseSeconds = 5e-3;

  static void raise(std::atomic<uint64_t>& value, uint64_t least) {
    for (uint64_t last = value; last < least;) value.compare_exchange_weak(last, least);
  }
  void send_wake_ups(uint64_t handshake) {
    std::map<int, std::string> texts;
    for (int r = 0; r < size(); ++r) {
      if (r != rank()) texts[r] = std::string(reinterpret_cast<const char*>(&handshake), sizeof(handshake));
    }
    wake_ups_->send(texts, kWakeUp);
  }

  std::shared_ptr<HostsGroup> group_;
  std::shared_ptr<ControlChannel> wake_ups_;
  std::atomic<uint64_t> n_handshakes_{0};  // of this channel
  std::atomic<uint64_t> demanded_{0};      // the latest that a peer demands
  std::atomic<uint64_t> wanted_{0};        // the latest that this rank demands
  std::atomic<uint32_t> n_wake_ups_{0};
};

}  // namespace horo
