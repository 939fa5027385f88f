#include "hosts/mpi.h"

#include <algorithm>
#include <cstring>
#include <list>
#include <mutex>
#include <optional>
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
  int (*iprobe)(int, int, Handle, int*, void*);
  int (*recv)(void*, int, Handle, int, int, Handle, void*);
  int (*get_count)(const void*, Handle, int*);
  int (*finalized)(int*);
  int (*error_string)(int, char*, int*);
  Handle communicator;
  Handle byte;
  int any_source;
  int any_tag;
  size_t status_bytes;
  size_t status_source;
  size_t status_tag;

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
    const std::lock_guard turn(mpi_turn);
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
    const std::lock_guard turn(mpi_turn);
    const int n = static_cast<int>(n_bytes);
    mpi_.check(mpi_.iallgather(mine, n, mpi_.byte, everyone, n, mpi_.byte, mpi_.communicator, requests_.data()));
  }

  bool done() override {
    int flag = 0;
    const std::lock_guard turn(mpi_turn);
    // Completed requests become MPI_REQUEST_NULL, and may be tested again.
    mpi_.check(mpi_.testall(static_cast<int>(requests_.size()), requests_.data(), &flag, statuses_.data()));
    return flag != 0;
  }

 private:
  const Mpi<Handle>& mpi_;
  std::vector<Handle> requests_;
  std::vector<uint8_t> statuses_;  // MPI_STATUSES_IGNORE differs between libraries
};

template <class Handle>
class Control : public MpiControlChannel {
 public:
  Control(const Mpi<Handle>& mpi, std::optional<int> tag) : mpi_(mpi), tag_(tag.value_or(mpi.any_tag)) {}

  void send(const std::map<int, std::string>& texts, int tag) override {
    const std::lock_guard lock(mutex_);
    forget_sent();
    for (const auto& [peer, text] : texts) {
      ++n_sent_[peer];
      Sent& sent = under_way_.emplace_back();
      sent.text = text;
      auto* data = reinterpret_cast<uint8_t*>(sent.text.data());
      sent.transfer = std::make_unique<MpiTransfer<Handle>>(mpi_, std::vector<Message>{},
                                                            std::vector<Message>{{peer, tag, data, sent.text.size()}});
    }
  }

  std::vector<ShortMessage> receive() override {
    const std::lock_guard lock(mutex_);
    // An engine that was not stopped may call this until the process ends.
    return is_over() ? std::vector<ShortMessage>() : received();
  }

  bool is_over() override {
    int flag = 0;
    mpi_.finalized(&flag);
    return flag != 0;
  }

  int n_sent(int peer) const override {
    const std::lock_guard lock(mutex_);
    const auto found = n_sent_.find(peer);
    return found == n_sent_.end() ? 0 : found->second;
  }

  bool drained(const std::vector<int>& n_sent) override {
    const std::lock_guard lock(mutex_);
    received();
    forget_sent();
    for (int peer = 0; peer < static_cast<int>(n_sent.size()); ++peer) {
      if (n_received_[peer] < n_sent[peer]) return false;
    }
    return under_way_.empty();
  }

 private:
  struct Sent {
    std::string text;
    std::unique_ptr<Transfer> transfer;  // null if it could not be started
  };

  void forget_sent() {
    for (auto sent = under_way_.begin(); sent != under_way_.end();) {
      if (sent->transfer == nullptr || sent->transfer->done()) sent = under_way_.erase(sent);
      else ++sent;
    }
  }

  std::vector<ShortMessage> received() {
    std::vector<ShortMessage> received;
    std::vector<uint8_t> status(mpi_.status_bytes);
    const std::lock_guard turn(mpi_turn);
    try {
      while (true) {
        int flag = 0;
        mpi_.check(mpi_.iprobe(mpi_.any_source, tag_, mpi_.communicator, &flag, status.data()));
        if (flag == 0) break;
        ShortMessage message;
        std::memcpy(&message.peer, status.data() + mpi_.status_source, sizeof(int));
        std::memcpy(&message.tag, status.data() + mpi_.status_tag, sizeof(int));
        int n_bytes = 0;
        mpi_.check(mpi_.get_count(status.data(), mpi_.byte, &n_bytes));
        message.text.resize(static_cast<size_t>(n_bytes));
        mpi_.check(mpi_.recv(message.text.data(), n_bytes, mpi_.byte, message.peer, message.tag, mpi_.communicator,
                             status.data()));
        ++n_received_[message.peer];
        received.push_back(std::move(message));
      }
    } catch (const PeerLost&) {  // from MPI with fault tolerance
      if (received.empty()) throw;
    }
    return received;
  }

  Mpi<Handle> mpi_;
  const int tag_;
  mutable std::mutex mutex_;  // held from a probe to its receive, and for the members below
  std::list<Sent> under_way_;
  std::map<int, int> n_sent_, n_received_;  // by peer
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
    mpi_.iprobe = reinterpret_cast<decltype(mpi_.iprobe)>(functions.iprobe);
    mpi_.recv = reinterpret_cast<decltype(mpi_.recv)>(functions.recv);
    mpi_.get_count = reinterpret_cast<decltype(mpi_.get_count)>(functions.get_count);
    mpi_.finalized = reinterpret_cast<decltype(mpi_.finalized)>(functions.finalized);
    mpi_.error_string = reinterpret_cast<decltype(mpi_.error_string)>(functions.error_string);
    std::memcpy(&mpi_.communicator, handles.communicator.data(), sizeof(Handle));
    std::memcpy(&mpi_.byte, handles.byte.data(), sizeof(Handle));
    mpi_.any_source = handles.any_source;
    mpi_.any_tag = handles.any_tag;
    mpi_.status_bytes = handles.status_bytes;
    mpi_.status_source = handles.status_source;
    mpi_.status_tag = handles.status_tag;
  }
  size_t largest_message() const override { return largest_message_; }
  std::unique_ptr<Transfer> begin(const std::vector<Message>& receive, const std::vector<Message>& send) override {
    return std::make_unique<MpiTransfer<Handle>>(mpi_, receive, send);
  }
  std::unique_ptr<Transfer> allgather(const uint8_t* mine, size_t n_bytes, uint8_t* everyone) override {
    return std::make_unique<MpiTransfer<Handle>>(mpi_, mine, n_bytes, everyone);
  }
  std::shared_ptr<MpiControlChannel> control_channel(std::optional<int> tag) const override {
    return std::make_shared<Control<Handle>>(mpi_, tag);
  }

 private:
  Mpi<Handle> mpi_;
  size_t largest_message_;
};

}  // namespace

std::recursive_mutex mpi_turn;

std::unique_ptr<MpiPointToPoint> mpi_point_to_point(const MpiFunctions& functions, const MpiHandles& handles,
                                                    size_t largest_message) {
  const size_t size = handles.communicator.size();
  if (handles.byte.size() == size && size == sizeof(int)) {
    return std::make_unique<WithHandles<int>>(functions, handles, largest_message);
  }
  if (handles.byte.size() == size && size == sizeof(void*)) {
    return std::make_unique<WithHandles<void*>>(functions, handles, largest_message);
  }
  throw std::invalid_argument("handles of " + std::to_string(size) + " bytes do not belong to a known MPI");
}

}  // namespace horo
