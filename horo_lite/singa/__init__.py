"""SINGA on several processes, also on CPUs: `import horo_lite.singa as hvd`.

    world = hvd.init()
    hvd.broadcast_parameters(model.get_params())
    sgd = hvd.DistributedOptimizer(opt.SGD(lr=0.1))         # in place of opt.DistOpt(…)
    ...
    sgd(loss)                                               # or sgd.backward_and_update(loss)

`DistributedOptimizer` has the methods of SINGA's `DistOpt`, whose `Communicator` exists only in
builds with CUDA and NCCL. To keep a program unchanged, call `install()` first: from then on
`opt.DistOpt` itself works, with the `Communicator` of this package.

Models must not be compiled with `use_graph=True`: SINGA then replays C++ operations without running
Python, so nothing could be exchanged; the first step raises an error.

Tested on a stand-in with SINGA's Python interface, and by hand on SINGA 3.0.0.dev1 for CPUs, the
only wheel on PyPI, whose accessors had to be fixed first; not on a build with CUDA. Only
horo_lite.adapters.singa accesses SINGA's memory.
"""

from __future__ import annotations

# ruff: noqa: F401, F403
from horo_lite import *
from horo_lite.singa.communicator import Communicator, NcclIdHolder, install
from horo_lite.singa.optimizer import DistributedOptimizer, broadcast_optimizer_state
