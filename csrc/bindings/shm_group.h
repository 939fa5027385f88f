// The ranks of one host as Python has them: a group that keeps the memory it lies in.
#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "bindings/python.h"
#include "pack/layout.h"
#include "shm/segment.h"
#include "shm/shm_group.h"

namespace horo {

struct PyShmGroup {
  std::shared_ptr<Segment> segment;
  ShmGroup shm;

  PyShmGroup(std::shared_ptr<Segment> memory, size_t offset, int rank, int size, std::vector<int> pids,
             std::vector<std::string> names)
      : segment(std::move(memory)), shm(segment->data() + offset, rank, size, std::move(pids), std::move(names)) {
    shm.on_idle = check_signals;
  }
};

// Both lay the tensors out on the wire for the call.
void all_reduce(ShmGroup& group, const std::vector<TensorRef>& refs, Op op, Wire wire,
                const std::vector<double>& weights, Factor factor);
void reduce_in_place(ShmGroup& group, const std::vector<TensorRef>& refs, Op op, Factor factor,
                     const std::vector<ptrdiff_t>& distances);

}  // namespace horo
