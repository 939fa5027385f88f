// The state of the other ranks on several hosts, and what this one reports to them.
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "hosts/carrier.h"
#include "shm/shm_group.h"
#include "shm/stall_detector.h"

namespace horo {

// Which peers have left, given up or arrived, as received from the control channel. An operation begins with a
// handshake, in which all ranks take part: begin() counts operations. For any thread; none may hold the GIL.
class PeerStatus {
 public:
  // `ranks` and `names` are the ranks' numbers and names in messages; `rank` is this one, `host` has those of its host.
  PeerStatus(std::shared_ptr<ControlChannel> control, ShmGroup& host, std::shared_ptr<StallDetector> detector, int rank,
             std::vector<int> ranks, std::vector<std::string> names);

  // Begins another operation on this rank; "": a handshake between two operations.
  void begin(const std::string& label, uint32_t flags = 0);
  void set_label(const std::string& label);
  // The last operation, and when it began, by StallDetector::clock_ns().
  std::string label() const;
  int64_t began_ns() const;

  // Throws PeerLost if the last operation cannot be completed, or Stalled.
  void check_all();
  // Throws PeerLost if `peer`, which `name` needs, has left, or if any died or gave up; -1 for no peer in particular.
  void check_one(int peer, const std::string& name);
  // Whether that rank has left after sending this one at most n_records records of messages.
  bool has_left(int peer, int64_t n_records);

  // Shows the ranks of this host, and ranks that wait on other hosts, that this one waits.
  void report_wait(StallDetector::Wait& wait);
  // For a wait in a round: reports that this rank waits, and returns the flags of those that do; 0: they do not.
  std::vector<uint32_t> entered();
  // Tells peers how late this rank will be; "": no longer.
  void announce(const std::string& what, double expect_s);
  // Counts a record of messages that this rank has sent to a peer, which learns their number when this rank leaves.
  void count_record(int peer);
  // Makes peers that wait for this rank throw PeerLost, or Stalled if that is the reason.
  void abandon(const std::string& reason);
  // The same, because another rank was lost: peers throw `cause`.
  void pass_on(const std::string& cause);
  // Makes peers throw PeerLost if they wait for this rank in an operation that it is not in.
  void leave(const std::string& reason);

 private:
  struct Left {
    uint64_t n_begun;  // the last operation that it was in
    int64_t n_records;
    std::string reason;
  };
  struct Arrival {
    uint64_t n_begun = 0;
    uint32_t flags = 0;
    int64_t ns = 0;
  };

  std::string operation() const;
  void update();
  void receive();
  void note(const ShortMessage& message);
  void check_lost(const std::string& operation) const;
  void send_arrived();
  void say_once(const std::map<int, std::string>& texts, int tag);
  std::map<int, std::string> to_all(const std::string& text) const;

  const std::shared_ptr<ControlChannel> control_;
  ShmGroup& host_;
  const std::shared_ptr<StallDetector> detector_;
  const int rank_;
  const std::vector<int> ranks_;
  const std::vector<std::string> names_;
  const std::string scope_;
  std::atomic<bool> is_receiving_{false};

  // Guards the following members. Never held in a call of the control channel, which may need another thread.
  mutable std::mutex mutex_;
  std::string label_;
  bool is_between_ = true;  // two operations
  int64_t began_ns_ = 0;
  uint64_t n_begun_ = 0;
  uint32_t flags_ = 0;
  std::vector<int64_t> n_records_;  // of messages that this rank has sent to each peer
  std::map<int, Left> left_;
  std::string lost_;    // which rank gave up, and why, or why another rank gave up
  std::set<int> said_;  // tags that this rank has sent about its end
  std::map<int, Arrival> arrivals_;
  Arrival arrival_;  // of this rank, as reported to its peers
};

}  // namespace horo
