"""Makes torch know the backend "horo_lite", at next to no cost: `import torch` calls this.

The package's entry point in the group `torch.backends` is `register`. It imports nothing of the
package until a process group is made, and whatever is wrong with the package's installation must
not make `import torch` fail.
"""

from __future__ import annotations

import contextlib
from importlib import import_module
from typing import Any

NAME = "horo_lite"
SCHEME = "horo-lite"  # of init_method="horo-lite://": an underscore is not allowed there


def register() -> None:
    """Register the backend, and where its ranks meet if MPI has started them. Local, idempotent."""
    with contextlib.suppress(Exception):  # a torch without distributed, or of another time
        from torch.distributed import Backend

        # Of a module whose name in its package is that of a function.
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
