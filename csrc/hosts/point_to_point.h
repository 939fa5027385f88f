// Messages between ranks of different hosts, over any carrier.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

namespace horo {

// The purpose of messages; those that Python sends have 0.
enum Tag : int { kSumTag = 1, kResultTag, kGatherTag, kShareTag, kCopyTag };

// Messages from one rank to another with the same tag arrive in the order in which they were sent.
struct Message {
  int peer;
  int tag;
  uint8_t* data;
  size_t n_bytes;
};

// Adds a message, in pieces of at most `largest` bytes; adds nothing if it is empty.
void add_in_pieces(std::vector<Message>& messages, Message message, size_t largest);

// Messages in flight.
class Transfer {
 public:
  virtual ~Transfer() = default;
  // Returns whether all have been sent and received. Never waits; the carrier may make progress only in this call.
  virtual bool done() = 0;
  // Waits until all have been. Calls `on_idle`, if any, some 20 times per second; it throws to stop waiting. If it
  // reports a lost peer, this is ignored if that peer has completed its part.
  void wait(const std::function<void()>& on_idle);
};

// The bytes that this process has given to carriers for other ranks: the contents of messages, not what ranks tell each
// other about operations (handshakes, control channels). Each is added by the function that the caller hands it to.
inline std::atomic<uint64_t> bytes_sent{0};

class PointToPoint {
 public:
  virtual ~PointToPoint() = default;
  // Longer messages should be sent in pieces.
  virtual size_t largest_message() const { return SIZE_MAX; }
  // Never waits, and counts the bytes. The messages' memory may be accessed until the transfer is done, even if it is
  // dropped before.
  std::unique_ptr<Transfer> start(const std::vector<Message>& receive, const std::vector<Message>& send);
  // The same without counting the bytes, for messages that belong to a handshake.
  virtual std::unique_ptr<Transfer> begin(const std::vector<Message>& receive, const std::vector<Message>& send) = 0;
};

}  // namespace horo
