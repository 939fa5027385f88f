// The engine for Python, and operations that are Python functions.
#include <nanobind/nanobind.h>
#include <nanobind/stl/function.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <functional>
#include <memory>
#include <optional>
#include <thread>

#include "bindings/python.h"
#include "bindings/recorder.h"
#include "bindings/stall_detector.h"
#include "bindings/tensors.h"
#include "engine/engine.h"
#include "engine/rank_group.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace horo {
namespace {

using Describe = Function<std::string()>;
using Headers = ListOf<std::tuple<uint64_t, int64_t, double>>;
using Participate = Function<std::tuple<int64_t, double, nb::bytes>(ListOf<int>)>;
using Explain = Function<std::string(std::string, ListOf<std::string>, ListOf<int>)>;

// Whether every rank raises this error in an operation, at the same point, so that the next operation can follow.
bool is_raised_by_all(const nb::python_error& error) {
  return error.matches(PyExc_ValueError) || error.matches(error_class("RAISED_ALIKE"));
}

std::vector<double> weights_of(const std::vector<Entry>& entries) {
  std::vector<double> weights;
  for (const Entry& entry : entries) weights.push_back(entry.weight);
  return weights;
}

std::vector<std::tuple<uint64_t, int64_t, double>> headers_of(const std::vector<Entry>& entries) {
  std::vector<std::tuple<uint64_t, int64_t, double>> headers;
  for (const Entry& entry : entries) headers.emplace_back(entry.digest, entry.count, entry.weight);
  return headers;
}

bool counts_differ(const std::vector<Entry>& entries) {
  return std::any_of(entries.begin(), entries.end(), [&](const Entry& each) { return each.count != entries[0].count; });
}

constexpr double kBetweenSignalsSeconds = 0.05;  // how long a wait may delay Ctrl-C
constexpr double kForeverSeconds = 3600.0;

struct PyJob {
  std::shared_ptr<Job> job;
  std::shared_ptr<Engine> engine;
  Shared value;  // what a Python function returned

  void wait_until_done() {
    while (!job->done()) {
      {
        const WithoutGil release;
        job->wait(kBetweenSignalsSeconds);
      }
      if (PyErr_CheckSignals() != 0) throw nb::python_error();
    }
  }

  bool withdraw(bool beside) {
    {
      const WithoutGil release;
      engine->withdraw(job);
      while (beside && !job->wait(kForeverSeconds)) {
      }
    }
    wait_until_done();
    return job->is_withdrawn;
  }

  void wait(bool beside) {
    const int64_t since_ns = StallDetector::clock_ns();
    engine->begin_wait(job, beside);
    try {
      wait_until_done();
    } catch (...) {
      engine->end_wait(*job);
      throw;
    }
    engine->end_wait(*job);
    Recorder::of_process().waited(since_ns, job->begun_ns, StallDetector::clock_ns());
    engine->result(*job);
  }
};

std::string description_by(nb::handle describe) {
  return in_python([&] { return nb::cast<std::string>(describe()); });
}

Participation participation_by(nb::handle participation, const std::vector<int>& joined) {
  return in_python([&] {
    try {
      const auto [count, weight, text] = nb::cast<std::tuple<int64_t, double, nb::bytes>>(participation(joined));
      return Participation{"", count, weight, std::string(text.c_str(), text.size())};
    } catch (const nb::python_error& error) {
      if (!error.matches(error_class("MismatchError"))) throw;
      return Participation{nb::cast<std::string>(nb::str(error.value())), 0, 1.0, ""};
    }
  });
}

std::shared_ptr<PyJob> new_job(const std::shared_ptr<Engine>& engine, const std::string& name, uint64_t digest,
                               int64_t count, double weight, Describe describe, Participate participation,
                               const Tensors* changes) {
  auto job = std::make_shared<PyJob>();
  job->engine = engine;
  job->job = std::make_shared<Job>();
  job->job->entry = {name, digest, count, weight};
  for (const Buffer& buffer : changes == nullptr ? std::vector<Buffer>() : changes->buffers()) {
    const auto begin = reinterpret_cast<uintptr_t>(buffer.data);
    if (buffer.n_bytes != 0) job->job->changes.emplace_back(begin, begin + buffer.n_bytes);
  }
  job->job->describe = [held = shared(describe)] { return description_by(held.get()); };
  job->job->participation = [held = shared(participation)](const std::vector<int>& joined) {
    return participation_by(held.get(), joined);
  };
  return job;
}

using Run = std::function<void(const std::vector<Entry>&)>;

// Runs a Python function, whose result becomes the job's value.
Run run_of(const std::shared_ptr<PyJob>& job, Function<nb::object(Headers)> function) {
  return [held = shared(function), weak = std::weak_ptr<PyJob>(job)](const std::vector<Entry>& entries) {
    in_python([&] {
      try {
        nb::object value = nb::handle(held.get())(headers_of(entries));
        if (const auto strong = weak.lock()) strong->value = shared(value);
      } catch (const nb::python_error& error) {
        if (!is_raised_by_all(error)) throw;
        throw Recoverable{std::make_exception_ptr(PythonError(error))};
      }
    });
  };
}

// Makes a blocking call, on this thread, and returns what `function` returned or raises what it raised.
nb::object call(Engine& engine, const std::shared_ptr<Job>& job,
                const std::function<nb::object(const std::vector<Entry>&)>& function) {
  nb::object value = nb::none();
  std::optional<nb::python_error> raised;
  job->run = [&](const std::vector<Entry>& entries) {
    in_python([&] {
      try {
        value = function(entries);
      } catch (nb::python_error& error) {
        raised.emplace(error);
        if (!is_raised_by_all(error)) throw;
        throw Recoverable{std::make_exception_ptr(PythonError(error))};
      }
    });
  };
  std::exception_ptr failed;
  {
    const WithoutGil release;
    try {
      engine.call(job);
    } catch (...) {
      failed = std::current_exception();
    }
  }
  if (raised) throw std::move(*raised);
  if (failed) std::rethrow_exception(failed);
  return value;
}

std::function<void(const std::string&)> stand_in_of(Function<nb::object(nb::bytes)> stand_in) {
  return [held = shared(stand_in)](const std::string& participation) {
    in_python([&] { nb::handle(held.get())(nb::bytes(participation.data(), participation.size())); });
  };
}

nb::object order_of(const std::vector<Entry>& entries) {
  nb::list order;
  for (const Entry& entry : entries) order.append(entry.sequence);
  return order;
}

std::shared_ptr<Engine> new_engine(std::unique_ptr<Channel> channel, std::vector<int> ranks, Explain explain) {
  auto text = [held = shared(explain)](const std::string& label, const std::vector<std::string>& descriptions,
                                       const std::vector<int>& whose) {
    return in_python([&] { return nb::cast<std::string>(nb::handle(held.get())(label, descriptions, whose)); });
  };
  const auto remove = [](Engine* engine) {
    const WithoutGil release;  // its thread may want the GIL to end
    // That thread cannot wait for itself, if it drops the last reference: the operation that it runs may hold one.
    if (engine->drives_here()) std::thread([engine] { delete engine; }).detach();
    else delete engine;
  };
  const std::shared_ptr<Engine> engine(new Engine(std::move(channel), std::move(ranks), text), remove);
  engine->on_idle = check_signals;
  return engine;
}

}  // namespace

void bind_engine(nb::module_& m) {
  nb::class_<PyJob>(m, "Job", "An operation in flight.")
      .def_prop_ro("name", [](const PyJob& job) { return job.job->title(); })
      .def_prop_ro(
          "position", [](const PyJob& job) { return job.job->position(); },
          "The job's number, the same on all ranks; 0: not announced yet.")
      .def("done", [](const PyJob& job) { return job.job->done(); })
      .def("withdraw", &PyJob::withdraw, "beside"_a = false,
           "Return True if it was not run and never will be; False if it is done. Does not wait for other ranks' "
           "programs. `beside`: not the training thread; this one asks for the GIL only once it is done.")
      .def("wait", &PyJob::wait, "beside"_a = false, "`beside`: not the training thread, which may continue meanwhile.")
      .def_prop_ro(
          "times",
          [](const PyJob& job) {
            const Job& one = *job.job;
            return std::make_tuple(one.submitted_ns.load(), one.begun_ns.load(), one.done() ? one.done_ns.load() : 0,
                                   one.failed());
          },
          "When this rank and when all ranks had submitted it, and when it was done, by CLOCK_MONOTONIC in ns (0: not "
          "yet); whether it failed.")
      .def("value", [](const PyJob& job) { return job.value ? nb::borrow(job.value.get()) : nb::none(); });

  nb::class_<Engine>(m, "Engine", "Matches the operations of a group across its ranks, and runs them.")
      .def_static(
          "over",
          [](const std::shared_ptr<RankGroup>& group, std::vector<int> ranks, Explain explain) {
            return new_engine(group->engine_channel(group), std::move(ranks), explain);
          },
          "group"_a, "ranks"_a, "explain"_a)
      .def(
          "watched_by",
          [](Engine& engine, std::shared_ptr<PyStallDetector> detector) { engine.watched_by(std::move(detector)); },
          "detector"_a, "Must be called immediately, if at all.")
      .def_prop_ro("n_failed", &Engine::n_failed, "How often all operations without a match have failed.")
      .def_prop_ro("drives_here", &Engine::drives_here,
                   "Whether this thread is in the middle of an operation, which a signal handler, a finalizer or a "
                   "hook has interrupted.")
      .def_prop_ro("busy_s", &Engine::busy_s, "The CPU time of its thread, in seconds.")
      .def("drain", &Engine::drain, nb::call_guard<WithoutGil>())
      .def(
          "submit_allreduce",
          [](const std::shared_ptr<Engine>& engine, const std::shared_ptr<RankGroup>& group, const std::string& name,
             uint64_t digest, Function<nb::object(Headers)> function, PyTensors tensors, const std::string& op,
             const std::string& wire, double prescale, double scale, int64_t count, double weight, Describe describe,
             Participate participation, const Operation* record, const std::vector<ptrdiff_t>& distances,
             const Tensors* changes) {
            auto job = new_job(engine, name, digest, count, weight, describe, participation, changes);
            const Tensors* refs = &nb::cast<Tensors&>(tensors);
            job->job->run = [=, otherwise = run_of(job, function), held = shared(tensors), op = op_of(op),
                             wire = wire_of(wire)](const std::vector<Entry>& entries) {
              if (counts_differ(entries)) return otherwise(entries);
              auto [weights, divisor] = weighting(op, weights_of(entries));
              weights = multiplied(std::move(weights), prescale, entries.size());
              group->allreduce(refs->refs(), op, wire, weights, {scale, divisor}, distances);
            };
            engine->submit(job->job, record);
            return job;
          },
          "group"_a, "name"_a, "digest"_a, "function"_a, "tensors"_a, "op"_a, "wire"_a, "prescale"_a, "scale"_a,
          "count"_a, "weight"_a, "describe"_a, "participation"_a, "record"_a.none(),
          "distances"_a = std::vector<ptrdiff_t>(), "changes"_a = nb::none(),
          "Like submit_call, but without Python, unless the ranks' counts differ. With `distances`, like "
          "reduce_in_place. `changes`: the caller's memory that it changes, which no other "
          "operation in flight may change.")
      .def(
          "submit_call",
          [](const std::shared_ptr<Engine>& engine, const std::string& name, uint64_t digest,
             Function<nb::object(Headers)> function, int64_t count, double weight, Describe describe,
             Participate participation, const Operation* record, const Tensors* changes) {
            auto job = new_job(engine, name, digest, count, weight, describe, participation, changes);
            job->job->run = run_of(job, function);
            engine->submit(job->job, record);
            return job;
          },
          "name"_a, "digest"_a, "function"_a, "count"_a, "weight"_a, "describe"_a, "participation"_a, "record"_a.none(),
          "changes"_a = nb::none(),
          "When every rank has submitted it, call `function` with their digests, counts and weights, in rank order. "
          "`record` describes it to the recorder, if it is to be recorded.")
      .def(
          "call",
          [](Engine& engine, const std::string& label, uint64_t digest, Function<nb::object(Headers)> function,
             int64_t count, double weight, Describe describe, Participate participation) {
            const auto job = std::make_shared<Job>();
            job->entry = {label, digest, count, weight};
            job->describe = [&describe] { return description_by(describe); };
            job->participation = [&participation](const std::vector<int>& joined) {
              return participation_by(participation, joined);
            };
            return call(engine, job, [&](const std::vector<Entry>& entries) { return function(headers_of(entries)); });
          },
          "label"_a, "digest"_a, "function"_a, "count"_a, "weight"_a, "describe"_a, "participation"_a,
          "Make a blocking call, matched by the order of such calls: when every rank has made it, return what "
          "`function` returns on this thread, given their digests, counts and weights in rank order. Raises what it "
          "raises. One thread at a time.")
      .def(
          "join",
          [](Engine& engine, Function<nb::object(nb::bytes)> stand_in) {
            const auto job = std::make_shared<Job>();
            job->entry.name = kJoin;
            job->stand_in = stand_in_of(stand_in);
            return call(engine, job, order_of);
          },
          "stand_in"_a,
          "Wait until all ranks have joined; return numbers that order them by when they did. Until then, "
          "`stand_in(participation)` submits this rank's part in each operation of the others. A blocking call.");
}

}  // namespace horo
