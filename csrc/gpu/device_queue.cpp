#include "gpu/device_queue.h"

namespace horo {

DeviceQueue::DeviceQueue(Device& device, int index)
    : device_(device),
      index_(index),
      stream_(device.new_stream(index)),
      followed_(device.new_event(index)),
      led_(device.new_event(index)) {}

DeviceQueue::~DeviceQueue() {
  try {
    synchronize();  // held memory is still in use until then
  } catch (const DeviceError&) {
  }
  for (auto& [event, object] : held_) spare_.push_back(event);
  try {
    for (Event event : spare_) device_.delete_event(index_, event);
    device_.delete_event(index_, led_);
    device_.delete_event(index_, followed_);
    device_.delete_stream(index_, stream_);
  } catch (const DeviceError&) {  // the process is losing its GPU
  }
}

// An event may be recorded again at once: a wait refers to the recording that was the latest when the wait was queued.
void DeviceQueue::follow(Stream producer) {
  const std::lock_guard lock(mutex_);
  device_.record(index_, followed_, producer);
  device_.wait(index_, stream_, followed_);
}

void DeviceQueue::lead(Stream consumer) {
  const std::lock_guard lock(mutex_);
  device_.record(index_, led_, stream_);
  device_.wait(index_, consumer, led_);
}

bool DeviceQueue::is_idle() { return !device_.is_capturing(index_, stream_) && device_.is_idle(index_, stream_); }

void DeviceQueue::synchronize() {
  const Event event = device_.new_event(index_);
  try {
    device_.record(index_, event, stream_);
    device_.synchronize(index_, event);
  } catch (const DeviceError&) {
    device_.delete_event(index_, event);
    throw;
  }
  device_.delete_event(index_, event);
}

void DeviceQueue::hold(std::shared_ptr<void> object, Stream stream) {
  if (device_.is_capturing(index_, stream)) return;
  // These may be Python objects, whose destructors may release the GIL to a thread that waits for the mutex.
  std::vector<std::shared_ptr<void>> dropped;
  const std::lock_guard lock(mutex_);
  while (!held_.empty() && device_.is_done(index_, held_.front().first)) {
    spare_.push_back(held_.front().first);
    dropped.push_back(std::move(held_.front().second));
    held_.pop_front();
  }
  if (spare_.empty()) spare_.push_back(device_.new_event(index_));
  const Event event = spare_.back();
  device_.record(index_, event, stream);
  spare_.pop_back();
  held_.emplace_back(event, std::move(object));
}

}  // namespace horo
