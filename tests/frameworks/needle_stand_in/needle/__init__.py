"""A stand-in for Needle, the framework that students of CMU 10-414/714 write.

There is no package of it. This one follows what the course specifies and its tests check: names,
arguments, and how values, gradients and parameters are stored. The implementation is ours, limited
to what training a small network needs. It does not know horo_lite.
"""

from . import data, nn, ops, optim
from .autograd import Tensor
from .backend_ndarray import NDArray, all_devices, cpu, cpu_numpy, cuda, default_device

__all__ = [
    "NDArray",
    "Tensor",
    "all_devices",
    "cpu",
    "cpu_numpy",
    "cuda",
    "data",
    "default_device",
    "nn",
    "ops",
    "optim",
]
