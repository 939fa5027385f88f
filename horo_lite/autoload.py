"""Register the backend "horo_lite" with torch, at almost no cost: `import torch` calls this.

`register` is the package's entry point in the group `torch.backends`. It imports nothing else of
the package until a process group is created, and a defect of the package's installation must not
make `import torch` fail.
"""

from __future__ import annotations

import contextlib
from importlib import import_module
from typing import Any

NAME = "horo_lite"
SCHEME = "horo-lite"  # of init_method="horo-lite://": an underscore is not allowed there


def register() -> None:
    """Register the backend, and a rendezvous for ranks that MPI started. Local, idempotent."""
    with contextlib.suppress(Exception):  # torch without distributed, or of another version
        from torch.distributed import Backend

        # By name: in its package, this module is shadowed by a function.
        meeting = import_module("torch.distributed.rendezvous")
        if NAME not in Backend.backend_list:
            Backend.register_backend(NAME, _new_process_group, extended_api=True, devices=["cpu"])
            meeting.register_rendezvous_handler(SCHEME, _rendezvous)


def _new_process_group(options: Any, backend_options: Any = None) -> Any:
    return _backend().new_process_group(options)


def _rendezvous(url: str, **options: Any) -> Any:
    return _backend().rendezvous(url, **options)


def _backend() -> Any:
    return import_module("horo_lite.torch.distributed")
