// Messages over MPI, without the GIL: its functions are those of the library that mpi4py has loaded.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "hosts/point_to_point.h"

namespace horo {

// Addresses of what has these names in that library.
struct MpiFunctions {
  void* isend;
  void* irecv;
  void* iallgather;
  void* testall;
  void* error_string;
};

// Handles as they lie in memory: an int in MPICH's ABI, a pointer in Open MPI's.
struct MpiHandles {
  std::vector<uint8_t> communicator;
  std::vector<uint8_t> byte;  // MPI_BYTE
  size_t status_bytes;
};

// Messages, and what else MPI does without waiting.
class MpiPointToPoint : public PointToPoint {
 public:
  // Leaves every rank's `n_bytes` in `everyone`, in rank order; all ranks of the communicator call it.
  virtual std::unique_ptr<Transfer> allgather(const uint8_t* mine, size_t n_bytes, uint8_t* everyone) = 0;
  // Operations that somebody else has started, whose requests lie at these addresses until they are done.
  virtual std::unique_ptr<Transfer> started(const std::vector<void*>& requests) = 0;
};

// For a thread that may call MPI. Throws std::invalid_argument for handles of neither kind.
std::unique_ptr<MpiPointToPoint> mpi_point_to_point(const MpiFunctions& functions, const MpiHandles& handles,
                                                    size_t largest_message);

}  // namespace horo
