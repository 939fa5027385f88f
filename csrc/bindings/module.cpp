// The module: how the core's errors reach Python, and functions that belong to no class.
#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstring>
#include <system_error>
#include <utility>

#include "bindings/python.h"
#include "bindings/tensors.h"
#include "gpu/device.h"
#include "gpu/nccl_dl.h"
#include "group.h"
#include "pack/pack.h"

namespace nb = nanobind;
using namespace nb::literals;
using namespace horo;

// Raises a Python error, whatever its text contains: names may have been truncated within a character.
static void raise(const char* type, const std::exception& error) {
  const std::string text = error.what();
  const auto decoded = nb::steal(PyUnicode_DecodeUTF8(text.data(), static_cast<Py_ssize_t>(text.size()), "replace"));
  if (decoded.is_valid()) PyErr_SetObject(error_class(type).ptr(), decoded.ptr());
}

NB_MODULE(_native, m) {
  nb::set_leak_warnings(false);  // at exit, the system frees what the last world held

  nb::register_exception_translator([](const std::exception_ptr& error, void*) {
    try {
      std::rethrow_exception(error);
    } catch (const PythonError& e) {
      e.restore();
    } catch (const PeerLost& e) {
      raise("PeerLostError", e);
    } catch (const Stalled& e) {
      raise("StallError", e);
    } catch (const Mismatch& e) {
      raise("MismatchError", e);
    } catch (const DeviceError& e) {
      raise("DeviceError", e);
    } catch (const NcclMissing& e) {
      raise("DeviceError", e);
    } catch (const std::system_error& e) {
      PyErr_SetObject(PyExc_OSError, nb::make_tuple(e.code().value(), e.what()).ptr());
    }
  });

  m.def("instruction_set", &instruction_set, "The build of the host kernels in use: avx512, avx2 or portable.");
  m.def("use_instruction_set", [](const std::string& name) { use_instruction_set(name.c_str()); }, "name"_a);
  m.def(
      "hash64",
      [](nb::bytes data) {
        uint64_t hash = data.size();
        const char* bytes = data.c_str();
        for (size_t i = 0; i < data.size(); i += 8) {
          uint64_t word = 0;
          std::memcpy(&word, bytes + i, std::min<size_t>(8, data.size() - i));
          hash = mixed(hash, word);
        }
        return digest_of(hash);
      },
      "data"_a, "A 63-bit hash that is the same in every process.");

  m.def(
      "weighting",
      [](const std::string& op, const std::vector<double>& weights) {
        Weighting result = weighting(op_of(op), weights);
        return std::pair(std::move(result.weights), result.divisor);
      },
      "op"_a, "weights"_a, "The factors of the ranks' contributions, if there are any, and the divisor of the sum.");

  bind_tensors(m);
  bind_recorder(m);
  bind_segment(m);
  bind_stall_detector(m);
  bind_rank_group(m);
  bind_shm_group(m);
  bind_wire_layout(m);
  bind_engine(m);
  bind_hosts(m);
  bind_device(m);
  bind_nccl(m);
  bind_xla(m);
  bind_reused_memory(m);
}
