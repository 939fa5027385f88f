"""horovod.data: batches that a thread prefetches."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from horo_lite.horovod.data import AsyncDataLoaderMixin, BaseDataLoader

pytestmark = pytest.mark.timeout(30)


class Squares(BaseDataLoader):
    def __init__(self, n: int, *, fails_at: int | None = None) -> None:
        self.n, self.fails_at = n, fails_at
        self.read: list[int] = []
        self.threads: set[str] = set()

    def __len__(self) -> int:
        return self.n

    def _iterate(self) -> Iterator[int]:
        for i in range(self.n):
            if i == self.fails_at:
                raise OSError("no more squares")
            self.threads.add(threading.current_thread().name)
            self.read.append(i)
            yield i

    def _process_batch(self, batch: int) -> int:
        return batch * batch


class Ahead(AsyncDataLoaderMixin, Squares):
    pass


def n_threads() -> int:
    return sum(thread.name == "horo_lite batches ahead" for thread in threading.enumerate())


@pytest.mark.parametrize("size", [0, 1, 64])
def test_batches_are_those_of_the_loader_in_its_order(size: int) -> None:
    loader = Ahead(size, 5)
    for _ in range(2):  # epochs
        assert list(loader) == list(Squares(5)) == [0, 1, 4, 9, 16]
    assert len(loader) == 5
    own = threading.current_thread().name
    assert (loader.threads == {own}) == (size == 0)
    assert n_threads() == 0


def test_they_are_read_ahead_as_far_as_asked_and_no_further() -> None:
    loader = Ahead(2, 100)
    batches = iter(loader)
    assert next(batches) == 0
    deadline = threading.Event()
    while len(loader.read) < 4 and not deadline.wait(0.01):
        pass
    deadline.wait(0.3)
    assert loader.read == [0, 1, 2, 3]  # one yielded, two waiting, one held by the thread
    batches.close()  # type: ignore[attr-defined]
    assert n_threads() == 0
    batches = iter(loader)
    assert next(batches) == 0
    loader.close_async_loader()
    assert len(list(batches)) <= 3
    assert n_threads() == 0


def test_its_error_comes_where_the_batch_would() -> None:
    batches = iter(Ahead(8, 5, fails_at=2))
    assert [next(batches), next(batches)] == [0, 1]
    with pytest.raises(OSError, match="no more squares"):
        next(batches)
    assert n_threads() == 0
