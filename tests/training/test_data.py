"""Properties of the data shards: together the ranks see exactly what one process would."""

from __future__ import annotations

import operator
import warnings
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from horo_lite.errors import NotInitializedError
from horo_lite.training.data import DistributedSampler, partition_dataset

SEEDS = st.integers(0, 2**40)
EPOCHS = st.integers(0, 1000)
SIZES = st.integers(1, 9)


def visits(n: int, size: int, epoch: int = 0, **options: Any) -> list[list[int]]:
    """Return the indices that each rank's sampler yields."""
    lists = []
    for rank in range(size):
        sampler = DistributedSampler(n, rank=rank, size=size, **options)
        sampler.set_epoch(epoch)
        lists.append(list(sampler))
        assert len(sampler) == len(lists[-1])
    return lists


@given(n=st.integers(1, 200), size=SIZES, seed=SEEDS, epoch=EPOCHS, shuffle=st.booleans())
def test_padded_sampler_visits_everything_equally_often(n, size, seed, epoch, shuffle):
    lists = visits(n, size, epoch, seed=seed, shuffle=shuffle)
    assert {len(own) for own in lists} == {-(-n // size)}
    counts = np.bincount([i for own in lists for i in own], minlength=n)
    assert len(counts) == n
    # Wrapped around: no sample is visited more than once more often than another.
    assert counts.min() >= 1
    assert counts.max() - counts.min() <= 1
    assert counts.sum() - n < size


@given(data=st.data(), size=SIZES, seed=SEEDS, epoch=EPOCHS, shuffle=st.booleans())
def test_dropping_sampler_visits_nothing_twice(data, size, seed, epoch, shuffle):
    n = data.draw(st.integers(size, 200))
    lists = visits(n, size, epoch, seed=seed, shuffle=shuffle, drop_last=True)
    assert {len(own) for own in lists} == {n // size}
    together = [i for own in lists for i in own]
    assert len(set(together)) == len(together) == n // size * size
    assert set(together) <= set(range(n))


@given(n=st.integers(1, 200), size=SIZES, seed=SEEDS, epoch=EPOCHS)
def test_sampler_deals_one_permutation(n, size, seed, epoch):
    (whole,) = visits(n, 1, epoch, seed=seed)
    dealt = [i for turn in zip(*visits(n, size, epoch, seed=seed), strict=True) for i in turn]
    assert dealt[:n] == whole
    assert dealt[n:] == (whole * size)[: len(dealt) - n]


def test_sampler_order_is_that_of_seed_and_epoch():
    orders = {
        (seed, epoch): tuple(visits(100, 1, epoch, seed=seed)[0])
        for seed in range(4)
        for epoch in range(4)
    }
    assert len(set(orders.values())) == len(orders)
    assert orders[2, 3] == tuple(visits(100, 1, 3, seed=2)[0])
    assert visits(7, 2, 5, shuffle=False) == [[0, 2, 4, 6], [1, 3, 5, 0]]


def test_sampler_takes_a_dataset_or_its_length():
    assert list(DistributedSampler(["a", "b", "c"], rank=0, size=2, shuffle=False)) == [0, 2]
    assert list(DistributedSampler(np.zeros((3, 5)), rank=1, size=2, shuffle=False)) == [1, 0]
    assert visits(2, 5, shuffle=False) == [[0], [1], [0], [1], [0]]


def test_sampler_errors_say_what_to_do():
    with pytest.raises(ValueError, match=r"3 samples on 4 ranks.*drop_last=False"):
        DistributedSampler(3, rank=0, size=4, drop_last=True)
    with pytest.raises(ValueError, match="at least one sample"):
        DistributedSampler([], rank=0, size=2)
    with pytest.raises(ValueError, match="both rank and size or neither"):
        DistributedSampler(5, rank=0)
    with pytest.raises(ValueError, match=r"rank=2 is not one of the 2 ranks"):
        DistributedSampler(5, rank=2, size=2)
    with pytest.raises(ValueError, match="seed must not be negative"):
        DistributedSampler(5, rank=0, size=1, seed=-1)
    with pytest.raises(ValueError, match="epoch must not be negative"):
        DistributedSampler(5, rank=0, size=1).set_epoch(-1)
    with pytest.raises(TypeError, match="not generator"):
        DistributedSampler(i for i in range(3))


def enter(monkeypatch, rank: int, size: int) -> None:
    """Make this the current world."""
    monkeypatch.setattr("horo_lite.context.is_initialized", lambda: True)
    monkeypatch.setattr("horo_lite.context.world", lambda: SimpleNamespace(rank=rank, size=size))


def test_rank_and_size_are_those_of_the_world_as_each_iteration_begins(monkeypatch):
    sampler = DistributedSampler(5, shuffle=False)
    enter(monkeypatch, 1, 3)
    loader, local_batch_size = partition_dataset(np.arange(8), 8, shuffle=False)
    assert (sampler.rank, sampler.size, list(sampler)) == (1, 3, [1, 4])
    assert local_batch_size == 3
    assert [batch.tolist() for batch in loader] == [[2, 3, 4]]
    under_way = iter(sampler)
    next(under_way)

    enter(monkeypatch, 1, 2)
    assert (sampler.rank, sampler.size, list(sampler)) == (1, 2, [1, 3, 0])
    assert (loader.rank, loader.size, loader.local_batch_size) == (1, 2, 4)
    assert [batch.tolist() for batch in loader] == [[4, 5, 6, 7]]
    assert list(under_way) == [4]

    monkeypatch.undo()  # no world: after shutdown()
    assert (len(sampler), loader.local_batch_size) == (3, 4)


def test_a_world_too_large_for_the_samples_is_an_error(monkeypatch):
    enter(monkeypatch, 0, 2)
    sampler = DistributedSampler(3, drop_last=True)
    loader, _ = partition_dataset(np.arange(8), 3)
    enter(monkeypatch, 0, 4)
    with pytest.raises(ValueError, match="3 samples on 4 ranks"):
        len(sampler)
    with pytest.raises(ValueError, match="batch_size=3 is the batch of all 4 ranks"):
        list(loader)


def test_sampler_feeds_a_torch_data_loader():
    torch_data = pytest.importorskip("torch.utils.data")
    samples = [(np.full(2, i), i) for i in range(10)]
    seen = []
    for rank in range(2):
        sampler = DistributedSampler(samples, rank=rank, size=2, seed=3)
        loader = torch_data.DataLoader(samples, batch_size=2, sampler=sampler)
        assert len(loader) == 3
        for epoch in range(2):
            sampler.set_epoch(epoch)
            labels = [label for _, labels in loader for label in labels.tolist()]
            assert labels == list(sampler)
            seen.append(labels)
    assert sorted(seen[0] + seen[2]) == list(range(10))
    assert seen[0] != seen[1]


@given(
    data=st.data(),
    n=st.integers(1, 150),
    size=SIZES,
    seed=SEEDS,
    epoch=EPOCHS,
    shuffle=st.booleans(),
    drop_last=st.booleans(),
)
def test_shares_joined_are_the_batches_of_one_process(
    data, n, size, seed, epoch, shuffle, drop_last
):
    if n < size:
        drop_last = False
    batch_size = data.draw(st.integers(size, max(size, n) if drop_last else 2 * max(size, n)))
    features = np.random.default_rng(0).normal(size=(n, 2, 3)).astype(np.float32)
    dataset = (features, np.arange(n))
    options = {"shuffle": shuffle, "seed": seed, "drop_last": drop_last}

    def loader_of(rank: int, size: int) -> Any:
        loader, local = partition_dataset(dataset, batch_size, rank=rank, size=size, **options)
        assert local == loader.local_batch_size
        loader.set_epoch(epoch)
        return loader

    whole = loader_of(0, 1)
    shards = [loader_of(rank, size) for rank in range(size)]
    assert whole.local_batch_size == batch_size
    assert sum(shard.local_batch_size for shard in shards) == batch_size
    assert {len(shard) for shard in shards} == {len(whole)}

    seen = []
    for (x, y), *shares in zip(whole, *shards, strict=True):
        np.testing.assert_array_equal(np.concatenate([share[0] for share in shares]), x)
        np.testing.assert_array_equal(np.concatenate([share[1] for share in shares]), y)
        np.testing.assert_array_equal(x, features[y])
        counts = [len(share[1]) for share in shares]
        assert max(counts) - min(counts) <= 1
        if len(y) == batch_size:
            assert counts == [shard.local_batch_size for shard in shards]
            assert min(counts) >= 1
        seen += y.tolist()
    assert len(seen) == len(set(seen)) == (n // batch_size * batch_size if drop_last else n)
    assert len(whole) == -(-len(seen) // batch_size)


def test_loader_can_be_iterated_again_in_another_order():
    loader, _ = partition_dataset(np.arange(40), 10, rank=1, size=2)

    def epoch() -> list[list[int]]:
        return [batch.tolist() for batch in loader]

    first = epoch()
    assert epoch() == first
    loader.set_epoch(1)
    assert epoch() != first
    loader.set_epoch(0)
    assert epoch() == first


SAMPLES_5 = np.arange(10, dtype=np.float32).reshape(5, 2)


@pytest.mark.parametrize(
    ("dataset", "expected"),
    [
        (SAMPLES_5, SAMPLES_5[2:4]),
        (list(SAMPLES_5), SAMPLES_5[2:4]),
        ((SAMPLES_5, [0, 1, 2, 3, 4]), (SAMPLES_5[2:4], np.array([2, 3]))),
        ({"x": SAMPLES_5, "y": range(5)}, {"x": SAMPLES_5[2:4], "y": np.array([2, 3])}),
        ([(x, i) for i, x in enumerate(SAMPLES_5)], (SAMPLES_5[2:4], np.array([2, 3]))),
        ([{"x": x} for x in SAMPLES_5], {"x": SAMPLES_5[2:4]}),
        ([[1, 2], [3, 4], [5, 6], [7, 8], [9, 0]], np.array([[5, 6], [7, 8]])),
    ],
    ids=["array", "list", "tuple", "dict", "pairs", "dicts", "lists"],
)
def test_every_kind_of_dataset(dataset, expected):
    loader, local = partition_dataset(dataset, 4, rank=1, size=2, shuffle=False, drop_last=False)
    assert local == 2
    first, last = loader
    assert_same(first, expected)

    # The last batch is sample 4 alone, which this rank gets; the other one's shard is empty.
    empty = list(partition_dataset(dataset, 4, rank=0, size=2, shuffle=False, drop_last=False)[0])
    for mine, others, full in zip(fields(last), fields(empty[1]), fields(expected), strict=True):
        assert mine.shape == (1, *full.shape[1:])
        assert others.shape == (0, *full.shape[1:])
        assert mine.dtype == others.dtype == full.dtype


class Labelled:
    """Like pandas' Series: brackets take labels."""

    def __init__(self, values: Any, labels: list[int]) -> None:
        self.iloc = values
        self.shape = values.shape
        self._place_of = {label: i for i, label in enumerate(labels)}

    def __len__(self) -> int:
        return len(self.iloc)

    def __getitem__(self, labels: Any) -> Any:
        return self.iloc[[self._place_of[label] for label in labels]]


def test_rows_with_labels_are_taken_by_position():
    y = np.arange(5)
    shuffled = Labelled(y, [3, 0, 4, 1, 2])
    for mixed, plain in (
        ((SAMPLES_5, shuffled), (SAMPLES_5, y)),
        ({"x": SAMPLES_5, "y": shuffled}, {"x": SAMPLES_5, "y": y}),
        (shuffled, y),
    ):
        batches, wanted = (
            partition_dataset(dataset, 2, rank=1, size=2, seed=5)[0] for dataset in (mixed, plain)
        )
        for batch, expected in zip(batches, wanted, strict=True):
            assert_same(batch, expected)


def fields(batch: Any) -> list[Any]:
    if isinstance(batch, dict):
        return list(batch.values())
    return list(batch) if isinstance(batch, tuple) else [batch]


def assert_same(batch: Any, expected: Any) -> None:
    assert type(batch) is type(expected)
    if isinstance(batch, dict):
        assert batch.keys() == expected.keys()
    for own, wanted in zip(fields(batch), fields(expected), strict=True):
        assert own.dtype == wanted.dtype
        np.testing.assert_array_equal(own, wanted)


def test_torch_tensors_stay_tensors():
    torch = pytest.importorskip("torch")
    x = torch.arange(12.0).reshape(6, 2)
    loader, _ = partition_dataset((x, torch.arange(6)), 4, rank=1, size=2, seed=1)
    ((batch, labels),) = loader
    assert isinstance(batch, torch.Tensor)
    assert torch.equal(batch, x[labels])


@pytest.mark.parametrize("kind", ["dataset", "tuples", "lists", "dicts", "tensors"])
def test_samples_of_torch_become_the_batches_of_its_data_loader(kind: str) -> None:
    torch = pytest.importorskip("torch")
    x = torch.arange(10.0).reshape(5, 2).bfloat16()  # a dtype that NumPy lacks
    samples: Any = {
        "dataset": torch.utils.data.TensorDataset(x, torch.arange(5)),
        "tuples": [(row, i, f"sample {i}") for i, row in enumerate(x)],
        "lists": [[row, i] for i, row in enumerate(x)],
        "dicts": [{"x": row, "y": i} for i, row in enumerate(x)],
        "tensors": list(x),
    }[kind]

    def batches(rank: int, size: int) -> list[Any]:
        loader, _ = partition_dataset(
            samples, 4, rank=rank, size=size, shuffle=False, drop_last=False
        )
        return [fields(batch) for batch in loader]

    def as_lists(batch: Any) -> list[Any]:
        return [x.tolist() if isinstance(x, torch.Tensor) else list(x) for x in batch]

    whole = torch.utils.data.DataLoader(samples, batch_size=4)
    expected = [fields(tuple(batch) if isinstance(batch, list) else batch) for batch in whole]
    for alone, batch in zip(batches(0, 1), expected, strict=True):
        assert as_lists(alone) == as_lists(batch)
        assert [getattr(field, "dtype", type(field)) for field in alone] == [
            getattr(field, "dtype", type(field)) for field in batch
        ]
    # Two ranks: each has half of the first batch; the last sample is that of rank 1.
    for first, second, batch in zip(batches(0, 2), batches(1, 2), expected, strict=True):
        assert list(map(operator.add, as_lists(first), as_lists(second))) == as_lists(batch)
    assert len(batches(0, 2)[1][0]) == 0


def test_partition_errors_say_what_to_do():
    x = np.zeros((10, 2))
    with pytest.raises(ValueError, match=r"batch_size=3 is the batch of all 4 ranks together"):
        partition_dataset(x, 3, rank=0, size=4)
    with pytest.raises(ValueError, match=r"10 samples cannot fill one batch of 11"):
        partition_dataset(x, 11, rank=0, size=2)
    with pytest.raises(ValueError, match=r"equally long, but have 10 in array 0, 9 in array 1"):
        partition_dataset((x, np.zeros(9)), 2, rank=0, size=2)
    with pytest.raises(ValueError, match="has no arrays"):
        partition_dataset({}, 2, rank=0, size=2)
    with pytest.raises(ValueError, match="at least one sample"):
        partition_dataset(np.zeros((0, 3)), 2, rank=0, size=2)
    graphs = [[("nodes", np.zeros(n)), ("edges", np.zeros((2, n)))] for n in (3, 4)]
    with pytest.raises(ValueError, match=r"samples of type list cannot be stacked .*indices"):
        next(iter(partition_dataset(graphs, 2, rank=0, size=1)[0]))


@pytest.mark.parametrize("kind", ["sampler", "loader"])
def test_a_third_iteration_of_one_epoch_is_a_warning_on_rank_0(kind: str) -> None:
    def made(rank: int, shuffle: bool = True) -> Any:
        if kind == "sampler":
            return DistributedSampler(6, rank=rank, size=2, shuffle=shuffle)
        return partition_dataset(np.arange(6), 2, rank=rank, size=2, shuffle=shuffle)[0]

    def warned(samples: Any, n: int) -> list[str]:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(n):
                list(samples)
        return [str(one.message) for one in caught]

    mine = made(0)
    assert not warned(mine, 2)
    (text,) = warned(mine, 4)
    assert "third iteration in the order of epoch 0" in text
    mine.set_epoch(7)
    assert not warned(mine, 2)
    (text,) = warned(mine, 1)
    assert "epoch 7" in text
    assert not warned(made(1), 5)
    assert not warned(made(0, shuffle=False), 5)


def test_a_place_is_given_whole_or_by_the_world() -> None:
    for place in ({"rank": 0}, {"size": 2}):
        with pytest.raises(ValueError, match="pass both rank and size or neither"):
            DistributedSampler(10, **place)
    with pytest.raises(NotInitializedError):
        len(DistributedSampler(10))
