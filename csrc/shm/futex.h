// Threads and processes that wait for a word of memory to change. There is nothing to destroy: a forked child can free
// memory for which a thread of its parent waits, while pthread_cond_destroy() would wait for that thread forever.
#pragma once

#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>

namespace horo {

// Returns at once if the value differs from `expected`.
inline void futex_wait(std::atomic<uint32_t>& value, uint32_t expected, double timeout_s) {
  timespec timeout;
  timeout.tv_sec = static_cast<time_t>(timeout_s);
  timeout.tv_nsec = static_cast<long>((timeout_s - static_cast<double>(timeout.tv_sec)) * 1e9);
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&value), FUTEX_WAIT, expected, &timeout, nullptr, 0);
}

inline void futex_wake(std::atomic<uint32_t>& value) {
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&value), FUTEX_WAKE, 1 << 30, nullptr, nullptr, 0);
}

}  // namespace horo
