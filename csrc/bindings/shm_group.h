// The ranks of one host for Python: a group that keeps its memory alive.
#pragma once

#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings/python.h"
#include "bindings/tensors.h"
#include "engine/rank_group.h"
#include "pack/layout.h"
#include "shm/segment.h"
#include "shm/shm_group.h"

namespace horo {

struct PyShmGroup : RankGroup {
  std::shared_ptr<Segment> segment;
  ShmGroup shm;

  PyShmGroup(std::shared_ptr<Segment> memory, size_t offset, int rank, int size, std::vector<int> pids,
             std::vector<std::string> names)
      : segment(std::move(memory)), shm(segment->data() + offset, rank, size, std::move(pids), std::move(names)) {
    shm.on_idle = check_signals;
  }

  int rank() const override { return shm.rank(); }
  int size() const override { return shm.size(); }
  std::string label() const override { return shm.label(); }
  std::vector<Header> agree(const std::string& label, const Header& mine) override { return shm.agree(label, mine); }
  void allreduce(const std::vector<TensorRef>& tensors, Op op, Wire wire, const std::vector<double>& weights,
                 Factor factor, const std::vector<ptrdiff_t>& distances) override;
  void reduce_scatter(const std::vector<std::vector<TensorRef>>& parts, Op op, Wire wire,
                      const std::vector<double>& weights, Factor factor,
                      const std::vector<ptrdiff_t>& distances) override;
  std::unique_ptr<Channel> engine_channel(const std::shared_ptr<RankGroup>& self) override;
  void check_peers(int awaited, const std::string& name) override { shm.check_peers(awaited, name); }
  // All that it has sent is here.
  bool has_left(int rank, int64_t) override { return shm.has_left(rank); }
  void abandon(const std::string& reason) override { shm.abandon(reason); }
  void leave(const std::string& reason) override { shm.leave(reason); }
  bool given_up() const override { return shm.has_left(shm.rank()); }
  void announce(const std::string&, double) override {}  // the board in shared memory says it
  std::vector<int> peer_pids(bool silent) const override { return shm.peer_pids(silent); }
  bool claim_report() override { return shm.claim_report(); }
  bool peer_reports() override { return shm.peer_reports(); }
};

// The buffers of a list of Tensors, one after the other.
std::vector<Buffer> buffers_of(ListOf<PyTensors> stream);
// From tuples of a rank, a position in its stream, and the Tensors to receive the bytes there.
using WantedTuple = std::tuple<int, size_t, PyTensors>;
std::vector<Wanted> wanted_of(ListOf<WantedTuple> wanted);

}  // namespace horo
