// The face of the GPU part towards Python.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include <cstring>

#include "bindings.h"
#include "cuda_driver.h"
#include "device_queue.h"
#include "nccl_dl.h"
#include "nccl_group.h"
#include "tensors.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace horo {
namespace {

using Unlocked = nb::call_guard<nb::gil_scoped_release>;

// A twin where a test asks for one, else the GPUs.
Device& device() {
  if (Device* twin = twin_device()) return *twin;
  std::string why;
  if (Device* cuda = cuda_device(&why)) return *cuda;
  throw DeviceError(why);
}

std::tuple<int, std::vector<std::string>, std::string> gpus() {
  if (twin_device() != nullptr) return {99000, twin_gpus(), ""};
  const CudaDriver driver = cuda_driver();
  return {driver.version, driver.uuids, driver.problem};
}

// Python drops its objects with the GIL in hand, and what waits for a stream's end must not have it: the stream may be
// the twin's, in the middle of a Python call.
template <class T>
std::shared_ptr<T> unlocked(T* object) {
  return std::shared_ptr<T>(object, [](T* dropped) {
    const nb::gil_scoped_release release;
    delete dropped;
  });
}

// Pinned host memory that stands in for a list of GPU tensors.
class Staging {
 public:
  explicit Staging(std::shared_ptr<DeviceQueue> queue) : queue_(std::move(queue)) {}
  ~Staging() {
    if (memory_ != nullptr) queue_->device().release_pinned(memory_);
  }
  Staging(const Staging&) = delete;
  Staging& operator=(const Staging&) = delete;

  // Tensors [first, last) of `from`, in host memory that the next call uses again, holding what they hold.
  std::unique_ptr<Tensors> download(const Tensors& from, size_t first, size_t last) {
    auto host = std::make_unique<Tensors>(from, first, last);
    const nb::gil_scoped_release release;
    if (host->n_bytes_aligned() > n_bytes_) {
      if (memory_ != nullptr) queue_->device().release_pinned(memory_);
      memory_ = nullptr;
      n_bytes_ = 0;
      memory_ = queue_->device().allocate_pinned(host->n_bytes_aligned());
      n_bytes_ = host->n_bytes_aligned();
    }
    host->move_to(static_cast<uint8_t*>(memory_));
    for (size_t i = first; i < last; ++i) copy(host->refs()[i - first], from.refs()[i]);
    queue_->synchronize();
    return host;
  }

  void upload(const Tensors& host, const Tensors& to, size_t first) {
    const nb::gil_scoped_release release;
    for (size_t i = 0; i < host.refs().size(); ++i) copy(to.refs()[first + i], host.refs()[i]);
    queue_->synchronize();  // the memory is used again
  }

 private:
  void copy(const TensorRef& to, const TensorRef& from) {
    const size_t n_bytes = from.n_elements * item_bytes(from.dtype);
    queue_->device().copy(queue_->index(), to.address, from.address, n_bytes, queue_->stream());
  }

  std::shared_ptr<DeviceQueue> queue_;
  void* memory_ = nullptr;
  size_t n_bytes_ = 0;
};

const Buffer& only(const std::vector<Buffer>& buffers) {
  if (buffers.size() != 1) throw std::invalid_argument("one array is meant");
  return buffers[0];
}

std::vector<Buffer> each(nb::list tensors) {
  std::vector<Buffer> buffers;
  for (nb::handle one : tensors) buffers.push_back(only(nb::cast<const Tensors&>(one).buffers()));
  return buffers;
}

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

// What a framework's stream would be.
struct TwinStream {
  Stream stream = device().new_stream(0);
  ~TwinStream() { device().delete_stream(0, stream); }
};

}  // namespace

void bind_device(nb::module_& m) {
  m.def("gpus", &gpus, Unlocked(),
        "The driver's version (13000 is CUDA 13.0, 0 none), the GPUs this process may use by unique names, why none.");
  m.def("cuda_runtime_version", &cuda_runtime_version, "Of the CUDA runtime that was built in; 0 where none was.");
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
      "GPU memory for others to import; `owner` lives as long as they need it. Strides count elements.");

  nb::class_<DeviceQueue>(m, "DeviceQueue", "A stream on one GPU, and its order with everybody else's.")
      .def(nb::new_([](int index) { return unlocked(new DeviceQueue(device(), index)); }), "index"_a)
      .def_prop_ro("index", &DeviceQueue::index)
      .def_prop_ro("stream", [](const DeviceQueue& queue) { return reinterpret_cast<uintptr_t>(queue.stream()); })
      .def(
          "follow", [](DeviceQueue& queue, uintptr_t producer) { queue.follow(reinterpret_cast<Stream>(producer)); },
          "producer"_a, "What is queued here from now on comes after what the producer's stream was given so far.")
      .def(
          "lead", [](DeviceQueue& queue, uintptr_t consumer) { queue.lead(reinterpret_cast<Stream>(consumer)); },
          "consumer"_a, "What the consumer's stream is given from now on comes after what is queued here.")
      .def("synchronize", &DeviceQueue::synchronize, Unlocked())
      .def(
          "hold",
          [](DeviceQueue& queue, nb::object object, std::optional<uintptr_t> stream) {
            queue.hold(shared(object), stream ? reinterpret_cast<Stream>(*stream) : queue.stream());
          },
          "object"_a, "stream"_a = nb::none(),
          "Keeps it until what is queued here, or was given to that stream, is done.")
      .def(
          "copy",
          [](DeviceQueue& queue, const Tensors& from, const Tensors& to) {
            const Buffer source = only(from.buffers());
            queue.device().copy(queue.index(), only(to.buffers()).data, source.data, source.n_bytes, queue.stream());
          },
          "source"_a, "to"_a);

  nb::class_<Staging>(m, "Staging", "Pinned host memory that stands in for GPU tensors.")
      .def(nb::init<std::shared_ptr<DeviceQueue>>(), "queue"_a)
      .def("download", &Staging::download, "tensors"_a, "first"_a, "last"_a, nb::keep_alive<0, 1>())
      .def("upload", &Staging::upload, "host"_a, "tensors"_a, "first"_a);

  m.def(
      "nccl_library",
      [](const std::vector<std::string>& candidates) {
        const NcclLibrary& nccl = nccl_library(candidates);
        return std::make_tuple(nccl.path, nccl.version);
      },
      "candidates"_a, "Path and version (22105 is 2.21.5) of the NCCL that is used. DeviceError where there is none.");
  m.def(
      "nccl_unique_id",
      [] {
        NcclUniqueId id{};
        if (nccl_library({}).GetUniqueId(&id) != kNcclSuccess) {
          throw DeviceError("NCCL could not open a socket for its ranks to meet: NCCL_DEBUG=INFO tells more");
        }
        return nb::bytes(id.bytes, sizeof(id.bytes));
      },
      "What rank 0 gives the others, so that they find each other.");

  nb::class_<NcclGroup>(m, "NcclGroup", "The ranks of a world, each with a GPU of its own, and NCCL between them.")
      .def(nb::new_([](std::shared_ptr<DeviceQueue> queue, nb::bytes id, int rank, int size, size_t bucket_bytes,
                       double timeout_s) {
             NcclUniqueId unique{};
             if (id.size() != sizeof(unique.bytes)) throw std::invalid_argument("a unique id has 128 bytes");
             std::memcpy(unique.bytes, id.data(), sizeof(unique.bytes));
             const nb::gil_scoped_release release;  // while all ranks connect
             return unlocked(
                 new NcclGroup(std::move(queue), nccl_library({}), unique, rank, size, bucket_bytes, timeout_s));
           }),
           "queue"_a, "id"_a, "rank"_a, "size"_a, "bucket_bytes"_a, "timeout_s"_a)
      .def(
          "split",
          [](NcclGroup& group, int color, int rank, int size) {
            const nb::gil_scoped_release release;
            auto part = group.split(color, rank, size);
            return part ? unlocked(part.release()) : nullptr;
          },
          "color"_a, "rank"_a, "size"_a)
      .def_prop_ro("rank", &NcclGroup::rank)
      .def_prop_ro("size", &NcclGroup::size)
      .def_prop_ro("can_use_windows", &NcclGroup::can_use_windows)
      .def_prop_ro("registered", &NcclGroup::registered)
      .def("register_bucket", &NcclGroup::register_bucket, "windows"_a, Unlocked())
      .def_static(
          "can_reduce",
          [](const Tensors& tensors, const std::string& op, double prescale, double scale, double divisor) {
            return NcclGroup::can_reduce(tensors.refs(), op_of(op), prescale, {scale, divisor});
          },
          "tensors"_a, "op"_a, "prescale"_a, "scale"_a, "divisor"_a)
      .def(
          "allreduce",
          [](NcclGroup& group, const Tensors& tensors, const std::string& op, const std::string& wire, double prescale,
             double scale, double divisor, std::optional<double> weight) {
            group.allreduce(tensors.refs(), op_of(op), wire_of(wire), prescale, {scale, divisor}, weight);
          },
          "tensors"_a, "op"_a, "wire"_a, "prescale"_a, "scale"_a, "divisor"_a, "weight"_a = nb::none(), Unlocked())
      .def(
          "broadcast",
          [](NcclGroup& group, const Tensors& tensors, int root) { group.broadcast(tensors.buffers(), root); },
          "tensors"_a, "root"_a, Unlocked())
      .def(
          "allgather",
          [](NcclGroup& group, const Tensors& send, nb::list receive) {
            const Buffer own = only(send.buffers());
            const std::vector<Buffer> into = each(receive);
            const nb::gil_scoped_release release;
            group.allgather(own, into);
          },
          "send"_a, "receive"_a)
      .def(
          "alltoall",
          [](NcclGroup& group, nb::list send, nb::list receive) {
            const std::vector<Buffer> from = each(send);
            const std::vector<Buffer> into = each(receive);
            const nb::gil_scoped_release release;
            group.alltoall(from, into);
          },
          "send"_a, "receive"_a)
      .def("close", &NcclGroup::close, Unlocked())
      .def("fail", &NcclGroup::fail, "reason"_a, Unlocked())
      .def("check", &NcclGroup::check, Unlocked());

  nb::class_<TwinStream>(m, "TwinStream", "A stream of the GPUs' twin in host memory, for tests.")
      .def(nb::new_([] { return unlocked(new TwinStream); }))
      .def_prop_ro("handle", [](const TwinStream& twin) { return reinterpret_cast<uintptr_t>(twin.stream); })
      .def(
          "call",
          [](TwinStream& twin, nb::callable function) {
            auto* head = static_cast<TwinStreamHead*>(twin.stream);
            auto* held = new Shared(shared(function));
            head->enqueue(
                head,
                [](void* argument) {
                  const std::unique_ptr<Shared> function(static_cast<Shared*>(argument));
                  const nb::gil_scoped_acquire gil;
                  nb::handle(function->get())();
                },
                held);
          },
          "function"_a, "Queues a call.")
      .def(
          "lead",
          [](TwinStream& twin, uintptr_t consumer) {
            const Event event = device().new_event(0);
            device().record(0, event, twin.stream);
            device().wait(0, reinterpret_cast<Stream>(consumer), event);
            device().delete_event(event);
          },
          "consumer"_a, "Its later work comes after what is queued here.");
}

}  // namespace horo
