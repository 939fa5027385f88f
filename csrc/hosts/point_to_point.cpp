#include "hosts/point_to_point.h"

#include <sched.h>
#include <sys/prctl.h>
#include <time.h>

#include <algorithm>
#include <chrono>
#include <optional>

#include "group.h"

namespace horo {
namespace {

using Clock = std::chrono::steady_clock;

// MPI and similar libraries move a socket's bytes while they are polled, some 64 KiB at a time. So a wait begins with
// polls only, and then sleeps for a fraction of the time it has lasted: messages over a fast link are not delayed, and
// waiting for a slow link, or a late rank, uses little of a core.
constexpr auto kSpin = std::chrono::microseconds(100);
constexpr int kPauseFraction = 16;
constexpr auto kLongestPause = std::chrono::microseconds(100);
// A wait longer than a window usually takes is a wait for a late rank: each poll costs some 20 us of CPU time, most of
// it for the sleep, and the wait gets longer by its 250th part at most.
constexpr int kLongFraction = 250;
constexpr auto kLongestOfAll = std::chrono::milliseconds(5);
constexpr auto kIdle = std::chrono::milliseconds(50);

void sleep_for(Clock::duration duration) {
  const auto ns = std::chrono::duration_cast<std::chrono::nanoseconds>(duration).count();
  const timespec pause = {0, static_cast<long>(ns)};
  nanosleep(&pause, nullptr);
}

// Allows sleeps of this thread that are shorter than the 50 us by which the kernel may prolong them.
class ShortSleeps {
 public:
  ShortSleeps() : slack_(prctl(PR_GET_TIMERSLACK)) { prctl(PR_SET_TIMERSLACK, 1000UL); }
  ~ShortSleeps() { prctl(PR_SET_TIMERSLACK, static_cast<unsigned long>(slack_)); }
  ShortSleeps(const ShortSleeps&) = delete;
  ShortSleeps& operator=(const ShortSleeps&) = delete;

 private:
  int slack_;
};

}  // namespace

void add_in_pieces(std::vector<Message>& messages, Message message, size_t largest) {
  for (size_t left = message.n_bytes; left > 0; left -= message.n_bytes, message.data += message.n_bytes) {
    message.n_bytes = std::min(largest, left);
    messages.push_back(message);
  }
}

std::unique_ptr<Transfer> PointToPoint::start(const std::vector<Message>& receive, const std::vector<Message>& send) {
  for (const Message& message : send) bytes_sent += message.n_bytes;
  return begin(receive, send);
}

void Transfer::wait(const std::function<void()>& on_idle) {
  const auto began = Clock::now();
  auto next = began + kIdle;
  std::optional<ShortSleeps> short_sleeps;
  while (!done()) {
    const auto now = Clock::now();
    if (now - began < kSpin) {
      sched_yield();
    } else {
      if (!short_sleeps) short_sleeps.emplace();
      const Clock::duration most = (now - began) / kLongFraction;
      sleep_for(
          std::min((now - began) / kPauseFraction, std::clamp<Clock::duration>(most, kLongestPause, kLongestOfAll)));
    }
    if (now < next) continue;
    next = now + kIdle;
    try {
      if (on_idle) on_idle();
    } catch (const PeerLost&) {
      if (!done()) throw;
      return;
    }
  }
}

}  // namespace horo
