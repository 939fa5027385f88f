// A list of Python arrays, for the core. Part of the bindings.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "bindings/python.h"
#include "pack/tensor_list.h"

namespace horo {

class Tensors : public TensorList {
 public:
  // Each array is read through the buffer protocol or DLPack and kept alive by this object. Errors name the index.
  // Arrays in a GPU's memory (then all of them, and of one GPU) are accepted only if a `stream` is given: their owners
  // are asked to order their work before that stream, as in DLPack; -1 asks for no order.
  Tensors(nanobind::sequence arrays, bool writable, std::optional<intptr_t> stream = {});
  // Tensors [first, last) of `like` in host memory, which they get later: see move_to().
  Tensors(const Tensors& like, size_t first, size_t last);
  // The rows [begin, end) of each array of `whole`, which `owner` keeps alive; if `flat`, the elements in C order.
  Tensors(const Tensors& whole, nanobind::object owner, const std::vector<std::pair<int64_t, int64_t>>& rows,
          bool flat);
  ~Tensors();
  Tensors(const Tensors&) = delete;
  Tensors& operator=(const Tensors&) = delete;

 private:
  bool add_buffer(size_t index, nanobind::handle array, bool writable, const DType* as,
                  const ElementType* type = nullptr);
  // Adds a view `as` another NumPy dtype, which stands for elements of `type`.
  bool add_bits(size_t index, nanobind::handle array, bool writable, const std::string& as, DType dtype,
                const ElementType* type);
  bool add_bytes(size_t index, nanobind::handle array, bool writable, const std::string& name, size_t n_bytes);
  bool add_exchanged(size_t index, nanobind::handle array, bool may_be_on_device);
  void add_dlpack(size_t index, nanobind::handle array, bool writable, std::optional<intptr_t> stream);
  void add_tensor(size_t index, const nanobind::dlpack::dltensor& tensor, bool may_be_on_device);
  void set_device(size_t index, int device);

  std::vector<Py_buffer> views_;
  std::vector<nanobind::object> objects_;
  std::vector<nanobind::ndarray<>> dlpacks_;
  PyTypeObject* bufferless_type_ = nullptr;  // a type with the buffer protocol, of arrays on a GPU
  PyTypeObject* plain_type_ = nullptr;       // another one, in host memory and without masks
  PyTypeObject* exchange_type_ = nullptr;    // the type whose table is `exchange_`
  int (*exchange_)(void* array, nanobind::dlpack::dltensor* tensor) = nullptr;
};

// As a Python object, in signatures.
using PyTensors = nanobind::typed<nanobind::object, Tensors>;

// The references of each of a list of Tensors.
std::vector<std::vector<TensorRef>> refs_of(ListOf<PyTensors> parts);
// The parts of a reduce-scatter, one for each of `size` ranks; the reduction of `rank`'s is left in `result`.
std::vector<std::vector<TensorRef>> parts_with_result(ListOf<PyTensors> parts, int size, int rank,
                                                      const Tensors& result);

}  // namespace horo
