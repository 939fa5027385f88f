"""Needle on several ranks: `import horo_lite.needle as hvd`, with an unchanged training loop.

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
    """Initialize, and return this rank's number and its Needle device.

    Every rank calls it once. The device is `ndl.cpu()` or, if this rank has a GPU and Needle the
    backend for it, `ndl.cuda(index)`; if your Needle takes no index, it is `ndl.cuda()`, and
    CUDA_VISIBLE_DEVICES selects the GPU. The arguments are those of `horo_lite.init`.
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
    """Return `(loader, bsz)`: a loader over this rank's part of `dataset`, with batches of `bsz`.

    Every rank calls it with the same dataset. `batch_size` counts the samples of all ranks
    together, and `bsz` is `batch_size // size`. Every rank gets every size-th sample, the same
    number as the others, so all have the same number of batches; up to size - 1 samples are left
    out.

    Under `elastic.run`, call it in the training function: a part belongs to the world in which it
    was made, and raises an error in another.

    The loader is Needle's `DataLoader` with tensors on `device`; with `shuffle`, it shuffles each
    epoch by NumPy's global state. Without `shuffle`, N ranks take the same steps as one process
    with the same `batch_size`, if N divides it.
    """
    n, bsz = len(dataset) // size(), batch_size // size()
    if min(n, bsz) < 1:
        raise ValueError(
            f"partition_dataset: {len(dataset)} samples in batches of {batch_size} leave nothing "
            f"for some of the {size()} ranks; batch_size counts the samples of all ranks together"
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
                "this loader has the samples of rank {} of {}, but this is now rank {} of {}: call "
                "partition_dataset in the function that elastic.run calls".format(
                    *self._place, rank(), size()
                )
            )
        chosen = self._indices[index]
        return self._dataset[chosen if np.ndim(chosen) else int(chosen)]

    def __len__(self) -> int:
        return len(self._indices)


class _OnDevice:
    """Puts the tensors of a loader from the earlier homeworks, without devices, on a device."""

    def __init__(self, loader: Any, options: dict[str, Any]) -> None:
        self._loader, self._options = loader, options

    def __iter__(self) -> Iterator[tuple[Any, ...]]:
        for batch in self._loader:
            yield tuple(ndl.Tensor(x, requires_grad=False, **self._options) for x in batch)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)
