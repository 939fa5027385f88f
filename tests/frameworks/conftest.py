"""What a framework's tests say of it: the README's table is made of their marks."""

from __future__ import annotations

import pytest

FEATURES = ("eager", "jit", "overlap", "in place", "fp16")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A feature that the README's table does not have is an error."""
    for item in items:
        for mark in item.iter_markers("shows"):
            unknown = [feature for feature in mark.args if feature not in FEATURES]
            if unknown or not mark.args:
                raise pytest.UsageError(f"{item.nodeid} shows {unknown or 'nothing'}: not a cell")
