// Explores the schedules of the engine (csrc/engine) on its transport (csrc/shm/shm_group.cpp): 2 or 3 ranks are
// threads under scheduler.h, their programs and their order follow from a seed, and what happens is compared with what
// would if each operation was atomic.
//
//   explored [n [seed]]          that many schedules; then, whether faults that are planted on purpose are found
//   explored --seed SEED [FAULT] one schedule; a finding prints its latest operations
#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <string_view>

#include "ranks.h"
#include "scheduler.h"

namespace horo {
namespace {

using schedule::Dice;

// Faults outside of the engine, each of which makes it look as if it had that error itself.
enum Fault {
  kNone,
  kLostWakeUp,        // a thread that sleeps is not woken
  kLostAtDrain,       // the engine's thread compares with the number of wake-ups when it goes to sleep, not before
  kMatchedTwice,      // an entry of one rank is announced again
  kMissedWithdrawal,  // by one rank
  kOtherOrder,        // one rank takes two entries in another order
  kFalseDeadlock,     // a call that waits for the driver counts as one that waits for the other ranks
  kEarlyReuse,        // the others read a joined rank's memory before it is ready
  kUnseenDeath,       // of a process
  kNFaults
};
constexpr const char* kFaults[] = {"none",           "lost-wake-up",      "lost-at-drain",
                                   "matched-twice",  "missed-withdrawal", "other-order",
                                   "false-deadlock", "early-reuse",       "unseen-death"};
Fault fault = kNone;

// How a rank ends before its program does, if one does.
enum Loss { kNobody, kLeaves, kAbandons, kRaises, kIsInterrupted, kDies, kNLosses };
constexpr const char* kReasons[] = {"", "has left", "raised ValueError", "on purpose", "", "died"};  // for the others

constexpr int kOperations = 16;  // of a step, at most
constexpr size_t kValues = 64;   // of an operation, at most

// The state shared by the ranks of one schedule.
struct World : Host {
  explicit World(Dice dice)
      : Host(dice.one_in(3) ? 3 : 2),
        base(dice()),
        n_steps(1 + static_cast<int>(dice() % 3)),
        loss(dice.one_in(3) ? static_cast<Loss>(1 + dice() % (kNLosses - 1)) : kNobody),
        victim(static_cast<int>(dice() % static_cast<uint64_t>(size))),
        lost_in(static_cast<int>(dice() % static_cast<uint64_t>(n_steps))),
        has_run(pids.size()),
        values(pids.size() * static_cast<size_t>(kOperations * (n_steps + 1)) * kValues, -1.0F) {
    for (int r = 0; r < size; ++r) pids[static_cast<size_t>(r)] = schedule::pid_of(r);
  }
  uint64_t base;
  int n_steps;
  Loss loss;
  int victim, lost_in;
  bool is_lost = false;
  int n_stuck = 0;                             // ranks in operations that do not match
  std::vector<std::vector<uint64_t>> has_run;  // operations by rank, in this order
  std::vector<float> values;                   // of each rank for each operation

  // Only in these cases do ranks look around every 50 ms: a peer's end wakes nobody; and that no rank can continue is
  // assumed only after some time.
  bool may_time_out() const { return has_lost() || n_stuck == size; }
  bool has_lost() const { return is_lost || (loss == kDies && schedule::has_ended(victim)); }
};

// The entries in a message of a round.
std::vector<std::string> entries_of(const std::string& message) {
  std::vector<std::string> entries;
  for (size_t at = 0; at < message.size();) {
    uint64_t n_name, is_withdrawal;
    std::memcpy(&n_name, message.data() + at, 8);
    std::memcpy(&is_withdrawal, message.data() + at + 8 + n_name, 8);
    entries.push_back(message.substr(at, 16 + n_name + (is_withdrawal != 0 ? 0 : 24)));
    at += entries.back().size();
  }
  return entries;
}

// What a rank's program is doing.
struct Doing {
  bool calls = false, drains = false;
};

class FaultyChannel : public ShmChannel {
 public:
  FaultyChannel(std::shared_ptr<ShmGroup> group, const Doing& doing)
      : ShmChannel(group), group_(std::move(group)), doing_(doing) {}
  std::vector<Header> agree(const std::string& label, const Header& mine, const Round* round) override {
    // The one after ranks that have joined have been told of an operation.
    if (fault == kEarlyReuse && round == nullptr && !is_round_) return std::vector<Header>(static_cast<size_t>(size()));
    is_round_ = round != nullptr;
    Header header = mine;
    if (fault == kFalseDeadlock && is_round_ && doing_.calls) header.flags |= kBlocked;
    return ShmChannel::agree(label, header, round);
  }
  std::vector<std::string> gather(const std::string& mine, const std::vector<Header>& headers) override {
    std::vector<std::string> all = ShmChannel::gather(mine, headers);
    if (!is_round_) return all;
    if (fault == kMatchedTwice && ++n_messages_ % 2 == 0) all[0] = former_ + all[0];
    if (fault == kMatchedTwice) former_ = all[0];
    for (int r = 0; r < size(); ++r) {
      std::vector<std::string> entries = entries_of(all[r]);
      if (fault == kMissedWithdrawal && rank() == 0 && r != 0) {
        std::erase_if(entries, [](const std::string& entry) { return entry[8 + static_cast<uint8_t>(entry[0])] != 0; });
      }
      if (fault == kOtherOrder && rank() == 0) std::reverse(entries.begin(), entries.end());
      all[r].clear();
      for (const std::string& entry : entries) all[r] += entry;
    }
    return all;
  }
  void wait(uint32_t n_wake_ups, double timeout_s) override {
    ShmChannel::wait(fault == kLostAtDrain && doing_.drains ? group_->n_wake_ups() : n_wake_ups, timeout_s);
  }

 private:
  std::shared_ptr<ShmGroup> group_;
  const Doing& doing_;
  bool is_round_ = false;  // the latest handshake
  int n_messages_ = 0;
  std::string former_;
};

struct Member {
  Member(World& of, int number)
      : world(of),
        rank(number),
        size(of.size),
        own{of.base + static_cast<uint64_t>(number) + 1},
        group(std::make_shared<ShmGroup>(of.asynchronous.data(), number, size, of.pids, of.names)) {
    const auto detector = std::make_shared<StallDetector>(of.board.data(), number, std::vector<int>(of.ranks.size(), 0),
                                                          of.pids, of.names);
    group->watched_by(detector, of.ranks);
    const auto explain = [](const std::string& name, const std::vector<std::string>&, const std::vector<int>&) {
      return name + " differs";
    };
    engine = std::make_unique<Engine>(std::make_unique<FaultyChannel>(group, doing), of.ranks, explain);
    engine->watched_by(detector);
    engine->on_idle = [this] {
      if (is_interrupted) world.is_lost = true, throw std::domain_error("a signal");
    };
  }
  bool is_lost_in(int step) const { return world.loss != kNobody && step == world.lost_in; }
  bool is_victim() const { return world.loss != kNobody && rank == world.victim; }
  std::vector<uint64_t>& has_run() const { return world.has_run[static_cast<size_t>(rank)]; }
  auto n_runs(uint64_t number) const { return std::count(has_run().begin(), has_run().end(), number); }
  // The same on all ranks.
  Dice common(int step) const { return {world.base * 31 + static_cast<uint64_t>(step)}; }

  World& world;
  int rank, size;
  Dice own;
  Doing doing;
  bool is_interrupted = false;
  int n_failed = 0;  // operations that did not match
  std::shared_ptr<ShmGroup> group;
  std::unique_ptr<Engine> engine;
};

// --- operations ---

struct Pending {
  uint64_t number;  // the same on all ranks
  float* values;
  std::shared_ptr<Job> job;
  std::string title() const { return "operation " + std::to_string(number) + ", " + job->title(); }
};

float value(uint64_t number, int rank, size_t i) {
  return static_cast<float>((1 << rank) + 8 * ((number * 7 + i) % 100));
}

// Adds up the ranks' values, in one of the ways in which operations use the transport.
void add_up(Member& me, uint64_t number, float* values) {
  Dice draw{me.world.base + number};
  const auto way = draw() % 4;
  const size_t n_chunks = 1 + draw() % 9;
  if (way == 0) {  // in place, in memory of all ranks
    const auto apart = static_cast<ptrdiff_t>(me.world.values.size() / static_cast<size_t>(me.size) * sizeof(float));
    std::vector<ptrdiff_t> distances;
    for (int r = 0; r < me.size; ++r) distances.push_back((r - me.rank) * apart);
    const Layout layout({{values, kValues, DType::kFloat32}}, Op::kSum, Wire::kNone, SIZE_MAX, me.size);
    me.group->reduce_in_place(layout, distances, {});
  } else if (way == 1) {
    std::vector<std::vector<float>> all(static_cast<size_t>(me.size), std::vector<float>(kValues));
    std::vector<Wanted> wanted;
    const auto bytes = [](float* at) { return Buffer{reinterpret_cast<uint8_t*>(at), kValues * sizeof(float)}; };
    for (int r = 0; r < me.size; ++r) wanted.push_back({r, 0, {bytes(all[r].data())}});
    wanted.erase(wanted.begin() + me.rank);
    me.group->exchange({bytes(values)}, std::vector<size_t>(all.size(), kValues * sizeof(float)), wanted);
    for (const std::vector<float>& theirs : all) {
      for (size_t i = 0; i < kValues; ++i) values[i] += theirs[i];
    }
  } else {  // in chunks of one or a few tensors
    std::vector<TensorRef> tensors;
    const size_t n = kValues / (n_chunks * static_cast<size_t>(me.size));
    for (size_t at = 0; at < kValues; at += tensors.back().n_elements) {
      tensors.push_back({values + at, std::min<size_t>(1 + draw() % (2 * n), kValues - at), DType::kFloat32});
    }
    const Layout layout(tensors, Op::kSum, Wire::kNone, n * sizeof(float) * static_cast<size_t>(me.size), me.size);
    me.group->allreduce(layout, std::vector<double>(static_cast<size_t>(me.size), 1.0), {});
  }
}

// `number` is less than kOperations, and that of an operation of this step.
Pending job_of(Member& me, const std::string& name, int step, int number_in_step, bool is_zero = false) {
  const auto number = static_cast<uint64_t>(step * kOperations + number_in_step);
  Pending pending{number, nullptr, std::make_shared<Job>()};
  const size_t share = me.world.values.size() / static_cast<size_t>(me.size);
  pending.values = me.world.values.data() + static_cast<size_t>(me.rank) * share + number * kValues;
  for (size_t i = 0; i < kValues; ++i) pending.values[i] = is_zero ? 0.0F : value(number, me.rank, i);
  Job& job = *pending.job;
  job.entry.name = name;
  job.entry.digest = number;
  const auto begin = reinterpret_cast<uintptr_t>(pending.values);
  job.changes.emplace_back(begin, begin + kValues * sizeof(float));
  job.run = [&me, number, values = pending.values](const std::vector<Entry>& entries) {
    expect(std::all_of(entries.begin(), entries.end(), [&](const Entry& e) { return e.digest == number; }),
           "entries of other operations were matched with operation " + std::to_string(number));
    me.has_run().push_back(number);
    if (Dice{me.world.base ^ number}.one_in(8)) schedule::take_time();
    add_up(me, number, values);
  };
  job.describe = [] { return ""; };
  job.participation = [number](const std::vector<int>&) { return Participation{"", 0, 1.0, std::to_string(number)}; };
  return pending;
}

Pending submit(Member& me, const std::string& name, int step, int number) {
  Pending pending = job_of(me, name, step, number);
  me.engine->submit(pending.job);
  return pending;
}

// With contributions of the first `n_with_data` ranks.
void check(Member& me, const Pending& pending, int n_with_data) {
  for (size_t i = 0; i < kValues; ++i) {
    float sum = 0;
    for (int r = 0; r < n_with_data; ++r) sum += value(pending.number, r, i);
    expect(pending.values[i] == sum, "a wrong result of " + pending.title() + " on rank " + std::to_string(me.rank));
  }
  expect(me.n_runs(pending.number) == 1, pending.title() + " has run once");
}

// Until it is done, without counting as a wait.
void poll(const Pending& pending) {
  while (!pending.job->wait(0.05)) {
  }
}

enum How { kHere, kBeside, kPolls };

void await(Member& me, const Pending& pending, int n_with_data, How how = kHere) {
  if (how != kPolls) me.engine->begin_wait(pending.job, how == kBeside);
  poll(pending);
  if (how != kPolls) me.engine->end_wait(*pending.job);
  me.engine->result(*pending.job);
  check(me, pending, n_with_data);
}

void call(Member& me, const Pending& pending) {
  const struct Calling {
    explicit Calling(bool& is) : is_so(is) { is_so = true; }
    ~Calling() { is_so = false; }
    bool& is_so;
  } calling(me.doing.calls);
  me.engine->call(pending.job);
}

void call(Member& me, const std::string& name, int step, int number, int n_with_data) {
  const Pending pending = job_of(me, name, step, number);
  call(me, pending);
  check(me, pending, n_with_data);
}

void call_or_submit(Member& me, const Pending& pending, bool is_call) {
  if (is_call) return call(me, pending);
  me.engine->submit(pending.job);
  await(me, pending, me.size);
}

// Runs beside the program's own thread, which waits for it at the end of the scope.
std::jthread beside(Member& me, std::function<void()> body) {
  return std::jthread([&me, body = std::move(body)] {
    try {
      body();
    } catch (const PeerLost& lost) {
      expect(me.world.may_time_out(), std::string("nobody is lost, but: ") + lost.what());
    } catch (const std::domain_error&) {
      expect(me.is_interrupted, "nobody was interrupted");
    }
  });
}

// --- the steps of a program; each rank has completed its operations at the end of a step ---

// Blocking calls, and asynchronous operations of several threads, which may wait for them once they have submitted all
// that the others can wait for.
void various(Member& me, int step) {
  Dice common = me.common(step);
  const auto n_segments = static_cast<int>(1 + common() % 2);
  const uint64_t n_beside = common() % 3;
  const bool calls_beside = n_beside != 0 && common.one_in(3);
  int number = 0;
  const auto make_call = [&me, step](int n) { call(me, "call", step, n, me.size); };
  std::vector<std::jthread> others;
  for (uint64_t thread = 0; thread < n_beside; ++thread) {
    const bool makes_calls = thread == 0 && calls_beside;
    const auto n = static_cast<int>(1 + common() % 2);
    const How how = thread == 0 ? kBeside : common.one_in(2) ? kHere : kPolls;
    others.push_back(beside(me, [=, &me, first = number, own = Dice{me.own()}]() mutable {
      std::vector<Pending> all;
      std::vector<int> order;
      for (int i = first; i < first + n; ++i) order.push_back(i);
      if (makes_calls) {
        for (const int i : order) make_call(i);
        return;
      }
      std::shuffle(order.begin(), order.end(), own);
      for (const int i : order) all.push_back(submit(me, "beside " + std::to_string(i), step, i));
      std::sort(all.begin(), all.end(), [](const Pending& a, const Pending& b) { return a.number < b.number; });
      for (const Pending& pending : all) await(me, pending, me.size, how);
    }));
    number += n;
  }
  std::vector<Pending> pending;
  int n_gradients = 0;
  for (int segment = 0; segment < n_segments; ++segment) {
    if (me.own.one_in(4)) others.clear();  // waits for them
    std::vector<int> order;
    const int first = number;
    for (auto n = static_cast<int>(common() % 4); n > 0; --n) order.push_back(number++);
    std::shuffle(order.begin(), order.end(), me.own);
    // The names, not the numbers, are those of other steps.
    for (const int i : order) {
      pending.push_back(submit(me, "gradient " + std::to_string(n_gradients + i - first), step, i));
    }
    n_gradients += number - first;
    std::shuffle(pending.begin(), pending.end(), me.own);
    for (auto n = me.own() % (pending.size() + 1); n > 0; --n) {
      await(me, pending.back(), me.size);
      pending.pop_back();
    }
    if (!calls_beside) make_call(number++);
  }
  for (const Pending& each : pending) await(me, each, me.size);
}

// One rank's arguments differ.
void differing(Member& me, int step) {
  Dice common = me.common(step);
  const bool is_odd = me.rank == static_cast<int>(common() % static_cast<uint64_t>(me.size));
  const Pending differs = job_of(me, "differs", step, is_odd);
  const bool is_call = common.one_in(2);
  thrown_by<Mismatch>([&] { call_or_submit(me, differs, is_call); });
}

// Ranks wait for operations that not all of them submit.
void stuck(Member& me, int step) {
  Dice common = me.common(step);
  const int odd = static_cast<int>(common() % static_cast<uint64_t>(me.size));
  const uint64_t way = common() % 4;
  const bool calls = way < 2 && (me.rank == odd) == (way == 0);
  const std::string name = way >= 2 ? "only of " + std::to_string(me.rank) : "bucket";
  // Of these, some may still have to be run when all ranks wait.
  std::vector<Pending> all_submit;
  for (auto n = common() % 3; n > 0; --n) {
    all_submit.push_back(submit(me, "all " + std::to_string(n), step, static_cast<int>(n) + 1));
  }
  ++me.world.n_stuck;
  ++me.n_failed;
  if (way == 3) {  // only threads beside the program wait, and a call that has not been made by all stays
    std::jthread other = beside(me, [&] {
      thrown_by<Mismatch>([&] { await(me, submit(me, name, step, 1), me.size, kBeside); });
      --me.world.n_stuck;
    });
    if (me.rank != odd) other.join();
    call(me, "barrier", step, 0, me.size);
    for (const Pending& each : all_submit) await(me, each, me.size);
    return;
  }
  const std::string text = thrown_by<Mismatch>([&] {
    if (calls) return call(me, "barrier", step, 0, me.size);
    await(me, submit(me, name, step, 1), me.size);
  });
  --me.world.n_stuck;
  expect(contains(text, (calls ? "barrier was called by" : name + " was submitted by")),
         "who makes which call: " + text);
  for (const Pending& each : all_submit) await(me, each, me.size);
}

// An operation that fails on all ranks, or only on the one that is to be lost.
void raising(Member& me, int step) {
  const bool on_all = !(me.world.loss == kRaises && me.is_lost_in(step)), is_call = me.common(step).one_in(2);
  const Pending raises = job_of(me, "raises", step, 0);
  if (!on_all && !me.is_victim()) return call_or_submit(me, raises, is_call);
  raises.job->run = [on_all](const std::vector<Entry>&) {
    const std::out_of_range error("on purpose");
    if (!on_all) throw error;
    throw Recoverable{std::make_exception_ptr(error)};
  };
  if (!on_all) me.world.is_lost = true;
  thrown_by<std::out_of_range>([&] { call_or_submit(me, raises, is_call); });
}

// All ranks withdraw what they have submitted, at any time; some, if others need it, submit it once more.
void withdrawing(Member& me, int step) {
  Dice common = me.common(step);
  const uint64_t who = 1 + common() % ((1 << me.size) - 1);
  const bool again = common.one_in(2);
  const bool withdraws = !again || (who >> me.rank & 1) != 0;
  const auto n_calls = static_cast<int>(common() % 3);
  const auto withdraw_after = static_cast<int>(me.own() % static_cast<uint64_t>(n_calls + 1));
  Pending pending = submit(me, "bucket", step, 0);
  for (int i = 0; i <= n_calls; ++i) {
    if (i != 0) call(me, "call", step, i, me.size);
    if (withdraws && i == withdraw_after) me.engine->withdraw(pending.job);
  }
  if (withdraws) poll(pending);
  if (!pending.job->is_withdrawn) await(me, pending, me.size);
  else expect(me.n_runs(pending.number) == 0, "what is withdrawn does not run");
  if (pending.job->is_withdrawn && again) await(me, submit(me, "bucket", step, 0), me.size);
  // A withdrawal ends only while no rank has left.
  if (!again) call(me, "all have withdrawn it", step, n_calls + 1, me.size);
}

// Ranks join one after the other, and contribute zeros to operations of the others.
void joining(Member& me, int step) {
  Dice common = me.common(step);
  std::vector<int> n_operations;
  for (int r = 0; r < me.size; ++r) n_operations.push_back(static_cast<int>(common() % 4));
  std::sort(n_operations.rbegin(), n_operations.rend());
  std::vector<std::pair<Pending, int>> pending;
  for (int i = 0; i < n_operations[static_cast<size_t>(me.rank)]; ++i) {
    int n_with_data = 0;
    while (n_with_data < me.size && n_operations[static_cast<size_t>(n_with_data)] > i) ++n_with_data;
    const uint64_t how = me.common(step * kOperations + i)() % 3;
    if (how == 0) {
      call(me, "call", step, i, n_with_data);
    } else {
      pending.emplace_back(submit(me, "gradient " + std::to_string(i), step, i), n_with_data);
      if (how == 1) await(me, pending.back().first, n_with_data), pending.pop_back();
    }
  }
  const auto await_all = [&] {
    for (const auto& [each, n_with_data] : pending) await(me, each, n_with_data);
    pending.clear();
  };
  if (me.own.one_in(2)) await_all();
  const auto join = std::make_shared<Job>();
  join->entry.name = kJoin;
  join->stand_in = [&](const std::string& number) {
    me.engine->submit(job_of(me, "zeros", 0, std::stoi(number), true).job);
  };
  join->run = [](const std::vector<Entry>&) {};
  call(me, {0, nullptr, join});
  await_all();
}

// Returns whether the program of the rank that is to be lost goes on.
bool be_lost(Member& me) {
  if (me.world.loss == kLeaves || me.world.loss == kAbandons) me.world.is_lost = true;
  if (me.world.loss == kLeaves) me.group->leave("its program has ended");
  if (me.world.loss == kAbandons) me.group->abandon("its program raised ValueError");
  if (me.world.loss == kIsInterrupted) me.is_interrupted = true;
  return me.world.loss != kLeaves;
}

void (*const kSteps[])(Member&, int) = {various, various,     various,     differing, stuck,
                                        raising, withdrawing, withdrawing, joining,   joining};

void program(Member& me) {
  for (int step = 0; step < me.world.n_steps; ++step) {
    if (me.is_victim() && me.is_lost_in(step) && !be_lost(me)) return;
    if (me.world.loss == kRaises && me.is_lost_in(step)) raising(me, step);
    else kSteps[me.common(-step - 1)() % std::size(kSteps)](me, step);
    // A thread beside this one that has learned of a loss leaves the rest to the engine, which is about to fail it.
    expect(me.engine->n_in_flight() == 0 || me.world.has_lost(), "all is done");
  }
  expect(me.engine->n_failed() == static_cast<uint64_t>(me.n_failed),
         "n_failed() is " + std::to_string(me.engine->n_failed()) + ", and not " + std::to_string(me.n_failed));
  // drain() completes what no thread waits for.
  std::vector<int> order(me.common(-100)() % 3);
  for (size_t i = 0; i < order.size(); ++i) order[i] = static_cast<int>(i);
  std::shuffle(order.begin(), order.end(), me.own);
  std::vector<Pending> all;
  for (const int i : order) all.push_back(submit(me, "last " + std::to_string(i), me.world.n_steps, i));
  // While it runs, it is too late; and the others may have left before they could learn of it.
  for (const Pending& each : all) {
    if (me.n_runs(each.number) != 0) me.engine->withdraw(each.job);
  }
  me.doing.drains = true;
  me.engine->drain();
  for (const Pending& pending : all) {
    expect(pending.job->done(), "drain() completes " + pending.title());
    me.engine->result(*pending.job);
    check(me, pending, me.size);
  }
  thrown_by<std::invalid_argument>([&] { submit(me, "late", me.world.n_steps, 4); });
}

void rank_of(World& world, int rank) {
  schedule::set_rank(rank);
  {
    Member me(world, rank);
    if (me.is_victim() && world.loss == kDies) schedule::kill_after(rank, me.own() % (1 << me.own() % 12));
    try {
      program(me);
    } catch (const std::domain_error& error) {
      expect(me.is_interrupted, error.what());
    } catch (const PeerLost& lost) {
      expect(world.may_time_out(), std::string("nobody is lost, but: ") + lost.what());
      expect(me.is_victim() || (contains(lost.what(), world.names[static_cast<size_t>(world.victim)]) &&
                                contains(lost.what(), kReasons[world.loss])),
             std::string("who is lost, and why: ") + lost.what());
      if (!me.is_interrupted) thrown_by<PeerLost>([&] { call(me, "afterwards", world.n_steps, 5, me.size); });
    } catch (const std::exception& error) {
      expect(false, std::string("a rank raised ") + error.what());
    }
    try {
      me.engine->drain();
    } catch (const std::exception&) {  // again
    }
    me.group->leave("its program has ended");
  }
  schedule::end_process(rank);
}

void explore(uint64_t seed) {
  alarm(60);
  check_seed = static_cast<unsigned>(seed);
  if (fault == kLostWakeUp) schedule::drop_wake_up = 1 + seed % 16;
  schedule::hides_ends = fault == kUnseenDeath;
  schedule::run(seed, [seed] {
    World world({seed ^ 0x5EED});
    schedule::may_time_out = [&world] { return world.may_time_out(); };
    {
      std::vector<std::jthread> ranks;
      for (int r = 0; r < world.size; ++r) ranks.emplace_back([&world, r] { rank_of(world, r); });
    }
    // The same on all ranks, as far as they came.
    for (const std::vector<uint64_t>& has_run : world.has_run) {
      const std::vector<uint64_t>& first = world.has_run[0];
      const auto n = static_cast<ptrdiff_t>(std::min(has_run.size(), first.size()));
      expect(std::equal(first.begin(), first.begin() + n, has_run.begin()), "the same order on all ranks");
      expect(has_run.size() == first.size() || world.loss != kNobody, "the same operations on all ranks");
    }
  });
}

schedule::Totals explore_all(uint64_t first, uint64_t n) {
  schedule::totals = {};
  for (uint64_t i = 0; i < n; ++i) explore(first + i);
  return schedule::totals;
}

// Returns the number of schedules until this fault is found, in a process of its own; 0: it is not.
uint64_t n_until_found(Fault planted, uint64_t first, uint64_t at_most) {
  void* shared = mmap(nullptr, sizeof(uint64_t), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  auto* n = static_cast<uint64_t*>(shared);
  const pid_t child = fork();
  if (child == 0) {
    fault = planted;
    schedule::is_quiet = true;
    if (std::freopen("/dev/null", "w", stderr) == nullptr) _exit(0);
    for (*n = 1; *n <= at_most; ++*n) explore(first + *n - 1);
    _exit(0);
  }
  int status = 0;
  waitpid(child, &status, 0);
  return WIFEXITED(status) && WEXITSTATUS(status) == schedule::kFound ? *n : 0;
}

}  // namespace
}  // namespace horo

int main(int argc, char** argv) {
  using namespace horo;
  cpu_set_t one;  // changing the core would take most of the time
  CPU_ZERO(&one);
  CPU_SET(static_cast<size_t>(sched_getcpu()), &one);
  sched_setaffinity(0, sizeof(one), &one);
  for (const int number : {SIGSEGV, SIGABRT, SIGALRM, SIGFPE, SIGBUS}) {
    ::signal(number, [](int signal) { schedule::finding(std::string("a crash: ") + strsignal(signal)); });
  }
  check_name = "schedule";
  explore(0);  // initializes static variables, so that later schedules are the same in every process
  if (argc > 2 && std::string(argv[1]) == "--seed") {
    if (argc > 3) fault = static_cast<Fault>(std::find(kFaults, kFaults + kNFaults, std::string(argv[3])) - kFaults);
    std::printf("no finding in %lu operations\n", explore_all(std::strtoull(argv[2], nullptr, 10), 1).operations);
    return 0;
  }
  const uint64_t n = argc > 1 ? std::strtoull(argv[1], nullptr, 10) : 1000;
  const uint64_t first = argc > 2 ? std::strtoull(argv[2], nullptr, 10) : 1;
  expect(explore_all(first, 100).hash == explore_all(first, 100).hash, "what happens follows from the seed");
  const auto begin = static_cast<double>(clock());
  const schedule::Totals all = explore_all(first, n);
  std::printf("%lu schedules in %.1f s, each with %lu operations and %lu switches of %lu threads\n", n,
              (static_cast<double>(clock()) - begin) / CLOCKS_PER_SEC, all.operations / n, all.switches / n,
              all.threads / n);
  bool all_found = true;
  for (int planted = 1; planted < kNFaults; ++planted) {
    const uint64_t found = n_until_found(static_cast<Fault>(planted), first, 5000);
    if (found == 0) std::printf("planted: %s: NOT FOUND\n", kFaults[planted]);
    else std::printf("planted: %s: found after %lu, by seed %lu\n", kFaults[planted], found, first + found - 1);
    all_found = all_found && found != 0;
  }
  return all_found ? 0 : 1;
}
