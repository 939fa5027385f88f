// The ranks of a world, each with a GPU of its own, and NCCL between them.
//
// Every call but fail() is made by all ranks in the same order, and returns once the work is queued: nothing waits for
// the GPU, and nothing here finds out whether the ranks do the same thing. Whoever calls makes sure of that, and calls
// fail() if it was not so.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "gpu/device_queue.h"
#include "gpu/nccl_dl.h"
#include "group.h"
#include "pack/layout.h"

namespace horo {

class NcclGroup {
 public:
  // Returns when all ranks have called it; throws DeviceError where they do not within `timeout_s`.
  NcclGroup(std::shared_ptr<DeviceQueue> queue, const NcclLibrary& nccl, const NcclUniqueId& id, int rank, int size,
            size_t bucket_bytes, double timeout_s);
  ~NcclGroup();
  NcclGroup(const NcclGroup&) = delete;
  NcclGroup& operator=(const NcclGroup&) = delete;

  // The ranks that pass the same color, `size` of them, this one `rank` among them: a group of their own, which
  // queues its work where this one does. Null with a color below 0.
  std::unique_ptr<NcclGroup> split(int color, int rank, int size);

  int rank() const { return rank_; }
  int size() const { return size_; }
  // Whether the bucket came from NCCL's own allocator: on all ranks, or windows cannot be used.
  bool can_use_windows() const { return nccl_.CommWindowRegister != nullptr && from_nccl_; }
  // Lets NCCL prepare the bucket for faster transfers. A failure costs speed only.
  void register_bucket(bool windows);
  std::string registered() const { return registered_; }  // "window", "buffer" or "no"

  // Whether allreduce() takes these: NCCL knows neither averages of integers nor all dtypes.
  static bool can_reduce(const std::vector<TensorRef>& tensors, Op op, double prescale, Factor factor);
  // In place. With a `weight`, the divisor is the sum of all ranks' weights, which only the GPU ever sees.
  void allreduce(const std::vector<TensorRef>& tensors, Op op, Wire wire, double prescale, Factor factor,
                 std::optional<double> weight);
  void broadcast(const std::vector<Buffer>& buffers, int root);
  // receive[r] gets what rank r sends; this rank's own part stays.
  void allgather(const Buffer& send, const std::vector<Buffer>& receive);
  void alltoall(const std::vector<Buffer>& send, const std::vector<Buffer>& receive);

  // All ranks leave: whoever does so first waits for the others, though not for long. Later calls throw.
  void close();
  // Ends what is under way and all that is to come: this and every later call throws DeviceError with this reason. For
  // any thread, at any time.
  void fail(const std::string& reason);
  // Throws if the group has failed, or NCCL has noticed a failure of its own.
  void check();

 private:
  struct Traffic;
  struct Bucket;

  NcclGroup(std::shared_ptr<DeviceQueue> queue, const NcclLibrary& nccl, NcclComm comm, int rank, int size,
            size_t bucket_bytes, double timeout_s);
  void start();
  void wait_until_ready(const char* what);
  void done(NcclResult result, const char* what);
  void give_up(NcclResult error, const char* what);
  bool is_idle_within(double seconds);
  void throw_if_failed();
  void abort(NcclComm comm);
  void begin();
  void measure(const std::vector<TensorRef>& tensors, const std::vector<Traffic>& traffic, double prescale);
  void send(Bucket& bucket, double prescale, Factor factor, const double* divisor);

  std::shared_ptr<DeviceQueue> queue_;
  Device& device_;
  int index_;
  const NcclLibrary& nccl_;
  int rank_;
  int size_;
  size_t bucket_bytes_;
  double timeout_s_;

  // Over the communicator: NCCL takes calls from one thread at a time. fail() takes it only if it is free soon.
  std::recursive_timed_mutex mutex_;
  NcclComm comm_ = nullptr;
  std::atomic<bool> failed_{false};
  std::mutex reason_mutex_;
  std::string reason_;

  void* bucket_ = nullptr;
  bool from_nccl_ = false;
  void* registration_ = nullptr;
  std::string registered_ = "no";
  std::atomic<bool> captured_{false};  // a CUDA graph may hold operations, and the addresses below
  double* one_ = nullptr;              // 1.0, from which a kernel makes this rank's weight,
  double* weight_ = nullptr;           // here, where it becomes the sum of all ranks'
  int32_t* exponents_ = nullptr;
  size_t n_exponents_ = 0;
};

}  // namespace horo
