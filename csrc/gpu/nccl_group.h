// The ranks of a world, each with a GPU of its own, and NCCL between them.
//
// All ranks make the same calls in the same order, except fail(). A call returns once the work is queued: none waits
// for the GPU, and none checks whether the ranks do the same. The caller makes sure of that, and calls fail() if they
// do not.
//
// A reduction packs a bucket (one kernel casts and scales), reduces it by one operation of NCCL, in place, and unpacks
// it (scales back, divides), all on one stream, so that memory for one bucket is enough. The operation is an
// all-reduce; or, if each rank receives a part of the results only, a reduce-scatter, for which a bucket consists of
// sections of equal size, one with a piece of each rank's part. A bucket that is one large tensor, sent without
// conversion, is reduced where it is. Sums are NCCL's: the same bits on all ranks that receive them, in an order that
// NCCL chooses, and 16-bit wire dtypes are added in 16 bits. So fp16 has one power-of-two scale for each tensor, common
// to all ranks, with headroom for the sum: before the buckets, one kernel computes each tensor's largest exponent and a
// max-reduction makes it common. float16 tensors are sent in this way even without compression.
#pragma once

#include <atomic>
#include <functional>
#include <limits>
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
  // Returns when all ranks have called it; throws DeviceError if they do not within `timeout_s`, and in split().
  // `check_signals` is called now and then while a call waits, and may throw, after which the group has failed.
  NcclGroup(std::shared_ptr<DeviceQueue> queue, const NcclLibrary& nccl, const NcclUniqueId& id, int rank, int size,
            size_t bucket_bytes, double timeout_s, std::function<void()> check_signals = {});
  ~NcclGroup();
  NcclGroup(const NcclGroup&) = delete;
  NcclGroup& operator=(const NcclGroup&) = delete;

  // A new group of the ranks that pass the same color: `size` of them, in which this one is `rank`. It queues its work
  // on the same stream as this group. Null for a color below 0.
  std::unique_ptr<NcclGroup> split(int color, int rank, int size);

  int rank() const { return rank_; }
  int size() const { return size_; }
  // Whether the bucket is from NCCL's own allocator; if that is not so on all ranks, windows cannot be used.
  bool can_use_windows() const { return nccl_.CommWindowRegister != nullptr && from_nccl_; }
  // Lets NCCL prepare the bucket for faster transfers. A failure only costs speed.
  void register_bucket(bool windows);
  std::string registered() const { return registered_; }  // "window", "buffer" or "no"

  // Whether reduce() supports these: NCCL has neither averages of integers nor all dtypes, and loses NaN in the
  // minimum and maximum of floats.
  static bool can_reduce(const std::vector<TensorRef>& tensors, Op op, double prescale, Factor factor);
  // Reduces in place. parts[r] is what rank r receives: of every tensor a run of elements, perhaps none, the rest of
  // which is undefined afterwards. A single part is what all ranks receive. With a `weight`, the divisor is the sum of
  // all ranks' weights, which stays on the GPU.
  void reduce(const std::vector<std::vector<TensorRef>>& parts, Op op, Wire wire, double prescale, Factor factor,
              std::optional<double> weight);
  // All ranks receive in of_rank[r] what rank r has there.
  void broadcast(const std::vector<std::vector<Buffer>>& of_rank);
  void alltoall(const std::vector<Buffer>& send, const std::vector<Buffer>& receive);

  // All ranks leave, when the GPU has done all work of the queue: those that come first wait for the others, but not
  // for long. Later calls throw. Frees the memory on the GPU; so does the destructor otherwise.
  void close();
  // Ends all operations, current and future: their calls throw DeviceError with this reason. Any thread may call it, at
  // any time.
  void fail(const std::string& reason);
  // Throws if the group has failed, or if NCCL reports an error.
  void check();

 private:
  static constexpr double kForever = std::numeric_limits<double>::infinity();
  struct Traffic;
  struct Section;

  NcclGroup(std::shared_ptr<DeviceQueue> queue, const NcclLibrary& nccl, NcclComm comm, int rank, int size,
            size_t bucket_bytes, double timeout_s, std::function<void()> check_signals);
  void start();
  void wait_until_ready(const char* what, double limit_s);
  void done(NcclResult result, const char* what, double limit_s = kForever);
  void check_signals();
  void give_up(NcclResult error, const char* what);
  void throw_if_failed();
  void abort(NcclComm comm);
  void begin();
  void leave();
  void measure(const std::vector<std::vector<TensorRef>>& parts, const std::vector<Traffic>& traffic, double prescale);
  static std::vector<Section> cut(const std::vector<TensorRef>& part, const std::vector<Traffic>& traffic,
                                  const Traffic& kind, size_t section_bytes);
  void send(const Traffic& traffic, const std::vector<Section>& bucket, double prescale, Factor factor,
            const double* divisor);

  std::shared_ptr<DeviceQueue> queue_;
  Device& device_;
  int index_;
  const NcclLibrary& nccl_;
  int rank_;
  int size_;
  size_t bucket_bytes_;
  double timeout_s_;
  std::function<void()> check_signals_;

  // Protects the communicator: NCCL allows calls from one thread at a time. fail() takes it only if it is free soon.
  std::recursive_timed_mutex mutex_;
  NcclComm comm_ = nullptr;
  std::atomic<bool> failed_{false};
  std::mutex reason_mutex_;
  std::string reason_;

  void* bucket_ = nullptr;
  bool from_nccl_ = false;
  void* registration_ = nullptr;
  std::string registered_ = "no";
  std::atomic<bool> captured_{false};  // CUDA graphs may hold operations, and the addresses below
  double* one_ = nullptr;              // 1.0, from which a kernel computes this rank's weight
  double* weight_ = nullptr;           // that weight; then the sum of all ranks' weights
  int32_t* exponents_ = nullptr;
  size_t n_exponents_ = 0;
};

}  // namespace horo
