#include "shm/distance.h"

#include <algorithm>

namespace horo {
namespace {

using Clock = std::chrono::steady_clock;

constexpr uint32_t kExchanges = 8;
constexpr uint32_t kFewest = 3;  // exchanges for a valid result: the first may have waited for the peer
// Cores that share an L3 cache need 120 to 220 ns, others 320 to 620, mostly above 500 (EPYC).
constexpr double kFarNs = 320.0;

}  // namespace

Distance::Distance(std::vector<Shared*> ranks, int rank) : ranks_(std::move(ranks)), rank_(rank) {}

void Distance::measure(std::chrono::microseconds limit) {
  const auto size = static_cast<int>(ranks_.size());
  Shared& own = *ranks_[static_cast<size_t>(rank_)];
  const Shared& next = *ranks_[static_cast<size_t>((rank_ + 1) % size)];
  const Shared& previous = *ranks_[static_cast<size_t>((rank_ + size - 1) % size)];
  // Numbers are never used twice, so a flag from a rank that is too late is not taken for an answer.
  uint32_t number = n_measurements_++ * kExchanges;
  const uint32_t last = number + kExchanges;
  uint32_t echoed = own.echo.load(std::memory_order_relaxed);
  uint32_t n_answers = 0;
  double fastest_ns = 0.0;
  const auto begin = Clock::now();
  auto sent_at = begin;
  own.ping.store(++number, std::memory_order_release);
  // The previous rank may already be in the next measurement. The difference is right beyond 2^32, too.
  const auto has_echoed = [&] { return static_cast<int32_t>(echoed - last) >= 0; };
  for (uint32_t turn = 1; n_answers < kExchanges || !has_echoed(); ++turn) {
    const uint32_t asked = previous.ping.load(std::memory_order_acquire);
    if (asked != echoed) own.echo.store(echoed = asked, std::memory_order_release);
    if (n_answers < kExchanges && next.echo.load(std::memory_order_acquire) == number) {
      const auto now = Clock::now();
      const double ns = std::chrono::duration<double, std::nano>(now - sent_at).count();
      fastest_ns = n_answers == 0 ? ns : std::min(fastest_ns, ns);
      sent_at = now;
      if (++n_answers < kExchanges) own.ping.store(++number, std::memory_order_release);
    }
    if (turn % 64 == 0 && Clock::now() - begin > limit) break;
  }
  if (n_answers < kFewest) return;
  round_trip_ns_ = fastest_ns;
  own.is_far.store(fastest_ns > kFarNs, std::memory_order_relaxed);
}

Stores Distance::stores(SlotStores wanted) const {
  if (wanted != SlotStores::kAuto) return wanted == SlotStores::kStreaming ? Stores::kStreaming : Stores::kCached;
  const bool any_far = std::any_of(ranks_.begin(), ranks_.end(), [](const Shared* rank) {
    return rank->is_far.load(std::memory_order_relaxed) != 0;
  });
  return any_far && kCanStream ? Stores::kStreaming : Stores::kCached;
}

}  // namespace horo
