// NCCL, opened at run time: nothing is linked and no nccl.h is needed, so one build serves machines with any NCCL from
// 2.18 on, and machines without.
//
// The declarations are NCCL's binary interface, copied from the headers of 2.18.3, 2.19.3, 2.27.7 and 2.32.3, which
// agree in everything used here.
//
// What the headers do not say about communicators with `blocking = 0`, and callers must know:
// - A call on one that is in progress returns kNcclInvalidArgument. Poll CommGetAsyncError after every call.
// - From about 2.22 on, *every* operation (or outermost GroupEnd) among several ranks returns kNcclInProgress, and one
//   of NCCL's threads puts it on the stream. An event recorded before CommGetAsyncError returns kNcclSuccess may come
//   before the operation, and stream capture may miss it. With `blocking = 1`, it is on the stream when the call
//   returns; the first operation of each kind waits in the call for the peers to connect.
// - After CommSplit the parent is in progress, and *new_comm is only written when the parent is ready again.
// - CommAbort invalidates the handle, and may return before the operations on streams have been aborted.
#pragma once

#include <climits>
#include <cstddef>
#include <stdexcept>
#include <string>
#include <vector>

namespace horo {

// There is no usable NCCL; the message lists what was tried, why each was refused, and what to install.
struct NcclMissing : std::runtime_error {
  using std::runtime_error::runtime_error;
};

using NcclComm = void*;
using NcclWindow = void*;
using NcclStream = void*;  // cudaStream_t

struct NcclUniqueId {
  char bytes[128];
};

enum NcclResult : int {
  kNcclSuccess = 0,
  kNcclUnhandledCudaError = 1,
  kNcclSystemError = 2,
  kNcclInternalError = 3,
  kNcclInvalidArgument = 4,
  kNcclInvalidUsage = 5,
  kNcclRemoteError = 6,
  kNcclInProgress = 7,
  kNcclTimeout = 8,  // from 2.32
};

enum NcclType : int {
  kNcclInt8 = 0,
  kNcclUint8 = 1,
  kNcclInt32 = 2,
  kNcclUint32 = 3,
  kNcclInt64 = 4,
  kNcclUint64 = 5,
  kNcclFloat16 = 6,
  kNcclFloat32 = 7,
  kNcclFloat64 = 8,
  kNcclBfloat16 = 9,
};

enum NcclOp : int { kNcclSum = 0, kNcclProd = 1, kNcclMax = 2, kNcclMin = 3, kNcclAvg = 4 };

inline constexpr int kNcclUndefined = INT_MIN;         // in NcclConfig: the library's default
inline constexpr int kNcclSplitNoColor = -1;           // CommSplit: this rank is in no new communicator, and gets null
inline constexpr int kNcclWindowDefault = 0x00;        // CommWindowRegister's flags
inline constexpr int kNcclWindowCollSymmetric = 0x01;  // all ranks register the same offset of memory from MemAlloc
inline constexpr int kNcclOldest = 21800;

// The layout of 2.17 and 2.18. Newer libraries only appended fields; they copy `size` bytes and give the fields that
// this `version` did not have their defaults.
struct NcclConfig {
  size_t size = sizeof(NcclConfig);
  unsigned magic = 0xcafebeef;
  unsigned version = kNcclOldest;
  int blocking = kNcclUndefined;
  int cga_cluster_size = kNcclUndefined;
  int min_ctas = kNcclUndefined;
  int max_ctas = kNcclUndefined;
  const char* net_name = nullptr;
  int split_share = kNcclUndefined;
  int padding = kNcclUndefined;  // newer libraries have a field here, which this value leaves at its default
};
static_assert(sizeof(NcclConfig) == 48 && offsetof(NcclConfig, net_name) == 32);

struct NcclLibrary {
  std::string path;  // by the dynamic linker's name
  int version;       // 21803 is 2.18.3

  NcclResult (*GetUniqueId)(NcclUniqueId* id);
  NcclResult (*CommInitRankConfig)(NcclComm* comm, int size, NcclUniqueId id, int rank, NcclConfig* config);
  NcclResult (*CommSplit)(NcclComm comm, int color, int key, NcclComm* new_comm, NcclConfig* config);
  NcclResult (*CommFinalize)(NcclComm comm);
  NcclResult (*CommDestroy)(NcclComm comm);
  NcclResult (*CommAbort)(NcclComm comm);
  NcclResult (*CommGetAsyncError)(NcclComm comm, NcclResult* error);
  const char* (*GetErrorString)(NcclResult result);
  const char* (*GetLastError)(NcclComm comm);  // ignores its argument: the last error of this process
  NcclResult (*AllReduce)(const void* from, void* to, size_t n_elements, NcclType type, NcclOp op, NcclComm comm,
                          NcclStream stream);
  // Rank r's `n_elements` of the result begin r * n_elements after the first; in place if `to` is there, too.
  NcclResult (*ReduceScatter)(const void* from, void* to, size_t n_elements, NcclType type, NcclOp op, NcclComm comm,
                              NcclStream stream);
  NcclResult (*Broadcast)(const void* from, void* to, size_t n_elements, NcclType type, int root, NcclComm comm,
                          NcclStream stream);
  NcclResult (*Send)(const void* from, size_t n_elements, NcclType type, int peer, NcclComm comm, NcclStream stream);
  NcclResult (*Recv)(void* to, size_t n_elements, NcclType type, int peer, NcclComm comm, NcclStream stream);
  NcclResult (*GroupStart)();
  NcclResult (*GroupEnd)();

  // From 2.19 on; null in older libraries.
  NcclResult (*MemAlloc)(void** memory, size_t n_bytes);
  NcclResult (*MemFree)(void* memory);
  NcclResult (*CommRegister)(NcclComm comm, void* memory, size_t n_bytes, void** handle);
  NcclResult (*CommDeregister)(NcclComm comm, void* handle);

  // From 2.27 on; null in older libraries.
  NcclResult (*CommWindowRegister)(NcclComm comm, void* memory, size_t n_bytes, NcclWindow* window, int flags);
  NcclResult (*CommWindowDeregister)(NcclComm comm, NcclWindow window);
};

// The library, opened by the first successful call of the process; later calls ignore the argument. `candidates` are
// paths that Python found (the nvidia-nccl wheel's). If HORO_LITE_NCCL_LIB is set, only that path is tried; else a copy
// that the process has loaded (torch's, CuPy's), then the candidates, then the system's. Throws NcclMissing.
const NcclLibrary& nccl_library(const std::vector<std::string>& candidates);

}  // namespace horo
