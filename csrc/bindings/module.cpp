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

NB_MODULE(_native, m) {
  nb::set_leak_warnings(false);  // at exit, the system frees what the last world held

  nb::register_exception_translator([](const std::exception_ptr& error, void*) {
    try {
      std::rethrow_exception(error);
    } catch (const PythonError& e) {
      e.restore();
    } catch (const PeerLost& e) {
      PyErr_SetString(error_class("PeerLostError").ptr(), e.what());
    } catch (const Stalled& e) {
      PyErr_SetString(error_class("StallError").ptr(), e.what());
    } catch (const Mismatch& e) {
      PyErr_SetString(error_class("MismatchError").ptr(), e.what());
    } catch (const DeviceError& e) {
      PyErr_SetString(error_class("DeviceError").ptr(), e.what());
    } catch (const NcclMissing& e) {
      PyErr_SetString(error_class("DeviceError").ptr(), e.what());
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
  bind_shm_group(m);
  bind_wire_layout(m);
  bind_engine(m);
  bind_hosts(m);
  bind_device(m);
  bind_nccl(m);
  bind_xla(m);
  bind_reused_memory(m);
}
