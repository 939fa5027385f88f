"""`hvd.run(fn, on=…)`: what Ray, Dask and Spark have in common, with threads instead of a cluster.

The clusters themselves are in tests/clusters, each in its own environment.
"""

from __future__ import annotations

import hashlib
import os
import pickle
import runpy
import sys
import tempfile
import threading
import time
import types
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import horo_lite as hvd
from horo_lite.launch import clusters, tasks
from horo_lite.launch.tasks import RankEnd, RankTask, ranks_by_host

# Not importorskip(): ranks under mpiexec import this file, and need no PyTorch.
pytestmark = pytest.mark.skipif(find_spec("torch") is None, reason="PyTorch is not installed")


def first_done(
    futures: Sequence[Future[RankEnd]], timeout_s: float | None
) -> Collection[Future[RankEnd]]:
    return wait(futures, timeout_s, FIRST_COMPLETED).done


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[list[RankTask]]:
    """Yield the tasks given to a cluster whose workers are threads; nothing may be left of it."""
    given: list[RankTask] = []

    def run_tasks(task: RankTask) -> list[RankEnd]:
        task = pickle.loads(pickle.dumps(task))
        given.append(task)
        hosts = ["a" if i % 2 else "b" for i in range(task.size)]
        address = tasks.address_of("127.0.0.1", tasks.free_port())
        cancelled = threading.Event()
        with ThreadPoolExecutor(task.size) as pool:
            running = [
                pool.submit(task.run, rank, address, cancelled.is_set)
                for rank in ranks_by_host(hosts)
            ]
            try:
                return tasks.ends_of(running, first_done, Future.result)
            finally:
                cancelled.set()

    monkeypatch.setattr(clusters, "cluster", {"ray": run_tasks}.__getitem__)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    yield given
    assert not list(tmp_path.iterdir())


def bits(scale: float) -> tuple[int, int, str]:
    """Return sums whose bits depend on their order, from a world of two simulated hosts."""
    world = hvd.init(device="cpu")
    rng = np.random.default_rng(world.rank)
    mine = (rng.standard_normal(5000) * 2.0 ** rng.integers(-9, 9, 5000)).astype(np.float32)
    total = hvd.allreduce(mine * np.float32(scale), op=hvd.Sum)
    return world.rank, os.getpid(), hashlib.sha256(total.tobytes()).hexdigest()


@pytest.mark.launches
def test_the_bits_are_those_of_mpiexec(cluster: list[RankTask]) -> None:
    env = {"HORO_LITE_TEST_HOSTS": "2,1", "HORO_LITE_DEVICE": "cpu"}
    found = hvd.run(bits, (0.3,), np=3, on="ray", env=env)
    expected = hvd.run(bits, (0.3,), np=3, env=env)
    assert [rank for rank, *_ in found] == [0, 1, 2]
    assert len({pid for _, pid, _ in found} | {os.getpid()}) == 4
    assert [digest for *_, digest in found] == [digest for *_, digest in expected]
    (task,) = cluster
    assert task.size == 3
    # A secret that all ranks have: no one else can write in their rendezvous.
    assert len(task.env["HORO_LITE_JOB_TOKEN"]) == 32


class NoDataError(Exception):
    pass


# More than a test may take: the other ranks must not learn of the failure by a time-out.
TOO_LONG = {"HORO_LITE_START_TIMEOUT_S": "1000"}


def fail(before_init: bool) -> None:
    if before_init and os.environ["HORO_LITE_RANK"] == "1":
        raise NoDataError("share 1 is missing")
    hvd.init()
    if hvd.rank() == 1:
        raise NoDataError("share 1 is missing")
    hvd.barrier()


@pytest.mark.launches
@pytest.mark.parametrize("before_init", [False, True])
def test_an_exception_comes_back(before_init: bool, cluster: list[RankTask]) -> None:
    """That of the rank that failed, and not those of the ranks that waited for it."""
    with pytest.raises(NoDataError, match="share 1 is missing") as raised:
        hvd.run(fail, (before_init,), np=2, on="ray", env=TOO_LONG)
    assert "on rank 1 of 2" in str(raised.value.__cause__)


def end_before_init() -> None:
    if os.environ["HORO_LITE_RANK"] == "1":
        os._exit(9)
    hvd.init()


@pytest.mark.launches
def test_a_rank_that_ends_without_a_word_before_init(cluster: list[RankTask]) -> None:
    with pytest.raises(hvd.JobError, match="exit code 9; rank 1 was the first to end"):
        hvd.run(end_before_init, np=2, on="ray", env=TOO_LONG)


def test_a_task_that_fails_itself() -> None:
    """As if a worker is lost: no task waits for the others."""
    lost, runs = Future[RankEnd](), Future[RankEnd]()
    lost.set_exception(ConnectionError("the worker is lost"))
    with pytest.raises(ConnectionError, match="the worker is lost"):
        tasks.ends_of([runs, lost], first_done, Future.result)


class Stage:
    """The part of Spark that horo_lite.launch.on_spark uses: a barrier stage of threads."""

    def __init__(self) -> None:
        self._own = threading.local()
        self._barrier = threading.Barrier(1)
        self._said: dict[int, str] = {}
        self.builder = self.sparkContext = self  # as on a SparkSession

    def getOrCreate(self) -> Stage:  # noqa: N802
        return self

    get = barrier = getOrCreate

    def parallelize(self, data: Sequence[int], n: int) -> Stage:
        assert len(data) == n
        self._barrier = threading.Barrier(n)
        return self

    def getTaskInfos(self) -> list[Any]:  # noqa: N802
        return [types.SimpleNamespace(address="127.0.0.1:5")] * self._barrier.parties

    def partitionId(self) -> int:  # noqa: N802
        return int(self._own.number)

    def allGather(self, message: str) -> list[str]:  # noqa: N802
        self._barrier.wait(300)
        self._said[self._own.number] = message
        self._barrier.wait(300)
        return [self._said[number] for number in range(self._barrier.parties)]

    def mapPartitions(self, run: Callable[..., Iterator[RankEnd]]) -> Stage:  # noqa: N802
        self._run = run
        return self

    def collect(self) -> list[RankEnd]:
        def task(number: int) -> list[RankEnd]:
            self._own.number = number
            return list(self._run(iter([number])))

        with ThreadPoolExecutor(self._barrier.parties) as pool:
            return [end for ends in pool.map(task, range(self._barrier.parties)) for end in ends]


class WaitingTask:
    """A RankTask of two, of which rank 1 may fail, and rank 0 would wait for it."""

    size = 2

    def __init__(self, code: int) -> None:
        self._code = code

    def run(self, rank: int, address: str, is_cancelled: Callable[[], bool]) -> RankEnd:
        until = time.monotonic() + 300
        while rank == 0 and self._code and not is_cancelled():
            assert time.monotonic() < until, "this rank was not cancelled"
            time.sleep(0.01)
        code = self._code if rank == 1 else -15 * is_cancelled()
        return RankEnd(rank, code, "", {}, time.time())


@pytest.mark.parametrize("code", [0, 9])
def test_spark_ends_the_ranks_that_wait_for_one_that_failed(
    code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage = Stage()
    for name, parts in (
        ("pyspark", {"BarrierTaskContext": stage}),
        ("pyspark.sql", {"SparkSession": stage}),
    ):
        module = types.ModuleType(name)
        vars(module).update(parts)
        monkeypatch.setitem(sys.modules, name, module)
    spark = runpy.run_path(str(Path(tasks.__file__).with_name("on_spark.py")))
    ends = spark["run_tasks"](WaitingTask(code))
    assert [(end.rank, end.code) for end in ends] == [(0, -15 if code else 0), (1, code)]


def count(folder: str) -> str:
    state = hvd.elastic.State(count=0, checkpoint=os.path.join(folder, "run.ckpt"))

    @hvd.elastic.run
    def train(state: Any) -> int:
        while state.count < 3:
            state.count += 1
            state.commit()
            if state.count == 2 and os.environ["HORO_LITE_RESTART"] == "0":
                os._exit(9)
        return int(state.count)

    hvd.init()
    return f"{train(state)} after {os.environ['HORO_LITE_RESTART']} restarts"


@pytest.mark.launches
def test_a_job_is_restarted(cluster: list[RankTask], tmp_path_factory: Any) -> None:
    """From the commit of a rank that has ended without a message."""
    kept = str(tmp_path_factory.mktemp("kept"))
    said = hvd.run(count, (kept,), np=1, on="ray", restarts=1)
    assert said == ["3 after 1 restarts"]


@pytest.mark.launches
def test_a_cancelled_task_ends_its_rank() -> None:
    begun, cancelled = threading.Event(), threading.Event()

    def is_cancelled() -> bool:
        begun.set()
        return cancelled.is_set()

    call = {"call": pickle.dumps((time.sleep, (600,), {})), "main": None, "argv": [""]}
    task = RankTask(pickle.dumps(call | {"is_last": True}), 1, {}, sys.path)
    with ThreadPoolExecutor(1) as pool:
        end = pool.submit(task.run, 0, "127.0.0.1:1", is_cancelled)
        assert begun.wait(60)
        cancelled.set()
        assert end.result(60).code != 0
    assert not end.result().files.keys() & {"result.0"}


@pytest.mark.parametrize(
    ("hosts", "ranks"),
    [
        (["a"], [0]),
        (["a", "a", "a"], [0, 1, 2]),
        (["b", "a", "b", "a"], [0, 2, 1, 3]),
        (["c", "a", "b", "a", "c"], [0, 2, 4, 3, 1]),
    ],
)
def test_ranks_of_a_host_are_consecutive(hosts: list[str], ranks: list[int]) -> None:
    assert ranks_by_host(hosts) == ranks


def test_addresses() -> None:
    assert tasks.address_of("node7", 5) == "node7:5"
    assert tasks.address_of("fe80::1", 5) == "[fe80::1]:5"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"on": "flink"}, "on must be 'ray', 'dask' or 'spark'"),
        ({"on": "ray", "hosts": "a:2"}, "are for mpiexec"),
        ({"on": "dask", "mpiexec_args": ["-v"]}, "are for mpiexec"),
    ],
)
def test_wrong_options_say_what_to_give(options: dict[str, Any], words: str) -> None:
    run: Callable[..., Any] = hvd.run
    with pytest.raises(ValueError, match=words):
        run(bits, np=2, **options)
