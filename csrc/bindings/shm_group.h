// The ranks of one host for Python: a group that keeps its memory alive.
#pragma once

#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings/python.h"
#include "bindings/tensors.h"
#include "engine/engine_group.h"
#include "pack/layout.h"
#include "shm/segment.h"
#include "shm/shm_group.h"

namespace horo {

struct PyShmGroup : EngineGroup {
  std::shared_ptr<Segment> segment;
  ShmGroup shm;

  PyShmGroup(std::shared_ptr<Segment> memory, size_t offset, int rank, int size, std::vector<int> pids,
             std::vector<std::string> names)
      : segment(std::move(memory)), shm(segment->data() + offset, rank, size, std::move(pids), std::move(names)) {
    shm.on_idle = check_signals;
  }

  std::unique_ptr<Channel> engine_channel(const std::shared_ptr<EngineGroup>& self) override;
  void reduce(const std::vector<TensorRef>& tensors, Op op, Wire wire, const std::vector<double>& weights,
              Factor factor, const std::vector<ptrdiff_t>& distances) override;
};

// The buffers of a list of Tensors, one after the other.
std::vector<Buffer> buffers_of(ListOf<PyTensors> stream);
// From tuples of a rank, a position in its stream, and the Tensors to receive the bytes there.
using WantedTuple = std::tuple<int, size_t, PyTensors>;
std::vector<Wanted> wanted_of(ListOf<WantedTuple> wanted);

}  // namespace horo
