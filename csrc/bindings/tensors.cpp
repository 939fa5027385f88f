#include "bindings/tensors.h"

#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>

#include <algorithm>
#include <cstdlib>

namespace nb = nanobind;
using namespace nb::literals;

namespace horo {
namespace {

std::string at(size_t index) { return "array " + std::to_string(index) + ": "; }

std::string type_of(nb::handle object) { return nb::cast<std::string>(nb::str(object.type().attr("__name__"))); }

constexpr int kManaged = 13;  // memory that migrates between host and GPU
bool is_gpu(int device_type) { return device_type == nb::device::cuda::value || device_type == kManaged; }

bool lies_on_gpu(nb::handle array) {
  nb::object place = nb::getattr(array, "__dlpack_device__", nb::none());
  return !place.is_none() && is_gpu(nb::cast<std::pair<int, int>>(place()).first);
}

constexpr DType kSigned[] = {DType::kInt8, DType::kInt16, DType::kInt32, DType::kInt64};
constexpr DType kUnsigned[] = {DType::kUInt8, DType::kUInt16, DType::kUInt32, DType::kUInt64};

bool dtype_of_format(const char* format, size_t n_bytes, DType* dtype) {
  if (format == nullptr) format = "B";
  if (*format == '@' || *format == '=' || *format == '<') ++format;
  if (format[0] == 0 || format[1] != 0) return false;
  const int size = n_bytes == 1 ? 0 : n_bytes == 2 ? 1 : n_bytes == 4 ? 2 : 3;
  switch (*format) {
    case '?':
      *dtype = DType::kBool;
      return true;
    case 'b':
    case 'h':
    case 'i':
    case 'l':
    case 'q':
      *dtype = kSigned[size];
      return true;
    case 'B':
    case 'H':
    case 'I':
    case 'L':
    case 'Q':
      *dtype = kUnsigned[size];
      return true;
    case 'e':
      *dtype = DType::kFloat16;
      return true;
    case 'f':
      *dtype = DType::kFloat32;
      return true;
    case 'd':
      *dtype = DType::kFloat64;
      return true;
    case 'g':
      *dtype = DType::kLongDouble;
      return true;
    default:
      return false;
  }
}

const ElementType* complex_of(DType part) {
  return element_type("complex" + std::to_string(16 * item_bytes(part)), part, 2, true);
}

const ElementType* bytes_of(const std::string& name, size_t n_bytes) {
  return element_type(name, DType::kUInt8, n_bytes, false);
}

// Whether torch has yet to negate the values in memory, which DLPack does not say.
bool is_negated(nb::handle array) {
  static PyObject* const is_neg = PyUnicode_InternFromString("is_neg");
  nb::object negated = nb::steal(PyObject_CallMethodObjArgs(array.ptr(), is_neg, nullptr));
  if (!negated.is_valid()) PyErr_Clear();
  return negated.ptr() == Py_True;
}

// The type of dtypes that the core has none for; nullptr if it cannot move them either.
const ElementType* type_of_dlpack(nb::dlpack::dtype type) {
  static const char* const floats[] = {"e3m4",     "e4m3", "e4m3b11fnuz", "e4m3fn",
                                       "e4m3fnuz", "e5m2", "e5m2fnuz",    "e8m0fnu"};
  constexpr int kFirstFloat8 = 7;  // of the codes that DLPack 1.1 added, in this order
  if (type.lanes != 1) return nullptr;
  if (static_cast<nb::dlpack::dtype_code>(type.code) == nb::dlpack::dtype_code::Complex) {
    if (type.bits == 32) return complex_of(DType::kFloat16);
    if (type.bits == 64) return complex_of(DType::kFloat32);
    return type.bits == 128 ? complex_of(DType::kFloat64) : nullptr;
  }
  const int number = type.code - kFirstFloat8;
  if (type.bits != 8 || number < 0 || number >= static_cast<int>(std::size(floats))) return nullptr;
  return bytes_of(std::string("float8_") + floats[number], 1);
}

bool dtype_of_dlpack(nb::dlpack::dtype type, DType* dtype) {
  if (type.lanes != 1) return false;
  using Code = nb::dlpack::dtype_code;
  const auto code = static_cast<Code>(type.code);
  const int size = type.bits == 8 ? 0 : type.bits == 16 ? 1 : type.bits == 32 ? 2 : type.bits == 64 ? 3 : -1;
  if (size < 0) return false;
  static const DType floats[] = {DType::kFloat16, DType::kFloat16, DType::kFloat32, DType::kFloat64};
  if (code == Code::Int) *dtype = kSigned[size];
  else if (code == Code::UInt) *dtype = kUnsigned[size];
  else if (code == Code::Float && size > 0) *dtype = floats[size];
  else if (code == Code::Bfloat && size == 1) *dtype = DType::kBFloat16;
  else if (code == Code::Bool && size == 0) *dtype = DType::kBool;
  else return false;
  return true;
}

}  // namespace

Tensors::Tensors(nb::sequence arrays, bool writable, std::optional<intptr_t> stream) {
  const size_t n = nb::len(arrays);
  refs_.reserve(n);
  shapes_.reserve(n);
  views_.reserve(n);  // a view must not move while it is held
  size_t index = 0;
  try {
    for (nb::handle array : arrays) {
      if (add_buffer(index, array, writable, nullptr)) {
        // NumPy, and other arrays in host memory.
      } else if (is_negated(array)) {
        throw nb::value_error((at(index) + "its negation is still pending: pass x.resolve_neg()").c_str());
      } else if (add_exchanged(index, array, stream.has_value())) {
        objects_.push_back(nb::borrow(array));
      } else if (nb::hasattr(array, "__dlpack__")) {
        add_dlpack(index, array, writable, stream);
      } else {
        throw nb::type_error((at(index) + "a " + type_of(array) +
                              " exports its memory neither through the buffer protocol nor through DLPack")
                                 .c_str());
      }
      ++index;
    }
  } catch (...) {
    for (Py_buffer& view : views_) PyBuffer_Release(&view);
    throw;
  }
}

Tensors::Tensors(const Tensors& like, size_t first, size_t last) : TensorList(like, first, last) {}

Tensors::Tensors(const Tensors& whole, nb::object owner, const std::vector<std::pair<int64_t, int64_t>>& rows,
                 bool flat)
    : TensorList(whole) {
  if (flat) flatten();
  keep_rows(rows);
  objects_.push_back(std::move(owner));
}

Tensors::~Tensors() {
  for (Py_buffer& view : views_) PyBuffer_Release(&view);
}

namespace {

// Returns the array's capsule, after asking its owner to make `stream` wait.
nb::object exported_to(nb::handle array, intptr_t stream) {
  try {
    return array.attr("__dlpack__")("stream"_a = stream);
  } catch (nb::python_error& error) {
    // Some of XLA's clients do not support this; without a stream they wait until the memory is ready.
    if (std::string(error.what()).find("UNIMPLEMENTED") == std::string::npos) throw;
    return array.attr("__dlpack__")();
  }
}

}  // namespace

// Tensors of one call go through one transport.
void Tensors::set_device(size_t index, int device) {
  if (device_.value_or(device) != device) {
    const auto place = [](int where) {
      return where == kCpu ? std::string("host memory") : "the memory of cuda:" + std::to_string(where);
    };
    throw nb::value_error((at(index) + "it is in " + place(device) + ", but array 0 is in " + place(*device_) +
                           ": all arrays of one call must be on the same device")
                              .c_str());
  }
  device_ = device;
}

bool Tensors::add_buffer(size_t index, nb::handle array, bool writable, const DType* as, const ElementType* type) {
  if (Py_TYPE(array.ptr()) == bufferless_type_ || !PyObject_CheckBuffer(array.ptr())) return false;
  if (Py_TYPE(array.ptr()) != plain_type_) {
    if (nb::hasattr(array.type(), "filled")) {  // of numpy.ma
      throw nb::type_error((at(index) + "it is a masked array, whose memory has numbers also where it is masked: pass "
                                        "x.filled(0), and, if the ranks' masks differ, the mask as another array")
                               .c_str());
    }
    // CuPy, from 14 on: its buffers are of memory that host and GPU share, and ordered by no stream.
    if (lies_on_gpu(array)) {
      bufferless_type_ = Py_TYPE(array.ptr());
      return false;
    }
    plain_type_ = Py_TYPE(array.ptr());
  }
  Py_buffer view;
  if (PyObject_GetBuffer(array.ptr(), &view, PyBUF_STRIDES | PyBUF_FORMAT) != 0) {
    PyErr_Clear();
    if (lies_on_gpu(array)) return false;  // beside others of its type in host memory, as in JAX
    // NumPy cannot export some types (dates, ml_dtypes'), but it can export their bytes.
    nb::object dtype = nb::getattr(array, "dtype", nb::none());
    const std::string name = nb::cast<std::string>(nb::str(nb::getattr(dtype, "name", dtype)));
    const bool has_bytes = as == nullptr && nb::hasattr(dtype, "itemsize") && nb::hasattr(array, "view");
    if (!has_bytes) throw nb::type_error((at(index) + "dtype " + name + " cannot be reduced or sent").c_str());
    if (name == "bfloat16") return add_bits(index, array, writable, "uint16", DType::kBFloat16, nullptr);
    const auto n_bytes = nb::cast<size_t>(dtype.attr("itemsize"));
    return add_bytes(index, array, writable, name, n_bytes);
  }
  DType dtype;
  const char* format = view.format;
  if (as != nullptr) {
    dtype = *as;
  } else if (format != nullptr && format[0] == 'Z' && dtype_of_format(format + 1, view.itemsize / 2, &dtype)) {
    type = complex_of(dtype);
  } else if (!dtype_of_format(format, static_cast<size_t>(view.itemsize), &dtype)) {
    const std::string what = format == nullptr ? "?" : format;
    const auto n_bytes = static_cast<size_t>(view.itemsize);
    PyBuffer_Release(&view);
    nb::object dtype_object = nb::getattr(array, "dtype", nb::none());
    const nb::object holds = nb::getattr(dtype_object, "hasobject", nb::bool_(what.find('O') != std::string::npos));
    if (nb::cast<bool>(holds)) {
      throw nb::type_error((at(index) + "an array of Python objects cannot be reduced or sent: convert it to numbers "
                                        "(x.astype(float)), or use allgather_object or broadcast_object")
                               .c_str());
    }
    const std::string name = dtype_object.is_none() ? what : nb::cast<std::string>(nb::str(dtype_object));
    if (n_bytes == 0 || !nb::hasattr(array, "view")) {
      throw nb::type_error((at(index) + "dtype " + name +
                            " cannot be reduced or sent: use integers, bool, or float16/bfloat16/float32/float64")
                               .c_str());
    }
    return add_bytes(index, array, writable, name, n_bytes);
  }
  if (writable && view.readonly) {
    PyBuffer_Release(&view);
    throw nb::value_error((at(index) +
                           "its memory is read-only, so it cannot be changed in place: pass a writable copy, or "
                           "use the out-of-place call")
                              .c_str());
  }
  views_.push_back(view);
  set_device(index, kCpu);
  const Py_buffer& held = views_.back();
  const auto n_axes = static_cast<size_t>(held.ndim);
  add(held.buf, dtype, {held.shape, n_axes}, {held.strides, n_axes}, type);
  return true;
}

bool Tensors::add_bytes(size_t index, nb::handle array, bool writable, const std::string& name, size_t n_bytes) {
  std::string as = "V";
  as += std::to_string(n_bytes);
  return add_bits(index, array, writable, as, DType::kUInt8, bytes_of(name, n_bytes));
}

bool Tensors::add_bits(size_t index, nb::handle array, bool writable, const std::string& as, DType dtype,
                       const ElementType* type) {
  nb::object bits = array.attr("view")(as);
  objects_.push_back(bits);
  return add_buffer(index, bits, writable, &dtype, type);
}

// DLPack's table of C functions, which newer frameworks (torch) attach to their array types: no Python call per array.
// It does not order streams, which the caller must do.
bool Tensors::add_exchanged(size_t index, nb::handle array, bool may_be_on_device) {
  struct Table {
    uint32_t major, minor;
    void* previous;
    void* allocate;
    void* to_managed;
    void* from_managed;
    int (*to_tensor)(void* array, nb::dlpack::dltensor* tensor);
    int (*current_stream)(int32_t device_type, int32_t device_id, void** stream);
  };
  PyTypeObject* type = Py_TYPE(array.ptr());
  if (type != exchange_type_) {
    exchange_type_ = type;
    exchange_ = nullptr;
    nb::object capsule = nb::getattr(nb::handle(reinterpret_cast<PyObject*>(type)), "__dlpack_c_exchange_api__", {});
    if (capsule.is_valid() && PyCapsule_IsValid(capsule.ptr(), "dlpack_exchange_api")) {
      const auto* table = static_cast<const Table*>(PyCapsule_GetPointer(capsule.ptr(), "dlpack_exchange_api"));
      if (table->major == 1) exchange_ = table->to_tensor;
    }
  }
  if (exchange_ == nullptr) return false;
  nb::dlpack::dltensor tensor{};
  if (exchange_(array.ptr(), &tensor) != 0) {
    PyErr_Clear();  // __dlpack__ raises a better error
    return false;
  }
  const bool is_complex = static_cast<nb::dlpack::dtype_code>(tensor.dtype.code) == nb::dlpack::dtype_code::Complex;
  if (is_complex && nb::cast<bool>(array.attr("is_conj")())) {
    throw nb::value_error((at(index) + "its conjugation is still pending: pass x.resolve_conj()").c_str());
  }
  add_tensor(index, tensor, may_be_on_device);
  return true;
}

void Tensors::add_dlpack(size_t index, nb::handle array, bool writable, std::optional<intptr_t> stream) {
  nb::object exported = nb::borrow(array);
  nb::ndarray<> view;
  try {
    const auto place = nb::cast<std::pair<int, int>>(array.attr("__dlpack_device__")());
    if (is_gpu(place.first)) {
      if (!stream) {
        throw nb::type_error(
            (at(index) + "it is in the memory of cuda:" + std::to_string(place.second) + ", not in host memory")
                .c_str());
      }
      exported = exported_to(array, *stream);
    }
    if (!nb::try_cast<nb::ndarray<>>(exported, view)) {
      nb::ndarray<nb::ro> read_only;
      if (!nb::try_cast<nb::ndarray<nb::ro>>(exported, read_only)) {
        throw nb::type_error(
            (at(index) + "the " + type_of(array) + " refused to export its memory through DLPack").c_str());
      }
      if (writable) {
        throw nb::value_error((at(index) + "its memory is read-only, so it cannot be changed in place").c_str());
      }
      objects_.push_back(nb::borrow(array));
      view = nb::ndarray<>(read_only);
    }
  } catch (nb::python_error& error) {
    throw nb::type_error((at(index) + in_one_line(error)).c_str());
  }
  nb::dlpack::dltensor tensor{};
  std::vector<int64_t> shape, strides;
  for (size_t d = 0; d < view.ndim(); ++d) {
    shape.push_back(static_cast<int64_t>(view.shape(d)));
    strides.push_back(view.stride(d));
  }
  tensor.data = view.data();
  tensor.device = {view.device_type(), view.device_id()};
  tensor.ndim = static_cast<int32_t>(view.ndim());
  tensor.dtype = view.dtype();
  tensor.shape = shape.data();
  tensor.strides = strides.data();
  dlpacks_.push_back(std::move(view));
  add_tensor(index, tensor, stream.has_value());
}

void Tensors::add_tensor(size_t index, const nb::dlpack::dltensor& tensor, bool may_be_on_device) {
  const int place = tensor.device.device_type;
  constexpr int kPinned = 3;  // host memory, for our purposes
  if (is_gpu(place) && may_be_on_device) {
    set_device(index, tensor.device.device_id);
  } else if (place == nb::device::cpu::value || place == kPinned) {
    set_device(index, kCpu);
  } else {
    const std::string where =
        is_gpu(place) ? "cuda:" + std::to_string(tensor.device.device_id) : "another kind of device";
    throw nb::type_error((at(index) + "it is in the memory of " + where +
                          ", not in host memory: copy it to the CPU, or use a GPU of this world from the start")
                             .c_str());
  }
  DType dtype;
  const ElementType* type = nullptr;
  if (!dtype_of_dlpack(tensor.dtype, &dtype)) {
    type = type_of_dlpack(tensor.dtype);
    if (type == nullptr) {
      throw nb::type_error(
          (at(index) + "its dtype cannot be reduced or sent: use integers, bool, or float16/bfloat16/float32/float64")
              .c_str());
    }
    dtype = type->part;
  }
  const auto item = static_cast<int64_t>(item_bytes(dtype) * (type == nullptr ? 1 : type->n_parts));
  const Axes dims(tensor.shape, static_cast<size_t>(tensor.ndim));
  std::vector<int64_t> strides(dims.size());
  int64_t dense = item;
  for (size_t d = dims.size(); d-- > 0; dense *= dims[d]) {
    strides[d] = tensor.strides == nullptr ? dense : tensor.strides[d] * item;
  }
  if (tensor.data == nullptr && std::find(dims.begin(), dims.end(), 0) == dims.end()) {
    throw nb::type_error((at(index) + "it has no memory of its own, because it wraps other tensors (DTensor): pass the "
                                      "tensor inside, x.to_local()")
                             .c_str());
  }
  add(static_cast<uint8_t*>(tensor.data) + tensor.byte_offset, dtype, dims, strides, type);
}

std::vector<std::vector<TensorRef>> refs_of(ListOf<PyTensors> parts) {
  std::vector<std::vector<TensorRef>> refs;
  for (nb::handle part : parts) refs.push_back(nb::cast<Tensors&>(part).refs());
  return refs;
}

std::vector<std::vector<TensorRef>> parts_with_result(ListOf<PyTensors> parts, int size, int rank,
                                                      const Tensors& result) {
  std::vector<std::vector<TensorRef>> refs = refs_of(parts);
  if (refs.size() != static_cast<size_t>(size)) {
    throw std::invalid_argument("reduce_scatter takes a part for each of " + std::to_string(size) + " ranks, not " +
                                std::to_string(refs.size()));
  }
  std::vector<TensorRef>& mine = refs[static_cast<size_t>(rank)];
  const auto alike = [](const TensorRef& a, const TensorRef& b) {
    return a.n_elements == b.n_elements && a.dtype == b.dtype;
  };
  if (!std::equal(mine.begin(), mine.end(), result.refs().begin(), result.refs().end(), alike)) {
    throw std::invalid_argument("the result differs from this rank's part in size or dtype");
  }
  for (size_t i = 0; i < mine.size(); ++i) {
    if (mine[i].source == nullptr) mine[i].source = mine[i].address;
    mine[i].address = result.refs()[i].address;
  }
  return refs;
}

}  // namespace horo
