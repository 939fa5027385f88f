"""SINGA over several processes, on CPUs too: `import horo_lite.singa as hvd`.

    world = hvd.init()
    hvd.broadcast_parameters(model.get_params())
    sgd = hvd.DistributedOptimizer(opt.SGD(lr=0.1))         # in place of opt.DistOpt(…)
    ...
    sgd(loss)                                               # or sgd.backward_and_update(loss)

`DistributedOptimizer` has the methods of SINGA's `DistOpt`, whose `Communicator` is only in builds
with CUDA and NCCL. A program that is to stay as it is calls `install()` first: from then on
`opt.DistOpt` itself works, with the `Communicator` here.

Models must not be compiled with `use_graph=True`: SINGA then replays C++ operations, and no Python
runs that could exchange anything; the first step says so.

Tested on a stand-in with SINGA's Python interface, and by hand on SINGA 3.0.0.dev1 for CPUs, the
only wheel on PyPI, whose accessors had to be mended first; not on a build with CUDA. All that
touches SINGA's memory is in horo_lite.adapters.singa.
"""

from __future__ import annotations

# ruff: noqa: F401, F403
from horo_lite import *
from horo_lite.singa.communicator import Communicator, NcclIdHolder, install
from horo_lite.singa.optimizer import DistributedOptimizer, broadcast_optimizer_state
