// Engines: operations submitted by several threads at once, in a different order on every rank.
#include <latch>

#include "ranks.h"

namespace horo {
namespace {

struct Pending {
  Reduction what;
  std::shared_ptr<Tensors> tensors;
  std::shared_ptr<Job> job;
};

// Like submit_allreduce() of the bindings.
Pending reduction_job(Rank& me, const std::string& name, const Reduction& what) {
  Pending pending{what, std::make_shared<Tensors>(what, me.rank), std::make_shared<Job>()};
  Job& job = *pending.job;
  job.entry.name = name;
  job.entry.digest = what.seed;
  job.entry.weight = what.weights[static_cast<size_t>(me.rank)];
  for (const TensorRef& ref : pending.tensors->refs) {
    const auto begin = reinterpret_cast<uintptr_t>(ref.address);
    if (ref.n_elements != 0) job.changes.emplace_back(begin, begin + ref.n_elements * item_bytes(ref.dtype));
  }
  job.run = [&me, what, tensors = pending.tensors](const std::vector<Entry>& entries) {
    Reduction weighted = what;
    for (size_t r = 0; r < entries.size(); ++r) weighted.weights[r] = entries[r].weight;
    all_reduce(*me.group, weighted, *tensors);
  };
  job.describe = [seed = what.seed] { return "seed " + std::to_string(seed); };
  job.participation = [name](const std::vector<int>&) { return Participation{"", 0, 0.0, name}; };
  return pending;
}

Pending submit(Rank& me, const std::string& name, const Reduction& what) {
  Pending pending = reduction_job(me, name, what);
  me.engine->submit(pending.job);
  return pending;
}

// Like PyJob::wait().
void await(Rank& me, const std::shared_ptr<Job>& job) {
  me.engine->begin_wait(job);
  while (!job->wait(0.05)) {
  }
  me.engine->end_wait(*job);
  me.engine->result(*job);
}

void await(Rank& me, const Pending& pending) {
  await(me, pending.job);
  check_result(pending.what, *pending.tensors, me.size, me.size);
}

// A blocking all-reduce, with the results that only the first n_with_data ranks' contributions give.
void call(Rank& me, const std::string& label, const Reduction& what, int n_with_data) {
  const Pending pending = reduction_job(me, label, what);
  me.engine->call(pending.job);
  check_result(pending.what, *pending.tensors, me.size, n_with_data);
}

void call(Rank& me, const std::string& label, const Reduction& what) { call(me, label, what, me.size); }

Reduction draw(unsigned seed, int n_ranks) {
  Random random(seed);
  return Reduction::draw(random, n_ranks, 20000);
}

void reduce_directly(Rank& me, Random& random) {
  const Reduction what = Reduction::draw(random, me.size, 3000);
  Tensors tensors(what, me.rank);
  me.direct.agree("a handshake", {});
  all_reduce(me.direct, what, tensors);
  check_result(what, tensors, me.size, me.size);
}

void end(Rank& me) {
  me.engine->drain();
  thrown_by<std::invalid_argument>([&] { submit(me, "late", draw(1, me.size)); });
  me.leave();
}

}  // namespace

// Three threads of every rank submit, each in its own order; the first makes handshakes of another group meanwhile.
void asynchronous(unsigned seed) {
  constexpr unsigned kThreads = 3, kNames = 4;
  for (int size = 1; size <= 3; ++size) {
    Host host(size);
    as_ranks(host, [&](Rank& me) {
      Random direct(seed);
      for (unsigned step = 0; step < 6; ++step) {
        std::latch submitted(kThreads);
        // The first thread waits only when all have submitted: names that are still missing would be a mismatch.
        const auto submit_and_wait = [&](unsigned thread) {
          Random own(seed + step * 100 + thread * 10 + static_cast<unsigned>(me.rank));
          std::vector<unsigned> names;
          for (unsigned i = 0; i < kNames; ++i) names.push_back(thread * kNames + i);
          std::shuffle(names.begin(), names.end(), own);
          std::vector<Pending> all;
          for (const unsigned name : names) {
            if (own() % 3 == 0) sleep_ms(static_cast<int>(own() % 3));
            all.push_back(submit(me, "gradient " + std::to_string(name), draw(seed + step * 100 + name, size)));
            if (thread == 0) reduce_directly(me, direct);
            all.front().job->done();
            expect(me.engine->n_in_flight() <= kThreads * kNames, "what is done is in flight no more");
          }
          submitted.arrive_and_wait();
          for (const Pending& pending : all) await(me, pending);
        };
        std::vector<std::jthread> others;
        for (unsigned thread = 1; thread < kThreads; ++thread) others.emplace_back(submit_and_wait, thread);
        submit_and_wait(0);
      }
      expect(me.engine->n_in_flight() == 0 && me.engine->n_failed() == 0, "all is done");
      // No thread waits for these; drain() completes them.
      for (unsigned i = 0; i < kNames; ++i) submit(me, std::to_string(i), draw(seed + i, size));
      end(me);
    });
  }
}

// Blocking calls of one thread, and asynchronous operations of others, which are submitted, awaited and withdrawn at
// any time; then another thread makes the calls.
void blocking_calls(unsigned seed) {
  constexpr unsigned kNames = 6;
  for (int size = 1; size <= 3; ++size) {
    Host host(size);
    as_ranks(host, [&](Rank& me) {
      Random steps(seed);
      for (unsigned step = 0; step < 6; ++step) {
        const unsigned base = seed + 100 * step;
        const unsigned n_calls = steps() % 8, first_name = steps() % kNames;
        const auto make_calls = [&] {
          Random own(base + static_cast<unsigned>(me.rank));
          for (unsigned i = 0; i < n_calls; ++i) {
            if (own() % 3 == 0) std::this_thread::sleep_for(std::chrono::microseconds(own() % 3000));
            call(me, "call " + std::to_string(i), draw(base + i, size));
          }
        };
        const auto submit_and_wait = [&] {
          Random own(base + 50 + static_cast<unsigned>(me.rank));
          std::vector<unsigned> names;
          for (unsigned i = first_name; i < kNames; ++i) names.push_back(i);
          std::shuffle(names.begin(), names.end(), own);
          std::vector<Pending> all;
          for (const unsigned name : names) {
            if (own() % 3 == 0) std::this_thread::sleep_for(std::chrono::microseconds(own() % 3000));
            all.push_back(submit(me, "gradient " + std::to_string(name), draw(base + 20 + name, size)));
          }
          return all;
        };
        if (step % 2 == 0) {
          std::vector<Pending> all;
          {
            const std::jthread other([&] { all = submit_and_wait(); });
            make_calls();
          }
          for (const Pending& pending : all) await(me, pending);
        } else {
          const std::jthread other(make_calls);
          for (const Pending& pending : submit_and_wait()) await(me, pending);
        }
        Pending withdrawn = submit(me, "withdrawn", draw(base, size));
        me.engine->withdraw(withdrawn.job);
        call(me, "all have withdrawn it", draw(base, size));
        while (!withdrawn.job->wait(0.05)) {
        }
        if (!withdrawn.job->is_withdrawn) check_result(withdrawn.what, *withdrawn.tensors, size, size);
      }
      expect(me.engine->n_in_flight() == 0 && me.engine->n_failed() == 0, "all is done");
      end(me);
    });
  }
}

// Blocking calls that differ, or that some ranks do not make while they wait for something else, fail on every rank.
void differing_calls(unsigned seed) {
  Host host(3);
  as_ranks(host, [&](Rank& me) {
    const bool is_odd = me.rank == static_cast<int>(seed % 3);
    for (int i = 0; i < 4; ++i) {
      const std::string differs = thrown_by<Mismatch>([&] { call(me, "differs", draw(seed + is_odd, me.size)); });
      expect(contains(differs, "differs differs: seed "), "both are described: " + differs);
      // One rank makes a call that the others do not make, or the other way round.
      const bool calls = is_odd == (i % 2 == 0);
      Pending pending;
      const std::string stuck = thrown_by<Mismatch>([&] {
        if (calls) return call(me, "barrier", draw(seed, me.size));
        pending = submit(me, "bucket", draw(seed, me.size));
        await(me, pending);
      });
      expect(contains(stuck, calls ? "barrier was called by" : "bucket was submitted by") &&
                 contains(stuck, calls ? "in bucket" : "in barrier"),
             "who makes which call: " + stuck);
      // Other threads' waits do not count, but that of the training thread does once it waits, too.
      const std::string other = thrown_by<Mismatch>([&] {
        std::jthread thread;
        if (calls) {
          thread = std::jthread([&] { thrown_by<Mismatch>([&] { call(me, "barrier", draw(seed, me.size)); }); });
          while (me.group->label() != "barrier") sleep_ms(1);
          sleep_ms(static_cast<int>(seed % 3) * 40);
        }
        pending = submit(me, "only of " + std::to_string(me.rank), draw(seed, me.size));
        await(me, pending);
      });
      expect(contains(other, "every rank is waiting"), "nobody waits for ever: " + other);
      call(me, "afterwards", draw(seed + 7, me.size));
    }
    const Pending raises = reduction_job(me, "raises", draw(seed, me.size));
    raises.job->run = [](const std::vector<Entry>&) {
      throw Recoverable{std::make_exception_ptr(std::out_of_range("on every rank alike"))};
    };
    thrown_by<std::out_of_range>([&] { me.engine->call(raises.job); });
    call(me, "afterwards", draw(seed + 8, me.size));
    end(me);
  });
}

// A rank that computes takes part in what others submit, and is not disturbed by blocking calls that it has not made.
void progress(unsigned seed) {
  Host host(3);
  std::latch others_wait(host.size - 1), computed(1);
  as_ranks(host, [&](Rank& me) {
    const bool computes = me.rank == static_cast<int>(seed % 3);
    call(me, "first", draw(seed, me.size));
    const Pending early = submit(me, "early", draw(seed + 1, me.size));
    if (computes) {
      while (!early.job->wait(0.05)) {
      }
      others_wait.wait();
      sleep_ms(20);  // so that they are in their call
      const uint32_t n_wake_ups = me.group->n_wake_ups();
      sleep_ms(150);
      expect(me.group->n_wake_ups() == n_wake_ups, "a call that waits wakes nobody");
      computed.count_down();
    } else {
      await(me, early);
      // Another thread submits and waits while the program is in its call.
      const std::jthread other([&] {
        computed.wait();
        sleep_ms(5);
        await(me, submit(me, "meanwhile", draw(seed + 2, me.size)));
      });
      others_wait.count_down();
      call(me, "late", draw(seed + 3, me.size));
      expect(early.job->done(), "it was done before");
    }
    if (computes) {
      await(me, submit(me, "meanwhile", draw(seed + 2, me.size)));
      call(me, "late", draw(seed + 3, me.size));
    }
    end(me);
  });
}

// A blocking call waits for the operation that runs, and not for all that every rank has submitted.
void priority(unsigned seed) {
  constexpr unsigned kNames = 30;
  Host host(3);
  std::latch call_begins(host.size);
  as_ranks(host, [&](Rank& me) {
    std::vector<Pending> all;
    for (unsigned i = 0; i < kNames; ++i) {
      all.push_back(reduction_job(me, "gradient " + std::to_string(i), draw(seed + i, me.size)));
      const auto& job = all.back().job;
      job->run = [&, run = job->run](const std::vector<Entry>& entries) {
        call_begins.wait();
        sleep_ms(2);
        run(entries);
      };
    }
    for (const Pending& pending : all) me.engine->submit(pending.job);
    call_begins.count_down();
    call(me, "urgent", draw(seed + 50, me.size));
    expect(!all.back().job->done(), "it is not the last");
    for (const Pending& pending : all) await(me, pending);
    end(me);
  });
}

// Errors on all ranks leave the engine usable.
void mismatches(unsigned seed) {
  Host host(3);
  as_ranks(host, [&](Rank& me) {
    const bool is_odd = me.rank == static_cast<int>(seed % 3);
    const Pending differs = submit(me, "differs", draw(seed + is_odd, me.size));
    expect(contains(thrown_by<Mismatch>([&] { await(me, differs); }), "seed "), "both are described");

    const Pending alone = submit(me, "only of " + std::to_string(me.rank), draw(seed, me.size));
    expect(contains(thrown_by<Mismatch>([&] { await(me, alone); }), "every rank is waiting"), "nobody waits for ever");
    expect(me.engine->n_failed() == 1, "that has happened once");

    Pending raises = reduction_job(me, "raises", draw(seed, me.size));
    raises.job->run = [](const std::vector<Entry>&) {
      throw Recoverable{std::make_exception_ptr(std::out_of_range("on every rank alike"))};
    };
    me.engine->submit(raises.job);
    thrown_by<std::out_of_range>([&] { await(me, raises); });

    const Pending twice = reduction_job(me, "twice", draw(seed, me.size));
    if (me.rank != 0) {
      me.engine->submit(twice.job);
      Pending same_memory = reduction_job(me, "another name", twice.what);
      same_memory.job->changes = twice.job->changes;
      if (!same_memory.job->changes.empty())
        thrown_by<std::invalid_argument>([&] { me.engine->submit(same_memory.job); });
      thrown_by<std::invalid_argument>([&] { submit(me, "twice", twice.what); });
    }
    me.direct.agree("all have tried", {});
    if (me.rank == 0) me.engine->submit(twice.job);
    await(me, twice);
    end(me);
  });
}

// Ranks join one after the other, and contribute zeros to operations of the others.
void joins(unsigned seed) {
  Host host(3);
  as_ranks(host, [&](Rank& me) {
    const auto reduction = [&](int i) {
      Reduction what = draw(seed + static_cast<unsigned>(i), me.size);
      if (what.op != Op::kSum) what = {Op::kSum, Wire::kFloat16, {DType::kFloat32}, {5000}, what.weights, what.seed};
      return what;
    };
    const auto n_calls = [&](int rank) { return 3 * (me.size - rank); };
    const auto n_with_data = [&](int i) {
      int n = me.size;
      while (n_calls(n - 1) <= i) --n;
      return n;
    };
    for (int i = 0; i < n_calls(me.rank); ++i) {
      const Pending pending = submit(me, std::to_string(i), reduction(i));
      await(me, pending.job);
      check_result(pending.what, *pending.tensors, me.size, n_with_data(i));
    }
    const auto join = [&] {
      const auto job = std::make_shared<Job>();
      job->entry.name = kJoin;
      job->stand_in = [&](const std::string& participation) {
        Pending part = reduction_job(me, participation, reduction(std::stoi(participation)));
        part.tensors->set_zero();
        me.engine->submit(part.job);
      };
      job->run = [](const std::vector<Entry>&) {};
      me.engine->call(job);
    };
    join();
    // The same with blocking calls.
    for (int i = 0; i < n_calls(me.rank); ++i) call(me, std::to_string(i), reduction(i), n_with_data(i));
    join();
    end(me);
  });
}

// The same with blocking calls.
void broken_calls(unsigned seed) {
  enum Way { kLeaves, kAbandons, kRaises, kIsInterrupted, kAnotherThreadLeaves, kNeverComes, kNWays };
  for (int way = 0; way < kNWays; ++way, ++seed) {
    Host host(3);
    as_ranks(host, [&](Rank& me) {
      const bool is_lost = me.rank == static_cast<int>(seed % 3);
      const std::string lost = "rank " + std::to_string(seed % 3);
      const Reduction what{Op::kSum, Wire::kNone, {DType::kFloat32}, {50000}, {1, 1, 1}, seed};
      Pending never;
      if (!is_lost && seed % 2 == 0) never = submit(me, "never", what);
      call(me, "first", what);
      const auto second = [&] { call(me, "second", what); };
      if (way == kNeverComes) me.detector->set_limits(0.1, 0.4);
      if (way == kAnotherThreadLeaves && !is_lost) sleep_ms(300);
      if (!is_lost && way == kNeverComes) {
        const std::string text = thrown_by<Stalled>(second);
        // On a busy machine the other one may be late, too.
        expect(contains(text, " did not arrive") && contains(text, lost + " was last in"), "who is late: " + text);
      } else if (!is_lost) {
        const std::string text = thrown_by<PeerLost>(second);
        expect(contains(text, lost), "who is lost: " + text);
        // The engine's thread may have noticed it before.
        expect(never.job != nullptr || contains(text, "waited in "), "where this rank was: " + text);
      } else if (way == kLeaves) {
        me.leave();
        return;
      } else if (way == kAbandons) {
        me.group->abandon("its program raised ValueError");
      } else if (way == kRaises) {
        const Pending raises = reduction_job(me, "second", what);
        raises.job->run = [&](const std::vector<Entry>&) { throw std::out_of_range("on this rank only"); };
        thrown_by<std::out_of_range>([&] { me.engine->call(raises.job); });
      } else if (way == kIsInterrupted) {
        sleep_ms(300);  // the others wait
        me.engine->on_idle = [] { throw std::domain_error("a signal"); };
        const Pending alone = reduction_job(me, "second", what);
        alone.job->run = [&](const std::vector<Entry>&) { me.group->agree("which the others are not in", {}); };
        thrown_by<std::domain_error>([&] { me.engine->call(alone.job); });
      } else if (way == kAnotherThreadLeaves) {
        const std::jthread other([&] {
          sleep_ms(100);
          me.leave();
        });
        expect(contains(thrown_by<PeerLost>(second), "has left"), "the reason is told");
        return;
      } else {
        thrown_by<Stalled>([&] {
          while (true) me.detector->check(), sleep_ms(5);
        });
        thrown_by<Stalled>(second);
      }
      const std::string after = thrown_by<PeerLost>(second);
      expect(contains(after, "can no longer be used"), "the group stays unusable: " + after);
      if (never.job != nullptr) {
        while (!never.job->wait(0.05)) {
        }
        expect(never.job->failed(), "what was in flight has failed");
      }
    });
  }
}

// One rank ends or fails while the others wait for it in their engines.
void broken_engines(unsigned seed) {
  enum Way { kLeaves, kAbandons, kRaises, kIsDestroyed, kNeverComes, kNWays };
  for (int way = 0; way < kNWays; ++way, ++seed) {
    Host host(3);
    as_ranks(host, [&](Rank& me) {
      const bool is_lost = me.rank == static_cast<int>(seed % 3);
      const Reduction what{Op::kSum, Wire::kNone, {DType::kFloat32}, {50000}, {1, 1, 1}, seed};
      await(me, submit(me, "first", what));
      const auto second = [&] { await(me, submit(me, "second", what)); };
      Pending never;
      if (!is_lost) never = submit(me, "never", what);
      me.direct.agree("that is in flight", {});
      if (way == kNeverComes) me.detector->set_limits(0.1, 0.4);  // not before: a busy machine may be as slow
      if (!is_lost) {
        if (way == kNeverComes) {
          thrown_by<Stalled>([&] { await(me, never.job); });
          thrown_by<Stalled>(second);
        } else {
          if (way == kRaises) thrown_by<PeerLost>(second);
          else thrown_by<PeerLost>([&] { await(me, never.job); });
          thrown_by<PeerLost>([&] {
            while (true) submit(me, "after that", what), sleep_ms(1);
          });
        }
        expect(never.job->failed(), "what was in flight has failed");
      } else if (way == kRaises) {
        Pending raises = reduction_job(me, "second", what);
        raises.job->run = [](const std::vector<Entry>&) { throw std::out_of_range("on this rank only"); };
        me.engine->submit(raises.job);
        thrown_by<std::out_of_range>([&] { await(me, raises.job); });
        thrown_by<PeerLost>(second);
      } else if (way == kAbandons) {
        me.group->abandon("its program raised ValueError");
      } else if (way == kNeverComes) {
        thrown_by<Stalled>([&] {
          while (true) me.detector->check(), sleep_ms(5);
        });
      } else {
        const Pending own = submit(me, "own", what);
        if (way == kIsDestroyed) me.engine.reset();
        me.leave();
      }
    });
  }
}

}  // namespace horo
