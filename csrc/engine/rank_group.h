// A group of ranks, whatever carries bytes between them: who they are and whether they live, and the operations on host
// memory that it has in common with all others.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "engine/engine.h"
#include "pack/layout.h"

namespace horo {

class RankGroup {
 public:
  virtual ~RankGroup() = default;
  virtual int rank() const = 0;
  virtual int size() const = 0;

  // Of the operation that began last.
  virtual std::string label() const = 0;
  // The handshake: returns every rank's header, in rank order.
  virtual std::vector<Header> agree(const std::string& label, const Header& mine) = 0;
  // Reduces these tensors in place. There is a weight for every rank, or none. With `distances`, the tensors are in
  // memory that all ranks share, as in ShmGroup::reduce_in_place, and there are no weights.
  virtual void allreduce(const std::vector<TensorRef>& tensors, Op op, Wire wire, const std::vector<double>& weights,
                         Factor factor, const std::vector<ptrdiff_t>& distances) = 0;
  // Leaves the reduction of parts[rank()] in its own tensors. With `distances` as above.
  virtual void reduce_scatter(const std::vector<std::vector<TensorRef>>& parts, Op op, Wire wire,
                              const std::vector<double>& weights, Factor factor,
                              const std::vector<ptrdiff_t>& distances) = 0;
  // For a group that belongs to engines: the channel between them. `self` is this group.
  virtual std::unique_ptr<Channel> engine_channel(const std::shared_ptr<RankGroup>& self) = 0;

  // Throws PeerLost if a peer has died or given up, or if `awaited`, which `name` needs, has left.
  virtual void check_peers(int awaited, const std::string& name) = 0;
  // Whether that rank has left after sending this one at most `n_records` messages.
  virtual bool has_left(int rank, int64_t n_records) = 0;
  // Ranks that wait for this one, now or later, throw PeerLost with this reason: it has given up, or left. Never block.
  virtual void abandon(const std::string& reason) = 0;
  virtual void leave(const std::string& reason) = 0;
  // Whether this rank has given up, or an operation has failed on it.
  virtual bool given_up() const = 0;
  // Tells ranks on other hosts how late this one will be; "": no longer.
  virtual void announce(const std::string& what, double expect_s) = 0;

  // Of the ranks on this host: see ShmGroup.
  virtual std::vector<int> peer_pids(bool silent) const = 0;
  virtual bool claim_report() = 0;
  virtual bool peer_reports() = 0;
};

}  // namespace horo
