// The ranks of several hosts: shared memory inside each, and whatever carries bytes between them.
//
// As ShmGroup for one host: every call is made by all ranks of the group in the same order, agree() is the handshake,
// and what follows needs no further checks. After an exception the group is of no more use, and its memory may be
// written to until what carries the bytes has ended.
#pragma once

#include <atomic>
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
  // `host` are the ranks of this host, in the order of `hosts`, and `memory` what they share, hosts.memory_bytes() of
  // it. `ranks` and `names` are what messages call the ranks of the group. If the calls are `direct`, they show what
  // the training thread does, and whom it waits for.
  HostsGroup(ShmGroup& host, std::shared_ptr<Carrier> carrier, std::shared_ptr<ControlChannel> control, Hosts hosts,
             uint8_t* memory, std::shared_ptr<StallDetector> detector, std::vector<int> ranks,
             std::vector<std::string> names, bool direct);

  int rank() const { return rank_; }
  int size() const { return static_cast<int>(ranks_.size()); }

  // The handshake: returns every rank's header, in rank order, once all have entered. `label` is what messages call it.
  std::vector<Header> agree(const std::string& label, Header mine);
  // After an agree() in which every rank's count was how many bytes it has: everyone's, in rank order.
  std::vector<std::string> gather(const std::string& mine, const std::vector<Header>& headers);
  // In place over these tensors. There is a weight for every rank, or none.
  void allreduce(const std::vector<TensorRef>& tensors, Op op, Wire wire, const std::vector<double>& weights,
                 Factor factor);
  // The same of parts[r] for every rank r, which gets only its own: that is read and written, the others are read.
  void reduce_scatter(const std::vector<std::vector<TensorRef>>& parts, Op op, Wire wire,
                      const std::vector<double>& weights, Factor factor);
  // Leaves in the buffers, which hold as many bytes on every rank, what the root's do.
  void broadcast(const std::vector<Buffer>& buffers, int root);
  // As of a ShmGroup, among the ranks of this host.
  void exchange_on_host(const std::vector<Buffer>& stream, const std::vector<size_t>& stream_bytes,
                        const std::vector<Wanted>& wanted);
  // Returns when the transfer is done, which is one of the carrier's.
  void wait(Transfer& transfer);

  PeerStatus& peers() { return peers_; }
  const PeerStatus& peers() const { return peers_; }
  // Nothing can be done any more: whoever waits for this rank, now or later, throws PeerLost. Never blocks.
  void abandon(const std::string& reason);
  // The same, because of what became of another rank: peers are told of that.
  void pass_on(const PeerLost& lost);
  bool given_up() const;

  // A number that changes whenever this rank begins or stops to wait for others, odd while it does; and the thread that
  // waits, or did last, as the kernel numbers it. For any thread.
  uint64_t n_waits() const { return n_waits_; }
  int waiting_thread() const { return waiting_thread_; }

  // Called while waiting, a few times a second, so that signals are seen; throws to stop waiting.
  std::function<void()> on_idle;

 private:
  // What travels with a handshake.
  struct Arrival {
    Header header;
    double waited_s;  // in the one before
  };

  void reduce(HostsAllreduce::Reduce how, const Layout& layout, const std::vector<double>& weights, Factor factor);
  template <class Operation>
  void giving_up_on_error(Operation operation);
  template <class Operation>  // Operation(on_idle)
  void reporting_waits(Operation operation);
  void fail(const std::string& broken, const std::string& reason);
  void note_broken(const std::string& broken);
  void idle(StallDetector::Wait& wait);
  void record_last_rank();

  ShmGroup& host_;
  const std::shared_ptr<Carrier> carrier_;
  const std::shared_ptr<StallDetector> detector_;
  const std::vector<int> ranks_;
  const int rank_;
  const bool direct_;
  HostsAllreduce allreduce_;
  HostsBroadcast broadcast_;
  PeerStatus peers_;
  std::atomic<uint64_t> n_waits_{0};
  std::atomic<int> waiting_thread_{0};
  mutable std::mutex mutex_;
  std::string broken_;  // why this group can no longer be used; under the mutex

  // Only for the thread that makes the calls. The carrier may read and write these after an exception.
  double waited_s_ = 0.0;  // in the last handshake
  Arrival arrival_{};
  std::vector<Arrival> arrivals_;
  std::string outgoing_;
  std::vector<std::string> incoming_;
};

}  // namespace horo
