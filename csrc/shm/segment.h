// A piece of memory shared by the ranks of one host, which no file name ever leads to.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>

namespace horo {

class Segment {
 public:
  // Anonymous memory (memfd): gone with the last process that holds it, and not counted against /dev/shm.
  static Segment create(size_t n_bytes);
  // Memory of another library, as a file that has no name any more; that library may have mapped it, too.
  static Segment adopt(int fd, size_t n_bytes);
  // The segment that process `pid` holds as descriptor `fd`; its token must be `token`, its owner this user. All
  // three keep a descriptor: see close_descriptor().
  static Segment open(pid_t pid, int fd, size_t n_bytes, uint64_t token);
  // Ordinary memory, for ranks that are threads of this process.
  static Segment local(size_t n_bytes);

  Segment(Segment&& other) noexcept;
  Segment& operator=(Segment&&) = delete;
  ~Segment();

  uint8_t* data() const { return data_ + header_bytes(); }
  int fd() const { return fd_; }
  // What tells the segment from every other.
  uint64_t token() const { return token_; }
  // The mapping stays; the descriptor that peers open it through, and make_private() needs, goes.
  void close_descriptor();
  // What this process writes from now on is seen by nobody else; for forked children. Copies nothing at once.
  void make_private();

 private:
  Segment(size_t n_bytes, int fd, uint64_t token);
  // A page with the token, which is a random number; memory of others has none, and is known by the number of its file.
  size_t header_bytes() const { return token_ & kAdopted ? 0 : 4096; }
  void map(int flags);
  static constexpr uint64_t kAdopted = uint64_t{1} << 62;
  uint64_t token_;
  size_t n_bytes_;  // with the header
  int fd_;
  uint8_t* data_ = nullptr;
};

}  // namespace horo
