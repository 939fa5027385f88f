// Messages over MPI, without the GIL: its functions are those of the library that mpi4py has loaded.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "hosts/carrier.h"

namespace horo {

// One thread at a time calls MPI, even under MPI_THREAD_MULTIPLE: when a peer dies, Open MPI 5.0.11's transport over
// TCP may deadlock between the MPI_Isend of one thread and the MPI_Iprobe of another. None of the calls waits for a
// peer.
extern std::recursive_mutex mpi_turn;

// Addresses of the functions with these names in that library.
struct MpiFunctions {
  void* isend;
  void* irecv;
  void* iallgather;
  void* testall;
  void* iprobe;
  void* recv;
  void* get_count;
  void* finalized;
  void* error_string;
};

// Handles and constants, as in memory: a handle is an int in MPICH's ABI, a pointer in Open MPI's.
struct MpiHandles {
  std::vector<uint8_t> communicator;
  std::vector<uint8_t> byte;  // MPI_BYTE
  int any_source;
  int any_tag;
  size_t status_bytes;
  size_t status_source;  // the offset of MPI_SOURCE in a status
  size_t status_tag;
};

// Short messages over a communicator. The object outlives all of them, or MPI.
class MpiControlChannel : public ControlChannel {
 public:
  // How many messages were sent to that peer.
  virtual int n_sent(int peer) const = 0;
  // Takes what has arrived. Returns whether nothing is in flight any more, given that rank r has sent this one
  // n_sent[r].
  virtual bool drained(const std::vector<int>& n_sent) = 0;
};

// Messages, and other MPI calls that do not wait.
class MpiPointToPoint : public Carrier {
 public:
  // For that tag, or for any: then there must be no other messages on the communicator.
  virtual std::shared_ptr<MpiControlChannel> control_channel(std::optional<int> tag) const = 0;
};

// For a thread that may call MPI. Throws std::invalid_argument if handles are of neither kind.
std::unique_ptr<MpiPointToPoint> mpi_point_to_point(const MpiFunctions& functions, const MpiHandles& handles,
                                                    size_t largest_message);

}  // namespace horo
