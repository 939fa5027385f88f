"""Steps with int8 and int4 between hosts: error feedback, overflows, and one host."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
from home_made import SGD, Parameter
from worlds import on_ranks

import horo_lite as hvd
from horo_lite.training.options import Options
from horo_lite.training.transform import Transform

pytestmark = [pytest.mark.served, pytest.mark.timeout(60)]

SHAPES = {"weight": (40, 300), "bias": (7,), "half": (500,)}
N_STEPS = 30


def zeros(shape: tuple[int, ...], dtype: str) -> Parameter:
    return Parameter(np.zeros(shape, np.float64), np.zeros(shape, dtype))


def gradients(step: int, rank: int) -> dict[str, np.ndarray]:
    """Return gradients with a part that is always the same, and small beside their blocks."""
    rng = np.random.default_rng([step, rank])
    return {
        name: (rng.standard_normal(shape) + 0.02 * (np.arange(np.prod(shape)) % 5).reshape(shape))
        * (1 + rank)
        for name, shape in SHAPES.items()
    }


def train(
    compression: hvd.Compressor, overflow_at: int = -1
) -> tuple[dict[str, np.ndarray], list[float], list[str]]:
    """Return the parameters, the largest result of each step, and the warnings."""
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        world = hvd.init()
        params = {
            name: zeros(shape, "float16" if name == "half" else "float32")
            for name, shape in SHAPES.items()
        }
        opt = hvd.DistributedOptimizer(
            SGD(params, -1.0), compression=compression, check_every=1, bucket_bytes=20_000
        )
        sizes = []
        for step in range(N_STEPS):
            for name, g in gradients(step, world.rank).items():
                params[name].grad[...] = g
            if step == overflow_at:
                params["weight"].grad[...] *= 1e30
                if world.rank == 1:
                    params["bias"].grad[3] = np.inf
            opt.synchronize()
            if not all(np.isfinite(p.grad).all() for p in params.values()):
                assert step == overflow_at
                continue  # as a loss scaler does
            with opt.skip_synchronize():
                opt.step()
            sizes.append(max(float(np.abs(p.grad).max()) for p in params.values()))
    said = [str(w.message) for w in warned if issubclass(w.category, RuntimeWarning)]
    return {name: p.data for name, p in params.items()}, sizes, said


def averages(n_ranks: int, skipped: int = -1) -> dict[str, np.ndarray]:
    total = {name: np.zeros(shape) for name, shape in SHAPES.items()}
    for step in set(range(N_STEPS)) - {skipped}:
        for name in SHAPES:
            total[name] += sum(gradients(step, r)[name] for r in range(n_ranks)) / n_ranks
    return total


@pytest.mark.parametrize("wire", ["int8", "int4"])
@pytest.mark.parametrize("hosts", ["1,1", "2,1"])
def test_the_error_of_all_steps_is_that_of_one(hosts: str, wire: str) -> None:
    n = hosts.count("1") + 2 * hosts.count("2")
    exact = averages(n)
    found = on_ranks(train, n, getattr(hvd.Compression, wire), hosts=hosts)
    for data, _, said in found:
        assert said == []
        for name, x in data.items():
            assert x.tobytes() == found[0][0][name].tobytes()
    levels = 127 if wire == "int8" else 7
    for name in ("weight", "bias"):
        error = np.abs(found[0][0][name] - exact[name])
        # 30 steps whose roundings added up would err by 30 times as much at worst, and a version
        # that never communicates by the ranks' differences.
        allowed = 1.5 * 4.5 * max(1 + r for r in range(n)) / levels
        assert 0 < error.max() < allowed
    # The part that never changes arrives, however small it is.
    flat = found[0][0]["weight"].reshape(-1) - exact["weight"].reshape(-1)
    for k in range(5):
        assert abs(flat[k::5].mean()) < 0.1 * 0.02 * N_STEPS


@pytest.mark.parametrize("wire", ["int8", "int4"])
def test_a_step_that_overflowed_leaves_nothing_behind(wire: str) -> None:
    for data, sizes, _ in on_ranks(train, 2, getattr(hvd.Compression, wire), 11, hosts="1,1"):
        assert max(sizes) < 20
        exact = averages(2, skipped=11)
        assert np.abs(data["weight"] - exact["weight"]).max() < 1.5 * 9 * 2 / 7


def test_on_one_host_it_changes_nothing_and_says_so() -> None:
    plain = on_ranks(train, 2, hvd.Compression.none)
    for wire in ("int8", "int4"):
        found = on_ranks(train, 2, getattr(hvd.Compression, wire))
        for (data, _, said), (expected, _, _) in zip(found, plain, strict=True):
            assert all(data[name].tobytes() == expected[name].tobytes() for name in SHAPES)
            assert len(said) == (data is found[0][0])
    assert "compression int4 changes what travels between hosts only" in found[0][2][0]


def by_hand() -> list[np.ndarray]:
    rank = hvd.init().rank
    x = np.random.default_rng(rank).standard_normal(1000).astype(np.float32)
    results = [hvd.allreduce(x, op=hvd.Sum, compression=hvd.Compression.int4) for _ in range(2)]
    (lists,) = hvd.grouped_allreduce([x], op=hvd.Max, compression=hvd.Compression.int4)
    rows = hvd.reducescatter(x, op=hvd.Sum, compression=hvd.Compression.int4)
    return [*results, lists, rows]


def test_a_call_of_its_own_has_no_memory() -> None:
    found = on_ranks(by_hand, 2, hosts="1,1")
    xs = [np.random.default_rng(r).standard_normal(1000).astype(np.float32) for r in range(2)]
    for rank, (first, second, largest, rows) in enumerate(found):
        assert first.tobytes() == second.tobytes() == found[0][0].tobytes()
        assert 0.05 < np.abs(first - sum(xs)).max() < 1.5 * 4 * 4 / 14
        np.testing.assert_array_equal(largest, np.maximum(*xs))
        # Only the sums of the other hosts are rounded.
        assert 0 < np.abs(rows - sum(xs)[500 * rank :][:500]).max() < 4.5 / 14


def what_is_left_over_belongs_to_its_elements() -> dict[str, tuple[list[bytes], list[bytes]]]:
    """Return results of steps, and what they should be, for steps that could mix it up."""
    rank = hvd.init().rank
    int4 = hvd.Compression.int4

    def given(step: int, i: int = 0) -> np.ndarray:
        rng = np.random.default_rng([step, rank, i])
        return rng.standard_normal((30, 40)).astype(np.float32)

    found = {}
    # The memory order changes between steps, and differs between ranks.
    for kind in "C", "mixed":
        p, results = zeros((30, 40), "float32"), []
        opt = hvd.DistributedOptimizer(SGD({"x": p}, -1.0), compression=int4)
        for step in range(6):
            order = "CF"[(step // 2 + rank * (step % 2)) % 2] if kind == "mixed" else "C"
            p.grad = given(step).copy(order)
            opt.step()
            results.append(p.grad.tobytes())
        found[kind] = results
    # Between two calls, there are many of other names.
    many: list[list[bytes]] = [[] for _ in range(10)]
    for step in range(6):
        for i, one in enumerate(many):
            x = hvd.average_gradients(given(step), compression=int4, name=f"model {i}")
            one.append(x.tobytes())
    # Several tensors have one name, as TensorFlow's variables may.
    for names in ["x", "x"], ["x", "y"]:
        transform = Transform(Options(compression=int4), copies=True)
        steps = [transform(names, [given(step), given(step, 1)]) for step in range(6)]
        found["".join(names)] = [x.tobytes() for both in steps for x in both]
    # The parameters go back.
    params = [np.zeros((30, 40), np.float32)]
    local = hvd.LocalSGD(params, every=1, compression=int4)
    start, tries = local.state_dict(), []
    for _ in range(2):
        params[0][...] = 0
        local.load_state_dict(start)
        tries.append([])
        for step in range(3):
            params[0] += given(step)
            local.step()
            tries[-1].append(params[0].tobytes())
    return {
        "memory order": (found["mixed"], found["C"]),
        "many names": (many[0], found["C"]),
        "one name": (found["xx"], found["xy"]),
        "back": (tries[1], tries[0]),
    }


def test_what_is_left_over_belongs_to_its_elements() -> None:
    found = on_ranks(what_is_left_over_belongs_to_its_elements, 2, hosts="1,1")
    assert found[0] == found[1]
    wrong = [how for how, (results, expected) in found[0].items() if results != expected]
    assert wrong == []
    assert len(set(found[0]["memory order"][0])) == 6
