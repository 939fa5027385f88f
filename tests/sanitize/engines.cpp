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
    me.group->agree(entries[0].name, {});
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

Reduction draw(unsigned seed, int n_ranks) {
  Random random(seed);
  return Reduction::draw(random, n_ranks, 20000);
}

void reduce_directly(Rank& me, Random& random) {
  const Reduction what = Reduction::draw(random, me.size, 3000);
  Tensors tensors(what, me.rank);
  me.direct.agree("a direct call", {});
  all_reduce(me.direct, what, tensors);
  check_result(what, tensors, me.size, me.size);
}

void end(Rank& me) {
  me.engine->drain();
  thrown_by<std::invalid_argument>([&] { submit(me, "late", draw(1, me.size)); });
  me.leave();
}

}  // namespace

// Three threads of every rank submit, each in its own order; the first makes direct calls meanwhile.
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

// Each rank withdraws its submission, which then has run on every rank or on none.
void withdrawals(unsigned seed) {
  Host host(3);
  as_ranks(host, [&](Rank& me) {
    Random own(seed + static_cast<unsigned>(me.rank));
    for (unsigned i = 0; i < 40; ++i) {
      const Pending pending = submit(me, "bucket", draw(seed + i, me.size));
      std::this_thread::sleep_for(std::chrono::microseconds(own() % 400));
      me.engine->withdraw(pending.job);
      while (!pending.job->wait(0.05)) {
      }
      const bool has_run = !pending.job->is_withdrawn;
      if (has_run) check_result(pending.what, *pending.tensors, me.size, me.size);
      for (const Header& header : me.direct.agree("who has run it", {0, has_run, 0})) {
        expect((header.count != 0) == has_run, "it has run on every rank or on none");
      }
    }
    end(me);
  });
}

// A rank withdraws a submission that is about to end, when its peers have ended: they need not learn of it.
void late_withdrawals(unsigned seed) {
  for (unsigned i = 0; i < 5; ++i) {
    Host host(3);
    std::latch peers_have_ended(host.size - 1), is_withdrawn(1);
    as_ranks(host, [&](Rank& me) {
      const bool is_last = me.rank == static_cast<int>(seed % 3);
      const Pending pending = reduction_job(me, "bucket", draw(seed + i, me.size));
      pending.job->run = [&, run = pending.job->run](const std::vector<Entry>& entries) {
        run(entries);
        if (is_last) is_withdrawn.wait();
      };
      me.engine->submit(pending.job);
      if (is_last) {
        peers_have_ended.wait();
        me.engine->withdraw(pending.job);
        is_withdrawn.count_down();
      }
      await(me, pending);
      end(me);
      if (!is_last) peers_have_ended.count_down();
    });
  }
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
    for (int i = 0; i < n_calls(me.rank); ++i) {
      const Pending pending = submit(me, std::to_string(i), reduction(i));
      await(me, pending.job);
      int n_with_data = me.size;
      while (n_calls(n_with_data - 1) <= i) --n_with_data;
      check_result(pending.what, *pending.tensors, me.size, n_with_data);
    }
    const auto join = std::make_shared<Job>();
    join->entry.name = kJoin;
    join->stand_in = [&](const std::string& participation) {
      Pending part = reduction_job(me, participation, reduction(std::stoi(participation)));
      part.tensors->set_zero();
      me.engine->submit(part.job);
    };
    join->run = [](const std::vector<Entry>&) {};
    me.engine->submit(join);
    await(me, join);
    end(me);
  });
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
        raises.job->run = [&](const std::vector<Entry>&) {
          me.group->agree("second", {});
          throw std::out_of_range("on this rank only");
        };
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
