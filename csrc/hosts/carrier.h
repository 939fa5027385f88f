// Carries bytes between the ranks of several hosts: everything that a HostsGroup uses.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "hosts/point_to_point.h"

namespace horo {

// Messages, and the exchange at the beginning of every operation.
class Carrier : public PointToPoint {
 public:
  // Gathers a few bytes of every rank in `everyone`, in rank order; all ranks call it. Never waits.
  virtual std::unique_ptr<Transfer> allgather(const uint8_t* mine, size_t n_bytes, uint8_t* everyone) = 0;
};

struct ShortMessage {
  int peer;
  int tag;
  std::string text;
};

// Short messages (up to 4 KiB); no call waits for them. For any thread, without the GIL.
class ControlChannel {
 public:
  virtual ~ControlChannel() = default;
  // Sends each of these peers its text. Messages to one peer arrive in the order in which they were sent.
  virtual void send(const std::map<int, std::string>& texts, int tag) = 0;
  // Returns the messages that have arrived. Throws PeerLost if there are none and a peer has died.
  virtual std::vector<ShortMessage> receive() = 0;
  // Peers that have died or left: receive() then returns everything that they have sent.
  virtual std::vector<int> ended() { return {}; }
  // Whether nothing can be sent any more, because this process is about to end.
  virtual bool is_over() { return false; }
};

}  // namespace horo
