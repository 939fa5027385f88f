"""op=Adasum in PyTorch's optimizers: each rank's own steps, combined as in Horovod."""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from launch import RanksFailedError, run_threads
from oracle import adasum_reference
from worlds import on_ranks

torch = pytest.importorskip("torch")

import horo_lite.torch as hvd  # noqa: E402
from horo_lite.collectives.compression import Compressor  # noqa: E402
from horo_lite.collectives.group import Group  # noqa: E402
from horo_lite.errors import MismatchError, NonFiniteError  # noqa: E402

SHAPES = {"weight": (7, 3), "bias": (3,), "scale": ()}
N_STEPS = 4
LR, MOMENTUM, DECAY = 0.1, 0.9, 0.05
Arrays = dict[str, np.ndarray]


def starts() -> Arrays:
    rng = np.random.default_rng(0)
    return {name: rng.standard_normal(shape) for name, shape in SHAPES.items()}


def target(rank: int, step: int, name: str) -> np.ndarray:
    """Return the target of a rank's backward pass: the gradient is `value - target`."""
    rng = np.random.default_rng([rank, step, len(name)])
    return rng.standard_normal(SHAPES[name]) + rank


def parameters() -> dict[str, Any]:
    return {name: torch.nn.Parameter(torch.tensor(value)) for name, value in starts().items()}


def backward(p: dict[str, Any], rank: int, step: int) -> Any:
    drawn = [(v - torch.tensor(target(rank, step, n))).square().sum() / 2 for n, v in p.items()]
    loss = torch.stack(drawn).sum()
    loss.backward()
    return loss


def sgd(p: dict[str, Any]) -> Any:
    return torch.optim.SGD(p.values(), lr=LR, momentum=MOMENTUM, weight_decay=DECAY)


def wrap(optimizer: Any, p: dict[str, Any], group: Group, **options: Any) -> Any:
    options = {"op": hvd.Adasum, "process_set": group, **options}
    return hvd.DistributedOptimizer(optimizer, p.items(), **options)


def values(p: dict[str, Any]) -> Arrays:
    return {name: value.detach().numpy().copy() for name, value in p.items()}


def assert_all_have(found: Sequence[Arrays], expected: Arrays) -> None:
    for name, value in expected.items():
        assert all(np.array_equal(one[name], found[0][name]) for one in found)
        np.testing.assert_allclose(found[0][name], value, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("passes", [1, 3])
@pytest.mark.parametrize("size", [2, 4])
def test_numbers_are_horovods(size: int, passes: int) -> None:
    """Horovod 0.28, in `_DistributedAdasumOptimizer`, for each parameter:

    start = current.copy(); step() computes current - lr * f(g); delta = current - start;
    allreduce_(delta) with Adasum; start += delta; current = start
    """
    current = starts()
    momenta: list[Arrays] = [{} for _ in range(size)]
    for step in range(N_STEPS):
        for name, start in current.items():
            deltas = []
            for rank, momentum in enumerate(momenta):
                each = range(step * passes, (step + 1) * passes)
                gradient = sum(start - target(rank, i, name) for i in each) + DECAY * start
                momentum[name] = MOMENTUM * momentum.get(name, 0.0) + gradient
                deltas.append(-LR * momentum[name])
            current[name] = start + adasum_reference(deltas)

    def rank(group: Group) -> tuple[Arrays, list[Any]]:
        p = parameters()
        optimizer = wrap(sgd(p), p, group, backward_passes_per_step=passes, check_every=1)
        for step in range(N_STEPS):
            optimizer.zero_grad(set_to_none=step % 2 == 0)
            for i in range(passes):
                backward(p, group.rank, step * passes + i)
            optimizer.synchronize()
            optimizer.step()
        return values(p), [optimizer.state[v]["momentum_buffer"].numpy() for v in p.values()]

    found = run_threads(size, rank)
    assert_all_have([one for one, _ in found], current)
    for (_, own), momentum in zip(found, momenta, strict=True):
        for got, name in zip(own, current, strict=True):
            np.testing.assert_allclose(got, momentum[name], rtol=1e-9)


MAKERS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "Adam": lambda p: torch.optim.Adam(p.values(), lr=0.1),
    "LBFGS": lambda p: torch.optim.LBFGS(list(p.values()), lr=0.2, max_iter=3),
}


@pytest.mark.parametrize("kind", MAKERS)
def test_any_optimizer_takes_its_own_step(kind: str) -> None:
    """With a closure, which a rank calls as often as its own optimizer does, for its own loss."""
    size = 2
    replicas = [parameters() for _ in range(size)]
    optimizers = [MAKERS[kind](p) for p in replicas]
    losses = []

    def stepped(optimizer: Any, p: dict[str, Any], rank: int, step: int) -> float:
        def closure() -> Any:
            optimizer.zero_grad()
            return backward(p, rank, step)

        return float(optimizer.step(closure).detach())

    for step in range(N_STEPS):
        start = values(replicas[0])
        for rank, (p, optimizer) in enumerate(zip(replicas, optimizers, strict=True)):
            losses.append(stepped(optimizer, p, rank, step))
        for name, value in start.items():
            deltas = [p[name].detach().numpy() - value for p in replicas]
            combined = torch.from_numpy(np.asarray(value + adasum_reference(deltas)))
            for p in replicas:
                p[name].data.copy_(combined)

    def rank(group: Group) -> tuple[Arrays, list[float]]:
        p = parameters()
        optimizer = wrap(MAKERS[kind](p), p, group)
        seen = [stepped(optimizer, p, group.rank, step) for step in range(N_STEPS)]
        return values(p), seen

    found = run_threads(size, rank)
    assert_all_have([one for one, _ in found], values(replicas[0]))
    seen = [loss for pair in zip(*(own for _, own in found), strict=True) for loss in pair]
    assert seen == pytest.approx(losses, rel=1e-9)


def test_state_is_saved_loaded_and_broadcast() -> None:
    """Once both ranks have one rank's momenta, equal gradients give equal steps."""

    def rank(group: Group) -> tuple[Arrays, Arrays]:
        p = parameters()
        optimizer = wrap(sgd(p), p, group)
        backward(p, group.rank, 0)
        optimizer.step()
        own = optimizer.state[p["bias"]]["momentum_buffer"].clone()
        file = io.BytesIO()
        torch.save(optimizer.state_dict(), file)
        file.seek(0)
        other = wrap(sgd(q := parameters()), q, group)
        for name, value in q.items():
            value.data.copy_(p[name])
        other.load_state_dict(torch.load(file))
        assert torch.equal(other.state[q["bias"]]["momentum_buffer"], own)
        hvd.broadcast_optimizer_state(other, 1, process_set=group)
        assert torch.equal(other.state[q["bias"]]["momentum_buffer"], own) == (group.rank == 1)
        momenta = {name: other.state[v]["momentum_buffer"].numpy().copy() for name, v in q.items()}
        before = values(q)
        other.zero_grad()
        backward(q, 7, 1)
        other.step()
        # Adasum of equal steps returns one of them.
        expected = {
            name: x - LR * (MOMENTUM * momenta[name] + x - target(7, 1, name) + DECAY * x)
            for name, x in before.items()
        }
        return values(q), expected

    found = run_threads(2, rank)
    assert_all_have([one for one, _ in found], found[0][1])


def test_parameters_that_not_every_rank_moves() -> None:
    """Sparse gradients, a parameter without a gradient on a rank, one that is frozen on a rank."""

    def rank(group: Group) -> list[Any]:
        table = torch.nn.Embedding(4, 2, sparse=True).double()
        table.weight.data.fill_(1.0)
        lone, frozen, still = (torch.nn.Parameter(torch.ones(3).double()) for _ in range(3))
        frozen.requires_grad_(group.rank == 1)
        still.requires_grad_(False)
        all_ = [table.weight, lone, frozen, still]
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(all_, lr=1.0), op=hvd.Adasum, process_set=group
        )
        loss = table(torch.tensor([group.rank, 3])).sum()
        if group.rank == 0:
            loss = loss + 2 * lone.sum()
        else:
            loss = loss + 5 * frozen.sum()
        loss.backward()
        optimizer.step()
        return [p.tolist() for p in all_]

    a, b = run_threads(2, rank)
    assert a == b
    table, lone, frozen, still = a
    # Rows (1, 0, 0, 1) and (0, 1, 0, 1): a·b / 2|a|² is 1/4.
    moved = adasum_reference([np.array([1, 0, 0, 1.0]), np.array([0, 1, 0, 1.0])])
    assert moved.tolist() == [0.75, 0.75, 0.0, 1.5]
    assert table == [[1 - x] * 2 for x in moved.tolist()]
    assert (lone, frozen, still) == ([-1.0] * 3, [-4.0] * 3, [1.0] * 3)


def test_a_step_that_cannot_be_combined_is_undone() -> None:
    """Parameters and state, so that the ranks continue as if it had not been taken."""

    def rank(group: Group) -> tuple[Arrays, Arrays]:
        p, q = parameters(), parameters()
        optimizer = wrap(sgd(p), p, group, check_finite="raise")
        undisturbed = wrap(sgd(q), q, group)
        for step in range(3):
            if step:
                before = values(p)
                backward(p, group.rank, 7)
                if step == 1 and group.rank:
                    p["bias"].grad[1] = float("nan")
                if step == 2:
                    optimizer.param_groups[0]["lr"] = LR * (1 + group.rank)
                error = NonFiniteError if step == 1 else MismatchError
                with pytest.raises(error, match="'bias'" if step == 1 else "differ: lr: "):
                    optimizer.step()
                assert all(np.array_equal(values(p)[name], before[name]) for name in before)
                optimizer.param_groups[0]["lr"] = LR
            for o, each in ((optimizer, p), (undisturbed, q)):
                o.zero_grad()
                backward(each, group.rank, step)
                o.step()
        return values(p), values(q)

    found = [each for both in run_threads(2, rank) for each in both]
    assert_all_have(found, found[1])


class Replacing(torch.optim.SGD):
    """Like some optimizers: assigns new memory to the parameter instead of changing it in place."""

    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            if p.dim() == 0 and self.param_groups[0].get("fails"):
                raise ZeroDivisionError
            p.data = p.data - LR * p.grad
            self.state[p]["n"] = self.state[p].get("n", 0) + 1


@pytest.mark.parametrize("fails", [False, True])
def test_steps_that_replace_memory_or_end_half_way(fails: bool) -> None:
    """A rank whose step raised has its old parameters and state, and may take another step."""

    def rank(group: Group) -> Arrays:
        p = parameters()
        optimizer = wrap(Replacing(p.values(), lr=LR), p, group)
        backward(p, group.rank, 0)
        if fails and group.rank:
            optimizer.param_groups[0]["fails"] = True
            with pytest.raises(ZeroDivisionError):
                optimizer.step()
            assert all(np.array_equal(x, starts()[name]) for name, x in values(p).items())
            assert not optimizer.state
            optimizer.param_groups[0]["fails"] = False
        optimizer.step()
        return values(p)

    expected = {
        name: x + adasum_reference([-LR * (x - target(r, 0, name)) for r in range(2)])
        for name, x in starts().items()
    }
    assert_all_have(run_threads(2, rank), expected)


def test_ranks_that_combine_other_things() -> None:
    def rank(group: Group) -> None:
        p = parameters()
        what = "gradients" if group.rank else "steps"
        optimizer = wrap(sgd(p), p, group, adasum_of=what)
        before = values(p)

        def step() -> None:
            backward(p, group.rank, 0)
            optimizer.step()

        with pytest.raises(MismatchError, match=r"Adasum of steps.*Adasum of gradients"):
            step()
        assert all(np.array_equal(values(p)[name], before[name]) for name in before)

    run_threads(2, rank)


def test_what_cannot_be() -> None:
    def rank(group: Group) -> None:
        p = parameters()
        with pytest.raises(ValueError, match=r"adasum_of must be .* not 'delta'"):
            wrap(sgd(p), p, group, adasum_of="delta")
        with pytest.raises(ValueError, match="needs op=Average"):
            wrap(sgd(p), p, group, gradient_predivide_factor=2.0)
        optimizer = wrap(sgd(p), p, group)
        with pytest.raises(ValueError, match="a weight needs op=Average"):
            optimizer.set_weight(3)
        with pytest.raises(RuntimeError, match="Clip between"), optimizer.skip_synchronize():
            optimizer.step()
        scaler = torch.amp.GradScaler("cpu")
        scaler.scale(torch.stack([v.sum() for v in p.values()]).sum()).backward()
        with pytest.raises(ValueError, match=r'GradScaler skips .* adasum_of="gradients"'):
            scaler.step(optimizer)
        torch.amp.GradScaler("cpu", enabled=False).step(optimizer)
        gradients = wrap(sgd(q := parameters()), q, group, adasum_of="gradients")
        scaler.scale(torch.stack([v.sum() for v in q.values()]).sum()).backward()
        scaler.step(gradients)

    run_threads(2, rank)
    with pytest.raises(RanksFailedError, match="must be a power of two, not 3"):
        run_threads(3, lambda group: wrap(sgd(p := parameters()), p, group))


def test_compression_is_ignored_with_a_word() -> None:
    def rank(group: Group) -> None:
        x = torch.ones(2)
        for compression in (hvd.Compression.fp16, Compressor("own"), hvd.Compression.none):
            wrap(sgd(p := parameters()), p, group, compression=compression)
            options = {"op": hvd.Adasum, "process_set": group}
            assert hvd.allreduce(x, compression=compression, **options).tolist() == [1.0, 1.0]

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run_threads(2, rank)
    said = [str(each.message) for each in caught]
    assert len(said) == 4, said  # by one rank
    assert all("does not compress: compression" in text for text in said), said


def test_alone_a_rank_takes_plain_steps() -> None:
    def rank(group: Group) -> Arrays:
        p = parameters()
        optimizer = wrap(sgd(p), p, group)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        scaler.scale(torch.stack([v.sum() for v in p.values()]).sum()).backward()
        scaler.step(optimizer)
        return values(p)

    expected = {name: x - LR * (1 + DECAY * x) for name, x in starts().items()}
    assert_all_have(run_threads(1, rank), expected)


def two_steps() -> list[float]:
    hvd.init()
    p = torch.nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([p], lr=0.5, momentum=0.5)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    optimizer = hvd.DistributedOptimizer(optimizer, op=hvd.Adasum)
    for _ in range(2):
        optimizer.zero_grad()
        p[hvd.rank()].backward()  # orthogonal: Adasum is the sum
        assert p.grad.tolist() == [float(i == hvd.rank()) for i in range(2)]
        optimizer.step()
    weights: list[float] = p.tolist()
    return weights


@pytest.mark.served
@pytest.mark.mpi
@pytest.mark.timeout(180)
def test_processes_on_two_hosts() -> None:
    for weights in on_ranks(two_steps, 2, hosts="1,1", timeout_s=60):
        assert weights == [-1.25, -1.25]
