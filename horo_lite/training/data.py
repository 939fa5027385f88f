"""Distribution of samples over the ranks, for any framework.

Both ways use one permutation, which every rank computes from `(seed, epoch)`: `partition_dataset`
divides each global batch into one share per rank, so that N ranks train on exactly the batches of
one process; `DistributedSampler` distributes indices for a data loader that makes its own batches.
Neither communicates with other ranks.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import import_module
from typing import Any

import numpy as np
import numpy.typing as npt

from horo_lite import context
from horo_lite.errors import warn

Indices = npt.NDArray[np.intp]


class _Shares:
    """What both have in common: the order of each epoch, and which rank's share to return."""

    def __init__(
        self, n: int, *, rank: int | None, size: int | None, shuffle: bool, seed: int
    ) -> None:
        self._n = n
        self._shuffle = shuffle
        self._seed = non_negative("seed", seed)
        self._epoch = 0
        self._n_iterations = 0  # of this epoch
        self._follows = rank is None and size is None
        self._place: tuple[int, int] | None = None
        if not self._follows:
            self._place = self._checked(rank_and_size(rank, size))

    @property
    def rank(self) -> int:
        """The rank whose share this is: by default this rank's number in the current world."""
        return self._resolve()[0]

    @property
    def size(self) -> int:
        """The number of ranks that share: by default that of the current world."""
        return self._resolve()[1]

    @property
    def epoch(self) -> int:
        return self._epoch

    def set_epoch(self, epoch: int) -> None:
        """Use the order of this epoch, the same on every rank, in the next iteration."""
        self._epoch = non_negative("epoch", epoch)
        self._n_iterations = 0

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self._epoch}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.set_epoch(state["epoch"])

    def _order(self) -> Indices:
        """Return the order of an iteration that begins."""
        self._n_iterations += 1
        # A script may look at a batch first, or evaluate what it has trained on.
        if self._n_iterations == 3 and self._shuffle and self.rank == 0:
            warn(
                f"{type(self).__name__} begins its third iteration in the order of epoch "
                f"{self._epoch}: call set_epoch(epoch) before each epoch, on every rank, or every "
                "epoch has this order. For one order on purpose, pass shuffle=False"
            )
        return sample_order(self._n, self._shuffle, self._seed, self._epoch)

    def _resolve(self) -> tuple[int, int]:
        # On each call, since `elastic.run` may have lost ranks. After shutdown(), and in a data
        # loader's worker, the values of the last world remain.
        if self._place is None or (self._follows and context.is_initialized()):
            self._place = self._checked(rank_and_size(None, None))
        return self._place

    def _checked(self, place: tuple[int, int]) -> tuple[int, int]:
        """Return the rank and the size; raise ValueError if there are too few samples for them."""
        raise NotImplementedError


class DistributedSampler(_Shares):
    """The indices of this rank's samples in an epoch: as many on every rank, together all samples.

    `dataset_or_n` is anything with a length, or the number of samples, the same on every rank. If
    the number is not divisible by the number of ranks, the first indices of the epoch are used a
    second time (nothing is left out, up to `size - 1` samples count twice), or, with
    `drop_last=True`, the last ones are left out. Iteration yields Python integers, so it can be
    passed to a torch `DataLoader(…, sampler=…)`. Call `set_epoch(e)` before each epoch; otherwise
    every epoch has the order of the first, and rank 0 warns.

    Unless both are given, `rank` and `size` are those of the world when an iteration begins. So
    under `elastic.run`, the remaining ranks share all samples, in an epoch that begins anew;
    `elastic.Sampler` distributes only the rest of the epoch.
    """

    def __init__(
        self,
        dataset_or_n: object,
        *,
        rank: int | None = None,
        size: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
    ) -> None:
        self._drop_last = drop_last
        super().__init__(length_of(dataset_or_n), rank=rank, size=size, shuffle=shuffle, seed=seed)

    def __len__(self) -> int:
        return self._n // self.size if self._drop_last else -(-self._n // self.size)

    def __iter__(self) -> Iterator[int]:
        rank, size = self._resolve()
        # np.resize repeats the order as often as necessary, also if n < size.
        return iter(np.resize(self._order(), len(self) * size)[rank::size].tolist())

    def _checked(self, place: tuple[int, int]) -> tuple[int, int]:
        _, size = place
        if self._drop_last and self._n < size:
            raise ValueError(
                f"DistributedSampler: {_samples(self._n)} on {size} ranks with drop_last=True "
                "leaves nothing for any rank; pass drop_last=False to use some of them twice, "
                "or start fewer ranks"
            )
        return place


class ShardedLoader(_Shares):
    """This rank's share of every global batch of an epoch; made by `partition_dataset`.

    It can be iterated any number of times; `set_epoch(e)` selects the order of the next iteration.
    """

    def __init__(
        self,
        gather: Callable[[Indices], Any],
        n: int,
        batch_size: int,
        *,
        rank: int | None,
        size: int | None,
        shuffle: bool,
        seed: int,
        drop_last: bool,
    ) -> None:
        self._gather = gather
        self._drop_last = drop_last
        self.batch_size = batch_size
        super().__init__(n, rank=rank, size=size, shuffle=shuffle, seed=seed)

    @property
    def local_batch_size(self) -> int:
        """This rank's number of samples in a full batch."""
        start, stop = _share(self.batch_size, *self._resolve())
        return stop - start

    def __len__(self) -> int:
        """Return the number of batches in an epoch, the same on every rank."""
        full = self._n // self.batch_size
        return full if self._drop_last else -(-self._n // self.batch_size)

    def __iter__(self) -> Iterator[Any]:
        place, order = self._resolve(), self._order()
        for i in range(len(self)):
            batch = order[i * self.batch_size : (i + 1) * self.batch_size]
            start, stop = _share(len(batch), *place)
            yield self._gather(batch[start:stop])

    def _checked(self, place: tuple[int, int]) -> tuple[int, int]:
        _, size = place
        if self.batch_size < size:
            raise ValueError(
                f"partition_dataset: batch_size={self.batch_size} is the batch of all {size} ranks "
                "together, which leaves some of them without a sample; pass "
                f"{size} or more, or start fewer ranks"
            )
        return place


def _share(n: int, rank: int, size: int) -> tuple[int, int]:
    """Return where a rank's part of a batch of n begins and ends; sizes differ by at most one."""
    return n * rank // size, n * (rank + 1) // size


def partition_dataset(
    dataset: Any,
    batch_size: int,
    *,
    rank: int | None = None,
    size: int | None = None,
    shuffle: bool = True,
    seed: int = 0,
    drop_last: bool = True,
) -> tuple[ShardedLoader, int]:
    """Return a loader of this rank's share of every global batch, and the share's size.

    The shares of batch i, joined in rank order, are exactly the batch i of one process with the
    same `batch_size` and `seed`, whatever the number of ranks: so a run on N ranks takes the same
    steps as a run on one. Every rank calls this with an equal dataset and equal arguments.

    `batch_size` counts the samples of all ranks together. It need not be divisible by the number of
    ranks, so a script works with any `-np`: shares then differ by one sample, and the mean over the
    batch is the average of the ranks' means *weighted by their sample counts*. Pass the count to
    the optimizer (see `weight` of `DistributedOptimizer`); with equal shares it has no effect.

    `dataset` is one of

    - an array (NumPy, torch, JAX, CuPy …): batches are arrays `array[indices]`; rows of pandas
      objects are selected by position, whatever their labels;
    - a tuple or a dict of arrays of equal length, such as `(images, labels)`: batches are tuples
      or dicts of arrays;
    - any other sequence of samples, such as a list or a torch dataset: samples are fetched one by
      one and stacked into NumPy arrays, field by field if they are tuples or dicts. If a sample
      has a torch tensor, batches are those of torch's DataLoader (`default_collate`): tensors.

    `drop_last=True` leaves out a last batch that is not full (if shuffled, these are other samples
    in each epoch). With `drop_last=False` it is distributed too, and a rank's share of it may be
    empty: use this for evaluation; in training, pass a weight of 0 to the optimizer.

    Unless both are given, `rank` and `size` are those of the world when an iteration begins. So
    under `elastic.run`, the remaining ranks share every batch, and the shares grow:
    `loader.local_batch_size` is the current size, and the weight is the actual number of samples.

    Args:
        dataset: The arrays or samples; the same on every rank.
        batch_size: The number of samples in a batch, of all ranks together.
        rank: This rank's number; by default that in the world.
        size: The number of ranks; by default that of the world.
        shuffle: Whether each epoch has an order of its own.
        seed: The seed of the order; the same on every rank.
        drop_last: Whether to leave out a last batch that is not full.

    Returns:
        The loader, and this rank's number of samples in a full batch.
    """
    batch_size = operator.index(batch_size)
    gather, n = _reader(dataset)
    loader = ShardedLoader(
        gather,
        n,
        batch_size,
        rank=rank,
        size=size,
        shuffle=shuffle,
        seed=seed,
        drop_last=drop_last,
    )
    local_batch_size = loader.local_batch_size
    if drop_last and n < batch_size:
        raise ValueError(
            f"partition_dataset: {_samples(n)} cannot fill one batch of {batch_size}; pass "
            "drop_last=False or a smaller batch_size"
        )
    return loader, local_batch_size


def sample_order(n: int, shuffle: bool, seed: int, epoch: int) -> Indices:
    """Return the indices of n samples, in order or in the epoch's order, the same on all ranks."""
    if not shuffle:
        return np.arange(n, dtype=np.intp)
    # A sequence as seed distinguishes every (seed, epoch); a sum would not: (0, 1) and (1, 0).
    return np.random.default_rng([seed, epoch]).permutation(n).astype(np.intp, copy=False)


def rank_and_size(rank: int | None, size: int | None) -> tuple[int, int]:
    """Return both as given, or those of the world; raise ValueError if they are invalid."""
    if rank is None and size is None:
        here = context.world()
        return here.rank, here.size
    if rank is None or size is None:
        raise ValueError(f"pass both rank and size or neither, not rank={rank}, size={size}")
    rank, size = operator.index(rank), operator.index(size)
    if not 0 <= rank < size:
        raise ValueError(f"rank={rank} is not one of the {size} ranks 0 … {size - 1}")
    return rank, size


def _reader(dataset: Any) -> tuple[Callable[[Indices], Any], int]:
    """Return a function from indices to a batch, and the number of samples."""
    if isinstance(dataset, Mapping):
        columns = {key: _array(column) for key, column in dataset.items()}
        n = _common_length(columns)
        return lambda indices: {key: _rows(a, indices) for key, a in columns.items()}, n
    if isinstance(dataset, tuple):
        arrays = tuple(_array(column) for column in dataset)
        n = _common_length(dict(enumerate(arrays)))
        return lambda indices: tuple(_rows(a, indices) for a in arrays), n
    if hasattr(dataset, "shape"):
        return lambda indices: _rows(dataset, indices), length_of(dataset)
    return lambda indices: _stack_samples(dataset, indices), length_of(dataset)


def _array(column: Any) -> Any:
    return column if hasattr(column, "shape") else np.asarray(column)


def _rows(array: Any, indices: Indices) -> Any:
    """Return the rows at these positions: in pandas, `[]` takes labels or column names."""
    return getattr(array, "iloc", array)[indices]


def _common_length(columns: Mapping[Any, Any]) -> int:
    if not columns:
        raise ValueError("the dataset has no arrays: pass (images, labels), for example")
    lengths = {key: length_of(column) for key, column in columns.items()}
    if len(set(lengths.values())) > 1:
        raise ValueError(
            "the arrays of a dataset have one row per sample and must be equally long, but have "
            + ", ".join(f"{n} in array {key!r}" for key, n in lengths.items())
            + "; a sequence of samples must be a list, not a tuple"
        )
    return next(iter(lengths.values()))


def _stack_samples(dataset: Any, indices: Indices) -> Any:
    if len(indices) == 0:  # one sample is needed for shapes and dtypes
        return _map_fields(lambda batch: batch[:0], _stack([dataset[0]]))
    return _stack([dataset[int(i)] for i in indices])


def _stack(samples: Sequence[Any]) -> Any:
    first = samples[0]
    try:
        if _has_tensor(first):
            batch = import_module("torch.utils.data").default_collate(samples)
            return tuple(batch) if isinstance(first, (tuple, list)) else batch
        if isinstance(first, Mapping):
            return {key: np.stack([np.asarray(s[key]) for s in samples]) for key in first}
        if isinstance(first, tuple):
            fields = zip(*samples, strict=True)
            return tuple(np.stack([np.asarray(value) for value in field]) for field in fields)
        return np.stack([np.asarray(s) for s in samples])
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(
            f"samples of type {type(first).__name__} cannot be stacked into arrays ({error}): "
            "partition their indices, as partition_dataset(np.arange(len(dataset)), …) does, and "
            "make the batches of them yourself, or pass a DistributedSampler to the loader that "
            "makes them"
        ) from error


def _has_tensor(sample: Any) -> bool:
    torch = sys.modules.get("torch")
    if isinstance(sample, Mapping):
        sample = tuple(sample.values())
    fields = sample if isinstance(sample, (tuple, list)) else (sample,)
    return torch is not None and any(isinstance(field, torch.Tensor) for field in fields)


def _map_fields(f: Callable[[Any], Any], batch: Any) -> Any:
    if isinstance(batch, dict):
        return {key: f(value) for key, value in batch.items()}
    if isinstance(batch, tuple):
        return tuple(f(value) for value in batch)
    return f(batch)


def length_of(dataset_or_n: Any) -> int:
    """Return the number of samples of a dataset, or the number itself."""
    try:
        n = len(dataset_or_n)
    except TypeError:
        if not hasattr(dataset_or_n, "__index__"):
            raise TypeError(
                "need a dataset with a length, or the number of samples, not "
                + type(dataset_or_n).__name__
            ) from None
        n = operator.index(dataset_or_n)
    if n < 1:
        raise ValueError(f"the dataset must hold at least one sample, not {n}")
    return n


def _samples(n: int) -> str:
    return "1 sample" if n == 1 else f"{n:,} samples"


def non_negative(name: str, value: int) -> int:
    """Return the value as an int; raise ValueError if it is negative."""
    value = operator.index(value)
    if value < 0:
        raise ValueError(f"{name} must not be negative, but it is {value}")
    return value
