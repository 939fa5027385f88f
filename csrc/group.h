// Shared by all transports: the memory that they move, and their errors.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

namespace horo {

struct Buffer {
  uint8_t* data;
  size_t n_bytes;
};

// Iterates over a list of buffers as if they were one.
class Cursor {
 public:
  explicit Cursor(const std::vector<Buffer>& buffers) : buffers_(buffers) {}

  template <class Copy>  // Copy(part of the list, offset within this step)
  void step(size_t n_bytes, Copy copy) {
    size_t done = 0;
    while (done < n_bytes) {
      const Buffer& buffer = buffers_[index_];
      const size_t n = std::min(n_bytes - done, buffer.n_bytes - position_);
      if (n != 0) copy(buffer.data + position_, done, n);
      done += n;
      position_ += n;
      if (position_ == buffer.n_bytes) {
        ++index_;
        position_ = 0;
      }
    }
  }

 private:
  const std::vector<Buffer>& buffers_;
  size_t index_ = 0;
  size_t position_ = 0;
};

// A peer died, left or gave up while this rank waited for it.
struct PeerLost : std::runtime_error {
  using std::runtime_error::runtime_error;
  // Found by `rank` while it waited in `operation`; "": between two operations.
  PeerLost(const std::string& cause, const std::string& rank, const std::string& operation)
      : std::runtime_error(cause + " while " + rank + " " + doing(operation)),
        cause(cause),
        rank(rank),
        operation(operation) {}
  static std::string doing(const std::string& operation) {
    return operation.empty() ? "was between two operations" : "waited in " + operation;
  }
  // The error that `next` raises if this was found between two operations.
  PeerLost in(const std::string& next) const {
    return operation.empty() && !cause.empty() ? PeerLost(cause, rank, next) : *this;
  }
  std::string cause;  // the part that applies to every rank; "" if it applies only to this one
  std::string rank, operation;
};

// No rank made progress for longer than the job allows; raised on every rank.
struct Stalled : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// The ranks' calls differ; raised on all of them, and the group remains usable.
struct Mismatch : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// The text of an error that ends an operation, in one line: Python's errors include tracebacks.
inline std::string in_one_line(const std::exception& error) {
  std::string text = error.what();
  text.erase(text.find_last_not_of('\n') + 1);
  return text.substr(text.rfind('\n') + 1);
}

}  // namespace horo
