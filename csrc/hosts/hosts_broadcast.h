// The broadcast between several hosts: shared memory inside each, messages between them, pipelined in windows.
//
// A window is divided into shares: every host except the root's owns one, and every rank of the host a part of it. The
// root copies a window into shared memory, from which the ranks of its host send each host its share. The owner of a
// part passes it on to the other hosts, where all ranks copy the window from shared memory. So no link carries a byte
// twice, however many hosts there are, and each pair of hosts has several flows. (The same holds for a chain of hosts,
// but there each host adds the time of a window.)
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
