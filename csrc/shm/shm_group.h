// The ranks of one host, in shared memory.
//
// All ranks of the group make every call, in the same order. agree() is the handshake, which determines whether they
// are about to do the same; the calls that follow need no further checks. The only state is a set of counters that all
// ranks advance in the same way. After an agree() all slots are free, and all ranks are at the same point, also after a
// mismatch.
//
// A waiting rank spins for microseconds, then sleeps on a futex. It wakes twenty times a second to check whether a peer
// died (by its pidfd), left or abandoned the group, and to handle Ctrl-C.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "group.h"
#include "pack/layout.h"
#include "shm/distance.h"
#include "shm/stall_detector.h"

namespace horo {

struct Header {
  uint64_t digest = 0;
  int64_t count = 0;
  double weight = 0;
  uint32_t flags = 0;   // in a round of engines: RoundFlag
  uint32_t n_more = 0;  // bytes that this rank sends after the handshake
};

// What a rank says in the header of a round; see Engine.
enum RoundFlag : uint32_t {
  kEntered = 1,        // always
  kCalls = 2,          // its program has made a blocking call, which the header announces
  kBlocked = 4,        // its program waits
  kBlockedBeside = 8,  // a thread beside it waits
};

// A handshake that is a round of engines.
struct Round {
  // Whether the engines of the other ranks are woken to enter it.
  bool demands = false;
  // Called a few times per second while waiting, with the flags of each rank; 0 for those that have not entered.
  const std::function<void(const std::vector<uint32_t>& flags)>& on_wait;
  // Called more often, if waiting means polling.
  std::function<void()> on_poll;
};

// A part of another rank's stream that this rank needs: from byte `begin` on, into `buffers`.
struct Wanted {
  int source;
  size_t begin;
  std::vector<Buffer> buffers;
};

class ShmGroup {
 public:
  static size_t memory_bytes(int size);

  // `memory` is shared by all ranks, and was zeroed when it was created. `pids[r]` is the process to watch for rank r's
  // death; 0: none (a thread of this process). `names[r]` is its name in messages.
  ShmGroup(uint8_t* memory, int rank, int size, std::vector<int> pids, std::vector<std::string> names);
  ~ShmGroup();
  ShmGroup(const ShmGroup&) = delete;
  ShmGroup& operator=(const ShmGroup&) = delete;

  int rank() const { return rank_; }
  int size() const { return size_; }
  // The name of this rank's latest operation.
  std::string label() const;

  // The handshake: returns every rank's header, in rank order, when all have entered. `label` is its name in messages;
  // "": this rank is between two operations, and peers see the last one's.
  std::vector<Header> agree(const std::string& label, const Header& mine, const Round* round = nullptr);
  // Throws if an operation has failed, and the group can no longer be used.
  void check_usable() const;
  void set_label(const std::string& label);

  // Reduces the layout's tensors, in place or from their sources; `layout` has chunk_bytes(…) and size() shares.
  void allreduce(const Layout& layout, const std::vector<double>& weights, Factor factor);
  // The same for tensors in memory that all ranks share, rank r's at `distances[r]` bytes from this one's: every rank
  // reduces its share of all of them in place. `layout` has a single chunk and size() shares; or one share, which is
  // different on every rank, and then only this rank's tensors get the result.
  void reduce_in_place(const Layout& layout, const std::vector<ptrdiff_t>& distances, Factor factor);
  // Rank r gets only share r, reduced; the others' shares do not change. `layout` has size() parts and chunk_bytes(…).
  void reduce_scatter(const Layout& layout, const std::vector<double>& weights, Factor factor);
  // The best chunk size for this many bytes in total.
  size_t chunk_bytes(size_t total_bytes) const;
  // How slots are written; it may differ between ranks, and results do not depend on it.
  std::atomic<SlotStores> slot_stores{SlotStores::kAuto};
  // How the next operation writes slots, and the round trip measured in the last large one: see Distance.
  Stores stores() const { return distance_.stores(slot_stores); }
  double round_trip_ns() const { return distance_.round_trip_ns(); }

  // Every rank offers a stream of bytes (stream_bytes[r] long, known to all) and takes the parts of others that it
  // needs.
  void exchange(const std::vector<Buffer>& stream, const std::vector<size_t>& stream_bytes,
                const std::vector<Wanted>& wanted);

  // Throws PeerLost if a peer has died or given up, or if `awaited` has left. `label` names the current activity in
  // messages.
  void check_peers(int awaited, const std::string& label);

  // Gives up on this rank: ranks that wait for it, now or later, throw PeerLost with this reason. Never blocks.
  void abandon(const std::string& reason);
  // The same, because another rank was lost: the others throw PeerLost with `cause`.
  void pass_on(const std::string& cause);
  // Leaves the group: ranks that wait for this one throw PeerLost with this reason.
  void leave(const std::string& reason);
  // Process IDs of peers that have not left, alive or dead. With `silent`, without those that have given up.
  std::vector<int> peer_pids(bool silent) const;
  // Whether that rank has left.
  bool has_left(int rank) const;
  // Returns true on one rank of the host, the first that calls it, so that an error is reported only once.
  bool claim_report();
  // Whether another rank has claimed the report, and is alive.
  bool peer_reports();
  // If SIGTERM ends this process after a peer was killed, reports which peer, unless another rank has done so: a
  // launcher that sees a death ends the others a moment later, even those that are busy and have not noticed it. Has no
  // effect if SIGTERM has a handler; a handler that is set later replaces this one.
  void report_at_sigterm();

  // For engines. The number of the next handshake, for the thread that makes them.
  uint32_t next_handshake() const { return entered_ + 1; }
  // The following are for any thread. Wakes the engines of the others, to enter that handshake, which this rank has
  // entered or is about to.
  void demand(uint32_t handshake);
  // Whether a peer demands a handshake that this rank has not entered.
  bool is_demanded() const;
  // Wakes this rank's engine.
  void wake() { wake(rank_); }
  // Returns once the number of wake-ups differs, a handshake is demanded, or after the time-out.
  void wait_for_wake_up(uint32_t n_wake_ups, double timeout_s);
  uint32_t n_wake_ups() const;

  // Reports waits to the stall detector of the world, in which the group's ranks have these numbers. Must be called
  // immediately or not at all.
  void watched_by(std::shared_ptr<StallDetector> detector, std::vector<int> ranks);

  // Called a few times per second while waiting, to handle signals; throws to stop waiting.
  std::function<void()> on_idle;

 private:
  struct Flag;
  struct RankBlock;

  static std::vector<Distance::Shared*> shared_distances(uint8_t* memory, int size);
  RankBlock& block(int rank) const;
  uint8_t* slot(int rank, size_t chunk) const;
  // For an operation with n_chunks: measures the distance if that takes little time in comparison.
  Stores stores_for(size_t n_chunks);
  void signal(Flag& flag, uint32_t value);
  void wait_for(int rank, Flag RankBlock::* flag, uint32_t value, const Round* round = nullptr);
  void wait_for_all(Flag RankBlock::* flag, uint32_t value, const Round* round = nullptr);
  void wake(int rank);
  void raise_demanded(uint32_t handshake);
  void check_not_given_up() const;
  // Says which rank has died or given up, or that `awaited` has left; "" if there is no problem.
  std::string why_lost(int awaited);
  void report_wait(StallDetector::Wait& wait, Flag RankBlock::* flag, uint32_t value, const Round* round);
  // Runs `look`; what tells it that the job has stalled ends this group, too.
  void unless_stalled(const std::function<void()>& look);
  void note_broken(const std::string& why);
  [[noreturn]] void lost(const std::string& cause, const std::string& operation);
  std::string operation() const;  // what this rank is in; "": between two
  void end(uint32_t how, const std::string& reason);
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
  mutable std::mutex mutex_;
  std::string broken_;  // why this group can no longer be used; under the mutex
  std::atomic<bool> is_broken_{false};
  bool oversubscribed_;
  long n_oom_kills_;  // when this group was created
  std::shared_ptr<StallDetector> detector_;
  std::vector<int> ranks_;  // their numbers in the stall detector
  std::string scope_;
  std::atomic<bool> is_between_{true};  // two operations
  uint32_t entered_ = 0;
  uint32_t packed_ = 0;
  uint32_t reduced_ = 0;
};

}  // namespace horo
