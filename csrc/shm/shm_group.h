// The ranks of one host, in shared memory.
//
// Every call is made by all ranks of the group in the same order. agree() is the handshake, in which they find out
// whether they are about to do the same thing; what follows needs no further checks.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "group.h"
#include "pack/layout.h"
#include "shm/distance.h"
#include "shm/stall_detector.h"

namespace horo {

struct Header {
  uint64_t digest;
  int64_t count;
  double weight;
};

// What one rank wants of another's stream: from byte `begin` on, into `buffers`.
struct Wanted {
  int source;
  size_t begin;
  std::vector<Buffer> buffers;
};

class ShmGroup {
 public:
  static size_t memory_bytes(int size);

  // `memory` is zeroed when it is created and shared by all ranks. `pids[r]` is what to watch for rank r's death;
  // 0: nothing (a thread of this process). `names[r]` is how messages call it.
  ShmGroup(uint8_t* memory, int rank, int size, std::vector<int> pids, std::vector<std::string> names);
  ~ShmGroup();
  ShmGroup(const ShmGroup&) = delete;
  ShmGroup& operator=(const ShmGroup&) = delete;

  int rank() const { return rank_; }
  int size() const { return size_; }
  // What this rank's latest operation is called.
  std::string label() const;

  // The handshake: returns every rank's header, in rank order, once all have entered. `label` is what messages call
  // it. With `wake_others`, the others' engines are woken once they can see that this rank is ahead of them.
  std::vector<Header> agree(const std::string& label, Header mine, bool wake_others = false);

  // Over the layout's tensors, in place or from their sources; `layout` is one of chunk_bytes(…) and size() shares.
  void allreduce(const Layout& layout, const std::vector<double>& weights, Factor factor);
  // The same for tensors that lie in memory which all ranks see, rank r's at `distances[r]` bytes from this one's:
  // every rank reduces its share of all of them where they lie. `layout` is one of a single chunk and size() shares.
  void reduce_in_place(const Layout& layout, const std::vector<ptrdiff_t>& distances, Factor factor);
  // Rank r gets share r alone, reduced; of the others' nothing changes. `layout` is one of size() parts and
  // chunk_bytes(…).
  void reduce_scatter(const Layout& layout, const std::vector<double>& weights, Factor factor);
  // How large chunks should be for this many bytes in all.
  size_t chunk_bytes(size_t total_bytes) const;
  // How slots are written; each rank decides for itself, and results do not depend on it.
  std::atomic<SlotStores> slot_stores{SlotStores::kAuto};
  // How the next operation writes slots, and the round trip that the latest large one measured: see Distance.
  Stores stores() const { return distance_.stores(slot_stores); }
  double round_trip_ns() const { return distance_.round_trip_ns(); }

  // Every rank puts out a stream of bytes (stream_bytes[r] long, known to all) and takes what it wants of the others'.
  void exchange(const std::vector<Buffer>& stream, const std::vector<size_t>& stream_bytes,
                const std::vector<Wanted>& wanted);

  // Throws PeerLost if some peer has died or given up, or if `awaited` has left. `label` is what messages call this
  // moment.
  void check_peers(int awaited, const std::string& label);

  // This rank gives up: whoever waits, now or later, raises PeerLost with this reason. Never blocks.
  void abandon(const std::string& reason);
  // The same, because of what became of another rank: `cause` is what the others raise.
  void pass_on(const std::string& cause);
  // This rank takes part in nothing any more; who waits for it raises PeerLost with this reason.
  void leave(const std::string& reason);
  // Process ids of peers that have not left, alive or dead. With `silent`, without those that have given up.
  std::vector<int> peer_pids(bool silent) const;
  // This one will do nothing more.
  bool has_left(int rank) const;
  // True for one rank of the host, the first that asks: what several could report is to be reported once.
  bool claim_report();
  // Whether another rank has claimed it, and lives.
  bool peer_reports();
  // If SIGTERM ends this process while a peer has been killed, it reports which one, unless another rank has: a
  // launcher that has seen a death ends the others a moment later, also those that are busy and have not seen it. Only
  // where nobody handles SIGTERM; who sets a handler later has it instead.
  void report_at_sigterm();

  // For the engine: wakes a rank's; and whether some peer has entered a handshake that this rank has not.
  void wake(int rank);
  bool peer_is_ahead() const;
  // Returns when woken, when a peer is ahead, or after the time-out.
  void wait_for_wake_up(double timeout_s);

  // A number that changes whenever this rank begins or stops to wait for others, odd while it does. It stops when what
  // it waits for is there, even if its thread has yet to wake. For any thread.
  uint64_t n_waits() const;
  // The thread that waits, or did last, as the kernel numbers it.
  int waiting_thread() const { return waiting_thread_; }

  // Waits are seen by the stall detector of the world, in which the group's ranks have these numbers. If the calls are
  // `direct`, they show what the training thread does, and whom it waits for. To be called at once or not at all.
  void watched_by(std::shared_ptr<StallDetector> detector, std::vector<int> ranks, bool direct);

  // Called while waiting, a few times a second, so that signals are seen; throws to stop waiting.
  std::function<void()> on_idle;

 private:
  struct Flag;
  struct RankBlock;

  static std::vector<Distance::Shared*> shared_distances(uint8_t* memory, int size);
  RankBlock& block(int rank) const;
  uint8_t* slot(int rank, size_t chunk) const;
  // For an operation of so many chunks: measures the distance if that is little beside them.
  Stores stores_for(size_t n_chunks);
  void signal(Flag& flag, uint32_t value);
  void wait_for(int rank, Flag RankBlock::* flag, uint32_t value);
  void wait_for_all(Flag RankBlock::* flag, uint32_t value);
  // Who has died or given up, or that `awaited` has left, in words; "" if all is well.
  std::string why_lost(int awaited);
  void set_label(const std::string& label);
  void report_wait(StallDetector::Wait& wait, Flag RankBlock::* flag, uint32_t value);
  [[noreturn]] void lost(const std::string& cause);
  void give_up(uint32_t how, const std::string& reason);
  std::string name(int rank) const;
  bool died(int rank);
  static void on_sigterm(int signal);
  void report_killed_peer() noexcept;

  uint8_t* memory_;
  int rank_;
  int size_;
  std::vector<int> pids_;
  std::vector<int> pidfds_;
  std::vector<std::string> names_;
  Distance distance_;
  std::string broken_;  // why this group can no longer be used
  bool oversubscribed_;
  long n_oom_kills_;  // when this began
  std::shared_ptr<StallDetector> detector_;
  std::vector<int> ranks_;  // as the stall detector numbers them
  std::string scope_;
  bool direct_ = false;
  std::atomic<uint64_t> n_waits_{0};
  std::atomic<int> waiting_thread_{0};
  std::atomic<const Flag*> awaited_{nullptr};  // in the wait under way, to be this:
  std::atomic<uint32_t> awaited_value_{0};
  uint32_t entered_ = 0;
  uint32_t packed_ = 0;
  uint32_t reduced_ = 0;
  uint32_t wake_ups_seen_ = 0;
};

}  // namespace horo
