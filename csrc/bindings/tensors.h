// A list of Python arrays as the core sees it. Part of the bindings.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "pack/tensor_list.h"

namespace horo {

class Tensors : public TensorList {
 public:
  // Each array comes through the buffer protocol or DLPack and is kept alive until this is dropped. Errors name the
  // index. Arrays in a GPU's memory (all, then, and of one GPU) are taken only where a `stream` is given: it is what
  // their owners are asked to order their work with, as DLPack has it; -1 asks for no order.
  Tensors(nanobind::sequence arrays, bool writable, std::optional<intptr_t> stream = {});
  // What tensors [first, last) of `like` would be in the CPU's memory, once they have some: see move_to().
  Tensors(const Tensors& like, size_t first, size_t last);
  // Of each array of `whole`, which stays alive with `owner`, the rows [begin, end) given for it.
  Tensors(const Tensors& whole, nanobind::object owner, const std::vector<std::pair<int64_t, int64_t>>& rows);
  ~Tensors();
  Tensors(const Tensors&) = delete;
  Tensors& operator=(const Tensors&) = delete;

 private:
  bool add_buffer(size_t index, nanobind::handle array, bool writable, const DType* as);
  bool add_exchanged(size_t index, nanobind::handle array, bool may_be_on_device);
  void add_dlpack(size_t index, nanobind::handle array, bool writable, std::optional<intptr_t> stream);
  void add_tensor(size_t index, const nanobind::dlpack::dltensor& tensor, bool may_be_on_device);
  void set_device(size_t index, int device);

  std::vector<Py_buffer> views_;
  std::vector<nanobind::object> objects_;
  std::vector<nanobind::ndarray<>> dlpacks_;
  PyTypeObject* bufferless_type_ = nullptr;  // its arrays have the buffer protocol, but no buffers
  PyTypeObject* exchange_type_ = nullptr;    // whose table `exchange_` is
  int (*exchange_)(void* array, nanobind::dlpack::dltensor* tensor) = nullptr;
};

// Of a list of Tensors, each's.
std::vector<std::vector<TensorRef>> refs_of(nanobind::list parts);
// Those of a reduce-scatter, one for each of `size` ranks, of which that of `rank` is to be left in `result`.
std::vector<std::vector<TensorRef>> parts_with_result(nanobind::list parts, int size, int rank, const Tensors& result);

}  // namespace horo
