"""Horovod's Keras API for Keras 3, on the torch, JAX and TensorFlow backends, and for tf_keras.

    import horo_lite.keras as hvd

    hvd.init()
    model.compile(optimizer=hvd.DistributedOptimizer(keras.optimizers.Adam()), loss=...)
    model.fit(..., callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)])

Everything in `horo_lite` is available here as well. Callbacks are those of tf_keras (Keras 2) if
TF_USE_LEGACY_KERAS=1 is set, as for `tf.keras`, or if tf_keras was imported before this module.
"""

from __future__ import annotations

# ruff: noqa: F403
from horo_lite import *
from horo_lite.collectives.reductions import Adasum as Adasum
from horo_lite.horovod.exceptions import HorovodInternalError as HorovodInternalError
from horo_lite.horovod.objects import *
from horo_lite.horovod.process_sets import *
from horo_lite.horovod.world import *
from horo_lite.keras import callbacks as callbacks
from horo_lite.keras import elastic as elastic
from horo_lite.keras.callbacks import (
    broadcast_global_variables as broadcast_global_variables,
)
from horo_lite.keras.operations import *
from horo_lite.keras.optimizer import DistributedOptimizer as DistributedOptimizer
from horo_lite.keras.optimizer import PartialDistributedOptimizer as PartialDistributedOptimizer
from horo_lite.keras.optimizer import load_model as load_model
from horo_lite.keras.optimizer import save_model as save_model
