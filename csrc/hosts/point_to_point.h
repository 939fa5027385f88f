// Messages between ranks of different hosts, whatever carries them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

namespace horo {

// What messages are for; those that Python sends have 0.
enum Tag : int { kSumTag = 1, kResultTag, kGatherTag, kShareTag, kCopyTag };

// Messages from one rank to another with one tag arrive in the order in which they were sent.
struct Message {
  int peer;
  int tag;
  uint8_t* data;
  size_t n_bytes;
};

// Adds a message, in pieces of at most so many bytes: none if it has none.
void add_in_pieces(std::vector<Message>& messages, Message message, size_t largest);

// Messages under way.
class Transfer {
 public:
  virtual ~Transfer() = default;
  // Whether all have been sent and received. Never waits; what carries them may make progress only in here.
  virtual bool done() = 0;
  // Returns when all have been. Calls `on_idle`, if any, some 20 times a second; it throws to stop waiting. What it
  // says about a peer that is lost does not count where that peer has done its part.
  virtual void wait(const std::function<void()>& on_idle);
};

class PointToPoint {
 public:
  virtual ~PointToPoint() = default;
  // Longer messages are better sent in pieces.
  virtual size_t largest_message() const { return SIZE_MAX; }
  // Never waits. The messages' memory may be used until the transfer is done, also if it is dropped before.
  virtual std::unique_ptr<Transfer> start(const std::vector<Message>& receive, const std::vector<Message>& send) = 0;
};

}  // namespace horo
