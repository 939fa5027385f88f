"""Distribution of samples over the ranks, if ranks may be lost in the middle of an epoch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from operator import length_hint
from typing import Any

from horo_lite.training.data import length_of, non_negative, rank_and_size, sample_order


class Sampler:
    """The indices of this rank's samples, among those that the world has not consumed in an epoch.

    All ranks distribute one order, generated from `(seed, epoch)`, round-robin; so the samples that
    the world has consumed, including those of ranks that died later, are a prefix of that order,
    which one number describes. `record_batch` counts them, after each step; an iteration after
    ranks were lost distributes the rest among the remaining ranks.

    `dataset_or_n` is anything with a length, or the number of samples, the same on every rank. Each
    rank gets the same number of indices; if the rest is not divisible by the number of ranks, its
    first indices are used a second time (up to `size - 1` samples at the end of an epoch).

    Every rank uses batches of the same size, and records each once. Call `set_epoch(e)` before an
    epoch begins or after it ends; for the current epoch, it has no effect. Without it, every epoch
    has the order of the first: an iteration after a complete one, which has left less than one more
    batch, starts a new epoch.
    """

    def __init__(self, dataset_or_n: object, shuffle: bool = True, seed: int = 0) -> None:
        self._n = length_of(dataset_or_n)
        self._shuffle = shuffle
        self._seed = non_negative("seed", seed)
        self._epoch = 0
        self._n_consumed = 0
        self._begin = 0  # the number of consumed samples when the current iteration began
        self._n_batch = 0  # samples of the iteration's last batch, of all ranks; 0: no batch yet
        self._left: Iterator[int] | None = None  # what the iteration has not handed out yet
        # Whether an iteration has begun since `set_epoch` or a change of the world. Only then may
        # it be complete, and the next one start a new epoch: a job that lost ranks between the last
        # batch of an epoch and the next epoch must not train on this one again.
        self._has_begun = False
        self._place: tuple[int, int] | None = None  # rank and size in the world of the iteration
        self.on_record: Callable[[], None] | None = None
        """Called after each record; set by the State that contains the sampler."""

    @property
    def epoch(self) -> int:
        return self._epoch

    @property
    def rank(self) -> int:
        return self._resolve()[0]

    @property
    def size(self) -> int:
        return self._resolve()[1]

    @property
    def processed_num(self) -> int:
        """The number of samples of this epoch that the world has consumed."""
        return self._n_consumed

    @property
    def processed_indices(self) -> list[int]:
        """The samples that the world has consumed, in the order of their distribution."""
        return self._dealt_out()[: self._n_consumed]

    @property
    def remaining_indices(self) -> list[int]:
        """The samples that the world has not consumed, in the order of their distribution."""
        return self._dealt_out()[self._n_consumed :]

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration, which is a new one unless it is in progress."""
        # Horovod's scripts call it after an epoch, possibly with the number of that epoch.
        if non_negative("epoch", epoch) != self._epoch or self._is_complete():
            self._epoch = epoch
            self._n_consumed = 0
        self.reset()

    def reset(self) -> None:
        """Distribute the samples that were not consumed among the current ranks.

        `elastic.run` calls it on every rank after each change of the world.
        """
        self._has_begun = False
        self._deal()

    def _deal(self) -> None:
        self._begin = self._n_consumed
        self._n_batch, self._left = 0, None
        self._place = None

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """Record that every rank has consumed one more batch, of `batch_size` samples each.

        Call it once per batch, when it has had its effect: after `optimizer.step()`. As in Horovod,
        `batch_idx` is not used: scripts may count batches from any number.
        """
        self._record(non_negative("batch_size", batch_size))

    def record_indices(self, indices: Sequence[int]) -> None:
        """Record that every rank has consumed as many samples as these, which were the next."""
        self._record(len(indices))

    def _record(self, n_samples: int) -> None:
        self._n_batch = n_samples * self.size
        self._n_consumed = min(self._n_consumed + self._n_batch, self._n)
        if self.on_record is not None:
            self.on_record()

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self._epoch, "n_consumed": self._n_consumed}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._epoch, self._n_consumed = state["epoch"], state["n_consumed"]
        self._deal()

    def __len__(self) -> int:
        return -(-(self._n - self._begin) // self.size)

    def __iter__(self) -> Iterator[int]:
        if self._is_complete():
            self._n_consumed = 0
        self._has_begun = True
        self._deal()
        rank, size = self._resolve()
        rest = self.remaining_indices
        total = len(self) * size
        while len(rest) < total:  # more than once if there are more ranks than samples
            rest += rest[: total - len(rest)]
        self._left = iter(rest[rank:total:size])
        return self._left

    def _is_complete(self) -> bool:
        """Return whether the iteration has no further batch; loaders may leave out the last."""
        rest = self._n - self._n_consumed
        if rest == 0 or self._n_batch:
            return self._has_begun and rest < max(self._n_batch, 1)
        # Without a batch: a rank that has joined since the last one does not know their size.
        return self._left is not None and not length_hint(self._left)

    def _dealt_out(self) -> list[int]:
        order: list[int] = sample_order(self._n, self._shuffle, self._seed, self._epoch).tolist()
        return order

    def _resolve(self) -> tuple[int, int]:
        if self._place is None:
            self._place = rank_and_size(None, None)
        return self._place
