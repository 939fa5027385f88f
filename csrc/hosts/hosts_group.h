// The ranks of several hosts: shared memory inside each, and a carrier of bytes between them.
//
// As with ShmGroup for one host, all ranks of the group make every call in the same order, agree() is the handshake,
// and the calls that follow need no further checks. After an exception the group can no longer be used, and its memory
// may be written to until the carrier has ended.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "hosts/carrier.h"
#include "hosts/hosts_allreduce.h"
#include "hosts/hosts_broadcast.h"
#include "hosts/peer_status.h"
#include "shm/shm_group.h"
#include "shm/stall_detector.h"

namespace horo {

class HostsGroup {
 public:
  // `host` contains the ranks of this host, in the order of `hosts`; they share `memory`, of hosts.memory_bytes().
  // `ranks` and `names` are the ranks' numbers and names in messages.
  HostsGroup(ShmGroup& host, std::shared_ptr<Carrier> carrier, std::shared_ptr<ControlChannel> control, Hosts hosts,
             uint8_t* memory, std::shared_ptr<StallDetector> detector, std::vector<int> ranks,
             std::vector<std::string> names);

  int rank() const { return rank_; }
  int size() const { return static_cast<int>(ranks_.size()); }

  // The handshake: returns every rank's header, in rank order, when all have entered. `label` is its name in messages;
  // "": that of the last one.
  std::vector<Header> agree(const std::string& label, const Header& mine, const Round* round = nullptr);
  // Throws if an operation has failed, and the group can no longer be used.
  void check_usable() const;
  // Returns every rank's bytes, in rank order, after an agree() with their numbers in the headers.
  std::vector<std::string> gather(const std::string& mine, const std::vector<Header>& headers);
  // Reduces these tensors in place. There is a weight for every rank, or none.
  void allreduce(const std::vector<TensorRef>& tensors, Op op, Wire wire, const std::vector<double>& weights,
                 Factor factor);
  // The same for parts[r] of every rank r, which gets only its own: that part is read and written, others are only
  // read.
  void reduce_scatter(const std::vector<std::vector<TensorRef>>& parts, Op op, Wire wire,
                      const std::vector<double>& weights, Factor factor);
  // Copies the root's buffers to those of all ranks, which have the same total size.
  void broadcast(const std::vector<Buffer>& buffers, int root);
  // Like ShmGroup::exchange, between the ranks of this host.
  void exchange_on_host(const std::vector<Buffer>& stream, const std::vector<size_t>& stream_bytes,
                        const std::vector<Wanted>& wanted);
  // Waits for a transfer of the carrier.
  void wait(Transfer& transfer) { wait(transfer, nullptr); }

  PeerStatus& peers() { return peers_; }
  const PeerStatus& peers() const { return peers_; }
  // Gives up on this rank: ranks that wait for it, now or later, throw PeerLost. Never blocks.
  void abandon(const std::string& reason);
  // The same, because another rank was lost, which is reported to the peers.
  void pass_on(const PeerLost& lost);
  bool given_up() const;

  // Called a few times per second while waiting, also for ranks of this host, to handle signals; throws to stop
  // waiting.
  void set_on_idle(const std::function<void()>& on_idle) { host_.on_idle = on_idle_ = on_idle; }

 private:
  // Data that travels with a handshake.
  struct Arrival {
    Header header;
    double waited_s;  // in the previous one; less than 0: not the program
  };

  void reduce(HostsAllreduce::Reduce how, const Layout& layout, const std::vector<double>& weights, Factor factor);
  template <class Operation>
  void giving_up_on_error(Operation operation);
  template <class Operation>  // Operation(on_idle)
  void reporting_waits(Operation operation);
  void fail(const std::string& broken, const std::string& reason);
  void note_broken(const std::string& broken);
  void wait(Transfer& transfer, const Round* round);
  void idle(StallDetector::Wait& wait, const Round* round = nullptr);
  void record_last_rank();

  ShmGroup& host_;
  const std::shared_ptr<Carrier> carrier_;
  const std::shared_ptr<StallDetector> detector_;
  const std::vector<int> ranks_;
  const int rank_;
  HostsAllreduce allreduce_;
  HostsBroadcast broadcast_;
  PeerStatus peers_;
  mutable std::mutex mutex_;
  std::string broken_;  // why this group can no longer be used; under the mutex

  // Only for the thread that makes the calls. The carrier may access these after an exception.
  std::function<void()> on_idle_;
  double waited_s_ = 0.0;  // in the last handshake
  Arrival arrival_{};
  std::vector<Arrival> arrivals_;
  std::string outgoing_;
  std::vector<std::string> incoming_;
};

}  // namespace horo
