#include "pack/tensor_list.h"

#include <algorithm>
#include <cstdlib>
#include <map>
#include <mutex>
#include <stdexcept>

namespace horo {
namespace {

// Whether the memory is dense and in C order.
bool in_order(Axes dims, Axes strides, size_t item) {
  auto expected = static_cast<int64_t>(item);
  for (size_t axis = dims.size(); axis-- > 0;) {
    if (dims[axis] != 1 && strides[axis] != expected) return false;
    expected *= dims[axis];
  }
  return true;
}

// Whether the memory is dense in some order of the axes, each stride being the product of the inner extents. `order`
// becomes a number other than 0 that tells two such orders apart.
bool find_order(Axes dims, Axes strides, size_t item, uint64_t* order) {
  std::vector<size_t> axes;
  for (size_t axis = dims.size(); axis-- > 0;) {
    if (dims[axis] != 1) axes.push_back(axis);
  }
  std::stable_sort(axes.begin(), axes.end(), [&](size_t a, size_t b) { return strides[a] < strides[b]; });
  auto expected = static_cast<int64_t>(item);
  *order = 1;
  for (size_t axis : axes) {
    if (strides[axis] != expected) return false;
    expected *= dims[axis];
    *order = *order * 31 + axis + 1;
  }
  return true;
}

size_t aligned_bytes(const TensorRef& ref) {
  return (ref.n_elements * item_bytes(ref.dtype) + kWireAlignment - 1) / kWireAlignment * kWireAlignment;
}

}  // namespace

uint64_t mixed(uint64_t hash, uint64_t value) {
  uint64_t z = hash ^ (value + kHashSeed + (hash << 6) + (hash >> 2));
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  return z ^ (z >> 31);
}

uint64_t digest_of(uint64_t hash) { return hash >> 1; }

const ElementType* element_type(const std::string& name, DType part, size_t n_parts, bool is_sum_of_parts) {
  static std::mutex mutex;
  static std::map<std::pair<std::string, size_t>, ElementType> types;
  const std::lock_guard<std::mutex> lock(mutex);
  return &types.try_emplace({name, n_parts}, ElementType{name, part, n_parts, is_sum_of_parts}).first->second;
}

size_t TensorList::item_size(size_t index) const {
  const ElementType* type = shapes_.at(index).type;
  return item_bytes(refs_[index].dtype) * (type == nullptr ? 1 : type->n_parts);
}

TensorList::TensorList(const TensorList& like, size_t first, size_t last)
    : refs_(like.refs_.begin() + static_cast<ptrdiff_t>(first), like.refs_.begin() + static_cast<ptrdiff_t>(last)),
      shapes_(like.shapes_.begin() + static_cast<ptrdiff_t>(first),
              like.shapes_.begin() + static_cast<ptrdiff_t>(last)),
      axes_(like.axes_),
      device_(kCpu) {}

void TensorList::move_to(uint8_t* memory) {
  for (TensorRef& ref : refs_) {
    ref.address = memory;
    memory += aligned_bytes(ref);
  }
}

void TensorList::keep_rows(const std::vector<std::pair<int64_t, int64_t>>& rows) {
  if (rows.size() != refs_.size()) throw std::invalid_argument("rows must be given for each of the arrays");
  for (size_t i = 0; i < refs_.size(); ++i) {
    if (shapes_[i].n_axes == 0 || shapes_[i].order != 0) {
      throw std::invalid_argument("rows need arrays in C order with at least one dimension");
    }
    const auto [begin, end] = rows[i];
    int64_t& n_rows = axes_[shapes_[i].first_axis];
    if (begin < 0 || end < begin || end > n_rows) throw std::out_of_range("the array has no such rows");
    TensorRef& ref = refs_[i];
    const size_t row = n_rows == 0 ? 0 : ref.n_elements / static_cast<size_t>(n_rows);
    const size_t offset = static_cast<size_t>(begin) * row * item_bytes(ref.dtype);
    ref.address = static_cast<uint8_t*>(ref.address) + offset;
    if (ref.source != nullptr) ref.source = static_cast<const uint8_t*>(ref.source) + offset;
    if (ref.residual != nullptr) ref.residual += static_cast<size_t>(begin) * row;
    ref.n_elements = static_cast<size_t>(end - begin) * row;
    n_rows = end - begin;
  }
}

void TensorList::flatten() {
  for (Shape& shape : shapes_) {
    if (shape.order != 0 || !shape.dense) throw std::invalid_argument("elements need arrays in C order");
    int64_t n_elements = 1;
    for (size_t axis = 0; axis < shape.n_axes; ++axis) n_elements *= axes_[shape.first_axis + axis];
    shape.first_axis = axes_.size();
    shape.n_axes = 1;
    axes_.push_back(n_elements);
  }
}

void TensorList::add(void* address, DType dtype, Axes dims, Axes strides, const ElementType* type) {
  const size_t n_parts = type == nullptr ? 1 : type->n_parts;
  const size_t item = item_bytes(dtype) * n_parts;
  size_t n_elements = 1;
  for (int64_t dim : dims) n_elements *= static_cast<size_t>(dim);
  // Most arrays are in C order, and steps with a thousand small ones should not pay for the others.
  bool dense = reinterpret_cast<uintptr_t>(address) % std::min<size_t>(item_bytes(dtype), 8) == 0;
  uint64_t order = 0;
  if (n_elements == 0) {
    dense = true;
  } else if (!in_order(dims, strides, item)) {
    dense = dense && find_order(dims, strides, item, &order);
  }
  refs_.push_back({address, n_elements * n_parts, dtype});
  shapes_.push_back({axes_.size(), dims.size(), order, dense, type});
  axes_.insert(axes_.end(), dims.begin(), dims.end());
  if (!dense) axes_.insert(axes_.end(), strides.begin(), strides.end());
}

std::vector<Buffer> TensorList::buffers() const {
  std::vector<Buffer> buffers;
  buffers.reserve(refs_.size());
  for (const TensorRef& ref : refs_) {
    buffers.push_back({static_cast<uint8_t*>(ref.address), ref.n_elements * item_bytes(ref.dtype)});
  }
  return buffers;
}

size_t TensorList::n_bytes_aligned() const {
  size_t total = 0;
  for (const TensorRef& ref : refs_) total += aligned_bytes(ref);
  return total;
}

size_t TensorList::n_bytes() const {
  size_t total = 0;
  for (const TensorRef& ref : refs_) total += ref.n_elements * item_bytes(ref.dtype);
  return total;
}

uint64_t TensorList::signature() const {
  uint64_t hash = refs_.size();
  for (size_t i = 0; i < refs_.size(); ++i) {
    hash = mixed(hash, static_cast<uint64_t>(refs_[i].dtype) << 32 | shapes_[i].n_axes);
    for (int64_t dim : shape(i)) hash = mixed(hash, static_cast<uint64_t>(dim));
    if (shapes_[i].type == nullptr) continue;
    for (char letter : shapes_[i].type->name) hash = mixed(hash, static_cast<uint64_t>(letter));
  }
  return digest_of(hash);
}

uint64_t TensorList::dtypes() const {
  uint64_t found = 0;
  for (size_t i = 0; i < refs_.size(); ++i) {
    found |= uint64_t{1} << (shapes_[i].type == nullptr ? static_cast<int>(refs_[i].dtype) : 63);
  }
  return found;
}

void TensorList::read_from(const TensorList& sources) {
  const bool is_here = device() == kCpu && sources.device() == kCpu;
  if (!is_here || sources.refs_.size() != refs_.size() || layout() != 0 || sources.layout() != 0) {
    throw std::invalid_argument("sources must be in host memory, in C order, one for each tensor");
  }
  for (size_t i = 0; i < refs_.size(); ++i) {
    const TensorRef& from = sources.refs_[i];
    if (from.n_elements != refs_[i].n_elements || from.dtype != refs_[i].dtype) {
      throw std::invalid_argument("source " + std::to_string(i) + " has another size or dtype");
    }
    refs_[i].source = from.address;
  }
}

void TensorList::keep_residuals(const TensorList& residuals) {
  if (residuals.device() != kCpu || residuals.refs_.size() != refs_.size() || residuals.layout() != 0) {
    throw std::invalid_argument("residuals must be in host memory, in C order, one for each tensor");
  }
  for (size_t i = 0; i < refs_.size(); ++i) {
    const TensorRef& to = residuals.refs_[i];
    if ((to.n_elements != 0 && to.n_elements != refs_[i].n_elements) || to.dtype != DType::kFloat32) {
      throw std::invalid_argument("residual " + std::to_string(i) + " has another size, or is not float32");
    }
    refs_[i].residual = to.n_elements == 0 ? nullptr : static_cast<float*>(to.address);
  }
}

uint64_t TensorList::layout() const {
  if (std::all_of(shapes_.begin(), shapes_.end(), [](const Shape& shape) { return shape.order == 0; })) return 0;
  uint64_t hash = 0;
  for (const Shape& shape : shapes_) hash = mixed(hash, shape.order);
  return digest_of(hash);
}

std::vector<size_t> TensorList::reordered() const {
  std::vector<size_t> indices;
  for (size_t i = 0; i < shapes_.size(); ++i) {
    if (shapes_[i].order != 0) indices.push_back(i);
  }
  return indices;
}

std::vector<size_t> TensorList::strided() const {
  std::vector<size_t> indices;
  for (size_t i = 0; i < shapes_.size(); ++i) {
    if (!shapes_[i].dense) indices.push_back(i);
  }
  return indices;
}

std::vector<uintptr_t> TensorList::addresses() const {
  std::vector<uintptr_t> addresses;
  for (const TensorRef& ref : refs_) addresses.push_back(reinterpret_cast<uintptr_t>(ref.address));
  return addresses;
}

// --- shared memory of tensors ---

namespace {

// Calls visit(offset) for each element, in C order, with its distance in bytes from the first.
template <class Visit>
void each_element(Axes dims, Axes strides, size_t axis, int64_t offset, const Visit& visit) {
  if (axis == dims.size()) return visit(offset);
  for (int64_t i = 0; i < dims[axis]; ++i) each_element(dims, strides, axis + 1, offset + i * strides[axis], visit);
}

}  // namespace

void TensorList::add_extents(std::vector<Extent>& extents, bool is_other) const {
  for (size_t i = 0; i < refs_.size(); ++i) {
    if (refs_[i].n_elements == 0) continue;  // the address of an empty tensor means nothing
    const auto begin = reinterpret_cast<intptr_t>(refs_[i].address);
    Extent extent{begin, begin, this, static_cast<uint32_t>(i), is_other};
    extent.end +=
        shapes_[i].dense ? static_cast<int64_t>(refs_[i].n_elements * item_bytes(refs_[i].dtype)) : extent.item();
    const Axes dims = shape(i), steps = strides(i);
    for (size_t axis = 0; axis < steps.size(); ++axis) {
      const int64_t reach = (dims[axis] - 1) * steps[axis];
      (reach < 0 ? extent.begin : extent.end) += reach;
    }
    extents.push_back(extent);
  }
}

// For two tensors whose extents overlap. Views with gaps may be interleaved, as x[::2] and x[1::2] are.
bool TensorList::have_common_elements(const Extent& a, const Extent& b) {
  if (a.strides().empty() && b.strides().empty()) return true;
  const intptr_t begin = std::max(a.begin, b.begin), end = std::min(a.end, b.end);
  std::vector<bool> taken(static_cast<size_t>(end - begin));
  bool found = false;
  const auto each_byte = [&](const Extent& extent, const auto& visit) {
    const int64_t item = extent.item();
    const auto start = reinterpret_cast<intptr_t>(extent.ref().address);
    const auto element = [&](int64_t offset) {
      for (intptr_t at = std::max(start + offset, begin); at < std::min(start + offset + item, end); ++at) {
        visit(static_cast<size_t>(at - begin));
      }
    };
    if (!extent.strides().empty()) return each_element(extent.dims(), extent.strides(), 0, 0, element);
    for (intptr_t at = begin; at < end; ++at) visit(static_cast<size_t>(at - begin));
  };
  each_byte(a, [&](size_t at) { taken[at] = true; });
  each_byte(b, [&](size_t at) { found = found || taken[at]; });
  return found;
}

// Whether the elements of both are at the same distances. An axis of extent 1 has no steps, whatever its stride is.
bool TensorList::same_steps(const Extent& a, const Extent& b) {
  const Axes dims = a.dims(), a_strides = a.strides(), b_strides = b.strides();
  if (!std::ranges::equal(dims, b.dims()) || a.order() != b.order() || a_strides.size() != b_strides.size()) {
    return false;
  }
  for (size_t axis = 0; axis < a_strides.size(); ++axis) {
    if (dims[axis] > 1 && a_strides[axis] != b_strides[axis]) return false;
  }
  return true;
}

bool TensorList::overlaps_itself(const Extent& extent) {
  const Axes dims = extent.dims(), strides = extent.strides();
  if (strides.empty()) return false;
  std::vector<std::pair<int64_t, int64_t>> axes;  // stride and extent
  for (size_t axis = 0; axis < dims.size(); ++axis) {
    if (dims[axis] > 1) axes.emplace_back(std::abs(strides[axis]), dims[axis]);
  }
  std::sort(axes.begin(), axes.end());
  int64_t inside = extent.item();  // bytes that the inner axes span
  bool apart = true;
  for (const auto& [stride, n] : axes) {
    apart = apart && stride >= inside;
    inside += (n - 1) * stride;
  }
  if (apart) return false;
  std::vector<int64_t> offsets;
  offsets.reserve(extent.ref().n_elements);
  each_element(dims, strides, 0, 0, [&](int64_t offset) { offsets.push_back(offset); });
  std::sort(offsets.begin(), offsets.end());
  const int64_t item = extent.item();
  return std::adjacent_find(offsets.begin(), offsets.end(), [&](int64_t a, int64_t b) { return b - a < item; }) !=
         offsets.end();
}

std::vector<Overlap> TensorList::overlaps(const TensorList* other) const {
  std::vector<Extent> extents;
  extents.reserve(refs_.size() + (other == nullptr ? 0 : other->refs_.size()));
  add_extents(extents, false);
  if (other != nullptr) other->add_extents(extents, true);
  std::vector<Overlap> found;
  if (other == nullptr) {
    for (const Extent& extent : extents) {
      if (overlaps_itself(extent)) found.push_back({extent.index, extent.index, 0, true});
    }
  } else if (device() != other->device()) {
    return found;
  }
  const auto by_begin = [](const Extent& a, const Extent& b) { return a.begin < b.begin; };
  if (!std::is_sorted(extents.begin(), extents.end(), by_begin)) std::sort(extents.begin(), extents.end(), by_begin);
  std::vector<const Extent*> open;  // those that reach beyond the start of the next
  for (const Extent& next : extents) {
    std::erase_if(open, [&](const Extent* e) { return e->end <= next.begin; });
    for (const Extent* earlier : open) {
      if (other != nullptr && earlier->is_other == next.is_other) continue;
      const bool in_order = other != nullptr ? next.is_other : earlier->index < next.index;
      const Extent& first = in_order ? *earlier : next;
      const Extent& second = in_order ? next : *earlier;
      const bool same = first.ref().address == second.ref().address && first.ref().dtype == second.ref().dtype &&
                        first.type() == second.type() && same_steps(first, second);
      if (!same && !have_common_elements(first, second)) continue;
      const ptrdiff_t distance =
          static_cast<uint8_t*>(second.ref().address) - static_cast<uint8_t*>(first.ref().address);
      found.push_back({first.index, second.index, distance, same});
    }
    open.push_back(&next);
  }
  std::sort(found.begin(), found.end(), [](const Overlap& a, const Overlap& b) {
    return std::pair(a.first, a.second) < std::pair(b.first, b.second);
  });
  return found;
}

std::string TensorList::dtype(size_t index) const {
  const ElementType* other = type(index);
  return other != nullptr ? other->name : dtype_name(refs_[index].dtype);
}

std::string TensorList::describe(size_t index) const {
  std::string text = dtype(index) + "[";
  const Axes dims = shape(index);
  for (size_t d = 0; d < dims.size(); ++d) text += (d != 0 ? ", " : "") + std::to_string(dims[d]);
  return text + "]";
}

}  // namespace horo
