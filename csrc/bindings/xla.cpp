// The handler that XLA calls, on its own threads, when a compiled program reaches an operation between ranks.
#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>

#include <cstring>
#include <iterator>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "bindings/python.h"
#include "bindings/xla_ffi.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace horo {
namespace {

PyObject* run_call = nullptr;  // a Python function, never released
int minor_version = kXlaOldestMinor;

XlaError* failed(const XlaApi* api, const char* message) {
  XlaErrorCreateArgs args{sizeof(XlaErrorCreateArgs), nullptr, message, kXlaAborted};
  return api->error_create(&args);
}

int64_t number(const XlaAttributes& attributes, const std::string& name) {
  for (int64_t i = 0; i < attributes.size; ++i) {
    const XlaText& text = *attributes.names[i];
    if (std::string(text.data, text.size) != name || attributes.types[i] != kXlaScalar) continue;
    const auto* scalar = static_cast<const XlaScalar*>(attributes.attributes[i]);
    int64_t value;
    if (scalar->dtype != kXlaInt64) break;
    std::memcpy(&value, scalar->value, sizeof(value));
    return value;
  }
  throw std::runtime_error("the compiled program lacks the number '" + name + "'");
}

struct Memory {
  void* data;
  size_t n_bytes;
};

// Only operands with memory: XLA's tokens are left out.
std::vector<Memory> buffers(const XlaOperands& operands) {
  std::vector<Memory> found;
  for (int64_t i = 0; i < operands.size; ++i) {
    if (operands.types[i] != kXlaBuffer) throw std::runtime_error("the compiled program has an unknown operand");
    const auto& buffer = *static_cast<const XlaBuffer*>(operands.operands[i]);
    if (buffer.dtype == kXlaToken) continue;
    size_t n_bytes = static_cast<size_t>(buffer.dtype) < std::size(kXlaItemBytes) ? kXlaItemBytes[buffer.dtype] : 0;
    if (n_bytes == 0) throw std::runtime_error("an array has a dtype that cannot be reduced or sent");
    for (int64_t d = 0; d < buffer.rank; ++d) n_bytes *= static_cast<size_t>(buffer.dims[d]);
    found.push_back({buffer.data, n_bytes});
  }
  return found;
}

nb::list views(const std::vector<Memory>& buffers, int access) {
  static char nothing;
  nb::list list;
  for (const Memory& memory : buffers) {
    char* data = memory.n_bytes == 0 ? &nothing : static_cast<char*>(memory.data);
    list.append(nb::steal(PyMemoryView_FromMemory(data, static_cast<Py_ssize_t>(memory.n_bytes), access)));
  }
  return list;
}

// Copies the first n_copies arguments to the results, unless XLA has given both the same memory.
void copy(const std::vector<Memory>& arguments, const std::vector<Memory>& results, int64_t n_copies) {
  for (size_t i = 0; i < static_cast<size_t>(n_copies); ++i) {
    const Memory &from = arguments.at(i), &to = results.at(i);
    if (from.n_bytes != to.n_bytes) throw std::runtime_error("a result differs in size from its argument");
    if (from.data != to.data) std::memcpy(to.data, from.data, from.n_bytes);
  }
}

XlaError* call_from_xla(XlaCallFrame* frame) {
  for (XlaExtension* extension = frame->extensions; extension != nullptr; extension = extension->next) {
    if (extension->type != kXlaMetadata) continue;
    XlaMetadata* metadata = reinterpret_cast<XlaMetadataExtension*>(extension)->metadata;
    metadata->version = {sizeof(XlaVersion), nullptr, kXlaMajor, minor_version};
    metadata->traits = 0;
    return nullptr;
  }
  if (frame->stage != kXlaExecute) return nullptr;
  try {
    const std::vector<Memory> arguments = buffers(frame->arguments), results = buffers(frame->results);
    copy(arguments, results, number(frame->attributes, "copies"));
    const WithGil gil;
    nb::object error = nb::handle(run_call)(number(frame->attributes, "call"), views(arguments, PyBUF_READ),
                                            views(results, PyBUF_WRITE));
    return error.is_none() ? nullptr : failed(frame->api, nb::cast<std::string>(error).c_str());
  } catch (nb::python_error& error) {
    const WithGil gil;
    if (!error.matches(PyExc_KeyboardInterrupt)) return failed(frame->api, error.what());
    PyErr_SetInterrupt();  // again, since XLA replaces this exception by another one
    return failed(frame->api, "KeyboardInterrupt");
  } catch (const std::exception& error) {
    return failed(frame->api, error.what());
  }
}

}  // namespace

void bind_xla(nb::module_& m) {
  m.def(
      "xla_handler",
      [](nb::callable run, std::pair<int, int> version) {
        const auto [major, minor] = version;
        if (major != kXlaMajor || minor < kXlaOldestMinor) return nb::object(nb::none());
        minor_version = minor;
        Py_XDECREF(run_call);
        run_call = run.inc_ref().ptr();
        return nb::steal(PyCapsule_New(reinterpret_cast<void*>(&call_from_xla), nullptr, nullptr));
      },
      "run"_a, "version"_a,
      nb::sig("def xla_handler(run: collections.abc.Callable[[int, list[memoryview], list[memoryview]], str | None], "
              "version: tuple[int, int]) -> object | None"),
      "Return a handler for that version of XLA, or None if the version is unknown: it calls `run(call, arguments, "
      "results)` with its attribute `call` and views of memory. The first `copies` arguments have been copied to the "
      "results. `run` returns None or an error message.");
}

}  // namespace horo
