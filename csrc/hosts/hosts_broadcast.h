// The broadcast between several hosts: shared memory inside each, messages between them, pipelined in windows.
//
// A window is divided into shares: every host except the root's owns one, and every rank of the host a part of it. The
// root copies a window into shared memory, from which the ranks of its host send each host its share. The owner of a
// part passes it on to the other hosts, where all ranks copy the window from shared memory. So no link carries a byte
// twice, however many hosts there are, and each pair of hosts has several flows. (The same holds for a chain of hosts,
// but there each host adds the time of a window.)
//
// MPI's own broadcasts know ranks and not hosts, and took two to three times as long (Open MPI, four ranks on two and
// on four hosts, 1 Gbit/s; at 10 Gbit/s, where the two cores of all hosts were the limit, neither is clearly slower).
// Relative to the carrier's own broadcast, this one took 0.7 to 1.2 of the time with one rank on each of two and of
// four hosts (Open MPI, MPICH, gloo), and with two ranks on each of two hosts 0.6 over gloo, 0.9 over MPICH, and a
// sixth or less over Open MPI (two jobs of nine turns, on a busy machine).
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "group.h"
#include "hosts/hosts_allreduce.h"
#include "hosts/point_to_point.h"
#include "shm/shm_group.h"

namespace horo {

class HostsBroadcast {
 public:
  // Like HostsAllreduce.
  HostsBroadcast(ShmGroup& group, std::shared_ptr<PointToPoint> messages, Hosts hosts, uint8_t* memory);

  // Copies the buffers of rank `root` to those of all ranks, which have the same total size. `label` is the operation's
  // name in messages, `on_idle` as in Transfer::wait(). After an exception, messages may still be in flight: the object
  // must no longer be used, and not be freed before they have ended.
  void broadcast(const std::vector<Buffer>& buffers, int root, const std::string& label,
                 const std::function<void()>& on_idle);

 private:
  struct Exchange;

  ShmGroup& group_;
  std::shared_ptr<PointToPoint> messages_;
  Hosts hosts_;
  uint8_t* memory_;
  size_t window_bytes_;
  std::vector<int> parts_;   // of this rank
  std::vector<int> others_;  // the other hosts
};

}  // namespace horo
