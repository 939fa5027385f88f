// This process's last operations, in a ring buffer.
//
// The memory may be a mapped file, which keeps them after any end of the process, and which others can read while it
// runs. So everything has a fixed position there, and there are no pointers. horo_lite/recording/records.py reads it.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string_view>
#include <unordered_map>
#include <vector>

namespace horo {

// The phases of an all-reduce.
enum class Phase : uint8_t { kPack, kWait, kReduce, kUnpack };
inline constexpr size_t kPhases = 4;
using PhaseTimes = std::array<int64_t, kPhases>;  // in ns

// Measures the phases of this thread's all-reduce. Costs nothing unless phases are recorded.
class PhaseClock {
 public:
  PhaseClock() : at_ns_(is_on.load(std::memory_order_relaxed) ? now_ns() : 0) {}
  // Adds the time since the last call to that phase.
  void ends(Phase phase) {
    if (at_ns_ == 0) return;
    const int64_t now = now_ns();
    times[static_cast<size_t>(phase)] += now - at_ns_;
    at_ns_ = now;
  }

  static thread_local PhaseTimes times;  // of this thread's operation so far
  static std::atomic<bool> is_on;

 private:
  static int64_t now_ns();
  int64_t at_ns_;
};

// One operation, as in memory. Texts are given by their positions; 0: none.
struct Operation {
  static constexpr uint8_t kAsynchronous = 1, kFailed = 2;
  static constexpr size_t kAxes = 6, kLabelBytes = 104;

  uint64_t number;                          // among all that this process has recorded, from 1; 0: unused entry
  uint64_t position;                        // the same on all ranks of the channel; 0: not known yet
  int64_t submitted_ns, begun_ns, done_ns;  // as in Job; 0: not yet
  uint64_t n_bytes;
  int64_t shape[kAxes];  // of its first tensor
  uint32_t n_tensors;
  uint32_t names;  // of its tensors
  uint32_t channel;
  uint32_t kind;
  uint8_t dtype;  // of its first tensor
  uint8_t n_axes;
  uint8_t flags;
  uint8_t reserved[5];
  PhaseTimes phases;
  char label[kLabelBytes];  // zero-terminated, unless it fills the array
};
static_assert(sizeof(Operation) == 256);

// The beginning of the memory.
struct RecordHeader {
  static constexpr size_t kBytes = 4096;  // Python describes the process after this struct

  char magic[16];
  uint32_t capacity;  // operations
  uint32_t text_bytes;
  std::atomic<uint32_t> n_text_bytes;  // in use
  uint32_t reserved;
  std::atomic<uint64_t> n_operations;  // recorded so far
  std::atomic<uint64_t> n_done;
  std::atomic<uint64_t> n_bytes;  // of operations that are done
  // The program's time in blocking calls and for asynchronous operations: waiting for other ranks, and after that.
  std::atomic<uint64_t> waited_ns, exchanged_ns;
  std::atomic<uint64_t> n_steps;  // of optimizers
};
static_assert(sizeof(RecordHeader) <= 1024);

class Recorder {
 public:
  // This process's recorder. It is never destroyed: threads may outlive the program's end.
  static Recorder& of_process();

  // The memory for `capacity` operations.
  static size_t memory_bytes(size_t capacity);
  // How many operations have been recorded so far.
  uint64_t n_operations() const { return header().n_operations; }
  // Records in this zeroed memory from now on; `owner` keeps it alive. Earlier operations are copied, unless `anew`: in
  // a new world, whose ranks restart their counts together.
  void use(uint8_t* memory, size_t n_bytes, std::shared_ptr<void> owner, bool anew);

  // Writes a text, and returns its position; 0 if there is no more room.
  uint32_t add_text(std::string_view text);

  // Records that this thread makes a blocking call on a channel, which may turn out to be an operation.
  void enter(uint32_t channel);
  // Records that the blocking call is an operation, unless already recorded: a second handshake is part of it. `what`
  // contains what is known of it.
  void operation(std::string_view label, Operation what);
  // Records that all ranks have reached it.
  void begin();
  void leave(bool failed);

  // Records that the program has waited for an asynchronous operation, which all ranks had submitted by `begun_ns`.
  void waited(int64_t since_ns, int64_t begun_ns, int64_t until_ns);
  // Counts an optimizer's step.
  void step() { header().n_steps += 1; }

  // Records an asynchronous operation, and returns its number.
  uint64_t submit(std::string_view label, Operation what);
  void place(uint64_t number, uint64_t position);
  void begin(uint64_t number, int64_t now_ns);
  void finish(uint64_t number, int64_t now_ns, bool failed);

 private:
  struct DirectCall {
    uint32_t channel;
    uint64_t number;
    int64_t entered_ns;
    bool begun;
  };

  Recorder();
  RecordHeader& header() const { return *reinterpret_cast<RecordHeader*>(memory_); }
  Operation& at(uint64_t number) const;
  Operation* find(uint64_t number) const;  // nullptr: overwritten by later ones
  char* texts() const;
  uint64_t add(std::string_view label, Operation& what);  // this and the following: under the mutex
  void finish(Operation& operation, int64_t now_ns, bool failed);

  static thread_local std::vector<DirectCall> calls_;  // that this thread is making

  std::mutex mutex_;
  uint8_t* memory_;
  std::shared_ptr<void> owner_;
  std::unordered_map<uint32_t, uint64_t> positions_;  // of the last blocking call of each channel
};

}  // namespace horo
