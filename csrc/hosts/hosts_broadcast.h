// The bytes of one rank for all ranks of several hosts: shared memory inside each, messages between them, pipelined in
// windows.
//
// A window is cut into shares: every host but the root's owns one, and every rank of the host a part of it. The root
// copies a window into shared memory, from which the ranks of its host send each host its share. Who owns a part passes
// it on to the other hosts, where all ranks copy the window out of shared memory. So no link carries a byte twice,
// however many hosts there are, and each pair of hosts has several flows. (In a chain of hosts no link would either,
// but each host would add a window's time.)
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
  // As of a HostsAllreduce.
  HostsBroadcast(ShmGroup& group, std::shared_ptr<PointToPoint> messages, Hosts hosts, uint8_t* memory);

  // Leaves in the buffers, which hold as many bytes on every rank, what those of rank `root` do. `label` is what
  // messages call it, `on_idle` as in Transfer::wait(). After an exception messages may still be under way: nothing
  // here may be used any more, nor freed before they have ended.
  void broadcast(const std::vector<Buffer>& buffers, int root, const std::string& label,
                 const std::function<void()>& on_idle);

 private:
  struct Exchange;

  ShmGroup& group_;
  std::shared_ptr<PointToPoint> messages_;
  Hosts hosts_;
  uint8_t* memory_;
  size_t window_bytes_;
  std::vector<int> parts_;   // those of this rank
  std::vector<int> others_;  // the other hosts
};

}  // namespace horo
