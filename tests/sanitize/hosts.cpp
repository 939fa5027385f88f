// HostsAllreduce: ranks of several hosts as threads, whose messages take their time.
#include "hosts/hosts_allreduce.h"

#include <algorithm>
#include <deque>
#include <map>
#include <mutex>
#include <tuple>

#include "ranks.h"

namespace horo {
namespace {

// Copies a message when both sides have asked for it and chance wants it: the memory is read and written late.
class Network {
 public:
  explicit Network(unsigned seed) : random_(seed) {}

  class Endpoint : public PointToPoint {
   public:
    Endpoint(Network& network, int rank) : network_(network), rank_(rank) {}
    std::unique_ptr<Transfer> start(const std::vector<Message>& receive, const std::vector<Message>& send) override {
      auto transfer = std::make_unique<Waiting>(network_);
      const std::lock_guard lock(network_.mutex_);
      for (const Message& m : receive) network_.add({m.peer, rank_, m.tag}, &Way::awaited, m, *transfer);
      for (const Message& m : send) network_.add({rank_, m.peer, m.tag}, &Way::sent, m, *transfer);
      return transfer;
    }

   private:
    Network& network_;
    int rank_;
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
    // Of floats, those whose sums are rounded as little as the oracle allows.
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
        HostsAllreduce among(me.direct, std::make_shared<Network::Endpoint>(network, number), mine, memory[h].data());
        for (size_t i = 0; i < all.size(); ++i) {
          const Reduction& what = all[i];
          Tensors tensors(what, number);
          const Layout layout(tensors.refs, what.op, what.wire, mine.window_bytes(), mine.n_shares());
          among.allreduce(layout, {}, {1.0, is_average(what.op) ? n_ranks : 1.0}, "operation");
          hashes[i * static_cast<size_t>(n_ranks) + static_cast<size_t>(number)] = tensors.hash();
          if (number == 0) check_result(what, tensors, n_ranks, n_ranks);
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

}  // namespace

void several_hosts(unsigned seed) {
  for (const std::vector<int>& sizes : {std::vector<int>{1, 1}, {2, 1}, {1, 1, 2}}) reduce_among(seed, sizes);
}

}  // namespace horo
