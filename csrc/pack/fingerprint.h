// Whether two replicas hold the same bits, how many values of one are not finite, and how far apart the two are. All
// tensors are in host memory, in C order.
#pragma once

#include <cstddef>
#include <cstdint>

#include "pack/layout.h"

namespace horo {

// A 64-bit hash to which every bit and its position count: a change is missed once in 2^64 times. It is the same on all
// machines of the same byte order.
uint64_t fingerprint(const TensorRef& tensor);

struct NonFinite {
  size_t n_nan = 0;
  size_t n_inf = 0;
};

// Only reads the memory once if all values are finite. Integers always are.
NonFinite count_non_finite(const TensorRef& tensor);

struct Difference {
  size_t n_elements = 0;   // whose bits differ
  double largest = 0.0;    // between elements that are finite in both
  double magnitude = 0.0;  // the largest finite one of `mine`
};

// Both have the same number of elements, of the same dtype.
Difference difference(const TensorRef& mine, const TensorRef& theirs);

}  // namespace horo
