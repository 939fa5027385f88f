"""Horovod's names for exceptions."""

from __future__ import annotations

from horo_lite.elastic.recovery import HostsUpdatedInterrupt
from horo_lite.errors import HoroLiteError as HorovodInternalError

__all__ = ["HorovodInternalError", "HostsUpdatedInterrupt"]
