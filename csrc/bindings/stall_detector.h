// The stall detector for Python, which keeps the memory of its board alive.
#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "shm/segment.h"
#include "shm/stall_detector.h"

namespace horo {

struct PyStallDetector : StallDetector {
  std::shared_ptr<Segment> segment;

  PyStallDetector(std::shared_ptr<Segment> memory, size_t offset, int rank, std::vector<int> hosts,
                  std::vector<int> pids, std::vector<std::string> names)
      : StallDetector(memory->data() + offset, rank, std::move(hosts), std::move(pids), std::move(names)),
        segment(std::move(memory)) {}
};

}  // namespace horo
