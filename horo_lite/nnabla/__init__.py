"""NNabla on several CPUs: solvers wrapped, or NNabla's own communicator.

    import horo_lite.nnabla as hvd          # or: import horo_lite.nnabla as C

    hvd.init()
    hvd.broadcast_parameters(nn.get_parameters())
    solver = hvd.DistributedOptimizer(S.Adam())
    solver.set_parameters(nn.get_parameters())

`weight_decay`, `clip_grad_by_norm`, `scale_grad`, `check_inf_grad` and similar methods see the
averaged gradients, as `update` does: the first of them after backward() exchanges gradients. With
uneven batches, call `solver.synchronize(weight=n)` first, and then
`with solver.skip_synchronize(): solver.update()`.

A script for NNabla's communicator imports `MultiProcessDataParallelCommunicator` from here instead
of `nnabla.communicators`, or runs unchanged:

    mpiexec -n 2 python -m horo_lite.nnabla train.py
"""

from __future__ import annotations

# ruff: noqa: F401, F403
from horo_lite import *
from horo_lite.nnabla.backward import overlap
from horo_lite.nnabla.communicator import MultiProcessDataParallelCommunicator
from horo_lite.nnabla.context import get_extension_context

MultiProcessCommunicator = MultiProcessDataParallelCommunicator
MultiProcessDataParalellCommunicator = MultiProcessDataParallelCommunicator  # NNabla's old name


def install() -> None:
    """Put this communicator into `nnabla.communicators`, where scripts import it from.

    Scripts that request "cudnn" without having it then compute on the CPU: see
    `get_extension_context`.
    """
    import nnabla.communicator
    import nnabla.communicators
    import nnabla.ext_utils

    nnabla.ext_utils.get_extension_context = get_extension_context

    for module in (nnabla.communicator, nnabla.communicators):
        module.MultiProcessCommunicator = MultiProcessDataParallelCommunicator
        module.MultiProcessDataParallelCommunicator = MultiProcessDataParallelCommunicator
        module.MultiProcessDataParalellCommunicator = MultiProcessDataParallelCommunicator
