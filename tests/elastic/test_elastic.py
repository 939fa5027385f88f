"""Training continues without dead ranks. Here at chosen moments; at random ones in tests/soak."""

from __future__ import annotations

import json
import pickle
import re
import threading
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from launch import Result, mpi_name, run_ranks

import horo_lite as hvd
from horo_lite import checkpoint, elastic
from horo_lite.errors import CheckpointError, PeerLostError
from horo_lite.transports.peers import allgather_objects

SOAK = Path(__file__).resolve().parents[1] / "soak" / "soak_training.py"
FT = ["--with-ft", "ulfm"]
needs_ulfm = pytest.mark.skipif(mpi_name() != "openmpi", reason="Open MPI's fault tolerance")

# --- State ---------------------------------------------------------------------------------------


class Weight:
    def __init__(self, n: int) -> None:
        self.data, self.grad = np.zeros(n), np.zeros(n)


class Momentum:
    def __init__(self, params: list[Weight]) -> None:
        self.params, self.rate = params, 0.1
        self.speed = {id(weight): np.zeros_like(weight.data) for weight in params}

    def step(self) -> None:
        for weight in self.params:
            self.speed[id(weight)] += weight.grad
            weight.data -= self.rate * self.speed[id(weight)]


class Net:
    def __init__(self) -> None:
        self.params = [Weight(3), Weight(2)]


@pytest.fixture
def alone():
    yield hvd.init()
    hvd.shutdown()


def test_a_snapshot_holds_everything_and_is_independent(alone) -> None:
    jnp = pytest.importorskip("jax.numpy")
    torch = pytest.importorskip("torch")
    net, array, tensor = Net(), np.arange(3.0), torch.zeros(2)
    opt = hvd.DistributedOptimizer(Momentum(net.params))
    layer = torch.nn.Linear(2, 2)
    adam = torch.optim.Adam(layer.parameters())
    tree = {"a": jnp.zeros(2), "b": [jnp.ones(1)]}
    state = elastic.State(
        net=net, opt=opt, array=array, tensor=tensor, layer=layer, adam=adam, tree=tree,
        sampler=elastic.Sampler(12), step=0, best=None, log=[],
    )  # fmt: skip

    def train() -> None:
        for weight in net.params:
            weight.grad[:] = 1
        opt.step()
        opt.rate *= 0.5
        layer(torch.ones(1, 2)).sum().backward()
        adam.step()
        array[:] += 1
        tensor.add_(1)
        state.tree = {"a": state.tree["a"] + 1, "b": [state.tree["b"][0] * 3]}
        state.sampler.record_batch(state.step, 2)
        state.step, state.best, state.log = state.step + 1, 0.5, [*state.log, "x"]

    def seen() -> bytes:
        return pickle.dumps(
            [
                [weight.data.tolist() for weight in net.params],
                [opt.speed[id(weight)].tolist() for weight in net.params],
                [opt.rate, array.tolist(), tensor.tolist(), state.sampler.processed_num],
                [p.tolist() for p in layer.parameters()],
                [int(s["step"]) for s in adam.state.values()],
                [state.tree["a"].tolist(), state.tree["b"][0].tolist()],
                [state.step, state.best, state.log],
            ]
        )

    looks, digests = [seen()], [state._digest()]
    snapshots = [pickle.dumps(state.snapshot())]
    for _ in range(3):
        train()
        if state.step == 2:
            state.commit()
        looks.append(seen())
        digests.append(state._digest())
        snapshots.append(pickle.dumps(state.snapshot()))
    assert len(set(looks)) == len(set(digests)) == 4
    state.restore()
    assert seen() == looks[2]
    for look, digest, snapshot in zip(looks, digests, snapshots, strict=True):
        state.load(pickle.loads(snapshot))
        assert (seen(), state._digest()) == (look, digest)
    assert state.array is array
    assert state.tensor is tensor
    state = elastic.State(x=np.array([2**40]), y=np.array([1 / 3]))
    state.x, state.y = jnp.zeros(1, int), jnp.zeros(1)  # of 32 bits
    state.restore()
    assert (state.x.tolist(), state.y.tolist()) == ([2**40], [1 / 3])


def test_arrays_of_any_dtype_are_kept(alone) -> None:
    for array in (
        np.array([1j, 2]), np.arange(2.0, dtype=">f4"), np.array(["ab", "c"]),
        np.array(["2026-11-23"], "M8[D]"), np.array([(1, 2.5)], [("n", "i4"), ("x", "f8")]),
    ):  # fmt: skip
        before, state = array.copy(), elastic.State(array=array)
        array[...] = array[-1:]
        state.restore()
        assert state.array is array
        assert (array == before).all()
    objects, masked = np.array([[1], None], object), np.ma.array([1, 2], mask=[True, False])
    state = elastic.State(objects=objects, masked=masked)
    for _ in range(2):
        objects[0].append(2)
        masked.mask = False
        state.restore()
        assert objects.tolist() == [[1], None]
        assert masked.tolist() == [None, 2]
    counts = elastic.State(array=np.zeros(2, int))  # floats on the rank that sends it
    counts.load({"array": np.array([0.5, 1.5])})
    assert counts.array.tolist() == [0.5, 1.5]
    counts.load({"array": np.ma.array([1.0, 2.0], mask=[True, False])})
    assert counts.array.tolist() == [None, 2]


def test_commits_in_the_background(alone, tmp_path, monkeypatch) -> None:
    disk, written, save = threading.Semaphore(0), [], checkpoint.save

    def slowly(path: str, snapshot: Any) -> None:
        assert disk.acquire(timeout=20)
        save(path, snapshot)
        written.append(snapshot["step"])

    monkeypatch.setattr(checkpoint, "save", slowly)
    path, array = str(tmp_path / "commits"), np.zeros(3)
    state = elastic.State(array=array, step=0, checkpoint=path, write_in_background=True)

    @elastic.run
    def train(state: elastic.State) -> None:
        for state.step in range(1, 4):
            array[:] = state.step
            if state.step > 1:  # it waits for the one before, and then does not wait for the disk
                threading.Timer(0.1, disk.release).start()
            state.commit()
            assert written == list(range(1, state.step))
            array[:] = -1  # what is written is a copy
        disk.release()

    train(state)
    assert written == [1, 2, 3]  # at its end
    kept = checkpoint.load(path)
    assert (kept["array"] == 3).all(), kept

    (tmp_path / "commits").unlink()
    (tmp_path / "commits").mkdir()
    disk.release(2)
    state.commit()
    with pytest.raises(CheckpointError, match="commits"):
        state.commit()
    state.flush()  # the error has been raised, and nothing is in progress


def test_a_commit_that_cannot_be_written_is_one_nevertheless(alone, tmp_path) -> None:
    """As on the other ranks, which write nothing and wait for this one to look for new ranks."""
    state = elastic.State(step=0, array=np.zeros(2), checkpoint=str(tmp_path))  # a folder
    looked = []
    state._check_for_ranks = lambda: looked.append(state.progress())
    state.step = 1
    state.array = np.ones(2)  # not counted
    with pytest.raises(CheckpointError):
        state.commit()
    ((is_whole, _, _, n_commits),) = looked
    assert (is_whole, n_commits) == (True, 1)
    state.step = 2
    state.restore()
    assert state.step == 1


@pytest.mark.parametrize("instead", [elastic.HostsUpdatedInterrupt, PeerLostError])
def test_a_commit_that_cannot_be_written_is_told_of_when_the_world_changes(
    alone, tmp_path, instead
) -> None:
    """The program cannot catch its error: that of the change is raised instead."""
    state = elastic.State(step=0, checkpoint=str(tmp_path))  # a folder

    def world_changes() -> None:
        raise instead("of the world")

    state._check_for_ranks = world_changes
    with pytest.warns(RuntimeWarning, match=str(tmp_path)), pytest.raises(instead):
        state.commit()


def test_names_that_refer_to_one_object_since_the_commit(alone) -> None:
    array, names = np.ones(2), ["a"]
    state = elastic.State(last=np.zeros(2), array=array, also=array, tree={"x": names}, names=names)
    state.last, state.tree = array, {"x": state.names, "y": state.names}
    array += 1
    state.restore()
    assert (state.last.tolist(), state.array.tolist()) == ([0, 0], [1, 1])
    assert state.also is state.array
    names.append("b")
    assert (state.names, state.tree) == (["a", "b"], {"x": ["a", "b"]})


def test_tensors_that_cannot_hold_what_was_committed(alone) -> None:
    torch = pytest.importorskip("torch")
    half, sparse = torch.tensor([0.5, 0.5]), torch.eye(2).to_sparse()
    state = elastic.State(
        other_dtype=half, empty=sparse, dense=sparse, expanded=half[:1].expand(2),
        array=np.array([0.5, 0.5]), tensor=half, number=5,
    )  # fmt: skip
    state.other_dtype = torch.zeros(2, dtype=torch.int64)
    state.empty, state.dense = torch.zeros(2, 2).to_sparse(), torch.zeros(2, 2)
    state.array, state.tensor, state.number = torch.zeros(2), np.zeros(2), torch.zeros(2)
    state.restore()
    for x in (state.other_dtype, state.expanded, state.array, state.tensor):
        assert x.tolist() == [0.5, 0.5]
    for x in (state.empty, state.dense):
        assert x.to_dense().tolist() == [[1, 0], [0, 1]]
    assert state.number == 5


@pytest.mark.parametrize("number", [int, np.int64])
def test_who_is_furthest(alone, number) -> None:
    weight = Weight(2)
    opt = hvd.DistributedOptimizer(Momentum([weight]))
    states = [elastic.State(opt=opt, step=number(0), array=weight.data) for _ in range(2)]
    ahead, behind = states
    assert ahead.progress().is_whole
    ahead.step = behind.step = number(1)
    assert ahead.progress() == behind.progress()
    ahead.step = number(2)
    assert max(states, key=elastic.State.progress) is ahead
    opt.step()  # both see it, and neither has counted it
    assert not ahead.progress().is_whole
    behind.step = number(2)
    assert max(states, key=elastic.State.progress) is behind
    ahead.commit()
    assert max(states, key=elastic.State.progress) is ahead


def test_who_has_taken_part_in_the_last_average_is_furthest(alone) -> None:
    """The others have only what they have learned themselves, however far they are."""
    states = []
    for _ in range(2):
        weights = np.zeros(2)
        local = hvd.LocalSGD([weights], every=3)
        states.append(elastic.State(weights=weights, local=local, step=0))
    behind, ahead = states
    for state in states:
        for _ in range(2):
            state.weights += 1
            state.step += 1
            state.local.step()
    ahead.local.average()  # in which the other one found that a rank was lost
    assert max(states, key=elastic.State.progress) is ahead
    behind.step += 1
    assert max(states, key=elastic.State.progress) is ahead


def test_optimizers_and_samplers_in_lists_count_too(alone) -> None:
    torch = pytest.importorskip("torch")
    weight, layer = Weight(2), torch.nn.Linear(1, 1)
    ours = hvd.DistributedOptimizer(Momentum([weight]))
    theirs = torch.optim.SGD(layer.parameters())
    sampler = elastic.Sampler(8)
    state = elastic.State(opts=[ours, {"other": theirs}], data=([sampler],), step=0)
    assert state.progress().is_whole
    for opt in (ours, theirs):
        opt.step()
        assert not state.progress().is_whole, "that step has not been counted"
        state.step += 1
        assert state.progress().is_whole
    ours.step()
    for i in range(4):
        sampler.record_batch(i, 2)
    assert state.progress().is_whole
    state.on_reset()
    assert list(sampler) == [], "the epoch is complete"


def test_gradients_of_a_step_that_was_lost_are_gone() -> None:
    class Accumulating(Momentum):
        def zero_grad(self) -> None:
            for weight in self.params:
                weight.grad[:] = 0

    weight = Weight(2)
    hvd.init()
    opt = hvd.DistributedOptimizer(Accumulating([weight]))
    weight.grad += 3
    hvd.shutdown()
    hvd.init()  # as elastic.run does, when a rank was lost in the exchange
    weight.grad += 1
    opt.step()
    assert weight.data.tolist() == [-0.1, -0.1]
    weight.grad += 3
    opt.synchronize()
    hvd.shutdown()
    hvd.init()
    opt.step()  # what was synchronized is not exchanged again
    assert opt.speed[id(weight)].tolist() == [1.0, 1.0]
    hvd.shutdown()


def test_gradients_of_a_world_of_one_rank_are_not_added_to_in_the_next(alone) -> None:
    """A rank may join at a commit, before a loop that ends with zero_grad() has come to it."""
    torch = pytest.importorskip("torch")
    import horo_lite.torch

    layer = torch.nn.Linear(1, 1)
    opt = horo_lite.torch.DistributedOptimizer(torch.optim.SGD(layer.parameters(), lr=1.0))
    layer(torch.ones(1)).backward()
    hvd.shutdown()
    hvd.init()
    layer(torch.ones(1)).backward()
    assert layer.bias.grad.item() == 1
    del opt


def test_gradients_of_a_lost_step_are_cleared_if_there_is_no_zero_grad(alone) -> None:
    net = Net()
    optimizer = hvd.DistributedOptimizer(Momentum(net.params))
    assert not hasattr(optimizer, "zero_grad")
    state = elastic.State(net=net, optimizer=optimizer)
    weight = net.params[0]
    for lose in (state.restore, lambda: (hvd.shutdown(), hvd.init())):
        weight.grad[:] = 1
        lose()
        assert not weight.grad.any()


def test_a_digest_tells_any_difference(alone) -> None:
    def digest(**changes: object) -> int:
        whole = {"a": np.arange(6.0).reshape(2, 3), "odd": np.arange(4) > 1, "n": 1, "s": ["x", {}]}
        return elastic.State(**{**whole, **changes})._digest()

    other = np.arange(6.0).reshape(2, 3)
    other[1, 2] = 5.5
    changes = [
        {"a": other}, {"a": np.asfortranarray(np.arange(6.0).reshape(2, 3))},
        {"a": np.arange(6.0).reshape(3, 2)}, {"a": np.arange(12.0).reshape(2, 6)[:, ::2]},
        {"a": np.arange(6).reshape(2, 3)}, {"odd": np.arange(4) > 2}, {"n": 2},
        {"s": ["x", {1: 2}]}, {"odd": np.array([None, "x"])},
    ]  # fmt: skip
    assert digest() == digest()
    assert len({digest(), *(digest(**change) for change in changes)}) == len(changes) + 1


@pytest.mark.filterwarnings("ignore:Sparse CSR")
def test_equal_tensors_have_equal_digests_wherever_their_memory_is(alone) -> None:
    torch = pytest.importorskip("torch")

    def digests(last: float) -> list[int]:
        x = torch.tensor([[0.0, 1, 2, 3], [4, 5, 6, last]])
        z = torch.complex(x, x)
        forms = [
            x.T, x[:, 1::2], x[1, 3:].expand(5), x.to_sparse(), x.to_sparse_csr(), x.bfloat16().T,
            z.conj(), z.conj().imag, SimpleNamespace(own=x), torch.nn.Parameter(x.T),
        ]  # fmt: skip
        return [elastic.State(tensor=form)._digest() for form in forms]

    ours = digests(7.0)
    assert digests(7.0) == ours
    assert not set(digests(8.0)) & set(ours)


def test_what_counts_nothing_is_always_whole(alone) -> None:
    opt = hvd.DistributedOptimizer(Momentum([Weight(2)]))
    state = elastic.State(opt=opt, array=np.zeros(2))
    opt.step()
    assert state.progress().is_whole


def test_a_step_that_was_interrupted_after_its_closure_is_no_whole_step(alone) -> None:
    class Searching(Momentum):
        def step(self, closure) -> None:
            closure()
            for weight in self.params:
                weight.data += 1
            closure()
            super().step()

    weight, fails = Weight(2), [False]
    opt = hvd.DistributedOptimizer(Searching([weight]))
    state = elastic.State(opt=opt, weights=[weight.data])

    def closure() -> None:
        weight.grad = np.ones(2)
        if fails[0] and weight.data[0] == 1:
            raise hvd.PeerLostError("rank 1 is dead")

    fails[0] = True
    with pytest.raises(hvd.PeerLostError):
        opt.step(closure)
    assert not state.progress().is_whole
    state.restore()
    assert state.progress().is_whole
    assert weight.data.tolist() == [0, 0]
    fails[0] = False
    opt.step(closure)
    assert state.progress().is_whole


def test_samplers_of_whole_epochs_stay_the_ones_that_loaders_have(alone) -> None:
    loader, _ = hvd.partition_dataset(np.arange(8), 2)
    sampler = hvd.DistributedSampler(8)
    state = elastic.State(loader=loader, samplers=[sampler])
    before = list(sampler)
    loader.set_epoch(3)
    sampler.set_epoch(3)
    there, order = state.snapshot(), list(sampler)
    state.restore()
    assert (loader.epoch, list(sampler)) == (0, before)
    state.load(pickle.loads(pickle.dumps(there)))  # it contains no dataset
    assert state.loader is loader
    assert state.samplers[0] is sampler
    assert (loader.epoch, list(sampler)) == (3, order)


def test_a_sampler_that_is_one_ranks_own_is_refused(alone) -> None:
    data = pytest.importorskip("torch.utils.data")
    with pytest.raises(TypeError, match=r"state\.sampler is a DistributedSampler of this rank"):
        elastic.State(sampler=data.DistributedSampler(range(4), 2, 1))
    sampler = elastic.Sampler(4)
    with pytest.raises(TypeError, match=r"state\.loader is a DataLoader of this rank"):
        elastic.State(loader=data.DataLoader(range(4), sampler=sampler), sampler=sampler)


def test_what_cannot_be_copied_is_named(alone) -> None:
    with pytest.raises(TypeError, match=r"state\.numbers\[1\] is a generator"):
        elastic.State(numbers=[1, (i for i in range(3))])


# --- Sampler -------------------------------------------------------------------------------------


def dealt(sampler: elastic.Sampler, monkeypatch, size: int, n_batches: int, batch: int) -> Counter:
    """Return what a world of that size consumes in n_batches; then the sampler is rank 0's."""
    seen: Counter = Counter()
    content = sampler.state_dict()
    for rank in reversed(range(size)):
        monkeypatch.setattr(elastic.sampler, "rank_and_size", lambda *_, r=rank: (r, size))
        sampler.load_state_dict(content)
        mine = list(sampler)
        assert len(mine) == len(sampler)
        for i in range(n_batches):
            seen.update(mine[i * batch : (i + 1) * batch])
            sampler.record_batch(i, batch)
    return seen


@pytest.mark.parametrize("worlds", [[(4, 3), (3, 2), (1, 99)], [(2, 1), (1, 99)], [(3, 99)]])
def test_every_sample_is_seen_once_whoever_is_lost(monkeypatch, worlds) -> None:
    sampler = elastic.Sampler(60, seed=3)
    sampler.set_epoch(2)
    seen: Counter = Counter()
    for size, n_batches in worlds:
        seen += dealt(sampler, monkeypatch, size, n_batches, 2)
        sampler.reset()  # as `elastic.run` does in a new world
        sampler.set_epoch(2)  # this epoch has already begun
    assert set(seen) == set(range(60))
    assert seen.total() <= 60 + sum(size - 1 for size, n in worlds if n == 99)
    assert (len(sampler), sampler.remaining_indices) == (0, [])
    sampler.set_epoch(3)
    assert len(sampler.remaining_indices) == 60
    assert sampler.remaining_indices != list(range(60))


def test_ends_are_filled_up(monkeypatch) -> None:
    seen = dealt(elastic.Sampler(10, shuffle=False), monkeypatch, 4, 3, 1)
    assert seen == Counter([*range(10), 0, 1])
    assert dealt(elastic.Sampler(1), monkeypatch, 4, 1, 1) == Counter({0: 4})


def test_the_order_is_that_of_seed_and_epoch(alone) -> None:
    orders = []
    for seed, epoch in [(0, 0), (0, 1), (1, 0)]:
        sampler = elastic.Sampler(20, seed=seed)
        sampler.set_epoch(epoch)
        orders.append(list(sampler))
    assert len(set(map(tuple, orders))) == 3
    sampler.record_indices(orders[2][:5])
    assert (sampler.processed_indices, sampler.remaining_indices) == (orders[2][:5], orders[2][5:])


@pytest.mark.parametrize("size", [1, 2, 3])
def test_without_set_epoch_every_epoch_has_the_samples_again(monkeypatch, size: int) -> None:
    sampler = elastic.Sampler(10, seed=4)
    monkeypatch.setattr(elastic.sampler, "rank_and_size", lambda *_: (size - 1, size))
    epochs = []
    for _ in range(3):
        epochs.append([])
        for i, index in enumerate(sampler):
            epochs[-1].append(index)
            sampler.record_batch(i, 1)
            assert sampler.processed_num == min((i + 1) * size, 10)
        assert len(epochs[-1]) == len(sampler) == -(-10 // size)
    assert epochs[0] == epochs[1] == epochs[2]
    assert sampler.remaining_indices == []


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("call", ["before", "after", "after, the next", "never"])
def test_no_epoch_is_left_out(monkeypatch, call: str, drop_last: bool) -> None:
    """Horovod says to call `set_epoch` at an epoch's end: scripts pass that epoch's number."""
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(elastic.sampler, "rank_and_size", lambda *_: (1, 2))
    sampler = elastic.Sampler(21)
    loader = torch.utils.data.DataLoader(range(21), 3, sampler=sampler, drop_last=drop_last)
    for epoch in range(4):
        if call == "before":
            sampler.set_epoch(epoch)
        seen = []
        for i, batch in enumerate(loader):
            seen += batch.tolist()
            sampler.record_batch(i, 3)
        assert len(seen) == (9 if drop_last else 11), f"epoch {epoch}"
        if call.startswith("after"):
            sampler.set_epoch(epoch + ("next" in call))


@pytest.mark.parametrize("call", ["after", "never"])
def test_ranks_that_join_after_the_last_full_batch_begin_the_next_epoch_with_the_others(
    monkeypatch, call: str
) -> None:
    """With loaders that leave out the rest: the new rank has not seen how large a batch is."""

    def epoch(sampler: elastic.Sampler, size: int) -> int:
        monkeypatch.setattr(elastic.sampler, "rank_and_size", lambda *_: (0, size))
        n_batches = len(list(sampler)) // 3
        for i in range(n_batches):
            sampler.record_batch(i, 3)
        if call == "after":
            sampler.set_epoch(0)
        return n_batches

    old, new = elastic.Sampler(21), elastic.Sampler(21)
    monkeypatch.setattr(elastic.sampler, "rank_and_size", lambda *_: (0, 2))
    for i, _ in zip(range(3), old, strict=False):
        old.record_batch(i, 3)
    new.load_state_dict(old.state_dict())
    for sampler in (old, new):
        sampler.reset()
        assert [epoch(sampler, 3) for _ in range(3)] == [0, 2, 2]


def test_a_restored_sampler_continues_although_its_loader_had_prefetched_all(alone) -> None:
    sampler = elastic.Sampler(6)
    sampler.record_batch(0, 2)
    content = sampler.state_dict()
    assert len(list(sampler)) == 4
    sampler.load_state_dict(content)
    assert len(list(sampler)) == 4


def test_an_epoch_that_is_complete_is_not_trained_on_again_after_a_loss(alone) -> None:
    sampler = elastic.Sampler(4)
    state = elastic.State(sampler=sampler, epoch=0)
    for i, _ in enumerate(sampler):
        sampler.record_batch(i, 1)
    state.commit()
    state.on_reset()
    assert list(sampler) == []
    assert len(list(sampler)) == 4, "the next epoch"
    # Nor by a rank that joined later, which has the state from the others.
    state.restore()
    newcomer = elastic.Sampler(4)
    newcomer.load_state_dict(sampler.state_dict())
    assert list(newcomer) == []


def test_after_sync_the_samplers_length_is_that_of_the_rest_on_the_root_too(alone) -> None:
    """Ranks that use len(loader) as the number of steps would diverge."""
    sampler = elastic.Sampler(16)
    state = elastic.State(sampler=sampler)
    for i, _ in zip(range(3), sampler, strict=False):
        sampler.record_batch(i, 4)
    assert len(sampler) == 16, "the current iteration"
    state.sync()
    assert (sampler.processed_num, len(sampler), len(list(sampler))) == (12, 4, 4)


def test_a_batch_counts_once_whatever_its_index(monkeypatch) -> None:
    """A script that resumes in the middle of an epoch may count batches from the epoch's start."""
    sampler = elastic.Sampler(60)
    monkeypatch.setattr(elastic.sampler, "rank_and_size", lambda *_: (1, 3))
    for n_done, index in enumerate([7, 8, 0, 0, 100], start=1):
        sampler.record_batch(index, 2)
        assert sampler.processed_num == n_done * 2 * 3
    for wrong, error in [(-1, ValueError), (1.5, TypeError)]:
        with pytest.raises(error):
            sampler.record_batch(0, wrong)
    assert sampler.processed_num == 30


# --- jobs that lose ranks ------------------------------------------------------------------------


@pytest.mark.launches
@needs_ulfm
@pytest.mark.parametrize(
    ("plan", "hosts"),
    [
        ({0: ["exchange", 3, 9]}, ""),
        ({0: ["beside", 12, 9], 3: ["exchange", 12, 11]}, "2,2"),
        ({1: ["after", 4, 15], 2: ["reset", 0, 9], 0: ["before", 30, 9]}, ""),
        ({2: ["end", 0, 9]}, ""),
    ],
    ids=["rank 0", "two at once, on two hosts", "one more while they recover", "at the end"],
)
def test_the_rest_goes_on(plan: dict[int, list[object]], hosts: str) -> None:
    env = {"SOAK_PLAN": json.dumps(plan), "HORO_LITE_TEST_HOSTS": hosts}
    result = run_ranks(SOAK, 4, env=env, options=FT, timeout_s=40).check()
    left = 4 - len(plan)
    assert re.findall(r"ENDS (\d)", result.stdout) == [str(left)] * left, str(result)
    assert "back to the last commit" not in result.stderr, str(result)


TRAIN = """
import os, signal, sys, threading, time
import numpy as np
import horo_lite as hvd
from stall_limits import limit_waits

hvd.init()
me = hvd.rank()

class SGD:
    def __init__(self):
        self.params = [self]
        self.data, self.grad = np.zeros(3), np.zeros(3)
    def step(self):
        self.data -= 0.5 * self.grad

inner = SGD()
opt = hvd.DistributedOptimizer(inner)
state = hvd.elastic.State(data=inner.data, opt=opt, step=0, sizes=[])
resets = []
state.register_reset_callbacks([lambda: resets.append(hvd.size())])

@hvd.elastic.run(min_size=MIN)
def train(state):
    while state.step < 12:
        inner.grad[:] = inner.data - state.step - hvd.rank()
        BEFORE
        opt.step()
        AFTER
        state.step, state.sizes = state.step + 1, [*state.sizes, hvd.size()]
        if state.step % 5 == 0:
            state.commit()
    return "trained"

answer = train(state)
reference = np.zeros(3)
for step, size in enumerate(state.sizes):
    reference -= 0.5 * (reference - step - (size - 1) / 2)
assert np.allclose(inner.data, reference, rtol=0, atol=1e-12), (inner.data, reference)
assert hvd.allgather_object(inner.data.tobytes()) == [inner.data.tobytes()] * hvd.size()
print(f"ENDS {answer} {state.sizes} {resets}", flush=True)
"""


def train(n: int, before: str = "pass", after: str = "pass", **options: object) -> Result:
    options.setdefault("options", FT)
    text = TRAIN.replace("MIN", str(options.pop("min_size", 1)))
    text = text.replace("BEFORE", before).replace("AFTER", after)
    return run_ranks(text, n, timeout_s=40, **options)


def ends(sizes: list[int], resets: list[int]) -> str:
    return f"ENDS trained {sizes} {resets}\n" * sizes[-1]


@pytest.mark.launches
@needs_ulfm
def test_an_exception_or_exit_is_one_ranks_death() -> None:
    result = train(
        4,
        "if (me, state.step) == (0, 2): raise ValueError('this rank only')\n"
        "        if (me, state.step) == (3, 7): sys.exit(3)\n"
        "        if (me, state.step) == (1, 9):\n"
        "            threading.Thread(target=int, args=('in a thread',)).start(), time.sleep(60)",
    ).check()
    assert result.stdout == ends([4] * 2 + [3] * 5 + [2] * 2 + [1] * 3, [3, 2, 1])
    assert "[rank 0] ValueError: this rank only" in result.stderr
    assert "invalid literal for int() with base 10: 'in a thread'" in result.stderr
    assert result.stderr.count("Traceback") == 3, result.stderr
    assert "horo_lite/elastic" not in result.stderr


@pytest.mark.launches
@needs_ulfm
@pytest.mark.parametrize("hosts", ["", "2,1,2"])
def test_ctrl_c_on_one_rank_ends_the_job(hosts: str) -> None:
    """Open MPI's launcher does not end the others, which wait for each other."""
    how = "if (me, state.step) == (2, 4): raise KeyboardInterrupt"
    result = train(5, how, env={"HORO_LITE_TEST_HOSTS": hosts})
    assert result.returncode != 0, str(result)
    assert "rank 2 of 5" in result.stderr
    assert "KeyboardInterrupt" in result.stderr


GROWN = """
import os, time
import numpy as np
import horo_lite as hvd

new = "HORO_LITE_REPLACEMENT" in os.environ
START
hvd.init()
me = None if new else hvd.rank()
assert not new or hvd.size() == 1  # its script runs alone until elastic.run

OPTIMIZER
state = hvd.elastic.State(opt=opt, data=data, step=0, sizes=[], left=6)
resets = []
state.register_reset_callbacks([lambda: resets.append(hvd.size())])

@hvd.elastic.run(max_size=3)
def train(state):
    while state.left:
        GRADIENT
        DIES
        opt.step()
        state.step, state.sizes = state.step + 1, [*state.sizes, hvd.size()]
        if FULL:
            state.left -= 1
        if state.step % 5 == 0:
            hvd.barrier()
            time.sleep(0.05)
            state.commit()

train(state)
reference = np.zeros(3)
for step, size in enumerate(state.sizes):
    reference -= 0.5 * (reference - step - (size - 1) / 2)
assert np.allclose(data, reference, rtol=1e-12, atol=0), (data, reference)
assert hvd.allgather_object(data.tobytes()) == [data.tobytes()] * hvd.size()
sizes = [size for i, size in enumerate(state.sizes) if i == 0 or size != state.sizes[i - 1]]
print(f"ENDS {hvd.rank()} {sizes} {resets}", flush=True)
print(f"STEPS of {os.getpid()}: {state.step}", flush=True)
"""


NUMPY = """
class SGD:
    def __init__(self):
        self.params = [self]
        self.data, self.grad = np.full(3, 9.0 if new else 0.0), np.zeros(3)
    def step(self):
        self.data -= 0.5 * self.grad

inner = SGD()
data, opt = inner.data, hvd.DistributedOptimizer(inner)
"""
GRADIENT = "inner.grad[:] = data - state.step - hvd.rank()"
IN_TORCH = """
import torch
weight = torch.nn.Parameter(torch.full((3,), 9.0 if new else 0.0, dtype=torch.float64))
data = weight.detach().numpy()
inner, names = torch.optim.SGD([weight], 0.5), [("weight", weight)]
opt = hvd.DistributedOptimizer(inner, named_parameters=names)
"""
TORCH_GRADIENT = """opt.zero_grad()
        (0.5 * (weight - state.step - hvd.rank()) ** 2).sum().backward()"""


def grow(
    dies: str, full: str, start: str = "pass", torch: bool = False, trace: Path | None = None
) -> Result:
    text = GROWN.replace("OPTIMIZER", IN_TORCH if torch else NUMPY)
    text = text.replace("GRADIENT", TORCH_GRADIENT if torch else GRADIENT)
    text = text.replace("DIES", dies).replace("FULL", full).replace("START", start)
    options = [*FT, "--prtemca", "prte_state_base_recoverable", "1"]
    env = {} if trace is None else {"HORO_LITE_TIMELINE": str(trace)}
    return run_ranks(text, 3, env=env, options=options, timeout_s=60).check()


def exchanges_in(trace: Path) -> Counter[str]:
    """Return the number of exchanges of each process in a trace, to which nothing is to add."""
    assert list(trace.parent.glob(f"{trace.name}*")) == [trace]
    pids, found = {}, Counter[str]()
    for event in json.loads(trace.read_text()):
        if event["name"] == "process_name":  # what follows is of this process
            pids[event["pid"]] = event["args"]["name"].rpartition("pid ")[2].rstrip(")")
        found[pids[event["pid"]]] += event["ph"] == "X" and event["cat"] == "allreduce"
    return found


def ended(result: Result) -> list[str]:
    return sorted(re.findall(r"ENDS (.*)", result.stdout))


@pytest.mark.launches
@needs_ulfm
@pytest.mark.parametrize("torch", [False, True])
def test_a_replacement_joins_at_a_commit(torch: bool, tmp_path: Path) -> None:
    if torch:
        pytest.importorskip("torch")
    result = grow(
        "if (me, state.step) == (1, 3): os.kill(os.getpid(), 9)",
        full="hvd.size() == 3 and 2 in state.sizes",
        torch=torch,
        trace=tmp_path / "trace.json",
    )
    expected = ["0 [3, 2, 3] [2, 3]", "1 [3, 2, 3] [2, 3]", "2 [3, 2, 3] [3]"]
    assert ended(result) == expected, str(result)
    exchanges = exchanges_in(tmp_path / "trace.json")
    steps = dict(re.findall(r"STEPS of (\d+): (\d+)", result.stdout))
    (lost,) = exchanges.keys() - steps.keys()  # its operations, too, are in the trace
    new = min(steps, key=exchanges.__getitem__)
    assert exchanges[lost] >= 3, str(result)
    assert exchanges[new] >= 6, str(result)
    assert all(exchanges[pid] >= int(steps[pid]) for pid in steps.keys() - {new}), str(result)


@pytest.mark.launches
@needs_ulfm
def test_replacements_and_those_who_started_them_may_die() -> None:
    result = grow(
        "n = str(state.sizes).count('3, 2')\n"
        "        who = [(1, 1), (0, 0), (None, 2), ()][n]\n"
        "        if (me, hvd.rank()) == who and state.sizes[-1:] == [3]:\n"
        "            os.kill(os.getpid(), 9)",
        full="hvd.size() == 3 and str(state.sizes).count('3, 2') == 3",
    )
    sizes = [3, 2, 3, 2, 3, 2, 3]
    expected = [f"{i} {sizes} {sizes[first:]}" for i, first in enumerate([1, 2, 6])]
    assert ended(result) == expected, str(result)


DIES_AS_SOON_AS_IT_HAS_JOINED = """
if new and str(os.listdir()).count("one more") < 2:
    import threading
    from horo_lite.elastic import recovery
    open(f"one more {os.getpid()}", "w").close()

    def renew(comm, renew=recovery.renew):
        threading.Timer(0.002, os.kill, [os.getpid(), 9]).start()
        renew(comm)

    recovery.renew = renew
"""


@pytest.mark.launches
@needs_ulfm
def test_replacements_may_die_as_soon_as_they_have_joined(tmp_path: Path) -> None:
    """Open MPI must know by then how to reach them: it would wait forever to be told."""
    result = grow(
        "if (me, state.step) == (1, 3): os.kill(os.getpid(), 9)",
        full="hvd.size() == 3 and 2 in state.sizes",
        start=DIES_AS_SOON_AS_IT_HAS_JOINED,
        trace=tmp_path / "trace.json",
    )
    expected = [f"{i} [3, 2, 3]" for i in range(3)]
    assert [end[:11] for end in ended(result)] == expected, str(result)
    exchanges = exchanges_in(tmp_path / "trace.json")
    steps = dict(re.findall(r"STEPS of (\d+): (\d+)", result.stdout))
    complete = [pid for pid in steps if exchanges[pid] >= int(steps[pid])]
    assert len(complete) == 2, (exchanges, str(result))


@pytest.mark.launches
@needs_ulfm
def test_a_replacement_that_never_comes_holds_nobody_up() -> None:
    result = grow(
        "if (me, state.step) == (1, 3): os.kill(os.getpid(), 9)",
        full="state.step > 400",
        start="if new: os.kill(os.getpid(), 9)\nhvd.elastic.growth._REPORT_S = 1.0",
    )
    assert ended(result) == ["0 [3, 2] [2]", "1 [3, 2] [2]"], str(result)
    report = "the replacement started 1 s ago has not reached elastic.run: continuing without it"
    assert result.stderr.count(report) == 1, str(result)


@pytest.mark.launches
@needs_ulfm
def test_an_exception_of_all_is_the_jobs_end() -> None:
    result = train(3, "if state.step == 2: raise ValueError('everywhere')")
    assert result.returncode == 1, str(result)
    assert "everywhere" in result.stderr
    assert "ENDS" not in result.stdout


SHARDED = """
import copy, os, signal
import numpy as np
import torch
import horo_lite
import horo_lite.torch as hvd
from horo_lite.torch import elastic

hvd.init()
me = hvd.rank()
torch.manual_seed(0)
net = torch.nn.Sequential(torch.nn.Linear(30, 70), torch.nn.Tanh(), torch.nn.Linear(70, 3))
alone = copy.deepcopy(net)
own = torch.optim.Adam(net.parameters(), lr=0.01)
optimizer = hvd.DistributedOptimizer(own, shard_state=True, shared_parameters=not TRAINED)
seen = []

def step(net, optimizer, batch):
    x = torch.randn(8, 30, generator=torch.Generator().manual_seed(batch))
    optimizer.zero_grad()
    net(x).square().mean().backward()
    optimizer.step()

# The same with a home-made optimizer, of which each rank has one for each of its parameters.
class Weight:
    def __init__(self, n):
        self.data, self.grad = np.ones((n, 2)), None

class Momentum:
    def __init__(self, weights):
        self.weights, self.velocity, self.lr = weights, [0 * w.data for w in weights], 0.5
    def step(self):
        for w, v in zip(self.weights, self.velocity):
            v *= 0.5
            v += w.grad
            w.data -= self.lr * v

weights = [Weight(n) for n in (3, 4, 5)]
other = horo_lite.DistributedOptimizer(Momentum, parameters=weights, shard_state=True)

def other_step(weights, optimizer, batch):
    for w in weights:
        w.grad = np.full(w.data.shape, float(batch))
    optimizer.step()
    optimizer.lr *= 0.5

if TRAINED:  # so that the state is divided when it is first saved, and sent
    step(net, optimizer, 99)
    other_step(weights, other, 99)
values = [w.data for w in weights]
state = elastic.TorchState(net, optimizer, other=other, values=values, batch=0)

@elastic.run
def train(state):
    while state.batch < 12:
        if (me, state.batch) in DEATHS:
            os.kill(os.getpid(), signal.SIGKILL)
        seen.append(state.batch)
        step(net, optimizer, state.batch)
        other_step(weights, other, state.batch)
        state.batch += 1
        if state.batch % 3 == 0:
            state.commit()

train(state)
expected = torch.optim.Adam(alone.parameters(), lr=0.01)
weights_alone = [Weight(n) for n in (3, 4, 5)]
other_alone = Momentum(weights_alone)
for batch in [99] * TRAINED + list(range(12)):
    step(alone, expected, batch)
    other_step(weights_alone, other_alone, batch)
assert other.lr == other_alone.lr
for w, v in zip(weights, weights_alone, strict=True):
    assert (w.data == v.data).all(), (w.data, v.data)
for p, q in zip(net.parameters(), alone.parameters(), strict=True):
    torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-6)
print("ENDS", me, hvd.size(), seen, flush=True)
"""


@pytest.mark.launches
@needs_ulfm
@pytest.mark.parametrize(("trained", "hosts"), [(1, ""), (0, "2,2")])
def test_the_lost_part_of_an_optimizers_state_comes_from_the_last_commit(
    trained: int, hosts: str
) -> None:
    pytest.importorskip("torch")
    deaths = "[(2, 5), (1, 8)]" if trained else "[(1, 1), (2, 8)]"
    script = SHARDED.replace("TRAINED", str(trained)).replace("DEATHS", deaths)
    env = {"HORO_LITE_TEST_HOSTS": hosts} if hosts else {}
    result = run_ranks(script, 4 if hosts else 3, options=FT, env=env, timeout_s=60).check()
    ends = sorted(line for line in result.stdout.splitlines() if "ENDS" in line)
    if trained:  # of three ranks, one is left in the end
        assert ends == [f"ENDS 0 1 {[*range(6), *range(3, 9), *range(6, 12)]}"]
    else:  # at first to the beginning, which sync() has saved
        seen = [0, 1, *range(9), *range(6, 12)]
        assert ends == [f"ENDS {me} 2 {seen}" for me in (0, 3)]
    assert "divided between the ranks (shard_state=True)" in result.stderr


LOCAL_STEPS = """
import os, signal
import numpy as np
import horo_lite as hvd

me = hvd.init().rank
weights = np.zeros(3)
local = hvd.LocalSGD([weights], every=5)
own = np.full(1, me)  # such as what the rank's optimizer keeps
state = hvd.elastic.State(weights=weights, own=own, local=local, step=0)

def reset():
    found = weights.tolist(), own.tolist()
    assert hvd.allgather_object(found) == [found] * hvd.size(), "callbacks see the same state"
    own[:] = hvd.size()

state.register_reset_callbacks([reset])

@hvd.elastic.run
def train(state):
    while state.step < 12:
        if (me, state.step) in [(2, 6), (0, 9)]:
            os.kill(os.getpid(), signal.SIGKILL)
        weights[:] += 10.0 ** me
        own[:] += me
        state.step += 1
        local.step()
    local.average()

train(state)
print("ENDS", me, hvd.size(), weights.tolist(), flush=True)
"""


@pytest.mark.launches
@needs_ulfm
@pytest.mark.parametrize("hosts", ["", "2,2"])
def test_local_steps_of_those_that_remain_are_not_lost(hosts: str) -> None:
    env = {"HORO_LITE_TEST_HOSTS": hosts} if hosts else {}
    result = run_ranks(LOCAL_STEPS, 4, options=FT, env=env, timeout_s=60).check()
    ends = sorted(line for line in result.stdout.splitlines() if "ENDS" in line)
    # Five steps of all ranks, and the rest of ranks 1 and 3.
    w = 5 * (1 + 10 + 100 + 1000) / 4 + 7 * (10 + 1000) / 2
    assert ends == [f"ENDS {me} 2 {[w] * 3}" for me in (1, 3)]


ENDS_BADLY = """
import os, signal, sys, time
import horo_lite as hvd

hvd.init()
me = hvd.rank()
state = hvd.elastic.State(step=0)

@hvd.elastic.run
def train(state):
    pids = hvd.allgather_object(os.getpid())
    hvd.barrier()
    if me in DEAD:
        os.kill(os.getpid(), signal.SIGKILL)
    while any(os.path.exists(f"/proc/{pids[rank]}") for rank in DEAD):
        time.sleep(0.01)
    ENDING

train(state)
"""


@pytest.mark.launches
@needs_ulfm
@pytest.mark.parametrize(
    ("ending", "n", "dead", "code"),
    [
        ("raise ValueError('on all that live')", 3, [1], 1),
        ("raise ValueError('on all that live')", 4, [0, 1, 2], 1),
        ("raise KeyboardInterrupt", 2, [0], 1),
        ("sys.exit(3)", 3, [1, 2], 3),
        ("sys.exit(3)", 4, [0, 2], 3),
    ],
)
def test_a_bad_end_beside_a_death_is_a_failure(
    ending: str, n: int, dead: list[int], code: int
) -> None:
    """Nobody has recovered from the death when the survivors end by themselves."""
    script = ENDS_BADLY.replace("DEAD", str(dead)).replace("ENDING", ending)
    result = run_ranks(script, n, options=FT, timeout_s=60)
    assert result.returncode == code, str(result)


class TornComm:
    """A communicator whose collective operations succeed, but deliver wrong data."""

    rank, size = 0, 2

    def __init__(self, sent: object, torn: str, junk: bytes) -> None:
        self.sent, self.torn, self.junk = sent, torn, junk

    def Allgather(self, mine: bytes, everyone: bytearray) -> None:  # noqa: N802
        everyone[: len(mine)] = mine
        theirs = mine if self.torn != "headers" else self.junk * len(mine)
        everyone[len(mine) :] = theirs[: len(mine)]

    def Allgatherv(self, mine: bytes, received: list[Any]) -> None:  # noqa: N802
        everyone, (size, _) = received
        everyone[:size] = mine
        everyone[size:] = mine if self.torn != "data" else mine[:-2] + self.junk * 2


class RunsCode:
    ran = False

    def __reduce__(self) -> tuple[Any, ...]:
        return setattr, (RunsCode, "ran", True)


@pytest.mark.parametrize("junk", [b"\0", b"\x10", b"\xff"])
@pytest.mark.parametrize("torn", ["headers", "data"])
def test_what_has_not_come_whole_is_never_unpickled(torn: str, junk: bytes) -> None:
    RunsCode.ran = False
    with pytest.raises(hvd.PeerLostError, match="a rank died"):
        allgather_objects(TornComm(RunsCode(), torn, junk), RunsCode())
    assert not RunsCode.ran
    assert allgather_objects(TornComm("a", "", junk), "a") == ["a", "a"]


@pytest.mark.launches
@needs_ulfm
@pytest.mark.parametrize("hosts", ["", "1,1,1", "2,1"])
def test_a_group_that_is_made_while_a_rank_dies(hosts: str) -> None:
    script = """
    import os, signal
    import numpy as np
    import horo_lite as hvd
    from horo_lite.transports import this_host

    hvd.init()
    me = hvd.rank()
    state = hvd.elastic.State(step=0)
    exchange, n_exchanges = this_host.allgather_objects, 0

    def die_between_two(comm, *args):
        global n_exchanges
        n_exchanges += 1
        if (me, n_exchanges) in ((0, 6), (1, 13)):
            os.kill(os.getpid(), signal.SIGKILL)
        return exchange(comm, *args)

    this_host.allgather_objects = die_between_two

    @hvd.elastic.run
    def train(state):
        while state.step < 10:
            part = hvd.new_group(range(hvd.size()))
            x = np.full(10, hvd.rank() + 1.0)
            total = hvd.allreduce(x, hvd.Sum, group=part)
            assert total.tolist() == [hvd.size() * (hvd.size() + 1) / 2] * 10
            hvd.free_group(part)
            state.step += 1

    train(state)
    print("ENDS", me, hvd.size(), flush=True)
    """
    result = run_ranks(script, 3, options=FT, env={"HORO_LITE_TEST_HOSTS": hosts}, timeout_s=60)
    assert result.check().stdout == "ENDS 2 1\n", str(result)


@pytest.mark.launches
@needs_ulfm
@pytest.mark.parametrize("hosts", ["", "2,1"])
@pytest.mark.parametrize("call", ["init()", "new_group([1, 2, 0])"])
def test_a_rank_that_fails_while_a_world_or_group_is_made_ends_the_job(
    call: str, hosts: str
) -> None:
    """Outside of elastic.run; MPI does not notice that a rank has ended by itself."""
    script = f"""
    import os
    import horo_lite as hvd
    from horo_lite.start import groups, session

    if {call!r} != "init()":
        hvd.init()
    if os.environ["OMPI_COMM_WORLD_RANK"] == "0":
        def fails(*arguments, **options):
            raise OSError("no memory for this rank")
        groups.connect = session.connect = fails
    hvd.{call}
    """
    env = {"HORO_LITE_TEST_HOSTS": hosts}
    result = run_ranks(script, 3, options=FT, env=env, timeout_s=30)
    assert result.returncode == 1, str(result)
    assert "rank 0 of 3" in result.stderr
    assert "no memory for this rank" in result.stderr


OWN_MISTAKES = """
import os, signal
import numpy as np
import horo_lite as hvd

hvd.init()
me = hvd.rank()

class State(hvd.elastic.State):
    def commit(self):
        if self.step == 6:
            IN_COMMIT
        super().commit()

def reset():
    IN_RESET

state = State(step=0)
state.register_reset_callbacks([reset])

@hvd.elastic.run
def train(state):
    while state.step < 9:
        total = hvd.allreduce(np.full(3, hvd.rank() + 1.0), hvd.Sum)
        assert total.tolist() == [hvd.size() * (hvd.size() + 1) / 2] * 3
        if (me, state.step) == (2, 2):
            os.kill(os.getpid(), signal.SIGKILL)
        state.step += 1
        if state.step % 3 == 0:
            state.commit()

train(state)
print("ENDS", me, hvd.size(), flush=True)
"""


@pytest.mark.launches
@needs_ulfm
@pytest.mark.parametrize(
    ("in_commit", "in_reset", "code", "left"),
    [
        ("if me == 1: raise OSError('не хватает места ' * 40)", "pass", 0, [0, 3]),
        ("if me == 0: os.kill(os.getpid(), signal.SIGKILL)", "pass", 0, [1, 3]),
        ("raise OSError('everywhere')", "pass", 1, []),
        ("pass", "if hvd.rank() == 0: raise ValueError('of one rank')", 1, []),
        ("pass", "raise ValueError('of all ranks')", 1, []),
    ],
)
def test_mistakes_in_commits_and_callbacks(
    in_commit: str, in_reset: str, code: int, left: list[int]
) -> None:
    """After a loss: a mistake in a commit ends one rank, and one in a callback ends the job."""
    script = OWN_MISTAKES.replace("IN_COMMIT", in_commit).replace("IN_RESET", in_reset)
    result = run_ranks(script, 4, options=FT, timeout_s=60)
    assert result.returncode == code, str(result)
    ends = sorted(re.findall(r"ENDS (\d) (\d)", result.stdout))
    assert ends == [(str(rank), str(len(left))) for rank in left], str(result)


@pytest.mark.launches
@needs_ulfm
def test_who_ends_early_in_good_order_is_told_of() -> None:
    result = train(2, "if (me, state.step) == (1, 2): sys.exit(0)")
    assert result.returncode == 1, str(result)
    assert "rank 1: the end of training" in result.stderr


@pytest.mark.launches
@needs_ulfm
@pytest.mark.parametrize("hosts", ["", "1,1,1"])
@pytest.mark.parametrize("call", ["hvd.recv(x, 1, tag=13)", "hvd.isend(x, 1, tag=13).wait()"])
def test_who_waits_for_a_message_of_a_rank_that_is_done_is_told_of(call: str, hosts: str) -> None:
    """Messages sent before the end arrive; the third rank waits in a collective."""
    script = """
    import sys, time
    import numpy as np
    import horo_lite as hvd

    me = hvd.init().rank

    @hvd.elastic.run
    def train(state):
        if me == 1:
            hvd.send(np.full(3, 5.0), 0)
            state.handle = hvd.isend(np.full(50_000, 6.0), 0)
            sys.exit(0)
        if me == 0:
            time.sleep(0.3)
            for n, expected in ((3, 5.0), (50_000, 6.0)):
                got = np.zeros(n)
                hvd.recv(got, 1)
                assert (got == expected).all()
            x, began = np.zeros(5000), time.monotonic()
            try:
                CALL
            except hvd.MismatchError:
                print("TOOK", time.monotonic() - began, flush=True)
                raise
        hvd.barrier()

    try:
        train(hvd.elastic.State(step=0))
    except hvd.HoroLiteError as error:
        print("RAISES", me, error, flush=True)
        raise
    """
    result = run_ranks(
        script.replace("CALL", call), 3, options=FT, env={"HORO_LITE_TEST_HOSTS": hosts}
    )
    assert result.returncode or hosts, str(result)
    name = "recv from rank 1 (tag 13)" if "recv" in call else "send to rank 1 (tag 13)"
    error = f"rank 1 has finished its function in elastic.run, while rank 0 waits in {name}"
    assert f"RAISES 0 {error}" in result.stdout, str(result)
    assert result.stdout.count("RAISES") == result.stdout.count(error) == 3, str(result)
    assert float(re.findall(r"TOOK (\S+)", result.stdout)[0]) < 3, str(result)


@pytest.mark.launches
@needs_ulfm
@pytest.mark.parametrize("hosts", ["", "1,1"])
def test_messages_go_on_after_a_function_and_in_threads_beside_it(hosts: str) -> None:
    result = run_ranks(
        """
        import threading, time
        import numpy as np
        import horo_lite as hvd

        me = hvd.init().rank

        def ping(tag):  # rank 0 comes late
            x = np.full(5000, 1.0)
            if me == 0:
                time.sleep(0.2)
                hvd.recv(x, 1, tag=tag)
            hvd.send(x, 1 - me, tag=tag)
            if me == 1:
                hvd.recv(x, 0, tag=tag)

        @hvd.elastic.run
        def train(state):
            hvd.barrier()
            ping(1)

        for _ in range(3):
            train(hvd.elastic.State(step=0))
            ping(2)

        def serve():
            x = np.zeros(3)
            hvd.recv(x, 0, tag=3)
            time.sleep(0.5)
            hvd.send(x + 1, 0, tag=4)

        def listen():
            hvd.recv(np.zeros(3), 0, tag=5)

        @hvd.elastic.run
        def train(state):
            if me == 1:  # its thread continues to serve
                state.threads = [threading.Thread(target=each) for each in (serve, listen)]
                for thread in state.threads:
                    thread.start()
            else:
                time.sleep(0.5)
                x = np.zeros(3)
                hvd.send(x, 1, tag=3)
                hvd.recv(x, 1, tag=4)
                assert x.tolist() == [1.0] * 3

        @hvd.elastic.run
        def wait_for_rank_1(state):
            time.sleep(0.5 * me)

        state = hvd.elastic.State(step=0, threads=[])
        train(state)
        wait_for_rank_1(hvd.elastic.State(step=0))
        if me == 0:
            hvd.send(np.zeros(3), 1, tag=5)
        for thread in state.threads:
            thread.join()
        print("ENDS", flush=True)
        """,
        2,
        options=FT,
        env={"HORO_LITE_TEST_HOSTS": hosts},
    ).check()
    assert result.stdout.count("ENDS") == 2, str(result)


@pytest.mark.launches
@needs_ulfm
def test_a_step_that_nobody_counted_is_taken_back() -> None:
    result = train(
        3,
        after="if (me, state.step, hvd.size()) == (1, 7, 3): os.kill(os.getpid(), 9)\n"
        "        hvd.barrier()",
    ).check()
    assert "back to the last commit" in result.stderr
    assert result.stdout == ends([3] * 5 + [2] * 7, [2])


@pytest.mark.launches
@needs_ulfm
def test_too_few_are_the_jobs_end_and_the_state_is_saved(tmp_path) -> None:
    path = tmp_path / "state"
    result = train(
        3,
        "if (me, state.step) in ((0, 3), (1, 7)): os.kill(os.getpid(), 9)",
        min_size=2,
        env={"HORO_LITE_CHECKPOINT": str(path)},
    )
    assert result.returncode == 1, str(result)
    assert f"1 rank left, fewer than min_size=2: the state is in {path}" in result.stderr
    saved = checkpoint.load(path)
    assert (saved["step"], saved["sizes"]) == (7, [3] * 3 + [2] * 4)


@pytest.mark.launches
@needs_ulfm
def test_who_hangs_is_killed_and_who_is_slow_is_awaited() -> None:
    result = train(
        4,
        "if state.step == 3: limit_waits(3)\n"
        "        if state.step == 3 and me in (1, 2): time.sleep({1: 0.7, 2: 60}[me])\n"
        "        if (me, state.step) == (3, 8): os.kill(os.getpid(), 9)\n"
        "        if (me, state.step) == (1, 8): time.sleep(0.5)",
    ).check()
    assert result.stdout == ends([4] * 3 + [3] * 5 + [2] * 4, [3, 2])


SHARES = """
import os, signal
import numpy as np
import horo_lite as hvd

hvd.init()
sampler = hvd.DistributedSampler(12)
loader, _ = hvd.partition_dataset(np.arange(12), 4)
state = hvd.elastic.State(epoch=0)

@hvd.elastic.run
def train(state):
    while state.epoch < 2:
        sampler.set_epoch(state.epoch)
        loader.set_epoch(state.epoch)
        for mine in (list(sampler), np.concatenate(list(loader)).tolist()):
            everyone = hvd.allgather_object(mine)
            assert sorted(sum(everyone, [])) == list(range(12)), everyone
        state.epoch += 1
        if hvd.size() == 3 and hvd.rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
    return hvd.size()

print("ENDS WITH", train(state))
"""


@pytest.mark.launches
@needs_ulfm
def test_the_samples_of_those_who_died_are_dealt_out_to_the_others() -> None:
    result = run_ranks(SHARES, 3, options=FT, timeout_s=60)
    assert result.stdout.count("ENDS WITH 2") == 2, str(result)


@pytest.mark.mpi
def test_without_fault_tolerance_a_lost_rank_ends_the_job() -> None:
    result = train(2, "pass", options=[]).check()
    assert result.stdout == ends([2] * 12, [])
    assert result.stderr.count("without `--with-ft ulfm`") == 1
    result = train(2, "if (me, state.step) == (1, 7): os.kill(os.getpid(), 9)", options=[])
    assert result.returncode != 0
    assert "ENDS" not in result.stdout


TORCH = """
import os, sys
import torch
import horo_lite.torch as hvd
from torch.nn.functional import cross_entropy

hvd.init()
me = hvd.rank()
torch.manual_seed(me)
data = torch.randn(72, 5, generator=torch.Generator().manual_seed(1))
labels = torch.arange(72) % 3
model = torch.nn.Sequential(torch.nn.Linear(5, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3))
opts = [
    hvd.DistributedOptimizer(
        torch.optim.AdamW(model[i].parameters(), lr=0.0075),
        model.named_parameters(),
        gradient_as_bucket_view=(i == 2),
    )
    for i in (0, 2)
]
sampler = hvd.elastic.ElasticSampler(data)
loader = torch.utils.data.DataLoader(range(72), batch_size=3, sampler=sampler)
state = hvd.elastic.TorchState(model, opts, sampler=sampler, epoch=0, batch=0, history=[])

def follow_size():
    for opt in opts:
        opt.param_groups[0]["lr"] = 0.0025 * hvd.size()

state.register_reset_callbacks([follow_size])
first = {}

@hvd.elastic.run
def train(state):
    if not first:
        first.update({name: tensor.clone() for name, tensor in model.state_dict().items()})
    for state.epoch in range(state.epoch, 2):
        sampler.set_epoch(state.epoch)
        for i, mine in enumerate(loader):
            together = hvd.allgather(mine).tolist()
            model.zero_grad()
            loss = cross_entropy(model(data[mine]), labels[mine])
            if (me, state.batch) == (0, 3):
                os.kill(os.getpid(), 9)
            loss.backward()
            for opt in opts:
                opt.step()
            sampler.record_batch(i, len(mine))
            state.history = [*state.history, (together, opts[0].param_groups[0]["lr"])]
            state.batch += 1

train(state)
mine, rates = model, [rate for _, rate in state.history]
model = torch.nn.Sequential(torch.nn.Linear(5, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3))
model.load_state_dict(first)
alone = torch.optim.AdamW(model.parameters())
for together, rate in state.history:
    alone.param_groups[0]["lr"] = rate
    alone.zero_grad()
    cross_entropy(model(data[together]), labels[together]).backward()
    alone.step()
error = max((a - b).abs().max().item() for a, b in zip(mine.parameters(), model.parameters()))
assert error < 1e-5, error
consumed = [i for together, _ in state.history for i in together]
assert set(consumed) == set(range(72))
assert 2 * 72 <= len(consumed) <= 2 * 72 + 3, len(consumed)  # padded at the end of an epoch
print("ENDS", sorted(set(rates)), flush=True)
"""


@pytest.mark.launches
@needs_ulfm
def test_torch() -> None:
    pytest.importorskip("torch")
    result = run_ranks(TORCH, 3, options=FT, timeout_s=90).check()
    assert result.stdout == "ENDS [0.005, 0.0075]\n" * 2, str(result)
