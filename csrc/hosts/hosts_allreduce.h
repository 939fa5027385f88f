// The all-reduce among several hosts: shared memory inside each, messages between them, pipelined in windows. And its
// first half, the reduce-scatter.
//
// Every host owns a share of each window, and every rank of the host a part of that share. A window is encoded into
// shared memory by all ranks of a host and summed there, each part by the rank that sends it: in rank order. Its owner
// receives the other hosts' sums, adds them up in host order and sends the result to all hosts, where every rank
// decodes it. So every link carries the bytes of a ring, each pair of hosts has several flows, and an element is
// rounded twice whatever travels with it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "hosts/point_to_point.h"
#include "pack/layout.h"
#include "shm/shm_group.h"

namespace horo {

// Which ranks are where, as PointToPoint numbers them: ranks[host][i] is the i-th of that host's group.
struct Hosts {
  std::vector<std::vector<int>> ranks;
  int here;                 // this rank's host
  size_t least_window = 0;  // what carries the bytes is slow with windows smaller than this

  int size() const { return static_cast<int>(ranks.size()); }
  // Parts of a host's share: as many as the largest host has ranks. Part p belongs to rank p modulo its host's size.
  int n_parts() const;
  int n_shares() const { return size() * n_parts(); }
  int share(int host, int part) const { return host * n_parts() + part; }
  int owner(int host, int part) const { return ranks[host][part % ranks[host].size()]; }
  // Those of the i-th rank of this host.
  std::vector<int> parts_of(int i) const;
  // The next one first: not all send to the same at once.
  std::vector<int> other_hosts() const;
  // The shares of a reduce-scatter, given what each rank is to get: those that belong to no rank are empty.
  std::vector<std::vector<TensorRef>> shares(const std::vector<std::vector<TensorRef>>& parts) const;
  // Of a window: more where it is cut into more shares, so that messages stay large.
  size_t window_bytes() const;
  // What the ranks of this host share for a HostsAllreduce, a HostsBroadcast, or both.
  size_t memory_bytes() const;
};

class HostsAllreduce {
 public:
  // `group` are this host's ranks, in the order of `hosts`; `memory` they share, memory_bytes() of it.
  HostsAllreduce(ShmGroup& group, std::shared_ptr<PointToPoint> messages, Hosts hosts, uint8_t* memory);

  // In place over the layout's tensors; `layout` is one of window_bytes() and n_shares(). `weights` are those of the
  // ranks of this host, or none. `label` is what messages call it. After an exception messages may still be under
  // way: nothing here may be used any more, nor freed before they have ended.
  void allreduce(const Layout& layout, const std::vector<double>& weights, Factor factor, const std::string& label);
  // The same, but the i-th rank of a host gets hosts().share(host, i) alone: `layout` is one of hosts().shares(…) as
  // parts. Each link carries half as much.
  void reduce_scatter(const Layout& layout, const std::vector<double>& weights, Factor factor,
                      const std::string& label);

  // One of these two.
  using Reduce = void (HostsAllreduce::*)(const Layout&, const std::vector<double>&, Factor, const std::string&);

  const Hosts& hosts() const { return hosts_; }

  // Called while waiting for other hosts, as in Transfer::wait().
  std::function<void()> on_idle;

 private:
  struct Exchange;

  uint8_t* image(size_t window, int rank) const { return slot(window) + rank * window_bytes_; }
  uint8_t* sum(size_t window) const { return image(window, group_.size()); }
  uint8_t* total(size_t window) const { return image(window, group_.size() + 1); }
  uint8_t* slot(size_t window) const;

  ShmGroup& group_;
  std::shared_ptr<PointToPoint> messages_;
  Hosts hosts_;
  uint8_t* memory_;
  size_t window_bytes_;
  std::vector<int> parts_;         // those of this rank
  std::vector<int> others_;        // the other hosts
  std::vector<uint8_t> received_;  // of the windows under way, the other hosts' sums of this rank's parts
};

}  // namespace horo
