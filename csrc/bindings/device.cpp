// GPUs, streams and memory for Python.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include <atomic>
#include <cstdlib>

#include "bindings/python.h"
#include "bindings/tensors.h"
#include "gpu/cuda_driver.h"
#include "gpu/device_queue.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace horo {
namespace {

using Unlocked = nb::call_guard<WithoutGil>;

// The fake GPUs that a test uses in place of this machine's (HORO_LITE_TEST_GPUS), or null.
const FakeGpus* fake_gpus() {
  static std::atomic<const FakeGpus*> known{nullptr};
  if (const FakeGpus* gpus = known) return gpus;
  const char* names = std::getenv("HORO_LITE_TEST_GPUS");
  if (names == nullptr || *names == 0) return nullptr;
  const WithGil gil;
  try {
    const nb::object gpus = nb::module_::import_("horo_lite._testing").attr("fake_gpus")();
    known = static_cast<const FakeGpus*>(nb::cast<nb::capsule>(gpus).data());
  } catch (const nb::python_error& error) {
    throw DeviceError(std::string("HORO_LITE_TEST_GPUS is set, but this build has no fake GPUs: they are part of "
                                  "development builds only (pip install --editable). ") +
                      error.what());
  }
  return known;
}

Device& device() {
  if (const FakeGpus* fake = fake_gpus()) return *fake->device;
  std::string why;
  if (Device* cuda = cuda_device(&why)) return *cuda;
  throw DeviceError(why);
}

std::tuple<int, std::vector<std::string>, std::string> gpus() {
  if (const FakeGpus* fake = fake_gpus()) return {99000, fake->names, ""};
  const CudaDriver driver = cuda_driver();
  return {driver.version, driver.bus_ids, driver.problem};
}

// Pinned host memory that stands in for a list of GPU tensors.
class Staging {
 public:
  explicit Staging(std::shared_ptr<DeviceQueue> queue) : queue_(std::move(queue)) {}
  ~Staging() {
    try {
      drop();
    } catch (const DeviceError&) {  // the process is losing its GPU
    }
  }
  Staging(const Staging&) = delete;
  Staging& operator=(const Staging&) = delete;

  // Copies tensors [first, last) of `from` into host memory, which the next call reuses.
  std::unique_ptr<Tensors> download(const Tensors& from, size_t first, size_t last) {
    auto host = std::make_unique<Tensors>(from, first, last);
    const WithoutGil release;
    if (host->n_bytes_aligned() > n_bytes_) {
      drop();
      memory_ = queue_->device().allocate_pinned(queue_->index(), host->n_bytes_aligned());
      n_bytes_ = host->n_bytes_aligned();
    }
    host->move_to(static_cast<uint8_t*>(memory_));
    for (size_t i = first; i < last; ++i) copy(host->refs()[i - first], from.refs()[i]);
    queue_->synchronize();
    return host;
  }

  void upload(const Tensors& host, const Tensors& to, size_t first) {
    const WithoutGil release;
    for (size_t i = 0; i < host.refs().size(); ++i) copy(to.refs()[first + i], host.refs()[i]);
    queue_->synchronize();  // the memory is reused
  }

 private:
  void drop() {
    if (memory_ != nullptr) queue_->device().release_pinned(queue_->index(), memory_);
    memory_ = nullptr;
    n_bytes_ = 0;
  }

  void copy(const TensorRef& to, const TensorRef& from) {
    const size_t n_bytes = from.n_elements * item_bytes(from.dtype);
    queue_->device().copy(queue_->index(), to.address, from.address, n_bytes, queue_->stream());
  }

  std::shared_ptr<DeviceQueue> queue_;
  void* memory_ = nullptr;
  size_t n_bytes_ = 0;
};

nb::dlpack::dtype dlpack_dtype(const std::string& name) {
  using Code = nb::dlpack::dtype_code;
  const auto type = [](Code code, int bits) {
    return nb::dlpack::dtype{static_cast<uint8_t>(code), static_cast<uint8_t>(bits), 1};
  };
  if (name == "bool") return type(Code::Bool, 8);
  if (name == "bfloat16") return type(Code::Bfloat, 16);
  const size_t digits = name.find_first_of("0123456789");
  const int bits = digits == std::string::npos ? 0 : std::stoi(name.substr(digits));
  const std::string kind = name.substr(0, digits);
  if (kind == "float") return type(Code::Float, bits);
  if (kind == "int") return type(Code::Int, bits);
  if (kind == "uint") return type(Code::UInt, bits);
  throw std::invalid_argument("unknown dtype '" + name + "'");
}

}  // namespace

void bind_device(nb::module_& m) {
  m.def(
      "gpus", &gpus, Unlocked(),
      "The driver's version (13000 is CUDA 13.0, 0: none), where the GPUs are on the PCI bus, and why there are none.");
  m.def("cuda_runtime_version", &cuda_runtime_version,
        "The version of the CUDA runtime in this build; 0 if there is none.");
  m.def(
      "dlpack_capsule",
      [](uintptr_t address, const std::vector<size_t>& shape, const std::string& dtype, int index, nb::object owner,
         std::optional<std::vector<int64_t>> strides) {
        const nb::ndarray<> array(reinterpret_cast<void*>(address), shape.size(), shape.data(), owner,
                                  strides ? strides->data() : nullptr, dlpack_dtype(dtype), nb::device::cuda::value,
                                  index);
        return nb::cast(array);
      },
      "address"_a, "shape"_a, "dtype"_a, "index"_a, "owner"_a, "strides"_a = nb::none(),
      "Export GPU memory; `owner` is kept alive as long as it is in use. Strides count elements.");

  // Without the GIL, since CUDA blocks if a stream has some 1,000 commands that wait, perhaps for a dead peer: the
  // watchdog, a Python thread, must be able to abort them.
  nb::class_<DeviceQueue>(m, "DeviceQueue", "A stream on one GPU, and its order with other streams.")
      .def(nb::new_([](int index) { return unlocked(new DeviceQueue(device(), index)); }), "index"_a)
      .def_prop_ro("index", &DeviceQueue::index)
      .def_prop_ro("stream", [](const DeviceQueue& queue) { return reinterpret_cast<uintptr_t>(queue.stream()); })
      .def(
          "follow", [](DeviceQueue& queue, uintptr_t producer) { queue.follow(reinterpret_cast<Stream>(producer)); },
          "producer"_a, Unlocked(),
          "Order work queued here from now on after the current work of the producer's stream.")
      .def(
          "lead", [](DeviceQueue& queue, uintptr_t consumer) { queue.lead(reinterpret_cast<Stream>(consumer)); },
          "consumer"_a, Unlocked(), "Order future work of the consumer's stream after the work queued here.")
      .def("is_idle", &DeviceQueue::is_idle, Unlocked(), "Whether all work queued here is done.")
      .def("synchronize", &DeviceQueue::synchronize, Unlocked())
      .def(
          "hold",
          [](DeviceQueue& queue, nb::object object, std::optional<uintptr_t> stream) {
            std::shared_ptr<void> held = shared(object);
            const WithoutGil release;
            queue.hold(std::move(held), stream ? reinterpret_cast<Stream>(*stream) : queue.stream());
          },
          "object"_a, "stream"_a = nb::none(),
          "Keep an object alive until the work queued here, or in that stream, is done.")
      .def(
          "copy",
          [](DeviceQueue& queue, const Tensors& from, const Tensors& to) {
            const Buffer source = only(from.buffers());
            const WithoutGil release;
            queue.device().copy(queue.index(), only(to.buffers()).data, source.data, source.n_bytes, queue.stream());
          },
          "source"_a, "to"_a);

  nb::class_<Staging>(m, "Staging", "Pinned host memory that stands in for GPU tensors.")
      .def(nb::init<std::shared_ptr<DeviceQueue>>(), "queue"_a)
      .def("download", &Staging::download, "tensors"_a, "first"_a, "last"_a, nb::keep_alive<0, 1>())
      .def("upload", &Staging::upload, "host"_a, "tensors"_a, "first"_a);
}

}  // namespace horo
