#include "recorder/recorder.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <stdexcept>

#include "shm/stall_detector.h"

namespace horo {
namespace {

constexpr char kMagic[16] = "horo_lite ops 1";
constexpr size_t kTextBytes = 256 << 10;
// Before init() provides more memory.
constexpr size_t kFirstCapacity = 64;

size_t copy_text(char* to, size_t room, std::string_view text) {
  size_t n = std::min(room, text.size());
  // Do not split a character.
  while (n != 0 && n < text.size() && (static_cast<uint8_t>(text[n]) & 0xC0) == 0x80) --n;
  std::memcpy(to, text.data(), n);
  if (n < room) to[n] = 0;
  return n;
}

}  // namespace

thread_local PhaseTimes PhaseClock::times = {};
std::atomic<bool> PhaseClock::is_on{false};
int64_t PhaseClock::now_ns() { return StallDetector::clock_ns(); }

thread_local std::vector<Recorder::DirectCall> Recorder::calls_;

Recorder& Recorder::of_process() {
  static auto* recorder = new Recorder();
  return *recorder;
}

Recorder::Recorder() : memory_(nullptr) {
  const size_t n_bytes = memory_bytes(kFirstCapacity);
  const std::shared_ptr<void> memory(std::calloc(1, n_bytes), std::free);
  if (memory == nullptr) throw std::bad_alloc();
  use(static_cast<uint8_t*>(memory.get()), n_bytes, memory, true);
}

size_t Recorder::memory_bytes(size_t capacity) {
  return RecordHeader::kBytes + kTextBytes + capacity * sizeof(Operation);
}

void Recorder::use(uint8_t* memory, size_t n_bytes, std::shared_ptr<void> owner, bool anew) {
  if (n_bytes < memory_bytes(1)) throw std::invalid_argument("too little memory for a recorder");
  const std::lock_guard lock(mutex_);
  uint8_t* const former = memory_;
  auto& made = *reinterpret_cast<RecordHeader*>(memory);
  made.capacity = static_cast<uint32_t>((n_bytes - memory_bytes(0)) / sizeof(Operation));
  made.text_bytes = kTextBytes;
  made.n_text_bytes = 1;  // position 0 is not used for texts
  if (former != nullptr) {
    const RecordHeader& before = header();
    std::memcpy(memory + RecordHeader::kBytes, texts(), before.n_text_bytes);
    made.n_text_bytes = before.n_text_bytes.load();
    const uint64_t last = anew ? 0 : before.n_operations.load();
    const uint64_t n = std::min<uint64_t>({last, before.capacity, made.capacity});
    auto* operations = reinterpret_cast<Operation*>(memory + memory_bytes(0));
    for (uint64_t number = last - n + 1; number <= last; ++number) operations[number % made.capacity] = at(number);
    made.n_operations = last;
    if (!anew) {
      made.n_done = before.n_done.load();
      made.n_bytes = before.n_bytes.load();
      made.waited_ns = before.waited_ns.load();
      made.exchanged_ns = before.exchanged_ns.load();
      made.n_steps = before.n_steps.load();
    }
  }
  if (anew) positions_.clear();
  memory_ = memory;
  std::memcpy(made.magic, kMagic, sizeof(kMagic));
  owner_.swap(owner);  // the previous one is dropped after the lock
}

Operation& Recorder::at(uint64_t number) const {
  auto* first = reinterpret_cast<Operation*>(memory_ + memory_bytes(0));
  return first[number % header().capacity];
}

Operation* Recorder::find(uint64_t number) const {
  Operation& found = at(number);
  return number != 0 && found.number == number ? &found : nullptr;
}

char* Recorder::texts() const { return reinterpret_cast<char*>(memory_ + RecordHeader::kBytes); }

uint32_t Recorder::add_text(std::string_view text) {
  const std::lock_guard lock(mutex_);
  RecordHeader& head = header();
  const uint32_t place = head.n_text_bytes;
  if (text.size() + 1 > head.text_bytes - place) return 0;
  std::memcpy(texts() + place, text.data(), text.size());
  texts()[place + text.size()] = 0;
  head.n_text_bytes = place + static_cast<uint32_t>(text.size()) + 1;
  return place;
}

uint64_t Recorder::add(std::string_view label, Operation& what) {
  RecordHeader& head = header();
  what.number = head.n_operations.load(std::memory_order_relaxed) + 1;
  Operation& place = at(what.number);
  std::memcpy(static_cast<void*>(&place), &what, offsetof(Operation, label));
  copy_text(place.label, sizeof(place.label), label);
  head.n_operations.store(what.number, std::memory_order_release);
  return what.number;
}

void Recorder::enter(uint32_t channel) { calls_.push_back({channel, 0, StallDetector::clock_ns(), false}); }

void Recorder::operation(std::string_view label, Operation what) {
  if (calls_.empty() || calls_.back().number != 0) return;
  DirectCall& call = calls_.back();
  what.channel = call.channel;
  what.submitted_ns = call.entered_ns;
  const std::lock_guard lock(mutex_);
  what.position = ++positions_[call.channel];
  call.number = add(label, what);
}

void Recorder::begin() {
  if (calls_.empty() || calls_.back().begun) return;
  calls_.back().begun = true;
  PhaseClock::times = {};
  begin(calls_.back().number, StallDetector::clock_ns());
}

void Recorder::leave(bool failed) {
  if (calls_.empty()) return;
  const DirectCall call = calls_.back();
  calls_.pop_back();
  if (call.number == 0) return;
  const int64_t now = StallDetector::clock_ns();
  const std::lock_guard lock(mutex_);
  Operation* operation = find(call.number);
  if (operation == nullptr) return;
  finish(*operation, now, failed);
  const int64_t begun = operation->begun_ns == 0 ? now : operation->begun_ns;
  header().waited_ns += begun - operation->submitted_ns;
  header().exchanged_ns += now - begun;
}

void Recorder::waited(int64_t since_ns, int64_t begun_ns, int64_t until_ns) {
  const int64_t begun = begun_ns == 0 ? until_ns : std::clamp(begun_ns, since_ns, until_ns);
  header().waited_ns += begun - since_ns;
  header().exchanged_ns += until_ns - begun;
}

uint64_t Recorder::submit(std::string_view label, Operation what) {
  const std::lock_guard lock(mutex_);
  what.flags |= Operation::kAsynchronous;
  return add(label, what);
}

void Recorder::place(uint64_t number, uint64_t position) {
  const std::lock_guard lock(mutex_);
  if (Operation* operation = find(number)) operation->position = position;
}

void Recorder::begin(uint64_t number, int64_t now_ns) {
  const std::lock_guard lock(mutex_);
  if (Operation* operation = find(number)) operation->begun_ns = now_ns;
}

void Recorder::finish(uint64_t number, int64_t now_ns, bool failed) {
  const std::lock_guard lock(mutex_);
  if (Operation* operation = find(number)) finish(*operation, now_ns, failed);
}

void Recorder::finish(Operation& operation, int64_t now_ns, bool failed) {
  operation.done_ns = now_ns;
  if (failed) operation.flags |= Operation::kFailed;
  if (operation.begun_ns != 0) operation.phases = PhaseClock::times;
  header().n_done += 1;
  header().n_bytes += operation.n_bytes;
}

}  // namespace horo
