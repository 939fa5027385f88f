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

// A rank that enters a round wakes all others, so engines need not exchange messages all the time. Nothing can wake a
// thread that waits for a message, so an idle engine checks for one now and then.
class HostsChannel : public Channel {
 public:
  HostsChannel(std::shared_ptr<HostsGroup> group, std::shared_ptr<ControlChannel> wake_ups)
      : group_(std::move(group)), wake_ups_(std::move(wake_ups)) {}
  int rank() const override { return group_->rank(); }
  int size() const override { return group_->size(); }
  std::vector<std::string> exchange(const std::string& mine, const std::string& label) override {
    std::map<int, std::string> texts;
    for (int r = 0; r < size(); ++r) {
      if (r != rank()) texts[r] = std::string(reinterpret_cast<const char*>(&round_), sizeof(round_));
    }
    wake_ups_->send(texts, kWakeUp);
    ++round_;
    is_behind_ = false;
    const std::vector<Header> headers = group_->agree(label, {0, static_cast<int64_t>(mine.size()), 1.0});
    return group_->gather(mine, headers);
  }
  bool peer_is_ahead() override {
    for (const ShortMessage& message : wake_ups_->receive()) {
      uint64_t round = 0;
      std::memcpy(&round, message.text.data(), std::min(sizeof(round), message.text.size()));
      // Wake-ups for rounds that this rank has already entered are late.
      is_behind_ = is_behind_ || round >= round_;
    }
    return is_behind_;
  }
  void wait(double timeout_s) override {
    const auto until = Clock::now() + std::chrono::duration<double>(timeout_s);
    for (double pause_s = kShortestPauseSeconds; n_wake_ups_ == n_seen_ && Clock::now() < until;
         pause_s = std::min(kLongestPauseSeconds, 1.5 * pause_s)) {
      futex_wait(n_wake_ups_, n_seen_, pause_s);
      if (n_wake_ups_ == n_seen_ && peer_is_ahead()) return;
    }
    n_seen_ = n_wake_ups_;
  }
  void wake() override {
    ++n_wake_ups_;
    futex_wake(n_wake_ups_);
  }
  void check(int rank, const std::string& name) override { group_->peers().check_one(rank, name); }
  void abandon(const std::string& reason) override { group_->abandon(reason); }
  void pass_on(const PeerLost& lost) override { group_->pass_on(lost); }

 private:
  using Clock = std::chrono::steady_clock;
  static constexpr int kWakeUp = 1;
  static constexpr double kShortestPauseSeconds = 50e-6;
  static constexpr double kLongestPauseSeconds = 5e-3;

  std::shared_ptr<HostsGroup> group_;
  std::shared_ptr<ControlChannel> wake_ups_;
  uint64_t round_ = 0;
  bool is_behind_ = false;  // a peer has entered a round that this rank has not
  std::atomic<uint32_t> n_wake_ups_{0};
  uint32_t n_seen_ = 0;  // how many of them the engine's thread has seen
};

}  // namespace horo
