"""A group that records what is sent through it, in order."""

from __future__ import annotations

from typing import Any

from horo_lite.collectives.group import Group


class Recording:
    def __init__(self, group: Group) -> None:
        self.group = group
        self.left: list[tuple[str, list[str]]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.group, name)

    def exchange(self, arrays: Any, **options: Any) -> Any:
        self.left.append(("at the end", list(options["names"])))
        return self.group.exchange(arrays, **options)

    def exchange_async(self, arrays: Any, **options: Any) -> Any:
        self.left.append(("early", list(options["names"])))
        return self.group.exchange_async(arrays, **options)

    def names(self) -> list[str]:
        return sorted(name for _, names in self.left for name in names)
