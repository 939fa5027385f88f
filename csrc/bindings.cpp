// The face towards Python. Everything that may wait releases the GIL.
#include <nanobind/nanobind.h>
#include <nanobind/stl/function.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <limits>
#include <memory>

#include "bindings.h"
#include "device.h"
#include "engine.h"
#include "fingerprint.h"
#include "layout.h"
#include "lookout.h"
#include "nccl_dl.h"
#include "pack.h"
#include "segment.h"
#include "shm_group.h"
#include "tensors.h"

namespace nb = nanobind;
using namespace nb::literals;
using namespace horo;

namespace {

void check_signals() {
  const nb::gil_scoped_acquire gil;
  if (PyErr_CheckSignals() != 0) throw nb::python_error();
}

using HeaderTuple = std::tuple<uint64_t, int64_t, double>;

struct Group {
  std::shared_ptr<Segment> segment;
  ShmGroup shm;

  Group(std::shared_ptr<Segment> memory, size_t offset, int rank, int size, std::vector<int> pids,
        std::vector<std::string> names)
      : segment(std::move(memory)), shm(segment->data() + offset, rank, size, std::move(pids), std::move(names)) {
    shm.on_idle = check_signals;
  }
};

struct HeldLookout : Lookout {
  std::shared_ptr<Segment> segment;

  HeldLookout(std::shared_ptr<Segment> memory, size_t offset, int rank, std::vector<int> hosts, std::vector<int> pids,
              std::vector<std::string> names)
      : Lookout(memory->data() + offset, rank, std::move(hosts), std::move(pids), std::move(names)),
        segment(std::move(memory)) {}
};

// A wait in Python.
struct PyWait {
  std::optional<Lookout::Wait> wait;
};

size_t total_bytes(const std::vector<TensorRef>& refs) {
  size_t total = 0;
  for (const TensorRef& ref : refs) total += ref.n_elements * item_bytes(ref.dtype);
  return total;
}

void all_reduce(ShmGroup& group, const std::vector<TensorRef>& refs, Op op, Wire wire, double prescale, Factor factor) {
  const Layout layout(refs, op, wire, group.chunk_bytes(total_bytes(refs)), group.size());
  group.allreduce(layout, prescale, factor);
}

void check_in_host_memory(const Tensors& tensors, bool in_c_order) {
  if (tensors.device() != kCpu || !tensors.strided().empty() || (in_c_order && tensors.layout() != 0)) {
    throw std::invalid_argument("arrays that are looked at lie in the host's memory, dense and in C order");
  }
}

void reduce_in_place(ShmGroup& group, const std::vector<TensorRef>& refs, Op op, Factor factor,
                     const std::vector<ptrdiff_t>& distances) {
  const Layout layout(refs, op, Wire::kNone, std::numeric_limits<size_t>::max(), group.size());
  group.reduce_in_place(layout, distances, factor);
}

// The engines of one host's ranks.
class ShmChannel : public Channel {
 public:
  explicit ShmChannel(std::shared_ptr<Group> group) : group_(std::move(group)) {
    group_->shm.on_idle = nullptr;  // signals are seen by the training thread
  }
  int rank() const override { return group_->shm.rank(); }
  int size() const override { return group_->shm.size(); }
  std::vector<std::string> meet(const std::string& mine, const std::string& label) override {
    ShmGroup& shm = group_->shm;
    const auto headers = shm.agree(label, {0, static_cast<int64_t>(mine.size()), 0}, true);
    std::vector<std::string> all(size());
    std::vector<size_t> sizes(size());
    std::vector<Wanted> wanted;
    for (int r = 0; r < size(); ++r) {
      sizes[r] = static_cast<size_t>(headers[r].count);
      all[r].resize(sizes[r]);
      if (r == rank()) all[r] = mine;
      else wanted.push_back({r, 0, {{reinterpret_cast<uint8_t*>(all[r].data()), sizes[r]}}});
    }
    shm.exchange({{reinterpret_cast<uint8_t*>(const_cast<char*>(mine.data())), mine.size()}}, sizes, wanted);
    return all;
  }
  void wait(double timeout_s) override { group_->shm.wait_for_bell(timeout_s); }
  void wake() override { group_->shm.ring_bell(rank()); }
  void stop() override { wake(); }
  bool peer_is_ahead() override { return group_->shm.peer_is_ahead(); }
  void check(int rank, const std::string& name) override { group_->shm.check_peers(rank, name); }
  void abandon(const std::string& reason) override { group_->shm.abandon(reason); }

 private:
  std::shared_ptr<Group> group_;
};

nb::object error_class(const char* name) { return nb::module_::import_("horo_lite.errors").attr(name); }

// Instead of what ends the engine, which all its jobs and callers are to raise: one of Python's can be raised once.
void throw_native(nb::python_error& error) {
  const auto text = [&] { return nb::cast<std::string>(nb::str(error.value())); };
  if (error.matches(error_class("PeerLostError"))) throw PeerLost(text());
  if (error.matches(error_class("StallError"))) throw Stalled(text());
}

// Engines that reach each other through a Python object with the methods of Channel (MPI, through mpi4py).
class PythonChannel : public Channel {
 public:
  explicit PythonChannel(nb::object channel)
      : channel_(shared(channel)),
        rank_(nb::cast<int>(channel.attr("rank"))),
        size_(nb::cast<int>(channel.attr("size"))) {}
  int rank() const override { return rank_; }
  int size() const override { return size_; }
  std::vector<std::string> meet(const std::string& mine, const std::string& label) override {
    const nb::gil_scoped_acquire gil;
    std::vector<std::string> all;
    for (nb::handle one : call("meet", nb::bytes(mine.data(), mine.size()), label)) {
      const auto bytes = nb::cast<nb::bytes>(one);
      all.emplace_back(bytes.c_str(), bytes.size());
    }
    return all;
  }
  void wait(double timeout_s) override {
    const nb::gil_scoped_acquire gil;
    call("wait", timeout_s);
  }
  void wake() override {
    const nb::gil_scoped_acquire gil;
    call("wake");
  }
  void stop() override {
    const nb::gil_scoped_acquire gil;
    call("stop");
  }
  bool peer_is_ahead() override {
    const nb::gil_scoped_acquire gil;
    return nb::cast<bool>(call("peer_is_ahead"));
  }
  void check(int rank, const std::string& name) override {
    const nb::gil_scoped_acquire gil;
    call("check", rank, name);
  }
  void abandon(const std::string& reason) override {
    const nb::gil_scoped_acquire gil;
    call("abandon", reason);
  }

 private:
  template <class... Args>
  nb::object call(const char* method, Args&&... args) {
    try {
      return nb::handle(channel_.get()).attr(method)(std::forward<Args>(args)...);
    } catch (nb::python_error& error) {
      throw_native(error);
      throw;
    }
  }
  Shared channel_;
  int rank_;
  int size_;
};

// What is common to all ranks' entries for one operation.
double total_weight(const std::vector<Entry>& entries) {
  double total = 0.0;
  for (const Entry& entry : entries) total += entry.weight;
  return total;
}

struct PyJob {
  std::shared_ptr<Job> job;
  std::shared_ptr<Engine> engine;
  Shared value;  // what a Python function returned

  void wait(bool beside) {
    engine->begin_wait(job, beside);
    try {
      while (!job->done()) {
        {
          const nb::gil_scoped_release release;
          engine->wait(*job);
        }
        if (PyErr_CheckSignals() != 0) throw nb::python_error();
      }
    } catch (...) {
      engine->end_wait(*job);
      throw;
    }
    engine->end_wait(*job);
    engine->result(*job);
  }
};

std::shared_ptr<PyJob> new_job(const std::shared_ptr<Engine>& engine, const std::string& name, uint64_t digest,
                               double weight, nb::callable describe, nb::callable recipe) {
  auto job = std::make_shared<PyJob>();
  job->engine = engine;
  job->job = std::make_shared<Job>();
  job->job->entry = {name, digest, weight};
  job->job->describe = [held = shared(describe)] {
    const nb::gil_scoped_acquire gil;
    return nb::cast<std::string>(nb::handle(held.get())());
  };
  job->job->recipe = [held = shared(recipe)](const std::vector<int>& joined) {
    const nb::gil_scoped_acquire gil;
    try {
      const auto [weight, text] = nb::cast<std::pair<double, nb::bytes>>(nb::handle(held.get())(joined));
      return Recipe{"", weight, std::string(text.c_str(), text.size())};
    } catch (nb::python_error& error) {
      if (!error.matches(error_class("MismatchError"))) throw;
      return Recipe{nb::cast<std::string>(nb::str(error.value())), 1.0, ""};
    }
  };
  return job;
}

std::shared_ptr<Engine> new_engine(std::unique_ptr<Channel> channel, std::vector<int> ranks, nb::callable explain) {
  auto text = [held = shared(explain)](const std::string& label, const std::vector<std::string>& descriptions,
                                       const std::vector<int>& whose) {
    const nb::gil_scoped_acquire gil;
    return nb::cast<std::string>(nb::handle(held.get())(label, descriptions, whose));
  };
  const auto remove = [](Engine* engine) {
    const nb::gil_scoped_release release;  // its thread may want the GIL to end
    delete engine;
  };
  const std::shared_ptr<Engine> engine(new Engine(std::move(channel), std::move(ranks), text), remove);
  engine->on_idle = check_signals;
  return engine;
}

}  // namespace

NB_MODULE(_native, m) {
  nb::set_leak_warnings(false);  // at exit, what the last world held is the system's to take back

  nb::register_exception_translator([](const std::exception_ptr& error, void*) {
    try {
      std::rethrow_exception(error);
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
      PyErr_SetString(PyExc_OSError, e.what());
    }
  });

  m.def("instruction_set", &instruction_set, "Which build of the host kernels runs: avx512, avx2 or portable.");
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

  nb::class_<Tensors>(m, "Tensors", "Addresses of a list of arrays, which are kept alive until this is dropped.")
      .def(nb::init<nb::sequence, bool, std::optional<intptr_t>>(), "arrays"_a, "writable"_a = true,
           "stream"_a = nb::none())
      .def_prop_ro("device", &Tensors::device)
      .def(
          "rows",
          [](nb::object self, int64_t begin, int64_t end) {
            return new Tensors(nb::cast<const Tensors&>(self), self, begin, end);
          },
          "begin"_a, "end"_a, nb::rv_policy::take_ownership, "Part of the only array, along its first dimension.")
      .def("__len__", [](const Tensors& t) { return t.refs().size(); })
      .def_prop_ro("nbytes", &Tensors::n_bytes)
      .def_prop_ro("signature", &Tensors::signature)
      .def_prop_ro("layout", &Tensors::layout)
      .def_prop_ro("strided", &Tensors::strided)
      .def_prop_ro("addresses", &Tensors::addresses)
      .def(
          "buffers",
          [](const Tensors& tensors) {
            std::vector<std::pair<uintptr_t, size_t>> buffers;
            for (const Buffer& b : tensors.buffers())
              buffers.emplace_back(reinterpret_cast<uintptr_t>(b.data), b.n_bytes);
            return buffers;
          },
          "Address and size in bytes of each.")
      .def("describe", &Tensors::describe, "index"_a)
      .def("shape", &Tensors::shape, "index"_a)
      .def(
          "itemsize", [](const Tensors& t, size_t index) { return item_bytes(t.refs().at(index).dtype); }, "index"_a)
      .def(
          "copy_to",
          [](const Tensors& from, const Tensors& to) {
            const nb::gil_scoped_release release;
            const std::vector<Buffer> source = from.buffers();
            const std::vector<Buffer> target = to.buffers();
            for (size_t i = 0; i < source.size(); ++i) {
              if (source[i].n_bytes != target.at(i).n_bytes) throw std::invalid_argument("the sizes differ");
              if (source[i].n_bytes != 0) std::memcpy(target[i].data, source[i].data, source[i].n_bytes);
            }
          },
          "other"_a, "The host's memory only.");

  m.def(
      "check_reducible",
      [](const Tensors& tensors, const std::string& op) {
        for (const TensorRef& ref : tensors.refs()) select_kernels(ref.dtype, Wire::kNone, op_of(op));
      },
      "tensors"_a, "op"_a, "Raises ValueError for a dtype for which the op has no meaning.");

  m.def(
      "fingerprints",
      [](const Tensors& tensors) {
        check_in_host_memory(tensors, true);
        const nb::gil_scoped_release release;
        std::vector<uint64_t> hashes;
        for (const TensorRef& ref : tensors.refs()) hashes.push_back(fingerprint(ref));
        return hashes;
      },
      "tensors"_a, "64 bits of each, equal where all bits are. In C order.");

  m.def(
      "count_non_finite",
      [](const Tensors& tensors) {
        check_in_host_memory(tensors, false);
        const nb::gil_scoped_release release;
        std::vector<std::pair<size_t, size_t>> counts;
        for (const TensorRef& ref : tensors.refs()) {
          const NonFinite found = count_non_finite(ref);
          counts.emplace_back(found.n_nan, found.n_inf);
        }
        return counts;
      },
      "tensors"_a, "How many elements of each are NaN, and how many infinite.");

  m.def(
      "difference",
      [](const Tensors& mine, const Tensors& theirs) {
        check_in_host_memory(mine, true);
        if (mine.refs().size() != 1 || theirs.refs().size() != 1 || mine.n_bytes() != theirs.n_bytes()) {
          throw std::invalid_argument("the difference is between two arrays of one size");
        }
        const nb::gil_scoped_release release;
        const Difference found = difference(mine.refs()[0], theirs.refs()[0]);
        return std::make_tuple(found.n_elements, found.largest, found.magnitude);
      },
      "mine"_a, "theirs"_a,
      "(elements whose bits differ, the largest difference, the largest element of `mine`); the dtype is that of "
      "`mine`.");

  nb::class_<Segment>(m, "Segment", nb::is_weak_referenceable())
      .def_static(
          "create", [](size_t n_bytes) { return std::make_shared<Segment>(Segment::create(n_bytes)); }, "n_bytes"_a)
      .def_static(
          "open",
          [](int pid, int fd, size_t n_bytes, uint64_t token) {
            return std::make_shared<Segment>(Segment::open(pid, fd, n_bytes, token));
          },
          "pid"_a, "fd"_a, "n_bytes"_a, "token"_a)
      .def("close_descriptor", &Segment::close_descriptor)
      .def("make_private", &Segment::make_private, "For forked children: what they write is theirs alone.")
      .def(
          "array",
          [](nb::object self, size_t begin, size_t n_bytes) {
            const auto& segment = nb::cast<const Segment&>(self);
            return nb::ndarray<nb::numpy, uint8_t, nb::ndim<1>>(segment.data() + begin, {n_bytes}, self);
          },
          "begin"_a, "n_bytes"_a, "A part of it, which keeps it alive.")
      .def_prop_ro("fd", &Segment::fd)
      .def_prop_ro("token", &Segment::token)
      .def_prop_ro("address", [](const Segment& segment) { return reinterpret_cast<uintptr_t>(segment.data()); });

  nb::class_<PyWait>(m, "Wait", "What one thread of this rank waits for.")
      .def(
          "look",
          [](PyWait& self, const std::string& what, const std::vector<int>& come, const std::vector<int>& late) {
            const nb::gil_scoped_release release;
            self.wait.value().look(what, come, late);
          },
          "what"_a, "come"_a, "late"_a, "To be called a few times a second. Raises StallError.")
      .def(
          "close",
          [](PyWait& self, bool went_well) {
            if (self.wait && went_well) self.wait->over();
            self.wait.reset();
          },
          "went_well"_a);

  nb::class_<HeldLookout>(m, "Lookout", "Who waits for whom among the ranks of a host, and who is late.")
      .def(nb::init<std::shared_ptr<Segment>, size_t, int, std::vector<int>, std::vector<int>,
                    std::vector<std::string>>(),
           "segment"_a, "offset"_a, "rank"_a, "hosts"_a, "pids"_a, "names"_a)
      .def_static("memory_bytes", &Lookout::memory_bytes, "size"_a)
      .def_prop_ro("rank", [](const HeldLookout& l) { return l.rank(); })
      .def(
          "set_limits", [](HeldLookout& l, double warn_s, double abort_s) { l.set_limits(warn_s, abort_s); },
          "warn_s"_a, "abort_s"_a)
      .def(
          "give_stacks", [](HeldLookout& l, int fd, int signal) { l.give_stacks(fd, signal); }, "fd"_a, "signal"_a)
      .def(
          "announce",
          [](HeldLookout& l, int rank, const std::string& what, double expect_s) { l.announce(rank, what, expect_s); },
          "rank"_a, "what"_a, "expect_s"_a)
      .def(
          "doing", [](HeldLookout& l, const std::string& what) { l.doing(what, Lookout::clock_ns()); }, "what"_a)
      .def(
          "wait",
          [](const std::shared_ptr<HeldLookout>& l) {
            auto wait = std::make_unique<PyWait>();
            wait->wait.emplace(l);
            return wait.release();
          },
          nb::rv_policy::take_ownership)
      .def(
          "scope", [](const HeldLookout& l, const std::vector<int>& ranks) { return l.scope(ranks); }, "ranks"_a)
      .def(
          "waited_for", [](HeldLookout& l, int rank, double s) { l.waited_for(rank, static_cast<int64_t>(s * 1e9)); },
          "rank"_a, "seconds"_a)
      .def(
          "tallies",
          [](const HeldLookout& l) {
            std::vector<std::pair<int64_t, double>> all;
            for (const Tally& tally : l.tallies()) all.emplace_back(tally.n_last, tally.waited_s);
            return all;
          },
          "Of every rank: how often it came last, and how long each of the others waited for it on average.")
      .def(
          "stall", [](HeldLookout& l, const std::string& reason) { l.stall(reason); }, "reason"_a,
          "All ranks of this host raise StallError, now or in their next call.")
      .def("check", [](const HeldLookout& l) { l.check(); });

  nb::class_<Group>(m, "ShmGroup", "The ranks of one host, meeting in shared memory.")
      .def(nb::init<std::shared_ptr<Segment>, size_t, int, int, std::vector<int>, std::vector<std::string>>(),
           "segment"_a, "offset"_a, "rank"_a, "size"_a, "pids"_a, "names"_a)
      .def_static("memory_bytes", &ShmGroup::memory_bytes, "size"_a)
      .def_prop_ro("rank", [](const Group& g) { return g.shm.rank(); })
      .def_prop_ro("size", [](const Group& g) { return g.shm.size(); })
      .def(
          "watched_by",
          [](Group& g, std::shared_ptr<HeldLookout> lookout, std::vector<int> ranks, bool direct) {
            g.shm.watched_by(std::move(lookout), std::move(ranks), direct);
          },
          "lookout"_a, "ranks"_a, "direct"_a, "`ranks` are the numbers of the group's ranks in the world.")
      .def(
          "agree",
          [](Group& g, const std::string& label, uint64_t digest, int64_t count, double weight) {
            std::vector<Header> headers;
            {
              const nb::gil_scoped_release release;
              headers = g.shm.agree(label, {digest, count, weight});
            }
            std::vector<HeaderTuple> result;
            result.reserve(headers.size());
            for (const Header& h : headers) result.emplace_back(h.digest, h.count, h.weight);
            return result;
          },
          "label"_a, "digest"_a, "count"_a = 0, "weight"_a = 1.0)
      .def(
          "allreduce",
          [](Group& g, const Tensors& tensors, const std::string& op, const std::string& wire, double prescale,
             double scale, double divisor) {
            const nb::gil_scoped_release release;
            all_reduce(g.shm, tensors.refs(), op_of(op), wire_of(wire), prescale, {scale, divisor});
          },
          "tensors"_a, "op"_a, "wire"_a, "prescale"_a = 1.0, "scale"_a = 1.0, "divisor"_a = 1.0)
      .def(
          "reduce_in_place",
          [](Group& g, const Tensors& tensors, const std::string& op, double scale, double divisor,
             const std::vector<ptrdiff_t>& distances) {
            const nb::gil_scoped_release release;
            reduce_in_place(g.shm, tensors.refs(), op_of(op), {scale, divisor}, distances);
          },
          "tensors"_a, "op"_a, "scale"_a, "divisor"_a, "distances"_a,
          "Tensors in memory that all ranks see, rank r's at distances[r] bytes from these.")
      .def(
          "exchange",
          [](Group& g, nb::list stream, const std::vector<size_t>& stream_bytes, nb::list wanted) {
            std::vector<Wanted> parts;
            for (nb::handle one : wanted) {
              const auto [source, begin, into] = nb::cast<std::tuple<int, size_t, nb::object>>(one);
              parts.push_back({source, begin, nb::cast<Tensors&>(into).buffers()});
            }
            std::vector<Buffer> out;
            for (nb::handle tensors : stream) {
              for (const Buffer& buffer : nb::cast<Tensors&>(tensors).buffers()) out.push_back(buffer);
            }
            const nb::gil_scoped_release release;
            g.shm.exchange(out, stream_bytes, parts);
          },
          "stream"_a, "stream_bytes"_a, "wanted"_a)
      .def(
          "check_peers", [](Group& g, const std::string& label, int awaited) { g.shm.check_peers(awaited, label); },
          "label"_a, "awaited"_a = -1, "Raises PeerLostError if a peer has died or given up, or if `awaited` has left.")
      .def(
          "has_left", [](const Group& g, int rank) { return g.shm.has_left(rank); }, "rank"_a)
      .def(
          "abandon", [](Group& g, const std::string& reason) { g.shm.abandon(reason); }, "reason"_a)
      .def(
          "leave", [](Group& g, const std::string& reason) { g.shm.leave(reason); }, "reason"_a)
      .def(
          "silent", [](const Group& g) { return g.shm.silent(); }, "The pids of peers that neither left nor gave up.")
      .def(
          "first_to_tell", [](Group& g) { return g.shm.first_to_tell(); },
          "True for one rank of the host, the first that asks.");

  m.def(
      "thread_group",
      [](int size) {
        auto memory = std::make_shared<Segment>(Segment::local(ShmGroup::memory_bytes(size)));
        std::vector<std::string> names;
        for (int r = 0; r < size; ++r) names.push_back("rank " + std::to_string(r));
        std::vector<std::shared_ptr<Group>> groups;
        for (int r = 0; r < size; ++r) {
          groups.push_back(std::make_shared<Group>(memory, 0, r, size, std::vector<int>(size, 0), names));
        }
        return groups;
      },
      "size"_a, "Ranks as threads of this process, for tests.");

  nb::class_<Layout>(m, "WireLayout",
                     "Where a list of tensors lies on the wire, for transports that move the bytes themselves.")
      .def(
          "__init__",
          [](Layout* self, const Tensors& tensors, const std::string& op, const std::string& wire, size_t chunk_bytes,
             int n_shares) {
            const Wire asked = wire_of(wire);
            const Wire between_hosts = asked == Wire::kNone ? Wire::kBetweenHosts : asked;
            new (self) Layout(tensors.refs(), op_of(op), between_hosts, chunk_bytes, n_shares);
          },
          "tensors"_a, "op"_a, "wire"_a, "chunk_bytes"_a, "n_shares"_a, nb::keep_alive<1, 2>())
      .def_prop_ro("n_chunks", &Layout::n_chunks)
      .def_prop_ro("largest_chunk", &Layout::largest_chunk)
      .def(
          "shares",
          [](const Layout& layout, size_t chunk) {
            std::vector<std::pair<size_t, size_t>> bounds;
            for (int s = 0; s < layout.n_shares(); ++s)
              bounds.emplace_back(layout.share_begin(chunk, s), layout.share_end(chunk, s));
            return bounds;
          },
          "chunk"_a)
      .def(
          "encode",
          [](const Layout& layout, size_t chunk, double prescale, uintptr_t image) {
            const nb::gil_scoped_release release;
            for (int s = 0; s < layout.n_shares(); ++s)
              layout.encode(chunk, s, prescale, reinterpret_cast<uint8_t*>(image));
          },
          "chunk"_a, "prescale"_a, "image"_a)
      .def(
          "reduce",
          [](const Layout& layout, size_t chunk, int share, const std::vector<uintptr_t>& images, double scale,
             double divisor, uintptr_t image) {
            const nb::gil_scoped_release release;
            std::vector<const uint8_t*> from;
            for (uintptr_t address : images) from.push_back(reinterpret_cast<const uint8_t*>(address));
            layout.reduce(chunk, share, from, -1, 1.0, {scale, divisor}, reinterpret_cast<uint8_t*>(image), false);
          },
          "chunk"_a, "share"_a, "images"_a, "scale"_a, "divisor"_a, "image"_a)
      .def(
          "decode",
          [](const Layout& layout, size_t chunk, uintptr_t image) {
            const nb::gil_scoped_release release;
            for (int s = 0; s < layout.n_shares(); ++s)
              layout.decode(chunk, s, reinterpret_cast<const uint8_t*>(image));
          },
          "chunk"_a, "image"_a);

  nb::class_<PyJob>(m, "Job", "An operation in flight.")
      .def_prop_ro("name", [](const PyJob& job) { return job.job->entry.name; })
      .def("done",
           [](PyJob& job) {
             if (job.job->done()) return true;
             const nb::gil_scoped_release release;
             return job.engine->poll(*job.job);
           })
      .def(
          "begin_wait", [](PyJob& job) { job.engine->begin_wait(job.job); },
          "Whoever looks out for late ranks counts from now; until wait() returns.")
      .def("wait", &PyJob::wait, "beside"_a = false, "`beside` the training thread, which may go on meanwhile.")
      .def("value", [](const PyJob& job) { return job.value ? nb::borrow(job.value.get()) : nb::none(); });

  nb::class_<Engine>(m, "Engine", "Runs asynchronous operations, matched by name across ranks.")
      .def_static(
          "over_shm",
          [](std::shared_ptr<Group> group, std::shared_ptr<Group> direct, std::vector<int> ranks,
             nb::callable explain) {
            auto engine = new_engine(std::make_unique<ShmChannel>(std::move(group)), std::move(ranks), explain);
            engine->direct_waits = [direct] { return direct->shm.n_waits(); };
            return engine;
          },
          "group"_a, "direct"_a, "ranks"_a, "explain"_a)
      .def_static(
          "over_channel",
          [](nb::object channel, std::vector<int> ranks, nb::callable explain, nb::object serve,
             nb::object direct_waits) {
            auto engine = new_engine(std::make_unique<PythonChannel>(channel), std::move(ranks), explain);
            if (!direct_waits.is_none()) {
              engine->direct_waits = [held = shared(direct_waits)] {
                const nb::gil_scoped_acquire gil;
                return nb::cast<uint64_t>(nb::handle(held.get())());
              };
            }
            if (!serve.is_none()) {
              engine->serve = [held = shared(serve)](double timeout_s) {
                const nb::gil_scoped_acquire gil;
                return nb::cast<bool>(nb::handle(held.get())(timeout_s));
              };
            }
            return engine;
          },
          "channel"_a, "ranks"_a, "explain"_a, "serve"_a = nb::none(), "direct_waits"_a = nb::none(),
          "`serve(timeout_s)`, where MPI allows one thread only: runs what the channel asks of it. `direct_waits()`: "
          "a number that is odd while this rank waits in a direct call, and never the same in two such waits.")
      .def(
          "watched_by",
          [](Engine& engine, std::shared_ptr<HeldLookout> lookout) { engine.watched_by(std::move(lookout)); },
          "lookout"_a, "To be called at once, if at all.")
      .def("n_in_flight", &Engine::n_in_flight)
      .def_prop_ro("n_failed", &Engine::n_failed, "How often everything that lacked a match has failed.")
      .def("drain", &Engine::drain, nb::call_guard<nb::gil_scoped_release>())
      .def(
          "submit_allreduce",
          [](const std::shared_ptr<Engine>& engine, const std::shared_ptr<Group>& group, const std::string& name,
             uint64_t digest, nb::object tensors, const std::string& op, const std::string& wire, double prescale,
             double scale, double divisor, bool weighted, double weight, nb::callable describe, nb::callable recipe,
             const std::vector<ptrdiff_t>& distances) {
            auto job = new_job(engine, name, digest, weight, describe, recipe);
            const Tensors* refs = &nb::cast<Tensors&>(tensors);
            job->job->run = [=, held = shared(tensors), op = op_of(op),
                             wire = wire_of(wire)](const std::vector<Entry>& entries) {
              group->shm.agree(entries[0].name, {});
              const double total = weighted ? total_weight(entries) : 1.0;
              const Factor factor{scale, divisor * (total == 0.0 ? 1.0 : total)};
              if (distances.empty()) all_reduce(group->shm, refs->refs(), op, wire, prescale, factor);
              else reduce_in_place(group->shm, refs->refs(), op, factor, distances);
            };
            engine->submit(job->job);
            return job;
          },
          "group"_a, "name"_a, "digest"_a, "tensors"_a, "op"_a, "wire"_a, "prescale"_a, "scale"_a, "divisor"_a,
          "weighted"_a, "weight"_a, "describe"_a, "recipe"_a, "distances"_a = std::vector<ptrdiff_t>(),
          "With `distances`, as reduce_in_place.")
      .def(
          "submit_call",
          [](const std::shared_ptr<Engine>& engine, const std::string& name, uint64_t digest, nb::callable function,
             double weight, nb::callable describe, nb::callable recipe) {
            auto job = new_job(engine, name, digest, weight, describe, recipe);
            std::weak_ptr<PyJob> weak = job;
            job->job->run = [held = shared(function), weak](const std::vector<Entry>& entries) {
              const nb::gil_scoped_acquire gil;
              std::vector<double> weights;
              for (const Entry& entry : entries) weights.push_back(entry.weight);
              try {
                nb::object value = nb::handle(held.get())(weights);
                if (const auto strong = weak.lock()) strong->value = shared(value);
              } catch (nb::python_error& error) {
                if (error.matches(error_class("MismatchError")) || error.matches(error_class("DeviceError")) ||
                    error.matches(PyExc_ValueError)) {
                  throw Recoverable{std::current_exception()};
                }
                throw_native(error);
                throw;
              }
            };
            engine->submit(job->job);
            return job;
          },
          "name"_a, "digest"_a, "function"_a, "weight"_a, "describe"_a, "recipe"_a)
      .def(
          "submit_join",
          [](const std::shared_ptr<Engine>& engine, nb::callable stand_in) {
            auto job = std::make_shared<PyJob>();
            job->engine = engine;
            job->job = std::make_shared<Job>();
            job->job->entry.name = kJoin;
            job->job->stand_in = [held = shared(stand_in)](const std::string& recipe) {
              const nb::gil_scoped_acquire gil;
              nb::handle(held.get())(nb::bytes(recipe.data(), recipe.size()));
            };
            std::weak_ptr<PyJob> weak = job;
            job->job->run = [weak](const std::vector<Entry>& entries) {
              const nb::gil_scoped_acquire gil;
              nb::list order;
              for (const Entry& entry : entries) order.append(entry.told);
              if (const auto strong = weak.lock()) strong->value = shared(order);
            };
            engine->submit(job->job);
            return job;
          },
          "stand_in"_a, "Until all ranks have, `stand_in(recipe)` submits this rank's part in what the others do.");

  bind_device(m);
  bind_kernels(m);
  bind_xla(m);
}
