// Memory for results that a framework takes over, reused when nothing refers to it any more.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstdlib>
#include <iterator>
#include <limits>
#include <map>
#include <memory>
#include <mutex>
#include <new>
#include <optional>
#include <utility>
#include <vector>

#include "bindings/python.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace horo {
namespace {

// XLA copies arrays with a smaller alignment.
constexpr size_t kAlignment = 64;
// Memory of this size or more comes from the kernel, which clears each page when it is first written: for gradients,
// this takes longer than their exchange.
constexpr size_t kSmallestReused = 64 << 10;
// The number of calls after which the peak of memory in use is reset.
constexpr size_t kRemembered = 1000;

// Holds no more memory than the recent peak of memory in use, and keeps no more than `most_kept` bytes for reuse; what
// exceeds this is freed, the oldest first.
class ReusedMemory : public std::enable_shared_from_this<ReusedMemory> {
 public:
  using Array = nb::ndarray<nb::numpy, uint8_t, nb::ndim<1>>;

  explicit ReusedMemory(size_t most_kept) : most_kept_(most_kept) {}
  ~ReusedMemory() { free_down_to(0); }

  ListOf<Array> arrays(const std::vector<size_t>& sizes) {
    ListOf<Array> made{nb::list()};
    for (size_t n_bytes : sizes) made.append(array(n_bytes));
    const std::lock_guard lock(mutex_);
    if (++n_calls_ % kRemembered == 0) {
      peak_before_ = std::exchange(peak_, in_use_);
      keep_beside(in_use_);
    }
    return made;
  }

  void clear() {
    const std::lock_guard lock(mutex_);
    free_down_to(0);
    peak_ = peak_before_ = in_use_;
  }

  // Bytes that arrays refer to, and bytes that are unused.
  std::pair<size_t, size_t> bytes() {
    const std::lock_guard lock(mutex_);
    return {in_use_, kept_bytes_};
  }

 private:
  // Memory that arrays refer to.
  struct Block {
    Block(std::shared_ptr<ReusedMemory> owner, size_t n_bytes)
        : owner(std::move(owner)), n_bytes(n_bytes), memory(this->owner->take(n_bytes)) {}
    ~Block() { owner->give_back(memory, n_bytes); }
    Block(const Block&) = delete;
    Block& operator=(const Block&) = delete;

    const std::shared_ptr<ReusedMemory> owner;
    const size_t n_bytes;
    void* const memory;
  };

  Array array(size_t n_bytes) {
    const size_t rounded = std::max(kAlignment, (n_bytes + kAlignment - 1) / kAlignment * kAlignment);
    auto block = std::make_unique<Block>(shared_from_this(), rounded);
    const nb::capsule owner(block.get(), [](void* dropped) noexcept { delete static_cast<Block*>(dropped); });
    return Array(block.release()->memory, {n_bytes}, owner);
  }

  void* take(size_t n_bytes) {
    const std::lock_guard lock(mutex_);
    const bool is_reused = n_bytes >= kSmallestReused;
    void* memory = is_reused ? take_kept(n_bytes) : nullptr;
    if (memory == nullptr) {
      // Free unused memory, so that no more is held than the peak in use.
      if (is_reused) keep_beside(in_use_ + n_bytes);
      memory = std::aligned_alloc(kAlignment, n_bytes);
    }
    if (memory == nullptr) throw std::bad_alloc();
    if (is_reused) peak_ = std::max(peak_, in_use_ += n_bytes);
    return memory;
  }

  void* take_kept(size_t n_bytes) {
    // The most recently used of that size, which is most likely to be in the cache.
    const auto next = kept_.lower_bound({n_bytes + 1, 0});
    if (next == kept_.begin() || std::prev(next)->first.first != n_bytes) return nullptr;
    const auto found = std::prev(next);
    void* memory = found->second;
    kept_.erase(found);
    kept_bytes_ -= n_bytes;
    return memory;
  }

  void give_back(void* memory, size_t n_bytes) noexcept {
    const std::lock_guard lock(mutex_);
    if (n_bytes < kSmallestReused) return std::free(memory);
    in_use_ -= n_bytes;
    try {
      kept_.emplace(std::pair(n_bytes, ++n_given_back_), memory);
      kept_bytes_ += n_bytes;
      free_down_to(most_kept_);
    } catch (const std::bad_alloc&) {
      std::free(memory);
    }
  }

  // `in_use` bytes are in use, or about to be.
  void keep_beside(size_t in_use) {
    const size_t limit = std::max(peak_, peak_before_);
    free_down_to(limit - std::min(limit, in_use));
  }

  void free_down_to(size_t n_bytes) {
    while (kept_bytes_ > n_bytes) {
      const auto oldest = std::min_element(
          kept_.begin(), kept_.end(), [](const auto& a, const auto& b) { return a.first.second < b.first.second; });
      kept_bytes_ -= oldest->first.first;
      std::free(oldest->second);
      kept_.erase(oldest);
    }
  }

  const size_t most_kept_;
  std::mutex mutex_;
  std::map<std::pair<size_t, size_t>, void*> kept_;  // by size, and by when it was returned
  size_t kept_bytes_ = 0;
  size_t in_use_ = 0;
  size_t peak_ = 0;  // of what was in use, since the last forgetting, and
  size_t peak_before_ = 0;
  size_t n_given_back_ = 0;
  size_t n_calls_ = 0;
};

}  // namespace

void bind_reused_memory(nb::module_& m) {
  nb::class_<ReusedMemory>(m, "ReusedMemory", "Memory that is reused when no array refers to it any more.")
      .def(nb::new_([](std::optional<size_t> most_kept) {
             return std::make_shared<ReusedMemory>(most_kept.value_or(std::numeric_limits<size_t>::max()));
           }),
           "most_kept"_a = nb::none())
      .def("arrays", &ReusedMemory::arrays, "sizes"_a,
           "Return arrays of these sizes in bytes, aligned as XLA requires.")
      .def("clear", &ReusedMemory::clear, "Free memory that no array refers to.")
      .def_prop_ro("bytes", &ReusedMemory::bytes, "Bytes that arrays refer to, and bytes that are kept for reuse.");
}

}  // namespace horo
