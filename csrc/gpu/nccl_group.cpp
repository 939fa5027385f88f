#include "gpu/nccl_group.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <thread>
#include <utility>

namespace horo {
namespace {

constexpr double kGoodbyeSeconds = 5.0;            // for ranks that end at different times
constexpr std::chrono::seconds kLetGo{2};          // for the thread that holds the communicator, once it has failed
constexpr double kBusySeconds = 0.001;             // of polling without a pause: the shortest sleep takes 0.1 ms
constexpr size_t kExponents = 4096;                // for how many tensors there is room from the start
constexpr size_t kLargestPiece = size_t{1} << 30;  // elements; the kernels count in 32 bits

bool is_float(DType dtype) {
  return dtype == DType::kFloat16 || dtype == DType::kBFloat16 || dtype == DType::kFloat32 || dtype == DType::kFloat64;
}

// Empty if NCCL has no such type.
std::optional<NcclType> nccl_type(DType dtype) {
  constexpr std::optional<NcclType> kNone;
  static constexpr std::optional<NcclType> kTypes[] = {
      kNcclUint8, kNcclInt8,   kNcclUint8,   kNone,         kNone,        kNcclInt32,   kNcclUint32,
      kNcclInt64, kNcclUint64, kNcclFloat16, kNcclBfloat16, kNcclFloat32, kNcclFloat64, kNone};
  static_assert(std::size(kTypes) == static_cast<size_t>(DType::kLast) + 1);
  return kTypes[static_cast<size_t>(dtype)];
}

NcclOp nccl_op(Op op, DType dtype) {
  const bool truth = dtype == DType::kBool;  // 0 and 1: the sum is "any", the product "all"
  switch (op) {
    case Op::kMin:
      return kNcclMin;
    case Op::kMax:
      return kNcclMax;
    case Op::kProduct:
      return truth ? kNcclMin : kNcclProd;
    default:
      return truth ? kNcclMax : kNcclSum;
  }
}

size_t aligned(size_t n_bytes) { return (n_bytes + kWireAlignment - 1) / kWireAlignment * kWireAlignment; }

// Leaves null behind, also for threads that do not hold the mutex.
NcclComm taken(NcclComm& comm) { return std::atomic_ref<NcclComm>(comm).exchange(nullptr); }

// Whether the pieces are equally long and follow each other in one tensor, as on the other ranks.
bool in_one_run(const std::vector<GpuPiece>& pieces, size_t item) {
  auto* next = static_cast<uint8_t*>(pieces[0].address);
  for (const GpuPiece& piece : pieces) {
    if (piece.tensor != pieces[0].tensor || piece.n_elements != pieces[0].n_elements || piece.address != next) {
      return false;
    }
    next += piece.n_elements * item;
  }
  return true;
}

int bits_for(int size) {
  int bits = 0;
  while ((1 << bits) < size) ++bits;
  return bits;
}

}  // namespace

// How one tensor is sent.
struct NcclGroup::Traffic {
  DType grad;
  DType wire;
  NcclOp op;
  bool scaled;  // by the tensor's own power of two, the same on all ranks

  Traffic(DType dtype, Op how, Wire asked) : grad(dtype), wire(dtype), op(nccl_op(how, dtype)) {
    const bool sums = how == Op::kSum || how == Op::kAverage || how == Op::kWeightedAverage;
    const bool narrows = (dtype == DType::kFloat32 || dtype == DType::kFloat64) && how != Op::kProduct;
    if (narrows && asked == Wire::kFloat16) wire = DType::kFloat16;
    if (narrows && asked == Wire::kBFloat16) wire = DType::kBFloat16;
    // Sums of float16 gradients may exceed their range, too.
    scaled = wire == DType::kFloat16 && (wire != grad || sums);
  }
  bool operator==(const Traffic& other) const {
    return grad == other.grad && wire == other.wire && op == other.op && scaled == other.scaled;
  }
};

// What one part has in a bucket.
struct NcclGroup::Section {
  std::vector<GpuPiece> pieces;  // their places on the wire are counted from the section's beginning
  size_t n_bytes = 0;
};

NcclGroup::NcclGroup(std::shared_ptr<DeviceQueue> queue, const NcclLibrary& nccl, const NcclUniqueId& id, int rank,
                     int size, size_t bucket_bytes, double timeout_s, std::function<void()> check_signals)
    : NcclGroup(std::move(queue), nccl, nullptr, rank, size, bucket_bytes, timeout_s, std::move(check_signals)) {
  NcclConfig config;
  config.blocking = 0;
  {
    const Device::Current current(device_, index_);
    done(nccl_.CommInitRankConfig(&comm_, size_, id, rank_, &config), "connect the ranks", timeout_s_);
  }
  start();
}

NcclGroup::NcclGroup(std::shared_ptr<DeviceQueue> queue, const NcclLibrary& nccl, NcclComm comm, int rank, int size,
                     size_t bucket_bytes, double timeout_s, std::function<void()> check_signals)
    : queue_(std::move(queue)),
      device_(queue_->device()),
      index_(queue_->index()),
      nccl_(nccl),
      rank_(rank),
      size_(size),
      // With room for a section of each rank.
      bucket_bytes_(aligned(std::max(bucket_bytes, static_cast<size_t>(size) * kWireAlignment))),
      timeout_s_(timeout_s),
      check_signals_(std::move(check_signals)),
      comm_(comm) {}

void NcclGroup::start() {
  const Device::Current current(device_, index_);
  device_.load_kernels(index_);
  if (nccl_.MemAlloc != nullptr) from_nccl_ = nccl_.MemAlloc(&bucket_, bucket_bytes_) == kNcclSuccess;
  if (!from_nccl_) bucket_ = device_.allocate(index_, bucket_bytes_);
  one_ = static_cast<double*>(device_.allocate(index_, 2 * kWireAlignment));
  weight_ = one_ + kWireAlignment / sizeof(double);
  exponents_ = static_cast<int32_t*>(device_.allocate(index_, kExponents * sizeof(int32_t)));
  n_exponents_ = kExponents;
  const double one = 1.0;
  device_.copy(index_, one_, &one, sizeof(one), queue_->stream());
  queue_->synchronize();
}

NcclGroup::~NcclGroup() { close(); }

// Graphs that hold operations may live as long as the program: then everything stays, also because CommFinalize and
// CommAbort would wait for the graph's end.
void NcclGroup::close() {
  const std::unique_lock lock(mutex_, kLetGo);  // a thread may never return from NCCL: the memory stays until it does
  if (!lock || captured_) return;
  leave();
  try {
    // Also for the work of a group that has followed on this queue.
    if (one_ != nullptr) queue_->synchronize();
    const Device::Current current(device_, index_);
    if (void* bucket = std::exchange(bucket_, nullptr)) {
      if (from_nccl_) nccl_.MemFree(bucket);
      else device_.release(index_, bucket);
    }
    if (one_ != nullptr) device_.release(index_, std::exchange(one_, nullptr));
    if (exponents_ != nullptr) device_.release(index_, std::exchange(exponents_, nullptr));
  } catch (const DeviceError&) {  // the process is losing its GPU
  }
}

// Destroying waits for the other ranks; a failed communicator is already aborted.
void NcclGroup::leave() {
  if (comm_ == nullptr || failed_) return;
  check_signals_ = {};  // a destructor must not throw
  try {
    const Device::Current current(device_, index_);
    // The communicator's memory must not be freed while its kernels use it, however late the GPU is. Who learns that a
    // peer has died calls fail().
    while (!queue_->is_idle()) {
      throw_if_failed();
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    if (registration_ != nullptr) {
      if (registered_ == "window") nccl_.CommWindowDeregister(comm_, registration_);
      else nccl_.CommDeregister(comm_, registration_);
    }
    done(nccl_.CommFinalize(comm_), "finish", kGoodbyeSeconds);
    nccl_.CommDestroy(taken(comm_));
    fail("the group was closed");
  } catch (const DeviceError& error) {
    fail(error.what());  // if it is not aborted by now
  }
}

std::unique_ptr<NcclGroup> NcclGroup::split(int color, int rank, int size) {
  NcclComm comm = nullptr;
  {
    const std::lock_guard lock(mutex_);
    throw_if_failed();
    const Device::Current current(device_, index_);
    NcclConfig config;
    config.blocking = 0;
    done(nccl_.CommSplit(comm_, color < 0 ? kNcclSplitNoColor : color, rank, &comm, &config), "split the group",
         timeout_s_);
  }
  if (color < 0) return nullptr;
  const Device::Current current(device_, index_);
  std::unique_ptr<NcclGroup> group(
      new NcclGroup(queue_, nccl_, comm, rank, size, bucket_bytes_, timeout_s_, check_signals_));
  group->wait_until_ready("split the group", timeout_s_);
  group->start();
  return group;
}

void NcclGroup::register_bucket(bool windows) {
  const std::lock_guard lock(mutex_);
  throw_if_failed();
  const Device::Current current(device_, index_);
  if (windows) {
    const NcclResult result =
        nccl_.CommWindowRegister(comm_, bucket_, bucket_bytes_, &registration_, kNcclWindowCollSymmetric);
    if (result == kNcclSuccess || result == kNcclInProgress) {
      done(result, "register the bucket", timeout_s_);
      if (registration_ != nullptr) registered_ = "window";
    }
  } else if (nccl_.CommRegister != nullptr) {
    if (nccl_.CommRegister(comm_, bucket_, bucket_bytes_, &registration_) == kNcclSuccess) registered_ = "buffer";
  }
}

// Returns on success; an error ends the group. A non-blocking communicator may need a while to connect to new peers or
// to put an operation on the stream; it may get no other call, and nothing may be queued behind the operation, until it
// is ready. CommSplit and CommWindowRegister return kNcclSuccess nevertheless.
//
// An operation has no limit, and nor has the connecting that NCCL may do at the first of its kind: a rank may be late
// for good reasons. Who learns that it is not calls fail().
void NcclGroup::done(NcclResult result, const char* what, double limit_s) {
  if (result == kNcclSuccess || result == kNcclInProgress) wait_until_ready(what, limit_s);
  else give_up(result, what);
}

void NcclGroup::give_up(NcclResult error, const char* what) {
  throw_if_failed();  // then the call failed because of that
  const char* detail = nccl_.GetLastError != nullptr ? nccl_.GetLastError(comm_) : "";
  fail(std::string("NCCL could not ") + what + ": " + nccl_.GetErrorString(error) +
       (detail != nullptr && *detail != 0 ? std::string(" (") + detail + ")" : "") + "; NCCL_DEBUG=INFO logs more");
  throw_if_failed();
}

void NcclGroup::wait_until_ready(const char* what, double limit_s) {
  using Seconds = std::chrono::duration<double>;
  const auto start = std::chrono::steady_clock::now();
  for (auto pause = std::chrono::microseconds(20);;) {
    throw_if_failed();
    NcclResult state = kNcclSuccess;
    const NcclResult asked = nccl_.CommGetAsyncError(comm_, &state);
    if (asked != kNcclSuccess) return give_up(asked, what);
    if (state == kNcclSuccess) return;
    if (state != kNcclInProgress) return give_up(state, what);
    const Seconds waited = std::chrono::steady_clock::now() - start;
    if (waited.count() > limit_s) {
      fail(std::string("NCCL could not ") + what + " within " + std::to_string(static_cast<int>(limit_s)) +
           " s: a rank did not make this call, or cannot be reached. NCCL_DEBUG=INFO shows how far it got, "
           "NCCL_SOCKET_IFNAME sets the network interface to use");
      throw_if_failed();
    }
    if (waited.count() < kBusySeconds) {
      std::this_thread::yield();
    } else {
      check_signals();
      std::this_thread::sleep_for(pause);
      pause = std::min(pause * 2, std::chrono::microseconds(2000));
    }
  }
}

void NcclGroup::throw_if_failed() {
  if (!failed_) return;
  const std::lock_guard lock(reason_mutex_);
  throw DeviceError(reason_);
}

// What has begun cannot be taken back: after Ctrl-C, the group has failed.
void NcclGroup::check_signals() {
  try {
    if (check_signals_) check_signals_();
  } catch (...) {
    fail("a signal handler of this rank has raised an exception during an operation");
    throw;
  }
}

// Begins an operation that queues work.
void NcclGroup::begin() {
  throw_if_failed();
  captured_ = captured_ || device_.is_capturing(index_, queue_->stream());
}

void NcclGroup::check() {
  throw_if_failed();
  const std::unique_lock lock(mutex_, std::try_to_lock);
  if (!lock) return;  // the thread that has it checks, too
  throw_if_failed();
  const Device::Current current(device_, index_);
  NcclResult state = kNcclSuccess;
  nccl_.CommGetAsyncError(comm_, &state);
  if (state != kNcclSuccess && state != kNcclInProgress) give_up(state, "continue");
}

bool NcclGroup::can_reduce(const std::vector<TensorRef>& tensors, Op op, double prescale, Factor factor) {
  const bool drops_nan = op == Op::kMin || op == Op::kMax;  // NCCL's fmin and fmax return the other operand
  const bool plain = prescale == 1.0 && factor.scale == 1.0 && factor.divisor == 1.0;
  // The kernels multiply in float32, by a factor that is multiplied by this rank's weight.
  const auto fits = [](double x) { return x == 0.0 || (std::fabs(x) >= 1e-20 && std::fabs(x) <= 1e20); };
  return fits(prescale) && fits(factor.scale) &&
         std::all_of(tensors.begin(), tensors.end(), [&](const TensorRef& tensor) {
           return nccl_type(tensor.dtype) &&
                  (is_float(tensor.dtype) ? !drops_nan : plain && op != Op::kAverage && op != Op::kWeightedAverage);
         });
}

void NcclGroup::reduce(const std::vector<std::vector<TensorRef>>& parts, Op op, Wire wire, double prescale,
                       Factor factor, std::optional<double> weight) {
  const bool is_for_these = parts.size() == 1 || parts.size() == static_cast<size_t>(size_);
  if (!is_for_these || std::any_of(parts.begin(), parts.end(), [&](const std::vector<TensorRef>& part) {
        return part.size() != parts[0].size();
      })) {
    throw std::invalid_argument("pass one part for all ranks, or one for each of the " + std::to_string(size_) +
                                ", with a run of elements of every tensor");
  }
  const std::lock_guard lock(mutex_);
  begin();
  const Device::Current current(device_, index_);
  const double* divisor = nullptr;
  if (weight) {
    prescale *= *weight;
    const GpuPiece piece{one_, 1, 0, 0, 0};
    KernelCall call{KernelCall::kPack, DType::kFloat64, DType::kFloat64, &piece, 1};
    call.wire = reinterpret_cast<uint8_t*>(weight_);
    call.prescale = *weight;
    device_.run(index_, call, queue_->stream());
    done(nccl_.AllReduce(weight_, weight_, 1, kNcclFloat64, kNcclSum, comm_, queue_->stream()), "add up the weights");
    divisor = weight_;
  }
  std::vector<Traffic> traffic;
  traffic.reserve(parts[0].size());
  for (const TensorRef& tensor : parts[0]) traffic.emplace_back(tensor.dtype, op, wire);
  measure(parts, traffic, prescale);

  std::vector<Traffic> kinds;
  for (const Traffic& one : traffic) {
    if (std::find(kinds.begin(), kinds.end(), one) == kinds.end()) kinds.push_back(one);
  }
  const size_t section_bytes = bucket_bytes_ / parts.size() / kWireAlignment * kWireAlignment;
  for (const Traffic& kind : kinds) {
    std::vector<std::vector<Section>> sections;  // of each part, bucket by bucket
    size_t n_buckets = 0;
    for (const std::vector<TensorRef>& part : parts) {
      sections.push_back(cut(part, traffic, kind, section_bytes));
      n_buckets = std::max(n_buckets, sections.back().size());
    }
    std::vector<Section> bucket(parts.size());
    for (size_t b = 0; b < n_buckets; ++b) {
      for (size_t p = 0; p < parts.size(); ++p) {
        bucket[p] = b < sections[p].size() ? std::move(sections[p][b]) : Section{};
      }
      send(kind, bucket, prescale, factor, divisor);
    }
  }
}

// Every scaled tensor's exponent is that of the largest magnitude on any rank.
void NcclGroup::measure(const std::vector<std::vector<TensorRef>>& parts, const std::vector<Traffic>& traffic,
                        double prescale) {
  if (std::none_of(traffic.begin(), traffic.end(), [](const Traffic& t) { return t.scaled; })) return;
  const size_t n_tensors = traffic.size();
  if (n_exponents_ < n_tensors) {
    if (device_.is_capturing(index_, queue_->stream())) {
      throw DeviceError(
          "memory for the scales of " + std::to_string(n_tensors) +
          " tensors cannot be allocated while a graph is being captured: run one step before the capture");
    }
    queue_->synchronize();  // once, if there are more tensors than ever before
    if (exponents_ != nullptr && !captured_) device_.release(index_, exponents_);
    exponents_ = nullptr;
    n_exponents_ = 0;
    exponents_ = static_cast<int32_t*>(device_.allocate(index_, n_tensors * sizeof(int32_t)));
    n_exponents_ = n_tensors;
  }
  device_.fill(index_, exponents_, kNoExponent & 0xff, n_tensors * sizeof(int32_t), queue_->stream());
  for (const DType dtype : {DType::kFloat16, DType::kFloat32, DType::kFloat64}) {
    std::vector<GpuPiece> pieces;
    for (const std::vector<TensorRef>& part : parts) {
      for (size_t t = 0; t < n_tensors; ++t) {
        if (!traffic[t].scaled || traffic[t].grad != dtype) continue;
        for (size_t first = 0; first < part[t].n_elements; first += kLargestPiece) {
          const size_t n = std::min(part[t].n_elements - first, kLargestPiece);
          pieces.push_back({static_cast<uint8_t*>(part[t].address) + first * item_bytes(dtype),
                            static_cast<uint32_t>(n), 0, 0, static_cast<uint32_t>(t)});
        }
      }
    }
    if (pieces.empty()) continue;
    KernelCall call{KernelCall::kMeasure, dtype, dtype, pieces.data(), pieces.size()};
    call.prescale = prescale;
    call.exponents = exponents_;
    device_.run(index_, call, queue_->stream());
  }
  done(nccl_.AllReduce(exponents_, exponents_, n_tensors, kNcclInt32, kNcclMax, comm_, queue_->stream()),
       "reduce the largest magnitudes");
}

// Cuts what a part has of one kind of traffic into sections, in the order of the tensors.
std::vector<NcclGroup::Section> NcclGroup::cut(const std::vector<TensorRef>& part, const std::vector<Traffic>& traffic,
                                               const Traffic& kind, size_t section_bytes) {
  const size_t grad_item = item_bytes(kind.grad);
  const size_t wire_item = item_bytes(kind.wire);
  std::vector<Section> sections;
  for (size_t t = 0; t < part.size(); ++t) {
    if (!(traffic[t] == kind)) continue;
    for (size_t first = 0; first < part[t].n_elements;) {
      const size_t remaining = std::min(part[t].n_elements - first, kLargestPiece);
      // A tensor is not cut to fill up a section, only if it is larger than an empty one.
      if (sections.empty() || sections.back().n_bytes + remaining * wire_item > section_bytes) sections.emplace_back();
      Section& section = sections.back();
      const size_t n = std::min(remaining, section_bytes / wire_item);
      section.pieces.push_back({static_cast<uint8_t*>(part[t].address) + first * grad_item, static_cast<uint32_t>(n), 0,
                                static_cast<uint32_t>(section.n_bytes / kWireAlignment), static_cast<uint32_t>(t)});
      section.n_bytes += aligned(n * wire_item);
      first += n;
    }
  }
  return sections;
}

// Packs, reduces and unpacks a bucket. Every rank decides the same, whatever its weight and its tensors' addresses are.
void NcclGroup::send(const Traffic& traffic, const std::vector<Section>& bucket, double prescale, Factor factor,
                     const double* divisor) {
  size_t largest = 0, total = 0, n_pieces = 0;
  for (const Section& section : bucket) {
    largest = std::max(largest, section.n_bytes);
    total += section.n_bytes;
    n_pieces += section.pieces.size();
  }
  // In a ring, a reduce-scatter sends what an all-reduce of half the bytes does: with much padding, that is cheaper.
  const bool scatters = bucket.size() > 1 && bucket.size() * largest < 2 * total;
  const size_t mine = bucket.size() > 1 ? static_cast<size_t>(rank_) : 0;
  std::vector<GpuPiece> pieces;
  pieces.reserve(n_pieces);
  size_t end = 0, first_of_mine = 0;
  for (size_t s = 0; s < bucket.size(); ++s) {
    if (s == mine) first_of_mine = pieces.size();
    for (GpuPiece piece : bucket[s].pieces) {
      piece.wire_offset += static_cast<uint32_t>(end / kWireAlignment);
      pieces.push_back(piece);
    }
    end += scatters ? largest : bucket[s].n_bytes;
  }
  const size_t wire_item = item_bytes(traffic.wire);
  const auto reduce = [&](void* data, size_t n_elements) {
    const NcclType type = nccl_type(traffic.wire).value();
    if (!scatters) {
      done(nccl_.AllReduce(data, data, n_elements, type, traffic.op, comm_, queue_->stream()), "reduce a bucket");
      return;
    }
    const size_t n = n_elements / bucket.size();
    done(nccl_.ReduceScatter(data, static_cast<uint8_t*>(data) + mine * n * wire_item, n, type, traffic.op, comm_,
                             queue_->stream()),
         "reduce a bucket");
  };

  KernelCall call{KernelCall::kPack, traffic.grad, traffic.wire, pieces.data(), pieces.size()};
  call.wire = static_cast<uint8_t*>(bucket_);
  call.prescale = prescale;
  call.factor = factor;
  call.divisor = divisor;
  if (traffic.scaled) {
    call.exponents = exponents_;
    call.headroom = traffic.op == kNcclSum ? bits_for(size_) : 0;
  }
  const bool travels_as_it_is = pieces.size() == (scatters ? bucket.size() : 1) && in_one_run(pieces, wire_item) &&
                                traffic.wire == traffic.grad && !traffic.scaled && prescale == 1.0 &&
                                divisor == nullptr;
  if (travels_as_it_is) {
    reduce(pieces[0].address, pieces.size() * pieces[0].n_elements);
    call.step = KernelCall::kScale;
  } else {
    device_.run(index_, call, queue_->stream());
    reduce(bucket_, end / wire_item);
    call.step = KernelCall::kUnpack;
  }
  call.pieces += first_of_mine;
  call.n_pieces = bucket[mine].pieces.size();
  const bool is_complete = travels_as_it_is && factor.scale == 1.0 && factor.divisor == 1.0;
  if (call.n_pieces != 0 && !is_complete) device_.run(index_, call, queue_->stream());
}

void NcclGroup::broadcast(const std::vector<std::vector<Buffer>>& of_rank) {
  const std::lock_guard lock(mutex_);
  begin();
  const Device::Current current(device_, index_);
  nccl_.GroupStart();
  NcclResult result = kNcclSuccess;
  for (int root = 0; root < size_; ++root) {
    for (const Buffer& buffer : of_rank[root]) {
      if (buffer.n_bytes == 0 || result != kNcclSuccess || failed_) continue;
      result = nccl_.Broadcast(buffer.data, buffer.data, buffer.n_bytes, kNcclUint8, root, comm_, queue_->stream());
      if (result == kNcclInProgress) result = kNcclSuccess;
    }
  }
  const NcclResult ended = nccl_.GroupEnd();
  done(result != kNcclSuccess ? result : ended, "broadcast");
}

void NcclGroup::alltoall(const std::vector<Buffer>& send, const std::vector<Buffer>& receive) {
  const std::lock_guard lock(mutex_);
  begin();
  const Device::Current current(device_, index_);
  nccl_.GroupStart();
  NcclResult result = kNcclSuccess;
  const auto note = [&](NcclResult one) {
    if (result == kNcclSuccess && one != kNcclInProgress) result = one;
  };
  for (int peer = 0; peer < size_; ++peer) {
    if (peer == rank_ || failed_) continue;
    if (send[peer].n_bytes != 0) {
      note(nccl_.Send(send[peer].data, send[peer].n_bytes, kNcclUint8, peer, comm_, queue_->stream()));
    }
    if (receive[peer].n_bytes != 0) {
      note(nccl_.Recv(receive[peer].data, receive[peer].n_bytes, kNcclUint8, peer, comm_, queue_->stream()));
    }
  }
  const NcclResult ended = nccl_.GroupEnd();
  done(result != kNcclSuccess ? result : ended, "exchange parts");
}

void NcclGroup::fail(const std::string& reason) {
  {
    const std::lock_guard lock(reason_mutex_);
    if (failed_) return;
    reason_ = reason;
    failed_ = true;  // a thread that holds the communicator while it waits releases it
  }
  // Only the abort makes a thread return from a call of NCCL that does not return otherwise.
  const std::unique_lock lock(mutex_, kLetGo);
  const NcclComm comm = taken(comm_);
  if (comm == nullptr) return;
  if (captured_) std::thread([this, comm] { abort(comm); }).detach();  // it may never return; this object stays, too
  else abort(comm);
}

// Ends kernels that wait for peers, and so every wait for this GPU.
void NcclGroup::abort(NcclComm comm) {
  try {
    const Device::Current current(device_, index_);
    nccl_.CommAbort(comm);
  } catch (const DeviceError&) {  // the process is losing its GPU
  }
}

}  // namespace horo
