"""`horovod.data`: data loaders whose batches a thread reads ahead of training."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from typing import Any

__all__ = ["AsyncDataLoaderMixin", "BaseDataLoader"]

_POLL_S = 0.1  # how often a thread whose loader is no longer read checks whether to end


class BaseDataLoader:
    """A loader of batches: derived classes define `__len__` and `_iterate`."""

    def __len__(self) -> int:
        """Return the number of batches."""
        raise NotImplementedError

    def _iterate(self) -> Iterator[Any]:
        """Yield the batches of an epoch."""
        raise NotImplementedError

    def _process_batch(self, batch: Any) -> Any:
        """Return what the training loop receives for a batch; called in its thread."""
        return batch

    def __iter__(self) -> Iterator[Any]:
        for batch in self._iterate():
            yield self._process_batch(batch)


class AsyncDataLoaderMixin:
    """Reads batches ahead, in a thread: `class Loader(AsyncDataLoaderMixin, OwnLoader)`.

    The thread lives until the end of the epoch, or until the loop over it is left. An exception
    that `_iterate` raises there is raised in the training loop when it reaches that batch.

    Args:
        async_loader_queue_size: How many batches are read ahead; with 0, no thread is used.
        *args: For the other base class.
        **kwargs: For the other base class.
    """

    def __init__(self, async_loader_queue_size: int = 64, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.async_loader_queue_size = async_loader_queue_size
        self._stops: list[threading.Event] = []

    def close_async_loader(self) -> None:
        """Stop reading; loops over this loader end after the batches that have been read."""
        for stop in self._stops:
            stop.set()

    def __iter__(self) -> Iterator[Any]:
        loader: Any = super()
        if self.async_loader_queue_size <= 0:
            yield from loader.__iter__()
            return
        ahead: queue.Queue[tuple[str, Any]] = queue.Queue(self.async_loader_queue_size)
        stop = threading.Event()
        self._stops.append(stop)

        def put(kind: str, what: Any = None) -> bool:
            while not stop.is_set():
                try:
                    ahead.put((kind, what), timeout=_POLL_S)
                except queue.Full:
                    continue
                return True
            return False

        def read() -> None:
            try:
                for batch in loader._iterate():
                    if not put("batch", batch):
                        return
                put("end")
            except BaseException as error:
                put("error", error)

        thread = threading.Thread(target=read, name="horo_lite batches ahead", daemon=True)
        thread.start()
        try:
            while True:
                try:
                    kind, what = ahead.get(timeout=_POLL_S)
                except queue.Empty:
                    if stop.is_set():
                        return
                    continue
                if kind == "error":
                    raise what
                if kind == "end":
                    return
                yield loader._process_batch(what)
        finally:
            stop.set()
            self._stops.remove(stop)
            thread.join()
