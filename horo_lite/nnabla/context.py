"""Contexts of scripts that were written for GPUs, on machines without NNabla's CUDA extension."""

from __future__ import annotations

import os
from importlib.util import find_spec
from typing import Any

import nnabla_ext.cpu
from nnabla.ext_utils import get_extension_context as context_of

from horo_lite.errors import say
from horo_lite.start.rendezvous_spec import expected_place

_told: list[str] = []


def get_extension_context(ext_name: str, **options: Any) -> Any:
    """Return NNabla's context; "cuda" and "cudnn" mean the CPU if their extension is missing.

    A line on stderr says so, once. `device_id` then has no effect.
    """
    if ext_name not in ("cuda", "cudnn", "cuda.cudnn") or find_spec("nnabla_ext.cuda") is not None:
        return context_of(ext_name, **options)
    if not _told and expected_place(os.environ)[0] == 0:
        _told.append(ext_name)
        say(
            f"NNabla's extension {ext_name!r} (nnabla-ext-cuda) is not installed: this script "
            "computes on the CPU"
        )
    return nnabla_ext.cpu.context(type_config=options.get("type_config", "float"))
