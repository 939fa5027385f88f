// Describes an operation on Python arrays to the recorder.
#pragma once

#include "bindings/tensors.h"
#include "recorder/recorder.h"

namespace horo {

// Includes the first tensor's properties, if there is one.
Operation operation_of(uint32_t channel, uint32_t kind, uint32_t names, const Tensors* tensors);

}  // namespace horo
