// The channel between engines of one host.
#pragma once

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
  std::vector<std::string> exchange(const std::string& mine, const std::string& label) override {
    const auto headers = group_->agree(label, {0, static_cast<int64_t>(mine.size()), 0}, true);
    std::vector<std::string> all(size());
    std::vector<size_t> sizes(size());
    std::vector<Wanted> wanted;
    for (int r = 0; r < size(); ++r) {
      sizes[r] = static_cast<size_t>(headers[r].count);
      all[r].resize(sizes[r]);
      if (r == rank()) all[r] = mine;
      else wanted.push_back({r, 0, {{reinterpret_cast<uint8_t*>(all[r].data()), sizes[r]}}});
    }
    group_->exchange({{reinterpret_cast<uint8_t*>(const_cast<char*>(mine.data())), mine.size()}}, sizes, wanted);
    return all;
  }
  void wait(double timeout_s) override { group_->wait_for_wake_up(timeout_s); }
  void wake() override { group_->wake(rank()); }
  bool peer_is_ahead() override { return group_->peer_is_ahead(); }
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
