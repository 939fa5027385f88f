// The all-reduce between several hosts: shared memory inside each, messages between them, pipelined in windows. Also
// its first half, the reduce-scatter.
//
// Every host owns a share of each window, and every rank of the host a part of that share. All ranks of a host encode a
// window into shared memory, where it is summed in rank order, each part by the rank that sends it. The owner of a part
// receives the other hosts' sums, adds them up in host order and sends the result to all hosts, where every rank
// decodes it (a reduce-scatter leaves this out). So every link carries as many bytes as in a ring, each pair of hosts
// has several flows, and an element is rounded twice, regardless of what travels with it.
//
// With int8 and int4, images hold float32: each host's sum is quantized in place just before it is sent, and the result
// into the memory of the owner's sum, which is no longer needed. A message is received at the end of the memory for its
// share, and decoded there from the front.
//
// Windows have 1 to 4 MiB. While one is summed and sent, the previous one is received and the one before that is
// gathered, so the link is never idle. MPI's functions are called without the GIL, gloo's through Python. Messages are
// polled with pauses that grow with the wait; twenty times a second the group looks for peers that died (PeerStatus)
// and, in the training thread, for Ctrl-C.
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

// Which ranks are on which host: ranks[host][i] is the i-th rank of that host's group, numbered as in PointToPoint.
struct Hosts {
  std::vector<std::vector<int>> ranks;
  int here;                 // this rank's host
  size_t least_window = 0;  // the carrier is slow with smaller windows

  int size() const { return static_cast<int>(ranks.size()); }
  // Parts of a host's share: as many as the largest host has ranks. Part p belongs to rank p modulo its host's size.
  int n_parts() const;
  int n_shares() const { return size() * n_parts(); }
  int share(int host, int part) const { return host * n_parts() + part; }
  int owner(int host, int part) const { return ranks[host][part % ranks[host].size()]; }
  // The parts of the i-th rank of this host.
  std::vector<int> parts_of(int i) const;
  // Beginning with the next one, so that not all send to the same host at once.
  std::vector<int> other_hosts() const;
  // The shares of a reduce-scatter, given each rank's part: shares that belong to no rank are empty.
  std::vector<std::vector<TensorRef>> shares(const std::vector<std::vector<TensorRef>>& parts) const;
  // The size of a window: larger if it is divided into more shares, so that messages stay large.
  size_t window_bytes() const;
  // The size of the memory that the ranks of this host share for a HostsAllreduce, a HostsBroadcast, or both.
  size_t memory_bytes() const;
};

class HostsAllreduce {
 public:
  // `group` contains this host's ranks, in the order of `hosts`; they share `memory`, of memory_bytes().
  HostsAllreduce(ShmGroup& group, std::shared_ptr<PointToPoint> messages, Hosts hosts, uint8_t* memory);

  // Reduces the layout's tensors in place; `layout` has window_bytes() and n_shares(). `weights` are those of the ranks
  // of this host, or empty. `label` is the operation's name in messages. After an exception, messages may still be in
  // flight: the object must no longer be used, and not be freed before they have ended.
  void allreduce(const Layout& layout, const std::vector<double>& weights, Factor factor, const std::string& label);
  // The same, but the i-th rank of a host gets only hosts().share(host, i): `layout` has hosts().shares(…) as parts.
  // Each link carries half as much.
  void reduce_scatter(const Layout& layout, const std::vector<double>& weights, Factor factor,
                      const std::string& label);

  // One of these two functions.
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
  std::vector<int> parts_;         // of this rank
  std::vector<int> others_;        // the other hosts
  std::vector<uint8_t> received_;  // the other hosts' sums of this rank's parts, for all windows in progress
};

}  // namespace horo
