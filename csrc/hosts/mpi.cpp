#include "hosts/mpi.h"

#include <cstring>
#include <stdexcept>
#include <string>

#include "group.h"

namespace horo {
namespace {

constexpr int kSuccess = 0;           // in every ABI
constexpr size_t kErrorBytes = 8192;  // the longest MPI_MAX_ERROR_STRING is 1024

template <class Handle>
struct Mpi {
  int (*isend)(const void*, int, Handle, int, int, Handle, Handle*);
  int (*irecv)(void*, int, Handle, int, int, Handle, Handle*);
  int (*iallgather)(const void*, int, Handle, void*, int, Handle, Handle, Handle*);
  int (*testall)(int, Handle*, int*, void*);
  int (*error_string)(int, char*, int*);
  Handle communicator;
  Handle byte;
  size_t status_bytes;

  void check(int code) const {
    if (code == kSuccess) return;
    std::vector<char> text(kErrorBytes);
    int length = 0;
    error_string(code, text.data(), &length);
    throw PeerLost("a rank died (" + std::string(text.data(), length) + ")");
  }
};

template <class Handle>
class MpiTransfer : public Transfer {
 public:
  MpiTransfer(const Mpi<Handle>& mpi, const std::vector<Message>& receive, const std::vector<Message>& send)
      : mpi_(mpi), requests_(receive.size() + send.size()), statuses_(requests_.size() * mpi.status_bytes) {
    Handle* request = requests_.data();
    for (const Message& m : receive) {
      mpi_.check(mpi_.irecv(m.data, static_cast<int>(m.n_bytes), mpi_.byte, m.peer, m.tag, mpi_.communicator, request));
      ++request;
    }
    for (const Message& m : send) {
      mpi_.check(mpi_.isend(m.data, static_cast<int>(m.n_bytes), mpi_.byte, m.peer, m.tag, mpi_.communicator, request));
      ++request;
    }
  }

  MpiTransfer(const Mpi<Handle>& mpi, const uint8_t* mine, size_t n_bytes, uint8_t* everyone)
      : mpi_(mpi), requests_(1), statuses_(mpi.status_bytes) {
    const int n = static_cast<int>(n_bytes);
    mpi_.check(mpi_.iallgather(mine, n, mpi_.byte, everyone, n, mpi_.byte, mpi_.communicator, requests_.data()));
  }

  // Of requests that lie elsewhere, and are to be null there, too, when they are complete.
  MpiTransfer(const Mpi<Handle>& mpi, const std::vector<void*>& requests)
      : mpi_(mpi), requests_(requests.size()), elsewhere_(requests), statuses_(requests.size() * mpi.status_bytes) {
    for (size_t i = 0; i < requests.size(); ++i) std::memcpy(&requests_[i], requests[i], sizeof(Handle));
  }

  bool done() override {
    int flag = 0;
    // What is complete becomes MPI_REQUEST_NULL, and to ask again is allowed.
    mpi_.check(mpi_.testall(static_cast<int>(requests_.size()), requests_.data(), &flag, statuses_.data()));
    for (size_t i = 0; flag != 0 && i < elsewhere_.size(); ++i) {
      std::memcpy(elsewhere_[i], &requests_[i], sizeof(Handle));
    }
    return flag != 0;
  }

 private:
  const Mpi<Handle>& mpi_;
  std::vector<Handle> requests_;
  std::vector<void*> elsewhere_;
  std::vector<uint8_t> statuses_;  // MPI_STATUSES_IGNORE differs between libraries
};

template <class Handle>
class WithHandles : public MpiPointToPoint {
 public:
  WithHandles(const MpiFunctions& functions, const MpiHandles& handles, size_t largest_message)
      : largest_message_(largest_message) {
    mpi_.isend = reinterpret_cast<decltype(mpi_.isend)>(functions.isend);
    mpi_.irecv = reinterpret_cast<decltype(mpi_.irecv)>(functions.irecv);
    mpi_.iallgather = reinterpret_cast<decltype(mpi_.iallgather)>(functions.iallgather);
    mpi_.testall = reinterpret_cast<decltype(mpi_.testall)>(functions.testall);
    mpi_.error_string = reinterpret_cast<decltype(mpi_.error_string)>(functions.error_string);
    std::memcpy(&mpi_.communicator, handles.communicator.data(), sizeof(Handle));
    std::memcpy(&mpi_.byte, handles.byte.data(), sizeof(Handle));
    mpi_.status_bytes = handles.status_bytes;
  }
  size_t largest_message() const override { return largest_message_; }
  std::unique_ptr<Transfer> start(const std::vector<Message>& receive, const std::vector<Message>& send) override {
    return std::make_unique<MpiTransfer<Handle>>(mpi_, receive, send);
  }
  std::unique_ptr<Transfer> allgather(const uint8_t* mine, size_t n_bytes, uint8_t* everyone) override {
    return std::make_unique<MpiTransfer<Handle>>(mpi_, mine, n_bytes, everyone);
  }
  std::unique_ptr<Transfer> started(const std::vector<void*>& requests) override {
    return std::make_unique<MpiTransfer<Handle>>(mpi_, requests);
  }

 private:
  Mpi<Handle> mpi_;
  size_t largest_message_;
};

}  // namespace

std::unique_ptr<MpiPointToPoint> mpi_point_to_point(const MpiFunctions& functions, const MpiHandles& handles,
                                                    size_t largest_message) {
  const size_t size = handles.communicator.size();
  if (handles.byte.size() == size && size == sizeof(int)) {
    return std::make_unique<WithHandles<int>>(functions, handles, largest_message);
  }
  if (handles.byte.size() == size && size == sizeof(void*)) {
    return std::make_unique<WithHandles<void*>>(functions, handles, largest_message);
  }
  throw std::invalid_argument("handles of " + std::to_string(size) + " bytes are of no MPI that is known");
}

}  // namespace horo
