// What an engine needs from a group of ranks, whatever its transport.
#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <vector>

#include "engine/engine.h"
#include "pack/layout.h"

namespace horo {

class EngineGroup {
 public:
  virtual ~EngineGroup() = default;
  // For a group that belongs to engines: the channel between them. `self` is this group.
  virtual std::unique_ptr<Channel> engine_channel(const std::shared_ptr<EngineGroup>& self) = 0;
  // Reduces these tensors in place, in an operation that all ranks run now. There is a weight for every rank, or none.
  // With `distances`, the tensors are in memory that all ranks share, as in ShmGroup::reduce_in_place.
  virtual void reduce(const std::vector<TensorRef>& tensors, Op op, Wire wire, const std::vector<double>& weights,
                      Factor factor, const std::vector<ptrdiff_t>& distances) = 0;
};

}  // namespace horo
