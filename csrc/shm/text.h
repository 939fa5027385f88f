// Text of limited size in memory that several processes share, for messages: a reader may get garbled text while it
// changes, but always valid UTF-8.
#pragma once

#include <algorithm>
#include <atomic>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <iterator>
#include <string>

namespace horo {

template <size_t N>
class SharedText {
 public:
  // Truncates between two characters if it does not fit. The last word always contains a 0, so that a reader always
  // finds an end.
  void set(const std::string& text) {
    size_t n = std::min(text.size(), N - 1);
    while (n > 0 && n < text.size() && (static_cast<uint8_t>(text[n]) & 0xC0) == 0x80) --n;
    for (size_t begin = 0; begin <= n; begin += sizeof(uint64_t)) {
      uint64_t word = 0;
      std::memcpy(&word, text.data() + begin, std::min(sizeof(word), n - begin));
      words_[begin / sizeof(word)].store(word, std::memory_order_relaxed);
    }
  }

  std::string get() const {
    char raw[N];
    for (size_t i = 0; i < std::size(words_); ++i) {
      const uint64_t word = words_[i].load(std::memory_order_relaxed);
      std::memcpy(raw + i * sizeof(word), &word, sizeof(word));
      if (std::memchr(raw + i * sizeof(word), 0, sizeof(word)) != nullptr) break;
    }
    return valid({raw, strnlen(raw, N)});
  }

  bool empty() const { return (words_[0].load(std::memory_order_relaxed) & 0xFF) == 0; }

 private:
  static_assert(N % sizeof(uint64_t) == 0 && std::endian::native == std::endian::little);

  static std::string valid(const std::string& raw) {
    std::string text;
    for (size_t i = 0; i < raw.size();) {
      const uint8_t lead = static_cast<uint8_t>(raw[i]);
      const size_t n = lead < 0x80 ? 1 : lead < 0xE0 ? 2 : lead < 0xF0 ? 3 : 4;
      uint32_t code = n == 1 ? lead : lead & (0x7Fu >> n);
      bool valid = (lead < 0x80 || lead >= 0xC0) && i + n <= raw.size();
      for (size_t k = 1; valid && k < n; ++k) {
        const uint8_t next = static_cast<uint8_t>(raw[i + k]);
        valid = (next & 0xC0) == 0x80;
        code = code << 6 | (next & 0x3F);
      }
      constexpr uint32_t kSmallest[] = {0, 0, 0x80, 0x800, 0x10000};
      valid = valid && code >= kSmallest[n] && code < 0x110000 && (code < 0xD800 || code > 0xDFFF);
      text += valid ? raw.substr(i, n) : "?";
      i += valid ? n : 1;
    }
    return text;
  }

  std::atomic<uint64_t> words_[N / sizeof(uint64_t)];
};

}  // namespace horo
