#include "shm/segment.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <stdexcept>
#include <string>
#include <system_error>

namespace horo {
namespace {

[[noreturn]] void fail(const std::string& what) {
  throw std::system_error(errno, std::generic_category(), "shared memory: " + what);
}

uint8_t* map(size_t n_bytes, int flags, int fd) {
  void* data = mmap(nullptr, n_bytes, PROT_READ | PROT_WRITE, flags, fd, 0);
  if (data == MAP_FAILED) fail("mmap of " + std::to_string(n_bytes) + " bytes");
  return static_cast<uint8_t*>(data);
}

}  // namespace

Segment Segment::create(size_t n_bytes) {
  n_bytes += kHeaderBytes;
  const int fd = memfd_create("horo_lite", MFD_CLOEXEC);
  if (fd < 0) fail("memfd_create");
  Segment segment(nullptr, n_bytes, fd);
  if (fchmod(fd, 0600) != 0) fail("fchmod");
  if (ftruncate(fd, static_cast<off_t>(n_bytes)) != 0) fail("ftruncate to " + std::to_string(n_bytes) + " bytes");
  segment.data_ = map(n_bytes, MAP_SHARED, fd);
  uint64_t token = 0;
  if (getrandom(&token, sizeof(token), 0) != sizeof(token)) fail("getrandom");
  token &= (uint64_t{1} << 62) - 1;
  std::memcpy(segment.data_, &token, sizeof(token));
  return segment;
}

Segment Segment::open(pid_t pid, int fd, size_t n_bytes, uint64_t token) {
  n_bytes += kHeaderBytes;
  const std::string path = "/proc/" + std::to_string(pid) + "/fd/" + std::to_string(fd);
  const int own_fd = ::open(path.c_str(), O_RDWR | O_NONBLOCK | O_NOCTTY | O_CLOEXEC);
  if (own_fd < 0) fail("open of " + path);
  Segment segment(nullptr, n_bytes, own_fd);
  struct stat status;
  if (fstat(own_fd, &status) != 0) fail("fstat");
  if (status.st_uid != geteuid()) throw std::runtime_error("shared memory: " + path + " belongs to another user");
  // Nor a file of ours: the location of the segment, which came from another process, may be forged.
  if (!S_ISREG(status.st_mode) || status.st_nlink != 0) {
    throw std::runtime_error("shared memory: " + path + " is not a segment but a file");
  }
  if (static_cast<size_t>(status.st_size) != n_bytes) {
    throw std::runtime_error("shared memory: " + path + " has another size than this rank expects");
  }
  segment.data_ = map(n_bytes, MAP_SHARED, own_fd);
  if (segment.token() != token) throw std::runtime_error("shared memory: " + path + " is not this job's segment");
  return segment;
}

Segment Segment::local(size_t n_bytes) {
  n_bytes += kHeaderBytes;
  return Segment(map(n_bytes, MAP_PRIVATE | MAP_ANONYMOUS, -1), n_bytes, -1);
}

Segment::Segment(Segment&& other) noexcept : data_(other.data_), n_bytes_(other.n_bytes_), fd_(other.fd_) {
  other.data_ = nullptr;
  other.fd_ = -1;
}

Segment::~Segment() {
  close_descriptor();
  if (data_ != nullptr) munmap(data_, n_bytes_);
}

uint64_t Segment::token() const {
  uint64_t token;
  std::memcpy(&token, data_, sizeof(token));
  return token;
}

void Segment::close_descriptor() {
  if (fd_ >= 0) ::close(fd_);
  fd_ = -1;
}

void Segment::make_private() {
  if (mmap(data_, n_bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_FIXED, fd_, 0) == MAP_FAILED) fail("mmap again");
}

}  // namespace horo
