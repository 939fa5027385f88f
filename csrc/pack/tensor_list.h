// Tensors by address, dtype, shape and strides: what ranks compare of them, and which of them share elements.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "group.h"
#include "pack/layout.h"

namespace horo {

inline constexpr uint64_t kHashSeed = 0x9e3779b97f4a7c15u;

// Mixes a value into a hash that is the same in every process (splitmix64's finaliser).
uint64_t mixed(uint64_t hash, uint64_t value);
// Digests pass through Python and MPI as signed 64-bit integers: 63 bits are portable.
uint64_t digest_of(uint64_t hash);

inline constexpr int kCpu = -1;

// A number for each axis of an array.
using Axes = std::span<const int64_t>;

// A type of elements for which DType has no name. The parts of complex numbers are reduced as any reals; bytes of other
// types can be moved, but not reduced.
struct ElementType {
  std::string name;
  DType part;
  size_t n_parts;
  bool is_sum_of_parts;  // whether the sum of two elements consists of the sums of their parts
};

// The only object for a type, which lives forever.
const ElementType* element_type(const std::string& name, DType part, size_t n_parts, bool is_sum_of_parts);

// The indices of two tensors that share elements; equal indices are one tensor whose own elements share memory.
struct Overlap {
  size_t first;
  size_t second;
  ptrdiff_t distance;  // in bytes, from where the first begins to where the second does
  bool same;           // the same elements in the same order: one tensor with two names
};

class TensorList {
 public:
  // The GPU whose memory they are in, or kCpu.
  int device() const { return device_.value_or(kCpu); }
  // Size of all, one after the other, each aligned to kWireAlignment.
  size_t n_bytes_aligned() const;
  void move_to(uint8_t* memory);
  const std::vector<TensorRef>& refs() const { return refs_; }
  // A reduction of these tensors reads `sources`, which match them, are in C order, and must outlive this list.
  void read_from(const TensorList& sources);
  // A reduction with quantized messages keeps there what they lack, by element in memory; they must outlive this list.
  // Nothing is kept for a tensor whose residual is empty.
  void keep_residuals(const TensorList& residuals);
  std::vector<Buffer> buffers() const;
  size_t n_bytes() const;
  uint64_t signature() const;
  // A bit for each dtype among them, and the highest for any other type.
  uint64_t dtypes() const;
  uint64_t layout() const;
  // The indices of those that are in another order than C's.
  std::vector<size_t> reordered() const;
  std::vector<size_t> strided() const;
  std::vector<uintptr_t> addresses() const;
  // All pairs that share elements, in order. With `other`, a pair's first is of this list and its second of `other`.
  std::vector<Overlap> overlaps(const TensorList* other = nullptr) const;
  // The name of a dtype, which may contain brackets (datetime64[ns]), and with it the shape.
  std::string dtype(size_t index) const;
  std::string describe(size_t index) const;
  // nullptr if the elements are of a DType.
  const ElementType* type(size_t index) const { return shapes_.at(index).type; }
  size_t item_size(size_t index) const;
  Axes shape(size_t index) const {
    const Shape& shape = shapes_.at(index);
    return {axes_.data() + shape.first_axis, shape.n_axes};
  }

 protected:
  struct Shape {
    size_t first_axis;  // in `axes_`
    size_t n_axes;
    uint64_t order;  // 0: C-contiguous
    bool dense;
    const ElementType* type;
  };

  TensorList() = default;
  TensorList(const TensorList&) = default;
  // Tensors [first, last) of `like` in host memory, which they get later: see move_to().
  TensorList(const TensorList& like, size_t first, size_t last);
  // Keeps of each tensor only the rows [begin, end) given for it.
  void keep_rows(const std::vector<std::pair<int64_t, int64_t>>& rows);
  // Makes a row of each element.
  void flatten();
  void add(void* address, DType dtype, Axes dims, Axes strides_bytes, const ElementType* type = nullptr);

  std::vector<TensorRef> refs_;
  std::vector<Shape> shapes_;
  std::vector<int64_t> axes_;  // every tensor's extents, and strides if it is not dense: one allocation for all
  std::optional<int> device_;

 private:
  // Where a tensor is: its elements are in [begin, end), and fill it if the tensor is dense.
  struct Extent {
    intptr_t begin, end;
    const TensorList* tensors;
    uint32_t index;
    bool is_other;
    const TensorRef& ref() const { return tensors->refs_[index]; }
    int64_t item() const { return static_cast<int64_t>(tensors->item_size(index)); }
    const ElementType* type() const { return tensors->type(index); }
    Axes dims() const { return tensors->shape(index); }
    Axes strides() const { return tensors->strides(index); }
    uint64_t order() const { return tensors->shapes_[index].order; }
  };
  void add_extents(std::vector<Extent>& extents, bool is_other) const;
  static bool have_common_elements(const Extent& a, const Extent& b);
  static bool overlaps_itself(const Extent& extent);
  static bool same_steps(const Extent& a, const Extent& b);
  // In bytes; empty if it is dense.
  Axes strides(size_t index) const {
    const Shape& shape = shapes_.at(index);
    return {axes_.data() + shape.first_axis + shape.n_axes, shape.dense ? 0 : shape.n_axes};
  }
};

// The buffer of a list of one array.
inline const Buffer& only(const std::vector<Buffer>& buffers) {
  if (buffers.size() != 1) throw std::invalid_argument("pass exactly one array");
  return buffers[0];
}

}  // namespace horo
