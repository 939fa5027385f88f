// Whether two replicas hold the same bits, what is not finite in one of them, and how far apart they are. Memory of the
// host, in C order.
#pragma once

#include <cstddef>
#include <cstdint>

#include "pack/layout.h"

namespace horo {

// 64 bits in which every bit and its position count: a change is missed once in 2^64 times. The same on every machine
// of one byte order.
uint64_t fingerprint(const TensorRef& tensor);

struct NonFinite {
  size_t n_nan = 0;
  size_t n_inf = 0;
};

// Nothing but a read of the memory where all is finite. Integers are.
NonFinite count_non_finite(const TensorRef& tensor);

struct Difference {
  size_t n_elements = 0;   // whose bits differ
  double largest = 0.0;    // between elements that are finite in both
  double magnitude = 0.0;  // the largest finite one of `mine`
};

// Both have the same number of elements, of the same dtype.
Difference difference(const TensorRef& mine, const TensorRef& theirs);

}  // namespace horo
