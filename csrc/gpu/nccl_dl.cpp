#include "gpu/nccl_dl.h"

#include <dlfcn.h>
#include <link.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>

namespace horo {
namespace {

std::string version_text(int version) {
  // Versions up to 2.8.x have one digit less.
  const int major = version < 10000 ? version / 1000 : version / 10000;
  const int minor = version < 10000 ? version % 1000 / 100 : version % 10000 / 100;
  return std::to_string(major) + "." + std::to_string(minor) + "." + std::to_string(version % 100);
}

// Why a library that was found cannot be used.
struct Refused : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// The address of a symbol. Without one: null if it is optional, else throws Refused.
template <class Function>
void find(void* library, const char* name, Function*& function, bool optional = false) {
  function = reinterpret_cast<Function*>(dlsym(library, name));
  if (function == nullptr && !optional) throw Refused("lacks the symbol " + std::string(name));
}

NcclLibrary take(void* library) {
  NcclLibrary nccl{};
  NcclResult (*get_version)(int*);
  find(library, "ncclGetVersion", get_version);
  if (get_version(&nccl.version) != kNcclSuccess) throw Refused("does not report its version");
  if (nccl.version < kNcclOldest) {
    throw Refused("is NCCL " + version_text(nccl.version) + ", but the oldest supported version is " +
                  version_text(kNcclOldest));
  }
  Dl_info info;
  if (dladdr(reinterpret_cast<void*>(get_version), &info) != 0) nccl.path = info.dli_fname;

  find(library, "ncclGetUniqueId", nccl.GetUniqueId);
  find(library, "ncclCommInitRankConfig", nccl.CommInitRankConfig);
  find(library, "ncclCommSplit", nccl.CommSplit);
  find(library, "ncclCommFinalize", nccl.CommFinalize);
  find(library, "ncclCommDestroy", nccl.CommDestroy);
  find(library, "ncclCommAbort", nccl.CommAbort);
  find(library, "ncclCommGetAsyncError", nccl.CommGetAsyncError);
  find(library, "ncclGetErrorString", nccl.GetErrorString);
  find(library, "ncclGetLastError", nccl.GetLastError);
  find(library, "ncclAllReduce", nccl.AllReduce);
  find(library, "ncclReduceScatter", nccl.ReduceScatter);
  find(library, "ncclBroadcast", nccl.Broadcast);
  find(library, "ncclSend", nccl.Send);
  find(library, "ncclRecv", nccl.Recv);
  find(library, "ncclGroupStart", nccl.GroupStart);
  find(library, "ncclGroupEnd", nccl.GroupEnd);

  find(library, "ncclMemAlloc", nccl.MemAlloc, true);
  find(library, "ncclMemFree", nccl.MemFree, true);
  find(library, "ncclCommRegister", nccl.CommRegister, true);
  find(library, "ncclCommDeregister", nccl.CommDeregister, true);
  find(library, "ncclCommWindowRegister", nccl.CommWindowRegister, true);
  find(library, "ncclCommWindowDeregister", nccl.CommWindowDeregister, true);
  return nccl;
}

// The copies of libnccl that this process has loaded, by the dynamic linker's names.
std::vector<std::string> loaded() {
  std::vector<std::string> paths;
  dl_iterate_phdr(
      [](dl_phdr_info* object, size_t, void* found) {
        const char* slash = std::strrchr(object->dlpi_name, '/');
        const char* name = slash == nullptr ? object->dlpi_name : slash + 1;
        if (std::strncmp(name, "libnccl.so", std::strlen("libnccl.so")) == 0) {
          static_cast<std::vector<std::string>*>(found)->push_back(object->dlpi_name);
        }
        return 0;
      },
      &paths);
  return paths;
}

// Tries one place after the other, and collects the refusals for the message.
class Search {
 public:
  // Returns whether the library can be used. `origin` says in the message where the path comes from.
  bool try_path(const std::string& path, const std::string& origin, int flags) {
    std::string refusal;
    void* library = nullptr;
    if (path.find('/') != std::string::npos && access(path.c_str(), F_OK) != 0) {
      refusal = "no such file";
    } else if (library = dlopen(path.c_str(), flags); library == nullptr) {
      const char* error = dlerror();
      refusal = "cannot be loaded: " + std::string(error == nullptr ? "no reason given" : error);
    } else {
      try {
        result_ = std::make_unique<NcclLibrary>(take(library));
        return true;
      } catch (const Refused& refused) {
        refusal = refused.what();
        dlclose(library);
      }
    }
    refused_ += "\n  " + path + " (" + origin + "): " + refusal;
    return false;
  }

  std::unique_ptr<NcclLibrary> run(const std::vector<std::string>& candidates) {
    const char* named = std::getenv("HORO_LITE_NCCL_LIB");
    if (named != nullptr && *named != '\0') {
      if (try_path(named, "HORO_LITE_NCCL_LIB; nothing else is tried", RTLD_NOW | RTLD_LOCAL))
        return std::move(result_);
    } else {
      for (const std::string& path : loaded()) {
        if (try_path(path, "already in this process", RTLD_LAZY | RTLD_NOLOAD)) return std::move(result_);
      }
      for (const std::string& path : candidates) {
        if (try_path(path, "the nvidia-nccl package", RTLD_NOW | RTLD_LOCAL)) return std::move(result_);
      }
      if (try_path("libnccl.so.2", "the system's", RTLD_NOW | RTLD_LOCAL)) return std::move(result_);
    }
    throw NcclMissing("no NCCL of version " + version_text(kNcclOldest) + " or newer was found. Tried:" + refused_ +
                      "\nInstall one with pip install 'horo_lite[cuda12]' or 'horo_lite[cuda13]', depending on the "
                      "CUDA version, or set HORO_LITE_NCCL_LIB to the path of a libnccl.so.2.");
  }

 private:
  std::unique_ptr<NcclLibrary> result_;
  std::string refused_;
};

}  // namespace

const NcclLibrary& nccl_library(const std::vector<std::string>& candidates) {
  // The library is never closed: its threads may outlive main().
  static std::mutex mutex;
  static const NcclLibrary* opened = nullptr;
  const std::lock_guard lock(mutex);
  if (opened == nullptr) opened = Search().run(candidates).release();
  return *opened;
}

}  // namespace horo
