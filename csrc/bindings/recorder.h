// What the recorder is told of an operation on Python's arrays.
#pragma once

#include "bindings/tensors.h"
#include "recorder/recorder.h"

namespace horo {

// With what is known of its first tensor, if it has any.
Operation operation_of(uint32_t channel, uint32_t kind, uint32_t names, const Tensors* tensors);

}  // namespace horo
