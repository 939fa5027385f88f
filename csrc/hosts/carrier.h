// What carries bytes between the ranks of several hosts: all that a HostsGroup uses.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "hosts/point_to_point.h"

namespace horo {

// Messages, and the exchange that begins every operation.
class Carrier : public PointToPoint {
 public:
  // Leaves every rank's few bytes in `everyone`, in rank order; all ranks call it. Never waits.
  virtual std::unique_ptr<Transfer> allgather(const uint8_t* mine, size_t n_bytes, uint8_t* everyone) = 0;
};

struct ShortMessage {
  int peer;
  int tag;
  std::string text;
};

// Short messages (up to 4 KiB), for which nobody waits: no call does. For any thread, without the GIL.
class ControlChannel {
 public:
  virtual ~ControlChannel() = default;
  // Sends each of these peers its text. Messages to one peer arrive in the order in which they were sent.
  virtual void send(const std::map<int, std::string>& texts, int tag) = 0;
  // Those that have arrived. Throws PeerLost where a peer has died and nothing has.
  virtual std::vector<ShortMessage> receive() = 0;
  // Peers that have died or left: receive() returns all that they have sent.
  virtual std::vector<int> ended() { return {}; }
  // Whether nothing can be sent any more, since this process is about to end.
  virtual bool is_over() { return false; }
};

}  // namespace horo
