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
  // The segment that process `pid` holds as descriptor `fd`; its token must be `token`, its owner this user. Both this
  // and create() keep a descriptor: see close_descriptor().
  static Segment open(pid_t pid, int fd, size_t n_bytes, uint64_t token);
  // Ordinary memory, for ranks that are threads of this process.
  static Segment local(size_t n_bytes);

  Segment(Segment&& other) noexcept;
  Segment& operator=(Segment&&) = delete;
  ~Segment();

  uint8_t* data() const { return data_ + kHeaderBytes; }
  size_t n_bytes() const { return n_bytes_; }
  int fd() const { return fd_; }
  uint64_t token() const;
  // The mapping stays; the descriptor that peers open it through, and make_private() needs, goes.
  void close_descriptor();
  // What this process writes from now on is seen by nobody else; for forked children. Copies nothing at once.
  void make_private();

 private:
  static constexpr size_t kHeaderBytes = 4096;  // holds the token
  Segment(uint8_t* data, size_t n_bytes, int fd) : data_(data), n_bytes_(n_bytes), fd_(fd) {}
  uint8_t* data_;
  size_t n_bytes_;
  int fd_;
};

}  // namespace horo
