"""Datasets, and the loader that makes batches of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from .ops import Tensor


class Dataset:
    def __init__(self, transforms: Any = None) -> None:
        self.transforms = transforms

    def __getitem__(self, index: Any) -> Any:
        raise NotImplementedError

    def __len__(self) -> int:
        raise NotImplementedError


class DataLoader:
    """Shuffles with NumPy's global state, again for each epoch."""

    def __init__(
        self,
        dataset: Dataset,
        batch_size: int = 1,
        shuffle: bool = False,
        device: Any = None,
        dtype: str = "float32",
    ) -> None:
        self.dataset, self.batch_size, self.shuffle = dataset, batch_size, shuffle
        self.device, self.dtype = device, dtype

    def __iter__(self) -> Iterator[tuple[Tensor, ...]]:
        n = len(self.dataset)
        order = np.random.permutation(n) if self.shuffle else np.arange(n)
        self._batches = iter(np.array_split(order, range(self.batch_size, n, self.batch_size)))
        return self

    def __next__(self) -> tuple[Tensor, ...]:
        samples = [self.dataset[i] for i in next(self._batches)]
        return tuple(
            Tensor(np.stack(column), device=self.device, dtype=self.dtype, requires_grad=False)
            for column in zip(*samples, strict=True)
        )
