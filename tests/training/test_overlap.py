"""When gradients are sent during backward(): if that leaves cores free."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from launch import run_threads
from worlds import script_on_ranks

import horo_lite as hvd
from horo_lite import context
from horo_lite.adapters import Adapter
from horo_lite.training import overlap
from horo_lite.training.overlap import Overlap
from horo_lite.training.reducer import Reducer


def group(one_host: bool = True) -> Any:
    host = SimpleNamespace(native_group=object() if one_host else None)
    return SimpleNamespace(transport=SimpleNamespace(host=host), busy_s=lambda: 0.0)


class Clocks:
    """Simulated clocks."""

    def __init__(self) -> None:
        self.used = self.now = 100.0

    def process_time(self) -> float:
        return self.used

    def perf_counter(self) -> float:
        return self.now

    def step(self, of: Overlap, seconds: float, cores: float) -> bool:
        """Simulate a step whose gradients take `seconds`, with that many busy cores."""
        began = None
        for _ in range(3):
            began = began or of.begin()
            self.now += seconds / 3
            self.used += cores * seconds / 3
        of.end(began)
        return of.pays


@pytest.fixture
def clocks(monkeypatch: pytest.MonkeyPatch) -> Clocks:
    clocks = Clocks()
    monkeypatch.setattr(overlap, "time", clocks)
    return clocks


def test_it_pays_where_half_a_core_is_free(clocks: Clocks) -> None:
    for cores, used, pays in ((1, 1, False), (1, 0.3, True), (4, 3.9, False), (4, 2, True)):
        assert clocks.step(Overlap(cores), 0.1, used) == pays
    # Four ranks on two cores: each can use half a core, and does, or leaves half of that.
    assert not clocks.step(Overlap(0.5), 0.1, 0.5)
    assert clocks.step(Overlap(0.5), 0.1, 0.2)


def test_what_the_exchange_itself_computes_does_not_count(clocks: Clocks) -> None:
    one = Overlap(1, exchanging_s=lambda: 0.7 * clocks.now)
    assert clocks.step(one, 0.1, 0.9)  # of which backward() uses a fifth of a core
    assert not clocks.step(one, 1.0, 1.3)
    # Two clocks, read one after the other: the difference may be negative.
    assert not clocks.step(Overlap(0, exchanging_s=lambda: 2 * clocks.used), 0.1, 1.0)


def test_an_engine_knows_how_long_it_had_a_core() -> None:
    def rank(group: hvd.Group) -> None:
        used, before = time.process_time(), group.busy_s()
        for _ in range(20):
            handle = hvd.allreduce_async(np.ones(100_000), group=group)
            group.synchronize(handle)
        assert 0 < group.busy_s() - before < time.process_time() - used
        began, before = time.monotonic(), group.busy_s()
        while time.monotonic() < began + 0.3:
            pass
        assert group.busy_s() - before < 0.3  # the engine did not compute

    run_threads(2, rank)


def test_it_follows_what_the_program_does(clocks: Clocks) -> None:
    one = Overlap(1)
    assert one.pays  # until something is measured
    assert [clocks.step(one, 0.1, 1.0) for _ in range(3)] == [False] * 3
    assert clocks.step(one, 1e-5, 0.0) is False  # a very short step has little weight
    assert [clocks.step(one, 0.1, 0.0) for _ in range(3)][-1] is True
    one.begin()
    clocks.now += 1000
    one.end(None)  # nothing was ready in this step; the abandoned one does not count
    assert one.pays
    assert clocks.step(one, 0.1, 1.0) is False


def test_what_the_user_says_counts_and_where_the_ranks_are(
    monkeypatch: pytest.MonkeyPatch, clocks: Clocks
) -> None:
    world = SimpleNamespace(cores=1.0, overlap="auto")
    assert Overlap.of(group()).pays  # of threads, without init()
    monkeypatch.setattr(context, "is_initialized", lambda: True)
    monkeypatch.setattr(context, "world", lambda: world)
    assert clocks.step(Overlap.of(group()), 0.1, 1.0) is False
    assert clocks.step(Overlap.of(group(one_host=False)), 0.1, 1.0) is True
    world.overlap = "always"
    assert clocks.step(Overlap.of(group()), 0.1, 1.0) is True
    world.overlap = "never"
    assert Overlap.of(group()).pays is False
    assert clocks.step(Overlap.of(group()), 0.1, 0.0) is False


def test_a_reducer_measures_from_the_first_gradient_to_the_last(clocks: Clocks) -> None:
    def rank(group: hvd.Group) -> None:
        of = Overlap(1)
        named = [(name, SimpleNamespace(grad=np.ones(3))) for name in "ab"]
        reducer = Reducer(group, Adapter(), named, overlap=of)

        def pays_after_a_busy_step() -> bool:
            clocks.now += 1000  # between steps
            reducer.ready(0)
            clocks.now += 0.1
            clocks.used += 0.1
            reducer.ready(1)
            reducer.finish()
            return of.pays

        assert [pays_after_a_busy_step() for _ in range(2)] == [False] * 2
        reducer.ready(0)
        reducer.abandon()
        assert not pays_after_a_busy_step()

    run_threads(1, rank)


@pytest.mark.served
@pytest.mark.mpi
def test_gradients_are_the_same_bits_whenever_they_leave(tmp_path: Any) -> None:
    """Each rank may have its own setting; the trace shows when they were sent."""
    pytest.importorskip("torch")
    code = """
    import os, sys
    import torch
    import horo_lite.torch as hvd

    setting = sys.argv[1]
    if setting == "each its own":
        rank = os.environ.get("OMPI_COMM_WORLD_RANK") or os.environ["PMI_RANK"]
        setting = ["never", "always"][int(rank)]
    world = hvd.init(overlap=setting)
    assert 0 < world.cores <= os.cpu_count()
    torch.manual_seed(1)
    model = torch.nn.Sequential(*(torch.nn.Linear(50, 50) for _ in range(6)))
    inner = torch.optim.SGD(model.parameters(), 0.1)
    optimizer = hvd.DistributedOptimizer(inner, model.named_parameters(), bucket_bytes=9000)
    torch.manual_seed(hvd.rank())
    for _ in range(4):
        optimizer.zero_grad()
        model(torch.randn(8, 50)).pow(2).sum().backward()
        optimizer.step()
    bits = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
    assert hvd.allgather_object(bits) == [bits] * 2
    if hvd.rank() == 0:
        import hashlib
        print("bits", hashlib.md5(bits).hexdigest())
    """
    found = {}
    for setting in ("never", "always", "auto", "each its own"):
        path = tmp_path / f"{setting}.json"
        env = {"HORO_LITE_TIMELINE": str(path)}
        done = script_on_ranks(code, 2, args=[setting], env=env)
        (found[setting],) = {line for line in done.stdout.splitlines() if "bits" in line}
        if setting != "auto":  # this one depends on how busy the machine is
            assert ("bucket 1 of" in path.read_text()) == (setting != "never")
    assert len(set(found.values())) == 1
