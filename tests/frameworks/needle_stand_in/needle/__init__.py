"""A stand-in for Needle, the framework that students of CMU 10-414/714 write.

There is no package of it. This one keeps to what the course prescribes and its own tests look at:
names, arguments, and how values, gradients and parameters are held. What is inside is ours, and
only as much of it as training a small network takes. It knows nothing of horo_lite.
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
