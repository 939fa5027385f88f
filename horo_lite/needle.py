"""Needle on several ranks: `import horo_lite.needle as hvd`, and the loop stays as it is.

    rank, device = hvd.init()
    train, bsz = hvd.partition_dataset(dataset, 128, device=device, dtype="float32")
    model = ResNet9(device=device)
    hvd.broadcast_parameters(model)
    opt = hvd.DistributedOptimizer(ndl.optim.Adam(model.parameters(), lr=0.001))
    for X, y in train:
        opt.reset_grad()
        loss_fn(model(X), y).backward()
        opt.step()

Started by `mpiexec -n 4 python train.py` or `python -m horo_lite -n 4 train.py`.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import needle as ndl
import numpy as np

import horo_lite

# ruff: noqa: F403
from horo_lite import *
from horo_lite import is_initialized, rank, size


def init(*args: Any, **options: Any) -> tuple[int, Any]:
    """`(rank, device)`: this rank's number, and the Needle device that it computes on.

    Called once by every rank. The device is `ndl.cpu()`, or, where this rank has a GPU and Needle
    the backend for it, `ndl.cuda(index)`; if yours takes no index, `ndl.cuda()`, and which GPU that
    is CUDA_VISIBLE_DEVICES says. Arguments as for `horo_lite.init`.
    """
    here = horo_lite.init(*args, **options)
    if here.device.kind == "cuda" and hasattr(ndl, "cuda"):
        device = (
            ndl.cuda(here.device.index) if inspect.signature(ndl.cuda).parameters else ndl.cuda()
        )
        if device.enabled():
            return here.rank, device
    return here.rank, ndl.cpu()


def partition_dataset(
    dataset: Any,
    batch_size: int,
    device: Any = None,
    dtype: str = "float32",
    *,
    shuffle: bool = True,
) -> tuple[Any, int]:
    """`(loader, bsz)`: a loader over this rank's part of `dataset`, with batches of `bsz`.

    Called by every rank with the same dataset. `batch_size` counts the samples of all ranks
    together, and `bsz` is `batch_size // size`. Every rank gets every size-th sample, as many as
    the others, so that all have equally many batches; up to size - 1 samples are left out.

    Under `elastic.run`, call it in the function that trains: a part is of the world that it was
    made in, and in another an error.

    The loader is Needle's `DataLoader`, which with `shuffle` orders each epoch anew by NumPy's
    global state, and gives tensors on `device`. Without it, N ranks take the steps that one process
    takes with the same `batch_size`, if N divides it.
    """
    n, bsz = len(dataset) // size(), batch_size // size()
    if min(n, bsz) < 1:
        raise ValueError(
            f"partition_dataset: {len(dataset)} samples in batches of {batch_size} leave nothing "
            f"for some of the {size()} ranks; batch_size is that of all ranks together"
        )
    part = _Part(dataset, n, (rank(), size()))
    known = inspect.signature(ndl.data.DataLoader).parameters
    options = {"device": device, "dtype": dtype}
    understood = {key: value for key, value in options.items() if key in known}
    loader = ndl.data.DataLoader(part, batch_size=bsz, shuffle=shuffle, **understood)
    return loader if "device" in known else _OnDevice(loader, options), bsz


class _Part(ndl.data.Dataset):  # type: ignore[misc]
    def __init__(self, dataset: Any, n: int, place: tuple[int, int]) -> None:
        super().__init__()
        self._dataset, self._place = dataset, place
        first, step = place
        self._indices = np.arange(n) * step + first

    def __getitem__(self, index: Any) -> Any:
        if is_initialized() and (rank(), size()) != self._place:
            raise RuntimeError(
                "this loader has the samples of rank {} of {}, and this is now rank {} of {}: call "
                "partition_dataset in the function that elastic.run calls".format(
                    *self._place, rank(), size()
                )
            )
        chosen = self._indices[index]
        return self._dataset[chosen if np.ndim(chosen) else int(chosen)]

    def __len__(self) -> int:
        return len(self._indices)


class _OnDevice:
    """A loader of the earlier homeworks, which knows no devices, with its tensors on one."""

    def __init__(self, loader: Any, options: dict[str, Any]) -> None:
        self._loader, self._options = loader, options

    def __iter__(self) -> Iterator[tuple[Any, ...]]:
        for batch in self._loader:
            yield tuple(ndl.Tensor(x, requires_grad=False, **self._options) for x in batch)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)
