// ShmGroup: collectives, and ranks that are lost in the middle of them.
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <limits>

#include "ranks.h"

namespace horo {
namespace {

uint8_t byte_of(unsigned seed, int rank, size_t position) {
  return static_cast<uint8_t>(seed + 7 * static_cast<unsigned>(rank) + 31 * static_cast<unsigned>(position));
}

// Every rank receives some part of every other one's stream, in pieces.
void exchange(Rank& me, Random& random) {  // all ranks draw the same
  const unsigned seed = random();
  std::vector<size_t> sizes;
  for (int r = 0; r < me.size; ++r)
    sizes.push_back(random() % 3 == 0 ? 0 : random() % (random() % 4 == 0 ? 2000000 : 99));
  const auto pieces = [&](std::vector<uint8_t>& memory) {
    const size_t cut = memory.size() / 3;
    return std::vector<Buffer>{
        {memory.data(), cut}, {memory.data() + cut, 0}, {memory.data() + cut, memory.size() - cut}};
  };
  std::vector<uint8_t> mine(sizes[static_cast<size_t>(me.rank)]);
  for (size_t i = 0; i < mine.size(); ++i) mine[i] = byte_of(seed, me.rank, i);
  std::vector<Wanted> wanted;
  std::vector<std::vector<uint8_t>> got;
  for (int r = 0; r < me.size; ++r) {
    const size_t begin = sizes[static_cast<size_t>(r)] / 4;
    got.emplace_back(sizes[static_cast<size_t>(r)] - begin - begin / 2);
    if (r != me.rank) wanted.push_back({r, begin, pieces(got.back())});
  }
  me.direct.exchange(pieces(mine), sizes, wanted);
  for (const Wanted& part : wanted) {
    const std::vector<uint8_t>& bytes = got[static_cast<size_t>(part.source)];
    for (size_t i = 0; i < bytes.size(); ++i) {
      expect(bytes[i] == byte_of(seed, part.source, part.begin + i),
             "the bytes of rank " + std::to_string(part.source));
    }
  }
}

void in_place(Rank& me, Random& random) {
  const DType dtypes[] = {DType::kFloat16, DType::kFloat32, DType::kFloat64, DType::kBFloat16};
  Reduction what;
  what.op = kOps[random() % 2];
  what.draw_weights(random, me.size);
  for (size_t n_tensors = random() % 4; n_tensors > 0; --n_tensors) {
    what.dtypes.push_back(dtypes[random() % std::size(dtypes)]);
    what.sizes.push_back(random() % 2000);
  }
  Tensors tensors(what, me.rank, me.host.gradients.data() + static_cast<size_t>(me.rank) * Host::kGradientBytes);
  me.direct.agree("gradients", {});
  std::vector<ptrdiff_t> distances;
  for (int r = 0; r < me.size; ++r) distances.push_back((r - me.rank) * static_cast<ptrdiff_t>(Host::kGradientBytes));
  const Factor factor{1.0, what.op == Op::kAverage ? static_cast<double>(me.size) : 1.0};
  const size_t all = std::numeric_limits<size_t>::max();
  size_t first = 0, last = what.sizes.size();
  const bool is_divided = random() % 2 == 0;  // each rank gets the results of some tensors only
  if (is_divided) {
    last = first_of_part(what.sizes.size(), me.rank + 1, me.size);
    first = first_of_part(what.sizes.size(), me.rank, me.size);
  }
  const std::vector<TensorRef> mine(tensors.refs.begin() + static_cast<ptrdiff_t>(first),
                                    tensors.refs.begin() + static_cast<ptrdiff_t>(last));
  me.direct.reduce_in_place(Layout(mine, what.op, what.wire, all, is_divided ? 1 : me.size), distances, factor);
  check_result(what, tensors, me.size, me.size, first, last);
}

// Parts with the same dtypes on every rank, and of any sizes.
void reduce_scatter(Rank& me, Random& random, size_t most_elements) {
  Reduction what = Reduction::draw(random, me.size, most_elements);
  const size_t n = what.dtypes.size();
  for (size_t i = 0; i < n * static_cast<size_t>(me.size - 1); ++i) {
    what.dtypes.push_back(what.dtypes[i]);
    what.sizes.push_back(random() % 4 == 0 ? 0 : random() % (most_elements / 2));
  }
  const Tensors tensors(what, me.rank);
  const Tensors result(what, 0);  // this rank's part of it is written
  const size_t part = static_cast<size_t>(me.rank) * n;
  std::vector<TensorRef> refs = tensors.refs;
  for (size_t t = part; t < part + n; ++t) {
    refs[t].source = refs[t].address;
    refs[t].address = result.refs[t].address;
  }
  const Layout layout(parts_of(refs, me.size), what.op, what.wire, me.direct.chunk_bytes(tensors.total_bytes));
  const uint64_t before = tensors.hash();
  const Weighting weights = weighting(what.op, what.weights);
  me.direct.reduce_scatter(layout, weights.weights, {1.0, weights.divisor});
  expect(tensors.hash() == before, "what the parts are");
  check_result(what, result, me.size, me.size, part, part + n);
}

void one_collective(Rank& me, Random& random, size_t most_elements) {
  const uint64_t digest = random();
  const auto headers = me.direct.agree("operation " + std::to_string(digest), {digest, me.rank, 0.5});
  for (int r = 0; r < me.size; ++r) {
    const Header& header = headers[static_cast<size_t>(r)];
    expect(header.digest == digest && header.count == r && header.weight == 0.5, "the header of every rank");
  }
  const unsigned kind = random() % 5;
  if (kind == 0) return exchange(me, random);
  if (kind == 1) return in_place(me, random);
  if (kind == 2) return reduce_scatter(me, random, most_elements);
  const Reduction what = Reduction::draw(random, me.size, most_elements);
  Tensors tensors(what, me.rank);
  all_reduce(me.direct, what, tensors);
  check_result(what, tensors, me.size, me.size);
}

}  // namespace

void collectives(unsigned seed) {
  for (int size = 1; size <= 4; ++size) {
    Host host(size);
    as_ranks(host, [&](Rank& me) {
      // Called by other threads of a process meanwhile.
      const std::jthread spectator([&](std::stop_token stop) {
        while (!stop.stop_requested()) {
          me.direct.has_left(0);
          me.direct.peer_pids(true);
          me.direct.label();
          me.detector->lateness();
          sleep_ms(1);
        }
      });
      Random random(seed + static_cast<unsigned>(size));
      Random own(seed + static_cast<unsigned>(me.rank));
      for (int i = 0; i < 25; ++i) {
        me.direct.slot_stores = static_cast<SlotStores>(own() % 3);
        one_collective(me, random, i % 8 == 0 ? 70000 : 3000);
      }
      me.leave();
    });
  }
}

// Ranks arrive at any time; those without an answer continue without one.
void distances(unsigned seed) {
  for (int size = 2; size <= 4; ++size) {
    std::vector<Distance::Shared> shared(static_cast<size_t>(size));
    std::vector<Distance::Shared*> all;
    for (Distance::Shared& one : shared) all.push_back(&one);
    std::vector<std::jthread> threads;
    for (int r = 0; r < size; ++r) {
      threads.emplace_back([&, r] {
        Random random(seed + static_cast<unsigned>(r));
        Distance distance(all, r);
        // Long enough for all to be scheduled, by turns if need be: whether two threads run at the same time for 20 µs
        // depends on what else this machine does.
        distance.measure(std::chrono::minutes(1));
        expect(distance.round_trip_ns() > 0.0, "an answer within a minute");
        for (int i = 0; i < 60; ++i) {
          if (random() % 8 == 0) std::this_thread::yield();
          distance.measure();
          const double ns = distance.round_trip_ns();
          const bool is_far = shared[static_cast<size_t>(r)].is_far != 0;
          expect(is_far == (ns > 320.0), "who is far: " + std::to_string(ns) + " ns");
          expect(!(is_far && kCanStream) || distance.stores(SlotStores::kAuto) == Stores::kStreaming, "far: streaming");
          expect(distance.stores(SlotStores::kCached) == Stores::kCached, "what is wanted");
          expect(distance.stores(SlotStores::kStreaming) == Stores::kStreaming, "what is wanted");
        }
      });
    }
    threads.clear();
    Distance first(all, 0);
    const bool any_far = std::any_of(shared.begin(), shared.end(), [](const auto& one) { return one.is_far != 0; });
    expect((first.stores(SlotStores::kAuto) == Stores::kStreaming) == (any_far && kCanStream), "one that is far");
  }
}

namespace {

struct Interrupted : std::exception {};

enum class Loss { kAbandons, kLeaves, kLeftByAnotherThread, kIsInterrupted, kIsKilled, kStalls };

void lose(unsigned seed, Loss loss) {
  constexpr int kSize = 3;
  const int lost = static_cast<int>(seed % kSize);
  Host host(kSize);
  const pid_t child = loss == Loss::kIsKilled ? fork() : 0;
  if (child == 0 && loss == Loss::kIsKilled) {
    while (true) pause();
  }
  host.pids[static_cast<size_t>(lost)] = child;
  as_ranks(host, [&](Rank& me) {
    me.detector->set_limits(0.1, 0);
    Random random(seed);
    for (unsigned i = 0; i < seed % 5; ++i) one_collective(me, random, 3000);
    if (loss == Loss::kStalls) me.detector->set_limits(0.1, 1);  // not before: a busy machine may be as slow
    if (loss == Loss::kLeftByAnotherThread || loss == Loss::kIsInterrupted) {
      if (me.rank != lost) sleep_ms(300);  // so that the lost rank waits
    }
    const auto goes_on = [&] {
      while (true) one_collective(me, random, 3000);
    };
    if (me.rank != lost) {
      const std::string text = loss == Loss::kStalls ? thrown_by<Stalled>(goes_on) : thrown_by<PeerLost>(goes_on);
      const std::string name = "rank " + std::to_string(lost);
      expect(contains(text, name), "'" + text + "' names " + name);
      if (loss == Loss::kIsKilled) expect(contains(text, "killed by signal 9"), "'" + text + "' says how");
    } else if (loss == Loss::kAbandons) {
      me.direct.abandon("its program raised ValueError");
    } else if (loss == Loss::kLeaves) {
      me.direct.leave("its program has ended");
    } else if (loss == Loss::kLeftByAnotherThread) {
      const std::jthread other([&] {
        sleep_ms(100);
        me.direct.leave("shutdown() was called");
      });
      expect(contains(thrown_by<PeerLost>(goes_on), "shutdown() was called"), "the reason is told");
    } else if (loss == Loss::kIsInterrupted) {
      me.direct.on_idle = [] { throw Interrupted(); };
      thrown_by<Interrupted>(goes_on);
    } else if (loss == Loss::kIsKilled) {
      kill(child, SIGKILL);
      return;  // without a message
    } else {
      const auto waits = [&] {
        while (true) {
          sleep_ms(5);
          me.detector->check();
        }
      };
      expect(contains(thrown_by<Stalled>(waits), "did not arrive"), "the reason is told");
    }
    if (me.rank == lost && (loss == Loss::kLeaves || loss == Loss::kLeftByAnotherThread)) return;
    const auto once_more = [&] { me.direct.agree("one more", {}); };
    if (loss == Loss::kStalls && me.rank == lost) thrown_by<Stalled>(once_more);
    else expect(contains(thrown_by<PeerLost>(once_more), "can no longer be used"), "the group stays unusable");
  });
  if (child != 0) waitpid(child, nullptr, 0);
}

}  // namespace

void losses(unsigned seed) {
  for (const Loss loss : {Loss::kAbandons, Loss::kLeaves, Loss::kLeftByAnotherThread, Loss::kIsInterrupted,
                          Loss::kIsKilled, Loss::kStalls}) {
    lose(seed++, loss);
  }
}

}  // namespace horo
