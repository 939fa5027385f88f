#include "testing/races.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <iterator>
#include <utility>

namespace horo {
namespace {

void join(Races::Clock& clock, const Races::Clock& other) {
  if (clock.size() < other.size()) clock.resize(other.size());
  for (size_t i = 0; i < other.size(); ++i) clock[i] = std::max(clock[i], other[i]);
}

}  // namespace

int Races::new_stream() {
  const std::lock_guard lock(mutex_);
  clocks_.emplace_back(clocks_.size() + 1);
  return static_cast<int>(clocks_.size()) - 1;
}

void Races::touch(int stream, const void* address, size_t n_bytes, bool writes, const char* what) {
  if (n_bytes == 0) return;
  const std::lock_guard lock(mutex_);
  Clock& now = clock(stream);
  const Access mine{stream, ++now[static_cast<size_t>(stream)], what};
  const auto begin = reinterpret_cast<uintptr_t>(address);
  const uintptr_t end = begin + n_bytes;
  const auto last = cut(end);
  for (auto at = cut(begin); at != last; ++at) {
    check(now, at->second.writes, mine, writes ? "overwrites what was written" : "reads what is written", at->first);
    if (writes) check(now, at->second.reads, mine, "overwrites what is read", at->first);
  }
  if (writes) {
    ranges_.erase(cut(begin), last);
    ranges_[begin] = {end, {mine}, {}};
    return;
  }
  for (uintptr_t at = begin; at < end;) {
    const auto next = ranges_.lower_bound(at);
    if (next == ranges_.end() || next->first != at) {  // a gap
      const uintptr_t until = next == ranges_.end() ? end : std::min(end, next->first);
      ranges_[at] = {until, {}, {mine}};
      at = until;
      continue;
    }
    std::erase_if(next->second.reads, [&](const Access& read) { return read.stream == stream; });
    next->second.reads.push_back(mine);
    at = next->second.end;
  }
}

Races::Clock Races::queued(int stream) {
  const std::lock_guard lock(mutex_);
  return clock(stream);
}

void Races::wait(int stream, const Clock& work) {
  const std::lock_guard lock(mutex_);
  join(clock(stream), work);
}

void Races::seen(const Clock& work) {
  const std::lock_guard lock(mutex_);
  join(host_, work);
}

void Races::forget(const void* address, size_t n_bytes) {
  const std::lock_guard lock(mutex_);
  const auto begin = reinterpret_cast<uintptr_t>(address);
  const auto last = cut(begin + n_bytes);
  ranges_.erase(cut(begin), last);
}

// The stream's clock, after all that the host has seen.
Races::Clock& Races::clock(int stream) {
  Clock& clock = clocks_[static_cast<size_t>(stream)];
  join(clock, host_);
  return clock;
}

void Races::check(const Clock& now, const std::vector<Access>& earlier, const Access& mine, const char* how,
                  uintptr_t at) {
  for (const Access& access : earlier) {
    const auto other = static_cast<size_t>(access.stream);
    if (other < now.size() && access.time <= now[other]) continue;
    std::fprintf(stderr,
                 "the fake GPU: a race at %#zx: %s on stream %d %s, and nothing orders it after %s on stream %d\n", at,
                 mine.what, mine.stream, how, access.what, access.stream);
    std::abort();
  }
}

// Returns the first range that begins at `at` or after it; none goes across it any more.
std::map<uintptr_t, Races::Range>::iterator Races::cut(uintptr_t at) {
  auto next = ranges_.lower_bound(at);
  if (next == ranges_.begin() || (next != ranges_.end() && next->first == at)) return next;
  Range& before = std::prev(next)->second;
  if (before.end <= at) return next;
  Range rest = before;
  before.end = at;
  return ranges_.emplace_hint(next, at, std::move(rest));
}

}  // namespace horo
