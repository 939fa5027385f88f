"""A stand-in for Needle, the framework that students of CMU 10-414/714 write.

There is no package of it. This one follows what the course specifies and its tests check: names,
arguments, and how values, gradients and parameters are stored. The implementation is ours, limited
to what training a small network needs. It does not know horo_lite.
"""

from . import data, nn, ops, optim
from .ops import Tensor, cpu, cpu_numpy, cuda

__all__ = ["Tensor", "cpu", "cpu_numpy", "cuda", "data", "nn", "ops", "optim"]
