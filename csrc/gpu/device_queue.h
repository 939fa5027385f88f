// A stream of our own on one GPU, and its order with everybody else's.
#pragma once

#include <deque>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "gpu/device.h"

namespace horo {

// Any thread may call; what they queue runs in the order of their calls.
class DeviceQueue {
 public:
  DeviceQueue(Device& device, int index);
  ~DeviceQueue();
  DeviceQueue(const DeviceQueue&) = delete;
  DeviceQueue& operator=(const DeviceQueue&) = delete;

  Device& device() const { return device_; }
  int index() const { return index_; }
  Stream stream() const { return stream_; }

  // What is queued here from now on comes after what `producer` has been given so far.
  void follow(Stream producer);
  // What `consumer` is given from now on comes after what is queued here.
  void lead(Stream consumer);
  // All that is queued here is done.
  void synchronize();
  // Keeps `object` until what `stream` has been given so far is done, and drops earlier ones that need no longer be
  // kept. Inside a graph capture nothing is kept: there, memory belongs to the graph.
  void hold(std::shared_ptr<void> object, Stream stream);

 private:
  Device& device_;
  int index_;
  Stream stream_;
  std::mutex mutex_;  // an event is recorded and waited for in one go
  Event followed_;
  Event led_;
  std::deque<std::pair<Event, std::shared_ptr<void>>> held_;
  std::vector<Event> spare_;
};

}  // namespace horo
