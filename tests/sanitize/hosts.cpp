// HostsAllreduce, HostsBroadcast, HostsGroup and engines: ranks of several hosts as threads, with delayed messages.
#include "hosts/hosts_allreduce.h"

#include <algorithm>
#include <chrono>
#include <deque>
#include <latch>
#include <map>
#include <mutex>
#include <thread>
#include <tuple>
#include <utility>

#include "engine/hosts_channel.h"
#include "hosts/hosts_group.h"
#include "ranks.h"

namespace horo {
namespace {

// Copies a message some time after both sides have posted it, at random: the memory is read and written late.
class Network {
 public:
  explicit Network(unsigned seed) : random_(seed) {}

  class Endpoint : public Carrier {
   public:
    Endpoint(Network& network, int rank, int n_ranks) : network_(network), rank_(rank), n_ranks_(n_ranks) {}
    std::unique_ptr<Transfer> begin(const std::vector<Message>& receive, const std::vector<Message>& send) override {
      auto transfer = std::make_unique<Waiting>(network_);
      const std::lock_guard lock(network_.mutex_);
      for (const Message& m : receive) network_.add({m.peer, rank_, m.tag}, &Way::awaited, m, *transfer);
      for (const Message& m : send) network_.add({rank_, m.peer, m.tag}, &Way::sent, m, *transfer);
      return transfer;
    }
    std::unique_ptr<Transfer> allgather(const uint8_t* mine, size_t n_bytes, uint8_t* everyone) override {
      constexpr int kTag = 0;
      std::vector<Message> receive, send;
      for (int r = 0; r < n_ranks_; ++r) {
        uint8_t* theirs = everyone + static_cast<size_t>(r) * n_bytes;
        if (r == rank_) std::memcpy(theirs, mine, n_bytes);
        else receive.push_back({r, kTag, theirs, n_bytes});
        if (r != rank_) send.push_back({r, kTag, const_cast<uint8_t*>(mine), n_bytes});
      }
      return begin(receive, send);
    }

   private:
    Network& network_;
    int rank_, n_ranks_;
  };

  // Short messages, which arrive immediately.
  class Notes : public ControlChannel {
   public:
    Notes(Network& network, int channel, int rank) : network_(network), channel_(channel), rank_(rank) {}
    void send(const std::map<int, std::string>& texts, int tag) override {
      const std::lock_guard lock(network_.mutex_);
      for (const auto& [peer, text] : texts) network_.notes_[{channel_, peer}].push_back({rank_, tag, text});
    }
    std::vector<ShortMessage> receive() override {
      const std::lock_guard lock(network_.mutex_);
      return std::exchange(network_.notes_[{channel_, rank_}], {});
    }

   private:
    Network& network_;
    int channel_, rank_;
  };

 private:
  struct Item {
    Message message;
    std::shared_ptr<int> left;  // messages of its transfer that are not done
  };
  struct Way {
    std::deque<Item> sent, awaited;
  };
  struct Waiting : Transfer {
    explicit Waiting(Network& network) : network(network) {}
    bool done() override {
      const std::lock_guard lock(network.mutex_);
      network.deliver();
      return *left == 0;
    }
    Network& network;
    std::shared_ptr<int> left = std::make_shared<int>(0);
  };

  void add(std::tuple<int, int, int> way, std::deque<Item> Way::* side, const Message& message, Waiting& transfer) {
    ++*transfer.left;
    (ways_[way].*side).push_back({message, transfer.left});
  }
  void deliver() {
    for (auto& [_, way] : ways_) {
      while (!way.sent.empty() && !way.awaited.empty() && random_() % 3 == 0) {
        const Item from = way.sent.front();
        const Item to = way.awaited.front();
        expect(from.message.n_bytes == to.message.n_bytes, "both sides know a message's size");
        std::memcpy(to.message.data, from.message.data, from.message.n_bytes);
        --*from.left;
        --*to.left;
        way.sent.pop_front();
        way.awaited.pop_front();
      }
    }
  }

  std::mutex mutex_;
  Random random_;
  std::map<std::tuple<int, int, int>, Way> ways_;
  std::map<std::pair<int, int>, std::vector<ShortMessage>> notes_;  // by channel and receiver
};

void reduce_among(unsigned seed, const std::vector<int>& sizes) {
  Random drawn(seed);
  Network network(seed);
  Hosts hosts{{}, 0};
  std::vector<std::unique_ptr<Host>> groups;
  std::vector<std::vector<uint8_t>> memory;
  int n_ranks = 0;
  for (const int size : sizes) {
    hosts.ranks.emplace_back();
    for (int i = 0; i < size; ++i) hosts.ranks.back().push_back(n_ranks++);
    groups.push_back(std::make_unique<Host>(size));
  }
  for (hosts.here = 0; hosts.here < hosts.size(); ++hosts.here) memory.emplace_back(hosts.memory_bytes());
  std::vector<Reduction> all;
  for (int i = 0; i < 4; ++i) {
    all.push_back(Reduction::draw(drawn, n_ranks, i == 0 ? 1500000 : 3000));
    all.back().wire = Wire::kBetweenHosts;
    all.back().op = kOps[i % 2];
    // For floats, those whose sums are rounded as little as the oracle allows.
    for (DType& dtype : all.back().dtypes) dtype = drawn() % 2 == 0 ? DType::kFloat32 : DType::kInt64;
  }
  std::vector<uint64_t> hashes(all.size() * static_cast<size_t>(n_ranks));
  std::vector<std::jthread> threads;
  for (size_t h = 0; h < sizes.size(); ++h) {
    threads.emplace_back([&, h] {
      as_ranks(*groups[h], [&](Rank& me) {
        Hosts mine = hosts;
        mine.here = static_cast<int>(h);
        const int number = mine.ranks[h][static_cast<size_t>(me.rank)];
        HostsAllreduce among(me.direct, std::make_shared<Network::Endpoint>(network, number, n_ranks), mine,
                             memory[h].data());
        HostsBroadcast spread(me.direct, std::make_shared<Network::Endpoint>(network, number, n_ranks), mine,
                              memory[h].data());
        for (size_t i = 0; i < all.size(); ++i) {
          const Reduction& what = all[i];
          Tensors tensors(what, number);
          const Layout layout(tensors.refs, what.op, what.wire, mine.window_bytes(), mine.n_shares());
          const Factor factor = {1.0, is_average(what.op) ? n_ranks : 1.0};
          among.allreduce(layout, {}, factor, "operation");
          hashes[i * static_cast<size_t>(n_ranks) + static_cast<size_t>(number)] = tensors.hash();
          if (number == 0) check_result(what, tensors, n_ranks, n_ranks);
          const Tensors alike(what, number);
          const int root = static_cast<int>(i) % n_ranks;
          spread.broadcast(alike.buffers(), root, "operation", {});
          expect(alike.hash() == Tensors(what, root).hash(), "the bits of the root");
          const Tensors scattered(what, number);
          const auto parts = parts_of(scattered.refs, n_ranks);
          among.reduce_scatter(Layout(mine.shares(parts), what.op, what.wire, mine.window_bytes()), {}, factor,
                               "operation");
          const size_t end = first_of_part(what.sizes.size(), number + 1, n_ranks);
          for (size_t t = first_of_part(what.sizes.size(), number, n_ranks); t < end; ++t) {
            const size_t n_bytes = what.sizes[t] * item_bytes(what.dtypes[t]);
            expect(std::memcmp(scattered.at(t, 0), tensors.at(t, 0), n_bytes) == 0, "the bits of an all-reduce");
          }
          for (const Wire wire : {Wire::kInt8, Wire::kInt4}) {  // only that all ranks have the same bits
            Tensors rounded(what, number);
            std::vector<std::unique_ptr<float[]>> residuals;
            for (TensorRef& ref : rounded.refs) {
              residuals.push_back(std::make_unique<float[]>(ref.n_elements));
              ref.residual = residuals.back().get();
            }
            const Layout quantized(rounded.refs, what.op, wire, mine.window_bytes(), mine.n_shares());
            among.allreduce(quantized, {}, factor, "operation");
            uint64_t& hash = hashes[i * static_cast<size_t>(n_ranks) + static_cast<size_t>(number)];
            hash = hash * 31 + rounded.hash();
          }
        }
        me.leave();
      });
    });
  }
  threads.clear();
  for (size_t i = 0; i < hashes.size(); ++i) {
    expect(hashes[i] == hashes[i - i % static_cast<size_t>(n_ranks)], "all ranks have the same bits");
  }
}

// The state shared by the ranks of one host.
struct HostMemory {
  HostMemory(const Hosts& hosts, int n_ranks, int here)
      : size(static_cast<int>(hosts.ranks[static_cast<size_t>(here)].size())),
        direct(Segment::local(ShmGroup::memory_bytes(size))),
        asynchronous(Segment::local(ShmGroup::memory_bytes(size))),
        board(Segment::local(StallDetector::memory_bytes(n_ranks))),
        windows(Hosts{hosts.ranks, here}.memory_bytes()),
        asynchronous_windows(windows.size()) {}
  int size;
  Segment direct, asynchronous, board;
  std::vector<uint8_t> windows, asynchronous_windows;
};

// A world of several hosts.
struct World {
  World(unsigned seed, const std::vector<int>& sizes) : direct(seed), asynchronous(seed + 1) {
    for (size_t h = 0; h < sizes.size(); ++h) {
      hosts.ranks.emplace_back();
      for (int i = 0; i < sizes[h]; ++i) {
        hosts.ranks.back().push_back(static_cast<int>(ranks.size()));
        ranks.push_back(static_cast<int>(ranks.size()));
        names.push_back("rank " + std::to_string(ranks.back()));
        host_of_rank.push_back(static_cast<int>(h));
      }
    }
    for (int h = 0; h < hosts.size(); ++h) memory.push_back(std::make_unique<HostMemory>(hosts, size(), h));
  }
  int size() const { return static_cast<int>(ranks.size()); }

  Network direct, asynchronous;
  Hosts hosts{{}, 0};
  std::vector<int> ranks, host_of_rank;
  std::vector<std::string> names;
  std::vector<std::unique_ptr<HostMemory>> memory;
};

// One rank of it.
struct Member {
  Member(World& world, int rank, int here, int place)
      : rank(rank),
        world(world),
        memory(*world.memory[static_cast<size_t>(here)]),
        detector(std::make_shared<StallDetector>(memory.board.data(), rank, world.host_of_rank,
                                                 std::vector<int>(world.ranks.size(), 0), world.names)),
        direct_host(memory.direct.data(), place, memory.size, pids(), own_names(here)),
        asynchronous_host(memory.asynchronous.data(), place, memory.size, pids(), own_names(here)),
        direct(group(world.direct, direct_host, here, memory.windows)),
        asynchronous(group(world.asynchronous, asynchronous_host, here, memory.asynchronous_windows)) {
    const auto explain = [](const std::string& name, const std::vector<std::string>& said, const std::vector<int>&) {
      return name + " differs: " + said.front() + ", " + said.back();
    };
    auto wake_ups = std::make_shared<Network::Notes>(world.asynchronous, 1, rank);
    auto channel = std::make_unique<HostsChannel>(asynchronous, std::move(wake_ups));
    engine = std::make_unique<Engine>(std::move(channel), world.ranks, explain);
    engine->watched_by(detector);
  }

  struct Pending {
    Reduction what;
    std::shared_ptr<Tensors> tensors;
    std::shared_ptr<Job> job;
  };
  Pending submit(const std::string& name, const Reduction& what, uint64_t digest) {
    Pending pending{what, std::make_shared<Tensors>(what, rank), std::make_shared<Job>()};
    pending.job->entry.name = name;
    pending.job->entry.digest = digest;
    pending.job->run = [this, what, tensors = pending.tensors](const std::vector<Entry>&) {
      reduce(*asynchronous, what, *tensors);
    };
    // Longer than one message.
    pending.job->describe = [digest] { return std::string(3 << 20, 'x') + std::to_string(digest); };
    engine->submit(pending.job);
    return pending;
  }
  void call(const std::string& label, const Reduction& what) {
    Tensors tensors(what, rank);
    const auto job = std::make_shared<Job>();
    job->entry = {label, 7, rank, 0.5};
    job->run = [&](const std::vector<Entry>& entries) {
      for (int r = 0; r < world.size(); ++r) {
        const Entry& entry = entries[static_cast<size_t>(r)];
        expect(entry.digest == 7 && entry.count == r && entry.weight == 0.5, "every rank's entry is what it announced");
      }
      reduce(*asynchronous, what, tensors);
    };
    engine->call(job);
    check_result(what, tensors, world.size(), world.size());
  }
  void await(const Pending& pending) {
    engine->begin_wait(pending.job);
    while (!pending.job->wait(0.05)) {
    }
    engine->end_wait(*pending.job);
    engine->result(*pending.job);
    check_result(pending.what, *pending.tensors, world.size(), world.size());
  }
  void reduce_directly(const Reduction& what) {
    Tensors tensors(what, rank);
    const std::vector<Header> headers = direct->agree("a handshake", {7, rank, 0.5});
    for (int r = 0; r < world.size(); ++r) {
      const Header& header = headers[static_cast<size_t>(r)];
      expect(header.digest == 7 && header.count == r && header.weight == 0.5, "every rank's header is what it sent");
    }
    reduce(*direct, what, tensors);
    check_result(what, tensors, world.size(), world.size());
  }
  void reduce(HostsGroup& group, const Reduction& what, Tensors& tensors) const {
    group.allreduce(tensors.refs, what.op, what.wire, {}, {1.0, is_average(what.op) ? world.size() : 1.0});
  }

  int rank;
  World& world;
  HostMemory& memory;
  std::shared_ptr<StallDetector> detector;
  ShmGroup direct_host, asynchronous_host;
  std::shared_ptr<HostsGroup> direct, asynchronous;
  std::unique_ptr<Engine> engine;

 private:
  std::vector<int> pids() const { return std::vector<int>(static_cast<size_t>(memory.size), 0); }
  std::vector<std::string> own_names(int here) const {
    std::vector<std::string> own;
    for (const int r : world.hosts.ranks[static_cast<size_t>(here)]) own.push_back(world.names[static_cast<size_t>(r)]);
    return own;
  }
  std::shared_ptr<HostsGroup> group(Network& network, ShmGroup& host, int here, std::vector<uint8_t>& windows) const {
    return std::make_shared<HostsGroup>(host, std::make_shared<Network::Endpoint>(network, rank, world.size()),
                                        std::make_shared<Network::Notes>(network, 0, rank),
                                        Hosts{world.hosts.ranks, here}, windows.data(), detector, world.ranks,
                                        world.names);
  }
};

// Blocking calls while other threads submit and wait; then one that some ranks do not make.
void make_calls(Member& me, const std::vector<Reduction>& all, unsigned seed) {
  for (int step = 0; step < 3; ++step) {
    const std::jthread other([&] {
      Random own(seed + static_cast<unsigned>(step));
      std::vector<Member::Pending> pending;
      for (const size_t n : {0, 1, 2}) {
        std::this_thread::sleep_for(std::chrono::microseconds(own() % 3000));
        pending.push_back(me.submit("operation " + std::to_string(n), all[n], 1));
      }
      for (const Member::Pending& each : pending) me.await(each);
    });
    Random own(seed + 100);
    for (int i = 0; i < 4; ++i) {
      std::this_thread::sleep_for(std::chrono::microseconds(own() % 3000));
      me.call("call " + std::to_string(i), all[4]);
    }
  }
  Member::Pending pending;
  const std::string stuck = thrown_by<Mismatch>([&] {
    if (me.rank == 0) return me.call("barrier", all[4]);
    pending = me.submit("bucket", all[0], 1);
    me.await(pending);
  });
  expect(contains(stuck, me.rank == 0 ? "barrier was called by rank 0 but not by" : "rank 0 in barrier"),
         "who makes which call: " + stuck);
  me.call("afterwards", all[4]);
}

// The program of all ranks of a world, and its end: rank 0 leaves while the others wait for it.
void run_asynchronously(unsigned seed, const std::vector<int>& sizes) {
  World world(seed, sizes);
  Random drawn(seed);
  std::vector<Reduction> all;
  for (int i = 0; i < 5; ++i) {
    all.push_back(Reduction::draw(drawn, world.size(), 3000));
    all.back().wire = Wire::kBetweenHosts;
    all.back().op = kOps[i % 2];
    for (DType& dtype : all.back().dtypes) dtype = drawn() % 2 == 0 ? DType::kFloat32 : DType::kInt64;
  }
  std::latch ended(world.size());  // messages that are in flight may use a rank's memory
  std::vector<std::jthread> threads;
  for (int h = 0; h < world.hosts.size(); ++h) {
    for (size_t i = 0; i < world.hosts.ranks[static_cast<size_t>(h)].size(); ++i) {
      threads.emplace_back([&, h, i] {
        const int rank = world.hosts.ranks[static_cast<size_t>(h)][i];
        try {
          Member me(world, rank, h, static_cast<int>(i));
          Random order(seed + static_cast<unsigned>(rank));
          std::vector<Member::Pending> pending;
          std::vector<size_t> numbers = {0, 1, 2, 3};
          std::shuffle(numbers.begin(), numbers.end(), order);
          for (const size_t n : numbers) pending.push_back(me.submit("operation " + std::to_string(n), all[n], 1));
          me.reduce_directly(all[4]);
          for (const Member::Pending& each : pending) me.await(each);
          const Member::Pending different = me.submit("different", all[0], static_cast<uint64_t>(rank));
          const std::string why = thrown_by<Mismatch>([&] { me.await(different); });
          expect(contains(why, "x0, xxx"), "a mismatch has what every rank said");
          me.await(me.submit("afterwards", all[1], 1));
          me.reduce_directly(all[4]);
          make_calls(me, all, seed + static_cast<unsigned>(rank));
          if (rank == 0 || seed % 2 == 0) {
            try {
              me.engine->drain();
            } catch (const Mismatch&) {  // thrown if it was not seen
              expect(false, "the mismatch has been seen");
            }
          } else {
            const std::string lost = thrown_by<PeerLost>([&] { me.call("another call", all[4]); });
            expect(contains(lost, "rank 0 has left") && contains(lost, "waited in another call"),
                   "who has left: " + lost);
            const std::string after = thrown_by<PeerLost>([&] { me.call("yet another call", all[4]); });
            expect(contains(after, "can no longer be used"), "the group stays unusable: " + after);
          }
          if (rank != 0) {
            const std::string lost = thrown_by<PeerLost>([&] { me.direct->agree("another call", {}); });
            expect(contains(lost, "rank 0"), "who has left is named");
            thrown_by<PeerLost>([&] { me.direct->agree("yet another call", {}); });
          }
          me.direct->peers().leave("its program has ended");
          me.asynchronous->peers().leave("its program has ended");
          ended.arrive_and_wait();
        } catch (const std::exception& error) {
          expect(false, "rank " + std::to_string(rank) + " raised " + error.what());
        }
      });
    }
  }
  threads.clear();
}

}  // namespace

void engines_of_several_hosts(unsigned seed) {
  for (const std::vector<int>& sizes : {std::vector<int>{1, 1}, {2, 1}}) run_asynchronously(seed, sizes);
}

void causes(unsigned seed) {
  World world(seed, {1, 1, 1});
  Member waits(world, 0, 0, 0), ends(world, 1, 1, 0), fails(world, 2, 2, 0);
  waits.direct->peers().begin("an operation");
  if (seed % 2 == 0) ends.direct->peers().abandon("interrupted");
  ends.direct->peers().leave("its program has ended");
  thrown_by<PeerLost>([&] { fails.direct->agree("an operation", {}); });
  fails.direct->peers().leave("an exception");
  const std::string cause = seed % 2 == 0 ? "rank 1 gave up (interrupted)" : "rank 1 has left (its program has ended)";
  const auto check = [&](auto call) {
    const std::string lost = thrown_by<PeerLost>(call);
    expect(lost.starts_with(cause + " while rank 0 waited"), "what came first is named, not what followed: " + lost);
  };
  check([&] { waits.direct->peers().check_all(); });
  check([&] { waits.direct->peers().check_one(1, "a message"); });

  // An engine also notices it between its rounds.
  const Member::Pending pending = fails.submit("an operation", {}, 1);
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  ends.asynchronous->peers().leave("its program has ended");
  thrown_by<PeerLost>([&] { fails.await(pending); });
  const std::string lost = thrown_by<PeerLost>([&] { waits.asynchronous->peers().check_all(); });
  expect(lost.starts_with("rank 1 has left"), "an engine passes on what it was that it has lost: " + lost);
}

void several_hosts(unsigned seed) {
  for (const std::vector<int>& sizes : {std::vector<int>{1, 1}, {2, 1}, {1, 1, 2}}) reduce_among(seed, sizes);
}

}  // namespace horo
