"""Horovod's name for its Keras API: `import horo_lite.tensorflow.keras as hvd`."""

# ruff: noqa: F401, F403
from horo_lite.keras import *
from horo_lite.keras import (
    DistributedOptimizer,
    HorovodInternalError,
    PartialDistributedOptimizer,
    broadcast_global_variables,
    callbacks,
    elastic,
    load_model,
    save_model,
)
