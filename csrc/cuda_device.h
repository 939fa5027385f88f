#pragma once

namespace horo {

// 0 where there is no driver or no device; CUDA_VISIBLE_DEVICES is honoured by the driver itself.
int cuda_device_count();

}  // namespace horo
