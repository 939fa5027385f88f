// A stream of horo_lite's own on one GPU, and its order with other streams.
#pragma once

#include <deque>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "gpu/device.h"

namespace horo {

// Any thread may call it; the work runs in the order of the calls.
class DeviceQueue {
 public:
  DeviceQueue(Device& device, int index);
  ~DeviceQueue();
  DeviceQueue(const DeviceQueue&) = delete;
  DeviceQueue& operator=(const DeviceQueue&) = delete;

  Device& device() const { return device_; }
  int index() const { return index_; }
  Stream stream() const { return stream_; }

  // Work queued here from now on runs after the work queued on `producer` so far.
  void follow(Stream producer);
  // Work queued on `consumer` from now on runs after the work queued here so far.
  void lead(Stream consumer);
  // Whether all work queued here is done, and no graph is being captured. Never blocks, as new work may.
  bool is_idle();
  // Waits until all work queued here is done.
  void synchronize();
  // Keeps `object` until the work queued on `stream` so far is done, and drops earlier ones that need no longer be
  // kept. During a graph capture nothing is kept: there, memory belongs to the graph.
  void hold(std::shared_ptr<void> object, Stream stream);

 private:
  Device& device_;
  int index_;
  Stream stream_;
  std::mutex mutex_;  // held from the recording of an event to the wait for it
  Event followed_;
  Event led_;
  std::deque<std::pair<Event, std::shared_ptr<void>>> held_;
  std::vector<Event> spare_;
};

}  // namespace horo
