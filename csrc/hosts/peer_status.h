// The state of the other ranks of several hosts, and what this one reports to them.
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

// Who has left, given up or arrived, as received from the control channel. An operation begins with a handshake, in
// which all ranks take part: begin() counts them. For any thread; none may have the GIL.
class PeerStatus {
 public:
  // `ranks` and `names` are what messages call the ranks, of which this is number `rank`; `host` are those of its host.
  PeerStatus(std::shared_ptr<ControlChannel> control, ShmGroup& host, std::shared_ptr<StallDetector> detector, int rank,
             std::vector<int> ranks, std::vector<std::string> names);

  // This rank begins another operation.
  void begin(const std::string& label);
  // The operation that began last, and when it did, by StallDetector::clock_ns().
  std::string label() const;
  int64_t began_ns() const;

  // Throws PeerLost if the operation that began last cannot be completed, or Stalled.
  void check_all();
  // Throws PeerLost if `peer`, needed for `name`, has left, or any died or gave up; -1 for no peer in particular.
  void check_one(int peer, const std::string& name);
  // Whether that rank has left, having sent this one at most so many records of messages.
  bool has_left(int peer, int64_t n_records);

  // Shows the ranks of this host, and those that wait on others, that this one waits.
  void report_wait(StallDetector::Wait& wait);
  // Tells peers that this rank will be late by so much; "": it is over.
  void announce(const std::string& what, double expect_s);
  // This rank has sent that one another record of messages: peers learn their number when it leaves.
  void count_record(int peer);
  // Peers that wait for this rank throw PeerLost, or Stalled if that is why.
  void abandon(const std::string& reason);
  // The same, because of what became of another rank: `cause` is what peers throw.
  void pass_on(const std::string& cause);
  // Peers that wait for this rank in an operation it is not in throw PeerLost.
  void leave(const std::string& reason);

 private:
  struct Left {
    uint64_t n_begun;  // the last operation that it was in
    int64_t n_records;
    std::string reason;
  };
  struct Arrival {
    uint64_t n_begun = 0;
    int64_t ns = 0;
  };

  std::string doing() const;
  void update();
  void receive();
  void note(const ShortMessage& message);
  void check_lost() const;
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

  // Guards what follows. Never held in a call of the control channel, which may need another thread.
  mutable std::mutex mutex_;
  std::string label_;
  int64_t began_ns_ = 0;
  uint64_t n_begun_ = 0;
  std::vector<int64_t> n_records_;  // of messages, that this rank has sent to each
  std::map<int, Left> left_;
  std::string lost_;    // who gave up, and why, or what another rank gave up for
  std::set<int> said_;  // tags, of this rank's end
  std::map<int, Arrival> arrivals_;
  Arrival arrival_;  // of this rank, as its peers know it
};

}  // namespace horo
