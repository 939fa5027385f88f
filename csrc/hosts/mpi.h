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
  void* testall;
  void* error_string;
};

// Handles as they lie in memory: an int in MPICH's ABI, a pointer in Open MPI's.
struct MpiHandles {
  std::vector<uint8_t> communicator;
  std::vector<uint8_t> byte;  // MPI_BYTE
  size_t status_bytes;
};

// Messages, and whatever else MPI has started.
class MpiPointToPoint : public PointToPoint {
 public:
  // Operations that somebody else has started, whose requests lie at these addresses until they are done.
  virtual std::unique_ptr<Transfer> started(const std::vector<void*>& requests) = 0;
};

// For a thread that may call MPI. Throws std::invalid_argument for handles of neither kind.
std::unique_ptr<MpiPointToPoint> mpi_point_to_point(const MpiFunctions& functions, const MpiHandles& handles,
                                                    size_t largest_message);

}  // namespace horo
