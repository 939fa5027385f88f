// The channel between engines of one host.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "engine/engine.h"
#include "shm/shm_group.h"

namespace horo {

class ShmChannel : public Channel {
 public:
  explicit ShmChannel(std::shared_ptr<ShmGroup> group) : group_(std::move(group)) {}
  int rank() const override { return group_->rank(); }
  int size() const override { return group_->size(); }
  uint64_t next_handshake() const override { return group_->next_handshake(); }
  std::vector<Header> agree(const std::string& label, const Header& mine, const Round* round) override {
    return group_->agree(label, mine, round);
  }
  std::vector<std::string> gather(const std::string& mine, const std::vector<Header>& headers) override {
    std::vector<std::string> all(size());
    std::vector<size_t> sizes(size());
    std::vector<Wanted> wanted;
    for (int r = 0; r < size(); ++r) {
      sizes[r] = headers[r].n_more;
      all[r].resize(sizes[r]);
      if (r == rank()) all[r] = mine;
      else wanted.push_back({r, 0, {{reinterpret_cast<uint8_t*>(all[r].data()), sizes[r]}}});
    }
    group_->exchange({{reinterpret_cast<uint8_t*>(const_cast<char*>(mine.data())), mine.size()}}, sizes, wanted);
    return all;
  }
  void set_label(const std::string& label) override { group_->set_label(label); }
  // Peers may still read what the operation before has left for them.
  bool needs_handshakes() const override { return true; }
  void demand(uint64_t handshake) override { group_->demand(static_cast<uint32_t>(handshake)); }
  bool is_demanded() override { return group_->is_demanded(); }
  uint32_t n_wake_ups() override { return group_->n_wake_ups(); }
  void wait(uint32_t n_wake_ups, double timeout_s) override { group_->wait_for_wake_up(n_wake_ups, timeout_s); }
  void wake() override { group_->wake(); }
  void set_on_idle(std::function<void()> on_idle) override { group_->on_idle = std::move(on_idle); }
  void check_usable() override { group_->check_usable(); }
  void check(int rank, const std::string& name) override { group_->check_peers(rank, name); }
  void abandon(const std::string& reason) override { group_->abandon(reason); }
  void pass_on(const PeerLost& lost) override {
    if (lost.cause.empty()) group_->abandon(lost.what());
    else group_->pass_on(lost.cause);
  }

 private:
  std::shared_ptr<ShmGroup> group_;
};

}  // namespace horo
