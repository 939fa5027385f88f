"""The hooks by which a failure of a rank ends the job."""

from __future__ import annotations

import sys
import threading
import weakref
from typing import Any

import pytest

from horo_lite.start import ending


class Waiting:
    """Stands for a transport in which others may wait for this rank."""


def test_hooks_on_top_keep_nothing_of_a_world_that_has_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Like torch.distributed's excepthook, of which each init_process_group() installs one more."""
    for module, name in (sys, "excepthook"), (threading, "excepthook"), (sys, "exit"):
        monkeypatch.setattr(module, name, getattr(module, name))
    transport: Any = Waiting()
    gone = weakref.ref(transport)
    ending.install(0, 2, None)
    ending.watch([transport])
    earlier = sys.excepthook
    sys.excepthook = lambda *error: earlier(*error)
    ending.uninstall()
    del transport
    assert gone() is None
