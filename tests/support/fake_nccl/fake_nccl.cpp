// A stand-in for NCCL: the same symbols over host memory, for real processes of one machine without a GPU.
//
// Streams are the fake device's (csrc/gpu/device.h): operations are queued on them and read their data when the stream
// gets to them. Ranks meet in anonymous shared memory (memfd) that the process which made the unique id holds open, so
// that nothing can be left behind. It reproduces pitfalls of the real library:
// - A communicator that is not ready answers ncclInvalidArgument.
// - With `blocking = 0` every operation among several ranks returns ncclInProgress (from 2.22 on) and is queued on its
//   stream by a thread of this library a little later: work to be ordered after it on the stream must wait until
//   ncclCommGetAsyncError no longer returns ncclInProgress.
// - ncclCommSplit puts the *parent* in progress; the new communicator exists when the parent is ready again. It
//   returns ncclSuccess nevertheless, and so does ncclCommWindowRegister.
// - Ranks whose calls do not match hang, until they are aborted.
// - The first reduction of each kind (all-reduce or reduce-scatter, small or large) connects the ranks (from 2.22 on):
//   it waits for them before it is queued.
// - The minimum and maximum of floats lose NaN, as fmin and fmax do.
// - ncclCommAbort returns before work that is queued on streams has ended, which it then does immediately.
//
// Environment:
//   HORO_LITE_FAKE_NCCL_VERSION=22707     the result of ncclGetVersion
//   HORO_LITE_FAKE_NCCL_LOG=prefix        one line per call in prefix.PID: `rank name count dtype op stream address`;
//                                         op is the root of a broadcast and the peer of send and recv
//   HORO_LITE_FAKE_NCCL_INIT_HANGS=r[:k]  rank r's (k-th) ncclCommInitRankConfig never completes
//   HORO_LITE_FAKE_NCCL_INIT_FAILS=r[:k]  ... gives the asynchronous error ncclSystemError
//   HORO_LITE_FAKE_NCCL_INIT_REFUSED=r[:k]  ... ncclInvalidUsage
//   HORO_LITE_FAKE_NCCL_FAILS_AT=r:n      the n-th operation (from 1) of rank r gives the asynchronous error
//                                         ncclRemoteError and never completes
//   HORO_LITE_FAKE_NCCL_SEED=1            a reduction does not add in rank order, but in one that depends on the seed,
//                                         the number of elements and the element, and is the same on all ranks
//   HORO_LITE_FAKE_NCCL_REGISTER_FAILS=1  registering gives ncclSystemError; =null: success and a null handle, as if
//                                         the hardware does not support it
// Ranks are those of the communicator made by ncclCommInitRankConfig, in its splits too; k and n are counted per
// process and rank, so that a new communicator after a failure works.
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "gpu/nccl_dl.h"
#include "pack/dtype.h"

using namespace horo;

namespace {

// The beginning of every stream of the fake device, as defined in csrc/gpu/device.h.
struct FakeStreamHead {
  void (*enqueue)(FakeStreamHead* stream, void (*work)(void*), void* argument);
  void (*touch)(FakeStreamHead* stream, const void* address, size_t n_bytes, bool writes, const char* what);
  bool (*capture)(FakeStreamHead* stream, void (*call)(void* argument, FakeStreamHead* stream), void* argument);
};

constexpr int kMaxRanks = 16;
constexpr size_t kFewElements = 4096;
constexpr size_t kSlotBytes = size_t{1} << 20;     // a rank's buffer for one piece of a collective
constexpr size_t kChannelBytes = size_t{1} << 16;  // the same for a message between two ranks

const char* setting(const char* name) {
  const char* value = std::getenv((std::string("HORO_LITE_FAKE_NCCL_") + name).c_str());
  return value != nullptr && *value != '\0' ? value : nullptr;
}

int library_version() {
  const char* value = setting("VERSION");
  return value == nullptr ? 22707 : std::atoi(value);
}

// Never destroyed, like all shared state here: threads of this library may outlive main().
std::mutex& shared_mutex = *new std::mutex;
char last_error[256];

NcclResult refuse(NcclResult result, const std::string& why) {
  const std::lock_guard lock(shared_mutex);
  std::snprintf(last_error, sizeof last_error, "%s", why.c_str());
  return result;
}

// --- State shared by the ranks ------------------------------------------------------------------------------------

// Operations on streams and operations of the host (init, split, finalize) are ordered separately.
enum LaneIndex { kOnStream, kOnHost, kLanes };

struct alignas(64) LaneRank {
  std::atomic<uint64_t> step;
  uint64_t what;      // a hash of this rank's current operation
  int64_t values[3];  // the arguments of a split, for the others
};

struct alignas(64) Channel {
  std::atomic<uint64_t> n_written;
  std::atomic<uint64_t> n_read;
  uint64_t what;  // a hash of the whole message's size and type
  uint8_t data[kChannelBytes];
};

struct Shared {
  uint64_t token;
  std::atomic<int> size;
  LaneRank lanes[kLanes][kMaxRanks];
  Channel channels[kMaxRanks][kMaxRanks];  // [from][to]
  alignas(4096) uint8_t slots[kMaxRanks][kSlotBytes];
};

// How a process finds it: in the unique id, or from a split's leader.
struct Address {
  int64_t pid;
  int64_t fd;
  uint64_t token;
};

Shared* map_shared(int fd) {
  void* memory = mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  return memory == MAP_FAILED ? nullptr : static_cast<Shared*>(memory);
}

std::map<int64_t, uint64_t>& descriptors = *new std::map<int64_t, uint64_t>;  // that this process holds open: tokens

bool create_shared(Address* address) {
  const int fd = memfd_create("fake_nccl", MFD_CLOEXEC);
  if (fd < 0 || ftruncate(fd, sizeof(Shared)) != 0) return false;
  Shared* shared = map_shared(fd);
  if (shared == nullptr || getrandom(&shared->token, sizeof shared->token, 0) != sizeof shared->token) return false;
  *address = {getpid(), fd, shared->token};
  munmap(shared, sizeof(Shared));
  const std::lock_guard lock(shared_mutex);
  descriptors[fd] = address->token;
  return true;
}

Shared* open_shared(const Address& address) {
  const std::string path = "/proc/" + std::to_string(address.pid) + "/fd/" + std::to_string(address.fd);
  const int fd = open(path.c_str(), O_RDWR | O_CLOEXEC);
  if (fd < 0) return nullptr;
  Shared* shared = lseek(fd, 0, SEEK_END) == static_cast<off_t>(sizeof(Shared)) ? map_shared(fd) : nullptr;
  close(fd);
  if (shared != nullptr && shared->token != address.token) {
    munmap(shared, sizeof(Shared));
    return nullptr;
  }
  return shared;
}

// Called once all have opened it.
void close_if_mine(const Address& address) {
  const std::lock_guard lock(shared_mutex);
  const auto found = descriptors.find(address.fd);
  if (address.pid != getpid() || found == descriptors.end() || found->second != address.token) return;
  close(static_cast<int>(address.fd));
  descriptors.erase(found);
}

uint64_t hash_of(std::initializer_list<uint64_t> values) {
  uint64_t hash = 1469598103934665603u;
  for (const uint64_t value : values) hash = (hash ^ value) * 1099511628211u + (hash >> 29);
  return hash;
}

// --- Communicators ------------------------------------------------------------------------------------------------

struct Comm {
  int rank = -1;
  int size = 0;
  int home = -1;  // its rank in the communicator that this one was split from, and so on up
  bool blocking = true;
  Shared* shared = nullptr;
  std::atomic<int> state{kNcclSuccess};
  std::atomic<bool> aborted{false};
  std::shared_ptr<Comm> parent;  // during the split: aborting the parent ends this, too
  std::atomic<bool> finalized{false};
  std::atomic<bool> connected[2][2] = {};  // for all-reduces and reduce-scatters, small and large
  std::atomic<int> n_threads{0};
  // Streams run concurrently; a communicator's operations run one after the other, in the order of the calls.
  std::atomic<uint64_t> n_queued{0};
  std::atomic<uint64_t> n_done{0};
  uint64_t steps[kLanes] = {0, 0};
  std::mutex mutex;
  std::set<void*> registered;

  ~Comm() {
    if (shared != nullptr) munmap(shared, sizeof(Shared));
  }
};
using CommPtr = std::shared_ptr<Comm>;

std::map<void*, CommPtr>& registry = *new std::map<void*, CommPtr>;
std::map<std::string, int>& counters = *new std::map<std::string, int>;

CommPtr find(NcclComm handle) {
  const std::lock_guard lock(shared_mutex);
  const auto found = registry.find(handle);
  return found == registry.end() ? nullptr : found->second;
}

NcclComm publish(const CommPtr& comm) {
  const std::lock_guard lock(shared_mutex);
  registry[comm.get()] = comm;
  return comm.get();
}

void forget(NcclComm handle) {
  const std::lock_guard lock(shared_mutex);
  registry.erase(handle);
}

// 1, 2, 3, ... for each name.
int count(const std::string& name) {
  const std::lock_guard lock(shared_mutex);
  return ++counters[name];
}

// Whether the setting `r[:k]` means this rank at its k-th time; without k, always.
bool is_meant(const char* name, int rank, int time) {
  const char* value = setting(name);
  if (value == nullptr) return false;
  int wanted_rank = -1;
  int wanted_time = time;
  std::sscanf(value, "%d:%d", &wanted_rank, &wanted_time);
  return wanted_rank == rank && wanted_time == time;
}

void log_call(const Comm* comm, const char* name, size_t n = 0, const char* type = "-", const std::string& op = "-",
              const void* stream = nullptr, const void* address = nullptr) {
  const char* prefix = setting("LOG");
  if (prefix == nullptr) return;
  char line[256];
  const int length =
      std::snprintf(line, sizeof line, "%d %s %zu %s %s %#zx %#zx\n", comm == nullptr ? -1 : comm->rank, name, n, type,
                    op.c_str(), reinterpret_cast<uintptr_t>(stream), reinterpret_cast<uintptr_t>(address));
  const std::string path = std::string(prefix) + "." + std::to_string(getpid());
  const int fd = open(path.c_str(), O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0600);
  if (fd < 0 || write(fd, line, static_cast<size_t>(length)) != length) std::perror(path.c_str());
  if (fd >= 0) close(fd);
}

// Sleeps until `done` (returns true) or until this communicator is aborted (false).
template <class Done>
bool wait_until(const Comm& comm, Done done) {
  const auto is_aborted = [&] { return comm.aborted || (comm.parent != nullptr && comm.parent->aborted); };
  for (useconds_t pause_us = 20; !is_aborted(); pause_us = std::min<useconds_t>(2 * pause_us, 1000)) {
    if (done()) return true;
    usleep(pause_us);
  }
  return false;
}

bool hang(const Comm& comm) {
  return wait_until(comm, [] { return false; });
}

// Waits until all ranks have reached their next step of this lane.
bool barrier(Comm& comm, LaneIndex lane) {
  const uint64_t step = ++comm.steps[lane];
  LaneRank* ranks = comm.shared->lanes[lane];
  ranks[comm.rank].step.store(step);
  return wait_until(comm, [&] {
    return std::all_of(ranks, ranks + comm.size, [&](const LaneRank& rank) { return rank.step.load() >= step; });
  });
}

// Waits until all ranks are about to do the same operation; else they hang. Another barrier of the lane must follow.
bool meet(Comm& comm, LaneIndex lane, uint64_t what) {
  LaneRank* ranks = comm.shared->lanes[lane];
  ranks[comm.rank].what = what;
  if (!barrier(comm, lane)) return false;
  const bool same = std::all_of(ranks, ranks + comm.size, [&](const LaneRank& rank) { return rank.what == what; });
  return same || hang(comm);
}

// The first barrier of a communicator. A rank that occurs twice hangs, as does one that expects another size.
bool join(Comm& comm) {
  int nobody = 0;
  if (!comm.shared->size.compare_exchange_strong(nobody, comm.size) && nobody != comm.size) return hang(comm);
  uint64_t absent = 0;
  std::atomic<uint64_t>& mine = comm.shared->lanes[kOnHost][comm.rank].step;
  if (!mine.compare_exchange_strong(absent, 1)) return hang(comm);
  return barrier(comm, kOnHost);
}

// Runs `work` here, or in its own thread while the communicator is in progress: then its result is the state
// afterwards.
NcclResult run_or_start(const CommPtr& comm, bool in_thread, std::function<NcclResult()> work) {
  if (!in_thread) return work();
  comm->state = kNcclInProgress;
  ++comm->n_threads;
  std::thread([comm, work = std::move(work)] {
    const NcclResult result = work();
    int in_progress = kNcclInProgress;  // an operation may have failed meanwhile
    comm->state.compare_exchange_strong(in_progress, result);
    --comm->n_threads;
  }).detach();
  return kNcclInProgress;
}

// Some calls do not report that they have only begun.
NcclResult unsaid(NcclResult result) { return result == kNcclInProgress ? kNcclSuccess : result; }

NcclResult ready(const CommPtr& comm) {
  if (comm == nullptr) return refuse(kNcclInvalidArgument, "not a communicator, or no longer one");
  const NcclResult state = static_cast<NcclResult>(comm->state.load());
  if (state == kNcclInProgress) {
    return refuse(kNcclInvalidArgument,
                  "Attempt to use communicator before the previous operation returned ncclSuccess");
  }
  return state;
}

// Returns the value of `blocking`, or -1 for a configuration that the library would reject.
int blocking_of(const NcclConfig* config, int inherited) {
  if (config == nullptr) return inherited;
  if (config->magic != NcclConfig{}.magic || config->size < sizeof(NcclConfig)) return -1;
  // The variable wins. (NCCL reads it once.)
  if (const char* wins = std::getenv("NCCL_COMM_BLOCKING")) return std::atoi(wins) != 0;
  if (config->blocking == kNcclUndefined) return 1;
  return config->blocking == 0 || config->blocking == 1 ? config->blocking : -1;
}

// --- Operations on streams ----------------------------------------------------------------------------------------

enum class Kind { kAllReduce, kReduceScatter, kBroadcast, kSend, kRecv };

struct Op {
  Kind kind;
  const void* from;
  void* to;
  size_t n;
  NcclType type;
  int argument;  // the NcclOp, the root or the peer
  bool fails;

  bool is_reduction() const { return kind == Kind::kAllReduce || kind == Kind::kReduceScatter; }
  // Into how many parts, of `n` elements each, the memory that it reads is divided.
  size_t n_parts(int size) const { return kind == Kind::kReduceScatter ? static_cast<size_t>(size) : 1; }
};

const char* const kTypeNames[] = {"int8",   "uint8",   "int32",   "uint32",  "int64",
                                  "uint64", "float16", "float32", "float64", "bfloat16"};
const char* const kOpNames[] = {"sum", "prod", "max", "min"};

size_t item_bytes_of(NcclType type) {
  static const size_t bytes[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2};
  return bytes[type];
}

template <class T>
T combined(T a, T b, int op) {
  if (op == kNcclMax || op == kNcclMin) {
    if (a != a) return b;
    if (b != b) return a;
  }
  switch (op) {
    case kNcclSum:
      return a + b;
    case kNcclProd:
      return a * b;
    case kNcclMax:
      return a < b ? b : a;
    default:
      return b < a ? b : a;
  }
}

// In rank order; 16-bit floats are rounded after each addition. With a seed, parts begin with different ranks, as in a
// ring, which depends on how many elements there are.
template <class Load, class Store>
void reduce_as(const Comm& comm, void* to, size_t n, int op, size_t item, Load load, Store store) {
  const char* seed = setting("SEED");
  for (size_t i = 0; i < n; ++i) {
    const uint64_t first = seed == nullptr ? 0 : hash_of({static_cast<uint64_t>(std::atoi(seed)), n, i / 64});
    const auto part = [&](int r) {
      return comm.shared->slots[(first + static_cast<uint64_t>(r)) % static_cast<uint64_t>(comm.size)] + i * item;
    };
    uint8_t* out = static_cast<uint8_t*>(to) + i * item;
    std::memcpy(out, part(0), item);
    for (int r = 1; r < comm.size; ++r) store(out, combined(load(out), load(part(r)), op));
  }
}

template <class T>
void reduce_plain(const Comm& comm, void* to, size_t n, int op) {
  const auto load = [](const void* at) {
    T value;
    std::memcpy(&value, at, sizeof value);
    return value;
  };
  reduce_as(comm, to, n, op, sizeof(T), load, [](void* at, T value) { std::memcpy(at, &value, sizeof value); });
}

template <float (*widen)(uint16_t), uint16_t (*round)(float)>
void reduce_16_bit(const Comm& comm, void* to, size_t n, int op) {
  const auto load = [](const void* at) {
    uint16_t bits;
    std::memcpy(&bits, at, sizeof bits);
    return widen(bits);
  };
  reduce_as(comm, to, n, op, sizeof(uint16_t), load, [](void* at, float value) {
    const uint16_t bits = round(value);
    std::memcpy(at, &bits, sizeof bits);
  });
}

void reduce(const Comm& comm, void* to, size_t n, NcclType type, int op) {
  switch (type) {
    case kNcclInt8:
      return reduce_plain<int8_t>(comm, to, n, op);
    case kNcclUint8:
      return reduce_plain<uint8_t>(comm, to, n, op);
    case kNcclInt32:
      return reduce_plain<int32_t>(comm, to, n, op);
    case kNcclUint32:
      return reduce_plain<uint32_t>(comm, to, n, op);
    case kNcclInt64:
      return reduce_plain<int64_t>(comm, to, n, op);
    case kNcclUint64:
      return reduce_plain<uint64_t>(comm, to, n, op);
    case kNcclFloat16:
      return reduce_16_bit<float_of_half, half_bits>(comm, to, n, op);
    case kNcclFloat32:
      return reduce_plain<float>(comm, to, n, op);
    case kNcclFloat64:
      return reduce_plain<double>(comm, to, n, op);
    case kNcclBfloat16:
      return reduce_16_bit<float_of_bfloat16, bfloat16_bits>(comm, to, n, op);
  }
}

bool run_collective(Comm& comm, const Op& op) {
  const uint64_t what = hash_of(
      {static_cast<uint64_t>(op.kind), op.n, static_cast<uint64_t>(op.type), static_cast<uint64_t>(op.argument)});
  if (!meet(comm, kOnStream, what)) return false;
  const size_t item = item_bytes_of(op.type);
  const size_t n_piece = kSlotBytes / item;
  const size_t n_parts = op.n_parts(comm.size);
  for (size_t part = 0; part < n_parts; ++part) {
    const bool receives = n_parts == 1 || part == static_cast<size_t>(comm.rank);
    for (size_t first = 0; first == 0 || first < op.n; first += n_piece) {
      const size_t n = std::min(n_piece, op.n - first);
      const size_t offset = first * item;
      if (n > 0 && (op.is_reduction() || op.argument == comm.rank)) {
        const size_t begin = part * op.n * item + offset;
        std::memcpy(comm.shared->slots[comm.rank], static_cast<const uint8_t*>(op.from) + begin, n * item);
      }
      if (!barrier(comm, kOnStream)) return false;
      if (n > 0 && op.is_reduction() && receives) {
        reduce(comm, static_cast<uint8_t*>(op.to) + offset, n, op.type, op.argument);
      } else if (n > 0 && !op.is_reduction()) {
        std::memcpy(static_cast<uint8_t*>(op.to) + offset, comm.shared->slots[op.argument], n * item);
      }
      if (!barrier(comm, kOnStream)) return false;
    }
  }
  return true;
}

// One message in flight. A sender is done when all of it was read, so that a message without a receiver hangs.
struct Transfer {
  const Op* op;
  Channel* channel;
  size_t n_moved = 0;
  bool begun = false;

  size_t n_bytes() const { return op->n * item_bytes_of(op->type); }
  uint64_t what() const { return hash_of({op->n, static_cast<uint64_t>(op->type)}); }

  // Returns whether it is finished; never blocks.
  bool advance() {
    const uint64_t written = channel->n_written.load();
    const bool is_empty = channel->n_read.load() == written;
    const size_t n = std::min(kChannelBytes, n_bytes() - n_moved);
    if (op->kind == Kind::kSend) {
      if (!is_empty) return false;
      if (begun && n == 0) return true;
      channel->what = what();
      if (n > 0) std::memcpy(channel->data, static_cast<const uint8_t*>(op->from) + n_moved, n);
      channel->n_written.store(written + 1);
    } else {
      if (is_empty || channel->what != what()) return false;
      if (n > 0) std::memcpy(static_cast<uint8_t*>(op->to) + n_moved, channel->data, n);
      channel->n_read.store(written);
    }
    begun = true;
    n_moved += n;
    return op->kind == Kind::kRecv && n_moved == n_bytes();
  }
};

// All messages of a group at once; those between the same two ranks in the order of the calls.
bool run_transfers(Comm& comm, const std::vector<Op>& ops) {
  std::vector<Transfer> open;
  for (const Op& op : ops) {
    if (op.kind == Kind::kSend) open.push_back({&op, &comm.shared->channels[comm.rank][op.argument]});
    if (op.kind == Kind::kRecv) open.push_back({&op, &comm.shared->channels[op.argument][comm.rank]});
  }
  return wait_until(comm, [&] {
    for (bool moved = true; moved;) {
      moved = false;
      std::set<std::pair<Channel*, Kind>> busy;  // to itself, a rank both sends and receives on one channel
      for (auto transfer = open.begin(); transfer != open.end();) {
        const size_t before = transfer->n_moved;
        const bool first = busy.emplace(transfer->channel, transfer->op->kind).second;
        if (first && transfer->advance()) {
          busy.erase({transfer->channel, transfer->op->kind});
          transfer = open.erase(transfer);
          moved = true;
        } else {
          moved = moved || transfer->n_moved != before;
          ++transfer;
        }
      }
    }
    return open.empty();
  });
}

// The operations that one call, or one group, queues on one stream for one communicator.
struct Work {
  CommPtr comm;
  FakeStreamHead* stream;
  std::vector<Op> ops;
  uint64_t ticket;

  bool run() {
    Comm& c = *comm;
    if (!wait_until(c, [&] { return c.n_done.load() == ticket; })) return false;
    for (const Op& op : ops) {
      if (op.fails) {
        c.state = refuse(kNcclRemoteError, "HORO_LITE_FAKE_NCCL_FAILS_AT");
        return hang(c);
      }
      if ((op.is_reduction() || op.kind == Kind::kBroadcast) && !run_collective(c, op)) return false;
    }
    return run_transfers(c, ops);
  }
};

void run_work(void* argument) {
  const std::unique_ptr<Work> work(static_cast<Work*>(argument));
  if (work->run()) ++work->comm->n_done;
}

// Declares what memory the work uses.
void touch(const Work& work) {
  for (const Op& op : work.ops) {
    const size_t n_bytes = op.n * item_bytes_of(op.type);
    const bool is_broadcast = op.kind == Kind::kBroadcast, is_root = is_broadcast && op.argument == work.comm->rank;
    if (op.is_reduction() || op.kind == Kind::kSend || is_root) {
      const size_t n_read = op.n_parts(work.comm->size) * n_bytes;
      work.stream->touch(work.stream, op.from, n_read, false, "an operation of NCCL");
    }
    if (op.is_reduction() || op.kind == Kind::kRecv || (is_broadcast && !is_root)) {
      work.stream->touch(work.stream, op.to, n_bytes, true, "an operation of NCCL");
    }
  }
}

void enqueue(std::vector<std::unique_ptr<Work>>& works) {
  for (std::unique_ptr<Work>& work : works) {
    touch(*work);
    FakeStreamHead* stream = work->stream;
    stream->enqueue(stream, run_work, work.release());
  }
}

// Queues a captured one again.
void replay(void* argument, FakeStreamHead* stream) {
  std::vector<std::unique_ptr<Work>> works;
  works.push_back(std::make_unique<Work>(*static_cast<Work*>(argument)));
  works[0]->stream = stream;
  works[0]->ticket = works[0]->comm->n_queued++;
  enqueue(works);
}

thread_local int group_depth = 0;
thread_local NcclResult group_error = kNcclSuccess;
thread_local std::vector<std::unique_ptr<Work>> group_works;

NcclResult launch_group() {
  std::vector<std::unique_ptr<Work>> works = std::move(group_works);
  group_works.clear();
  if (group_error != kNcclSuccess) return std::exchange(group_error, kNcclSuccess);
  std::erase_if(works, [](std::unique_ptr<Work>& work) {
    const bool is_captured = work->stream->capture(work->stream, replay, work.get());
    if (is_captured) work.release();  // for as long as the program runs
    return is_captured;
  });
  std::set<CommPtr> in_background;
  for (const std::unique_ptr<Work>& work : works) {
    work->ticket = work->comm->n_queued++;
    if (!work->comm->blocking && work->comm->size > 1 && library_version() >= 22200) in_background.insert(work->comm);
  }
  if (in_background.empty()) {
    enqueue(works);
    return kNcclSuccess;
  }
  for (const CommPtr& comm : in_background) {
    comm->state = kNcclInProgress;
    ++comm->n_threads;
  }
  auto shared_works = std::make_shared<std::vector<std::unique_ptr<Work>>>(std::move(works));
  std::thread([in_background, shared_works] {
    usleep(200);
    for (const std::unique_ptr<Work>& work : *shared_works) {
      const Op& op = work->ops[0];
      if (!op.is_reduction()) continue;
      if (work->comm->connected[op.kind == Kind::kReduceScatter][op.n > kFewElements].exchange(true)) continue;
      barrier(*work->comm, kOnHost);
    }
    enqueue(*shared_works);
    for (const CommPtr& comm : in_background) {
      int in_progress = kNcclInProgress;  // it may have failed meanwhile
      comm->state.compare_exchange_strong(in_progress, kNcclSuccess);
      --comm->n_threads;
    }
  }).detach();
  return kNcclInProgress;
}

NcclResult end_group() { return --group_depth == 0 ? launch_group() : kNcclSuccess; }

NcclResult check(const CommPtr& comm, const Op& op, const void* stream) {
  const NcclResult state = ready(comm);
  if (state != kNcclSuccess) return state;
  if (comm->finalized) return refuse(kNcclInvalidUsage, "the communicator was finalized");
  if (op.type < 0 || op.type > kNcclBfloat16) return refuse(kNcclInvalidArgument, "unknown type");
  if (op.argument < 0 || op.argument >= (op.is_reduction() ? 4 : comm->size)) {
    return refuse(kNcclInvalidArgument, op.is_reduction() ? "an op the stand-in has not" : "no such rank");
  }
  const bool reads =
      op.is_reduction() || op.kind == Kind::kSend || (op.kind == Kind::kBroadcast && op.argument == comm->rank);
  if (op.n > 0 && ((reads && op.from == nullptr) || (op.kind != Kind::kSend && op.to == nullptr))) {
    return refuse(kNcclInvalidArgument, "a null buffer");
  }
  if (op.kind == Kind::kReduceScatter) {  // NCCL does not check, and its results would be wrong
    const size_t n_bytes = op.n * item_bytes_of(op.type);
    const auto from = reinterpret_cast<uintptr_t>(op.from), to = reinterpret_cast<uintptr_t>(op.to);
    const bool is_apart = to + n_bytes <= from || from + op.n_parts(comm->size) * n_bytes <= to;
    if (!is_apart && to != from + static_cast<size_t>(comm->rank) * n_bytes) {
      return refuse(kNcclInvalidArgument, "the result overlaps what is read, at another place than this rank's");
    }
  }
  if (reinterpret_cast<uintptr_t>(stream) <= 2) return refuse(kNcclInvalidUsage, "the device has no default stream");
  return kNcclSuccess;
}

NcclResult add(const char* name, NcclComm handle, Op op, NcclStream stream) {
  const CommPtr comm = find(handle);
  const bool known = op.type >= 0 && op.type <= kNcclBfloat16;
  const std::string argument =
      op.is_reduction() && op.argument >= 0 && op.argument < 4 ? kOpNames[op.argument] : std::to_string(op.argument);
  log_call(comm.get(), name, op.n, known ? kTypeNames[op.type] : "?", argument, stream,
           op.kind == Kind::kSend ? op.from : op.to);
  // Also of those that are refused below, since a test counts the calls in the log.
  op.fails = comm != nullptr && is_meant("FAILS_AT", comm->home, count("operations of " + std::to_string(comm->home)));
  ++group_depth;  // a call outside a group is a group of its own
  const NcclResult result = check(comm, op, stream);
  if (result != kNcclSuccess) {
    group_error = result;
  } else {
    const auto on = static_cast<FakeStreamHead*>(stream);
    const auto same = std::find_if(group_works.begin(), group_works.end(), [&](const std::unique_ptr<Work>& work) {
      return work->comm == comm && work->stream == on;
    });
    if (same != group_works.end()) {
      (*same)->ops.push_back(op);
    } else {
      group_works.push_back(std::make_unique<Work>(Work{comm, on, {op}, 0}));
    }
  }
  const NcclResult launched = end_group();
  return result != kNcclSuccess ? result : launched;
}

// --- Operations of the host ---------------------------------------------------------------------------------------

NcclResult initialise(const CommPtr& comm, const Address& address) {
  const int time = count("inits of " + std::to_string(comm->home));
  if (is_meant("INIT_HANGS", comm->home, time)) hang(*comm);
  if (is_meant("INIT_FAILS", comm->home, time)) {
    return refuse(kNcclSystemError, "HORO_LITE_FAKE_NCCL_INIT_FAILS");
  }
  if (is_meant("INIT_REFUSED", comm->home, time)) return refuse(kNcclInvalidUsage, "Duplicate GPU detected");
  if (comm->aborted) return kNcclInternalError;
  comm->shared = open_shared(address);
  if (comm->shared == nullptr) return refuse(kNcclSystemError, "whoever made the unique id is gone");
  const bool joined = join(*comm);
  close_if_mine(address);
  return joined ? kNcclSuccess : kNcclInternalError;
}

NcclResult split(const CommPtr& parent, const CommPtr& child, int color, int key, NcclComm* new_comm) {
  LaneRank* ranks = parent->shared->lanes[kOnHost];
  int64_t* mine = ranks[parent->rank].values;
  mine[0] = color;
  mine[1] = key;
  if (!meet(*parent, kOnHost, hash_of({'s'}))) return kNcclInternalError;
  std::vector<int> members;
  for (int r = 0; r < parent->size; ++r) {
    if (child != nullptr && ranks[r].values[0] == color) members.push_back(r);
  }
  std::stable_sort(members.begin(), members.end(),
                   [&](int a, int b) { return ranks[a].values[1] < ranks[b].values[1]; });
  const auto place = std::find(members.begin(), members.end(), parent->rank);
  Address address{0, 0, 0};
  if (!barrier(*parent, kOnHost)) return kNcclInternalError;  // all have read the colors
  if (child != nullptr && place == members.begin()) {
    if (!create_shared(&address)) return kNcclSystemError;
    mine[0] = address.pid;
    mine[1] = address.fd;
    mine[2] = static_cast<int64_t>(address.token);
  }
  if (!barrier(*parent, kOnHost)) return kNcclInternalError;
  if (child != nullptr) {
    const int64_t* leader = ranks[members.front()].values;
    child->rank = static_cast<int>(place - members.begin());
    child->size = static_cast<int>(members.size());
    child->shared = open_shared({leader[0], leader[1], static_cast<uint64_t>(leader[2])});
    if (child->shared == nullptr) return kNcclSystemError;
  }
  if (!barrier(*parent, kOnHost)) return kNcclInternalError;
  if (address.pid != 0) close_if_mine(address);
  if (child != nullptr) {
    child->parent = parent;
    const bool joined = join(*child);
    child->parent = nullptr;
    if (!joined) return kNcclInternalError;
    *new_comm = publish(child);
  }
  return kNcclSuccess;
}

NcclResult finalize(const CommPtr& comm) {
  const bool flushed = wait_until(*comm, [&] { return comm->n_done == comm->n_queued; });
  if (!flushed || !meet(*comm, kOnHost, hash_of({'f'})) || !barrier(*comm, kOnHost)) return kNcclInternalError;
  return kNcclSuccess;
}

NcclResult register_memory(const CommPtr& comm, void** handle) {
  *handle = nullptr;
  const char* failure = setting("REGISTER_FAILS");
  if (failure != nullptr && std::strcmp(failure, "null") == 0) return kNcclSuccess;
  if (failure != nullptr) return refuse(kNcclSystemError, "HORO_LITE_FAKE_NCCL_REGISTER_FAILS");
  *handle = new char;
  const std::lock_guard lock(comm->mutex);
  comm->registered.insert(*handle);
  return kNcclSuccess;
}

NcclResult deregister_memory(const CommPtr& comm, void* handle) {
  if (handle == nullptr) return kNcclSuccess;
  const std::lock_guard lock(comm->mutex);
  if (comm->registered.erase(handle) == 0) return refuse(kNcclInvalidArgument, "not registered");
  delete static_cast<char*>(handle);
  return kNcclSuccess;
}

}  // namespace

// --- The library's symbols ----------------------------------------------------------------------------------------

#define EXPORTED extern "C" __attribute__((visibility("default")))

EXPORTED NcclResult ncclGetVersion(int* version) {
  *version = library_version();
  return kNcclSuccess;
}

EXPORTED NcclResult ncclGetUniqueId(NcclUniqueId* id) {
  log_call(nullptr, "ncclGetUniqueId");
  Address address;
  if (!create_shared(&address)) return refuse(kNcclSystemError, "no shared memory");
  std::memset(id->bytes, 0, sizeof id->bytes);
  std::memcpy(id->bytes, &address, sizeof address);
  return kNcclSuccess;
}

EXPORTED NcclResult ncclCommInitRankConfig(NcclComm* comm, int size, NcclUniqueId id, int rank, NcclConfig* config) {
  const CommPtr made = std::make_shared<Comm>();
  made->rank = made->home = rank;
  made->size = size;
  log_call(made.get(), "ncclCommInitRankConfig", static_cast<size_t>(size));
  *comm = nullptr;
  const int blocking = blocking_of(config, 1);
  if (blocking < 0) return refuse(kNcclInvalidArgument, "ncclConfig_t argument not initialized");
  if (rank < 0 || rank >= size || size > kMaxRanks) return refuse(kNcclInvalidArgument, "invalid rank requested");
  made->blocking = blocking == 1;
  Address address;
  std::memcpy(&address, id.bytes, sizeof address);
  *comm = publish(made);
  const NcclResult result = run_or_start(made, blocking == 0, [made, address] { return initialise(made, address); });
  if (blocking == 1 && result != kNcclSuccess) {
    forget(*comm);
    *comm = nullptr;
  }
  return result;
}

EXPORTED NcclResult ncclCommSplit(NcclComm comm, int color, int key, NcclComm* new_comm, NcclConfig* config) {
  const CommPtr parent = find(comm);
  log_call(parent.get(), "ncclCommSplit", 0, "-", std::to_string(color) + "/" + std::to_string(key));
  const NcclResult state = ready(parent);
  if (state != kNcclSuccess) return state;
  *new_comm = nullptr;
  const int blocking = blocking_of(config, parent->blocking ? 1 : 0);
  if (blocking < 0) return refuse(kNcclInvalidArgument, "ncclConfig_t argument not initialized");
  if (color < 0 && color != kNcclSplitNoColor) return refuse(kNcclInvalidArgument, "a negative color");
  const CommPtr child = color == kNcclSplitNoColor ? nullptr : std::make_shared<Comm>();
  if (child != nullptr) {
    child->home = parent->home;
    child->blocking = blocking == 1;
  }
  return unsaid(run_or_start(parent, !parent->blocking, [=] { return split(parent, child, color, key, new_comm); }));
}

EXPORTED NcclResult ncclCommFinalize(NcclComm handle) {
  const CommPtr comm = find(handle);
  log_call(comm.get(), "ncclCommFinalize");
  const NcclResult state = ready(comm);
  if (state != kNcclSuccess) return state;
  if (comm->finalized.exchange(true)) return refuse(kNcclInvalidArgument, "finalized twice");
  return run_or_start(comm, !comm->blocking, [comm] { return finalize(comm); });
}

EXPORTED NcclResult ncclCommDestroy(NcclComm handle) {
  if (handle == nullptr) return kNcclSuccess;
  const CommPtr comm = find(handle);
  log_call(comm.get(), "ncclCommDestroy");
  const NcclResult state = ready(comm);
  if (state != kNcclSuccess) return state;
  forget(handle);
  if (!comm->finalized) run_or_start(comm, !comm->blocking, [comm] { return finalize(comm); });
  return kNcclSuccess;
}

EXPORTED NcclResult ncclCommAbort(NcclComm handle) {
  if (handle == nullptr) return kNcclSuccess;
  const CommPtr comm = find(handle);
  log_call(comm.get(), "ncclCommAbort");
  if (comm == nullptr) return refuse(kNcclInvalidArgument, "not a communicator, or no longer one");
  comm->aborted = true;
  forget(handle);
  while (comm->n_threads > 0) usleep(100);
  return kNcclSuccess;
}

EXPORTED NcclResult ncclCommGetAsyncError(NcclComm handle, NcclResult* error) {
  const CommPtr comm = find(handle);
  if (comm == nullptr) return refuse(kNcclInvalidArgument, "not a communicator, or no longer one");
  *error = static_cast<NcclResult>(comm->state.load());
  return kNcclSuccess;
}

EXPORTED const char* ncclGetErrorString(NcclResult result) {
  static const char* const texts[] = {"no error",
                                      "unhandled cuda error",
                                      "unhandled system error",
                                      "internal error",
                                      "invalid argument",
                                      "invalid usage",
                                      "remote process exited or there was a network error",
                                      "NCCL operation in progress"};
  return result >= 0 && result <= kNcclInProgress ? texts[result] : "unknown result code";
}

EXPORTED const char* ncclGetLastError(NcclComm) { return last_error; }

EXPORTED NcclResult ncclAllReduce(const void* from, void* to, size_t n, NcclType type, NcclOp op, NcclComm comm,
                                  NcclStream stream) {
  return add("ncclAllReduce", comm, {Kind::kAllReduce, from, to, n, type, op, false}, stream);
}

EXPORTED NcclResult ncclReduceScatter(const void* from, void* to, size_t n, NcclType type, NcclOp op, NcclComm comm,
                                      NcclStream stream) {
  return add("ncclReduceScatter", comm, {Kind::kReduceScatter, from, to, n, type, op, false}, stream);
}

EXPORTED NcclResult ncclBroadcast(const void* from, void* to, size_t n, NcclType type, int root, NcclComm comm,
                                  NcclStream stream) {
  return add("ncclBroadcast", comm, {Kind::kBroadcast, from, to, n, type, root, false}, stream);
}

EXPORTED NcclResult ncclSend(const void* from, size_t n, NcclType type, int peer, NcclComm comm, NcclStream stream) {
  return add("ncclSend", comm, {Kind::kSend, from, nullptr, n, type, peer, false}, stream);
}

EXPORTED NcclResult ncclRecv(void* to, size_t n, NcclType type, int peer, NcclComm comm, NcclStream stream) {
  return add("ncclRecv", comm, {Kind::kRecv, nullptr, to, n, type, peer, false}, stream);
}

EXPORTED NcclResult ncclGroupStart() {
  log_call(nullptr, "ncclGroupStart");
  ++group_depth;
  return kNcclSuccess;
}

EXPORTED NcclResult ncclGroupEnd() {
  log_call(nullptr, "ncclGroupEnd");
  if (group_depth == 0) return refuse(kNcclInvalidUsage, "ncclGroupEnd: not in a group call.");
  return end_group();
}

EXPORTED NcclResult ncclMemAlloc(void** memory, size_t n_bytes) {
  *memory = std::aligned_alloc(4096, (n_bytes + 4095) / 4096 * 4096);
  log_call(nullptr, "ncclMemAlloc", n_bytes, "-", "-", nullptr, *memory);
  return *memory == nullptr ? kNcclSystemError : kNcclSuccess;
}

EXPORTED NcclResult ncclMemFree(void* memory) {
  log_call(nullptr, "ncclMemFree", 0, "-", "-", nullptr, memory);
  std::free(memory);
  return kNcclSuccess;
}

EXPORTED NcclResult ncclCommRegister(NcclComm handle, void* memory, size_t n_bytes, void** registration) {
  const CommPtr comm = find(handle);
  log_call(comm.get(), "ncclCommRegister", n_bytes, "-", "-", nullptr, memory);
  const NcclResult state = ready(comm);
  return state != kNcclSuccess ? state : register_memory(comm, registration);
}

EXPORTED NcclResult ncclCommDeregister(NcclComm handle, void* registration) {
  const CommPtr comm = find(handle);
  log_call(comm.get(), "ncclCommDeregister", 0, "-", "-", nullptr, registration);
  return comm == nullptr ? kNcclInvalidArgument : deregister_memory(comm, registration);
}

EXPORTED NcclResult ncclCommWindowRegister(NcclComm handle, void* memory, size_t n_bytes, NcclWindow* window,
                                           int flags) {
  const CommPtr comm = find(handle);
  log_call(comm.get(), "ncclCommWindowRegister", n_bytes, "-", std::to_string(flags), nullptr, memory);
  const NcclResult state = ready(comm);
  if (state != kNcclSuccess) return state;
  if (reinterpret_cast<uintptr_t>(memory) % 4096 != 0) return refuse(kNcclInvalidArgument, "not aligned to 4096 bytes");
  *window = nullptr;
  return unsaid(run_or_start(comm, !comm->blocking, [=] {  // collective
    if (!meet(*comm, kOnHost, hash_of({'w', n_bytes, static_cast<uint64_t>(flags)}))) return kNcclInternalError;
    if (!barrier(*comm, kOnHost)) return kNcclInternalError;
    return register_memory(comm, window);
  }));
}

EXPORTED NcclResult ncclCommWindowDeregister(NcclComm handle, NcclWindow window) {
  const CommPtr comm = find(handle);
  log_call(comm.get(), "ncclCommWindowDeregister", 0, "-", "-", nullptr, window);
  return comm == nullptr ? kNcclInvalidArgument : deregister_memory(comm, window);
}
