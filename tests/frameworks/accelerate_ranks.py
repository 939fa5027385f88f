"""Run one of Accelerate's own test scripts on a backend, by torchrun.

Arguments: the backend, and the name of a module of accelerate.test_utils.scripts.
"""

from __future__ import annotations

import sys
from importlib import import_module

from torch import distributed as dist

import horo_lite.torch  # noqa: F401 (registers the backend, also where the package is not installed)

backend, name = sys.argv[1:]
dist.init_process_group(backend)  # Accelerate only knows the backends of its own list
assert (dist.get_backend(), dist.get_world_size()) == (backend, 2)
import_module(f"accelerate.test_utils.scripts.{name}").main()
assert not dist.is_initialized()  # the script's last line ends the group
print("passed on a rank\n", end="", flush=True)
