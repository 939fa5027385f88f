// What an engine needs of a group of ranks, however they reach each other.
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
  // Of a group that is the engines' own: how they exchange. `self` is this one.
  virtual std::unique_ptr<Channel> engine_channel(const std::shared_ptr<EngineGroup>& self) = 0;
  // Of the group for direct calls.
  virtual Engine::DirectWait direct_wait() const = 0;
  // In place over these tensors, in an operation of that name which all ranks run now. There is a weight for every
  // rank, or none. With `distances`, the tensors lie in memory that all ranks see, as in ShmGroup::reduce_in_place.
  virtual void reduce(const std::string& name, const std::vector<TensorRef>& tensors, Op op, Wire wire,
                      const std::vector<double>& weights, Factor factor, const std::vector<ptrdiff_t>& distances) = 0;
};

}  // namespace horo
