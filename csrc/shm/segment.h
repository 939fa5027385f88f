// Memory shared by the ranks of one host, which never has a file name: peers open it through /proc/<pid>/fd. So a kill
// at any moment leaves nothing behind, and the size of /dev/shm does not matter. A world takes 1.5 MiB for each rank
// and transport, which the kernel allocates when it is used.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>

namespace horo {

class Segment {
 public:
  // Anonymous memory (memfd): freed with the last process that holds it, and not counted against /dev/shm.
  static Segment create(size_t n_bytes);
  // Memory of another library, as a file that no longer has a name; that library may have mapped it, too.
  static Segment adopt(int fd, size_t n_bytes);
  // The segment that process `pid` holds as descriptor `fd`; its token must be `token`, and its owner this user. All
  // three functions keep a descriptor: see close_descriptor().
  static Segment open(pid_t pid, int fd, size_t n_bytes, uint64_t token);
  // Ordinary memory, for ranks that are threads of this process.
  static Segment local(size_t n_bytes);

  Segment(Segment&& other) noexcept;
  Segment& operator=(Segment&&) = delete;
  ~Segment();

  uint8_t* data() const { return data_ + header_bytes(); }
  int fd() const { return fd_; }
  // Identifies the segment.
  uint64_t token() const { return token_; }
  // Keeps the mapping, but closes the descriptor through which peers open it, and which make_private() needs.
  void close_descriptor();
  // Makes future writes of this process invisible to others. Copies on write. Again, it does nothing.
  void make_private();

 private:
  Segment(size_t n_bytes, int fd, uint64_t token);
  // A page with the token, a random number; memory of other libraries has none, and is identified by its file's number.
  size_t header_bytes() const { return token_ & kAdopted ? 0 : 4096; }
  void map(int flags);
  static constexpr uint64_t kAdopted = uint64_t{1} << 62;
  uint64_t token_;
  size_t n_bytes_;  // including the header
  int fd_;
  uint8_t* data_ = nullptr;
  bool is_private_ = false;
};

}  // namespace horo
