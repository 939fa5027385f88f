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

uint64_t random_token() {
  uint64_t token = 0;
  if (getrandom(&token, sizeof(token), 0) != sizeof(token)) fail("getrandom");
  return token;
}

// Identifies an open file.
uint64_t number_of_file(const struct stat& status) {
  return static_cast<uint64_t>(status.st_ino) ^ static_cast<uint64_t>(status.st_dev) << 40;
}

// Checks that `fd` refers to memory and not to a file with a name, since it was received from another process.
struct stat memory_of(int fd, const std::string& name, size_t n_bytes) {
  struct stat status;
  if (fstat(fd, &status) != 0) fail("fstat");
  if (status.st_uid != geteuid()) throw std::runtime_error("shared memory: " + name + " belongs to another user");
  if (!S_ISREG(status.st_mode) || status.st_nlink != 0) {
    throw std::runtime_error("shared memory: " + name + " is not a segment but a file");
  }
  if (static_cast<size_t>(status.st_size) != n_bytes) {
    throw std::runtime_error("shared memory: " + name + " has another size than this rank expects");
  }
  return status;
}

}  // namespace

Segment::Segment(size_t n_bytes, int fd, uint64_t token) : token_(token), n_bytes_(n_bytes + header_bytes()), fd_(fd) {}

Segment Segment::create(size_t n_bytes) {
  const int fd = memfd_create("horo_lite", MFD_CLOEXEC);
  if (fd < 0) fail("memfd_create");
  Segment segment(n_bytes, fd, random_token() & (kAdopted - 1));
  if (fchmod(fd, 0600) != 0) fail("fchmod");
  if (ftruncate(fd, static_cast<off_t>(segment.n_bytes_)) != 0) {
    fail("ftruncate to " + std::to_string(segment.n_bytes_) + " bytes");
  }
  segment.map(MAP_SHARED);
  std::memcpy(segment.data_, &segment.token_, sizeof(token_));
  return segment;
}

Segment Segment::adopt(int fd, size_t n_bytes) {
  const int own_fd = fcntl(fd, F_DUPFD_CLOEXEC, 0);
  if (own_fd < 0) fail("fcntl");
  Segment segment(n_bytes, own_fd, kAdopted);
  segment.token_ |= number_of_file(memory_of(own_fd, "descriptor " + std::to_string(fd), n_bytes)) & (kAdopted - 1);
  segment.map(MAP_SHARED);
  return segment;
}

Segment Segment::open(pid_t pid, int fd, size_t n_bytes, uint64_t token) {
  const std::string path = "/proc/" + std::to_string(pid) + "/fd/" + std::to_string(fd);
  const int own_fd = ::open(path.c_str(), O_RDWR | O_NONBLOCK | O_NOCTTY | O_CLOEXEC);
  if (own_fd < 0) fail("open of " + path);
  Segment segment(n_bytes, own_fd, token);
  const struct stat status = memory_of(own_fd, path, segment.n_bytes_);
  segment.map(MAP_SHARED);
  uint64_t found = kAdopted | (number_of_file(status) & (kAdopted - 1));
  if (segment.header_bytes() > 0) std::memcpy(&found, segment.data_, sizeof(found));
  if (found != token) throw std::runtime_error("shared memory: " + path + " is not this job's segment");
  return segment;
}

Segment Segment::local(size_t n_bytes) {
  Segment segment(n_bytes, -1, 0);
  segment.map(MAP_PRIVATE | MAP_ANONYMOUS);
  return segment;
}

Segment::Segment(Segment&& other) noexcept
    : token_(other.token_),
      n_bytes_(other.n_bytes_),
      fd_(other.fd_),
      data_(other.data_),
      is_private_(other.is_private_) {
  other.data_ = nullptr;
  other.fd_ = -1;
}

Segment::~Segment() {
  close_descriptor();
  if (data_ != nullptr) munmap(data_, n_bytes_);
}

void Segment::map(int flags) {
  void* data = mmap(data_, n_bytes_, PROT_READ | PROT_WRITE, flags, fd_, 0);
  if (data == MAP_FAILED) fail("mmap of " + std::to_string(n_bytes_) + " bytes");
  data_ = static_cast<uint8_t*>(data);
}

void Segment::close_descriptor() {
  if (fd_ >= 0) ::close(fd_);
  fd_ = -1;
}

void Segment::make_private() {
  if (is_private_) return;  // another mapping would lose what this process has written
  map(MAP_PRIVATE | MAP_FIXED);
  is_private_ = true;
}

}  // namespace horo
