"""`horovod.ray.RayExecutor` and `horovod.spark.run`, with processes instead of a cluster.

The clusters themselves are in tests/clusters.
"""

from __future__ import annotations

import importlib
import os
import sys
import types
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import horo_lite as hvd
import horo_lite.horovod
import horo_lite.launch
from horo_lite.horovod import aliases
from horo_lite.launch import clusters, tasks
from horo_lite.launch.tasks import RankEnd, RankTask

torch = pytest.importorskip("torch")
pytest.importorskip("cloudpickle")
FAKE = Path(__file__).resolve().parents[1] / "support" / "fake_ray"
ENV = {"HORO_LITE_DEVICE": "cpu"}


@pytest.fixture
def horovod(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Make `horovod` this package, until the test ends."""
    before = set(sys.modules)
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    horo_lite.horovod.install(replace=True)
    yield
    for name in set(sys.modules) - before:
        if name.partition(".")[0] in ("horovod", "ray", "pyspark"):
            del sys.modules[name]


@pytest.fixture
def ray(horovod: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Yield the fake Ray; assert that no process is left."""
    ours = ("horo_lite.launch.on_ray", "horo_lite.horovod.ray")
    monkeypatch.syspath_prepend(str(FAKE))
    for name in (*ours, *(name for name in sys.modules if name.partition(".")[0] == "ray")):
        monkeypatch.delitem(sys.modules, name, raising=False)
    # Of an earlier test: `from horo_lite.launch import on_ray` would find it.
    monkeypatch.delattr(horo_lite.launch, "on_ray", raising=False)
    import ray

    assert Path(ray.__file__ or "").is_relative_to(FAKE)
    yield ray
    left = [process for process in ray.started if process.is_alive()]
    for process in left:
        process.kill()
    for name in ours:
        sys.modules.pop(name, None)
    assert not left


class Model:
    """An object that every worker makes."""

    def __init__(self, start: int, *, step: int = 1) -> None:
        self.value, self.step = start, step

    def train(self) -> int:
        self.value += self.step
        return self.value


@pytest.mark.launches
def test_ray_executor(ray: Any) -> None:
    import horovod.torch as horovod_torch  # which functions for the workers refer to
    from horovod.ray import RayExecutor

    def train(scale: float, *, plus: float) -> tuple[int, int, float, bool]:
        begins = not horovod_torch.is_initialized()
        horovod_torch.init()
        x = torch.full((2,), scale * (horovod_torch.rank() + 1))
        total = horovod_torch.allreduce(x, op=horovod_torch.Sum, name="x")[0].item() + plus
        return horovod_torch.rank(), os.getpid(), total, begins

    def fail(late: bool) -> None:
        horovod_torch.init()
        if horovod_torch.rank() == 1 and not late:
            raise ValueError("share 1 is missing")
        horovod_torch.barrier()
        if horovod_torch.rank() == 1:  # the others return
            raise ValueError("share 1 is missing")

    def fail_before_init(failing: int) -> None:
        if os.environ["HORO_LITE_RANK"] == str(failing):
            raise ValueError("share 1 is missing")
        horovod_torch.init()

    # More than the test may take: no rank may learn of another's failure by a time-out.
    settings = RayExecutor.create_settings(timeout_s=1000)
    executor = RayExecutor(settings, num_workers=3, use_gpu=True)
    executor.start(Model, [10], {"step": 2}, extra_env_vars=ENV)
    first = executor.run(train, args=[0.5], kwargs={"plus": 1})
    assert [(rank, total) for rank, _, total, _ in first] == [(0, 4.0), (1, 4.0), (2, 4.0)]
    assert len({pid for _, pid, *_ in first} | {os.getpid()}) == 4
    # The same processes, in the same world, with the objects that they have made.
    again = ray.get(executor.run_remote(train, [0.5], {"plus": 2}))
    assert again == [(rank, pid, 5.0, False) for rank, pid, *_ in first]
    assert executor.execute(lambda model: (model.train(), horovod_torch.rank())) == [
        (12, 0),
        (12, 1),
        (12, 2),
    ]
    assert executor.execute_single(lambda model: model.train()) == 14
    assert executor.execute(lambda model: model.value) == [14, 12, 12]
    # Workers of one node have consecutive numbers, and see the GPUs of all of them.
    visible = executor.run(lambda: (ray.node, os.environ["CUDA_VISIBLE_DEVICES"]))
    assert visible == [("127.0.0.1", "0,1"), ("127.0.0.1", "0,1"), ("127.0.0.2", "0")]
    # The error of the rank that failed, for which the others do not wait; then a new world.
    for late in (False, True):
        with pytest.raises(ValueError, match="share 1 is missing"):
            executor.run(fail, [late])
        after = executor.run(train, [1.0], {"plus": 0})
        assert after == [(rank, pid, 6.0, True) for rank, pid, *_ in first]
    # The same without a world yet, whichever of them keeps the store of the rendezvous.
    for failing in (0, 1):
        executor.run(horovod_torch.shutdown)
        with pytest.raises(ValueError, match="share 1 is missing"):
            executor.run(fail_before_init, [failing])
        after = executor.run(train, [1.0], {"plus": 0})
        assert after == [(rank, pid, 6.0, True) for rank, pid, *_ in first]
    executor.run(horovod_torch.shutdown)
    waiting = executor.run_remote(fail_before_init, [1])[2]
    why = r"rank 1 \(pid .* share 1 is missing\), while rank [02] .* waited in init\(\) for rank"
    with pytest.raises(hvd.PeerLostError, match=why):
        ray.get(waiting)
    executor.shutdown()
    assert [group.strategy for group in ray.util.removed] == ["PACK"]
    with pytest.raises(RuntimeError, match=r"call start\(\)"):
        executor.run(train, [1.0])


@pytest.mark.launches
def test_run_on_ray(ray: Any) -> None:
    """The same actors as a RayExecutor's, each with a rank as a process of its own."""

    def train(fails: bool) -> tuple[int, float]:
        world = hvd.init()
        if fails and world.rank == 1:
            raise ValueError("share 1 is missing")
        return world.rank, hvd.allreduce(torch.tensor([world.rank + 1.0]))[0].item()

    found = hvd.run(train, (False,), np=3, on="ray", env=ENV)
    assert found == [(0, 2.0), (1, 2.0), (2, 2.0)]
    with pytest.raises(ValueError, match="share 1 is missing"):
        hvd.run(train, (True,), np=2, on="ray", env=ENV)
    assert [group.bundles for group in ray.util.removed] == [[{"CPU": 1}] * n for n in (3, 2)]
    with pytest.raises(hvd.LauncherError, match=r"9 ranks on Ray need CPU 1 each.*free: 8"):
        hvd.run(train, (False,), np=9, on="ray", env={"HORO_LITE_START_TIMEOUT_S": "3"})


@pytest.mark.launches
def test_what_a_ray_executor_asks_for(ray: Any) -> None:
    from horovod.ray import RayExecutor

    settings = RayExecutor.create_settings(placement_group_timeout_s=3)
    executor = RayExecutor(settings, num_hosts=2, num_workers_per_host=2, cpus_per_worker=2)
    executor.start()
    assert executor.run(lambda: os.environ["HORO_LITE_RANK"]) == ["0", "1", "2", "3"]
    executor.shutdown()
    (group,) = ray.util.removed
    assert (group.strategy, group.bundles) == ("STRICT_SPREAD", [{"CPU": 4}] * 2)
    few = RayExecutor(settings, num_hosts=3)
    with pytest.raises(hvd.LauncherError, match=r"3 ranks on Ray on 3 nodes .*within 3 s.*8"):
        few.start()
    assert few.workers == []


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "num_workers, or num_hosts"),
        ({"num_workers": 2, "num_hosts": 1}, "num_workers, or num_hosts"),
        ({"num_workers": 0}, "1 or more, not 0"),
        ({"num_workers": 2, "gpus_per_worker": 1}, "use_gpu=True"),
        ({"min_workers": 1, "max_workers": 2}, "number of workers on Ray is fixed"),
    ],
)
def test_wrong_options_of_a_ray_executor(ray: Any, options: dict[str, Any], words: str) -> None:
    from horovod.ray import RayExecutor

    with pytest.raises(ValueError, match=words):
        RayExecutor(None, **options)


def test_parts_that_there_are_not(ray: Any) -> None:
    for module in ("horovod.spark.keras", "horovod.spark.common.store", "horovod.spark.torch"):
        with pytest.raises(ModuleNotFoundError, match=r"there are no estimators"):
            importlib.import_module(module)
    with pytest.raises(ModuleNotFoundError, match=r"RayExecutor, with a fixed number of workers"):
        importlib.import_module("horovod.ray.elastic_v2")
    import horovod.ray

    with pytest.raises(AttributeError, match=r"RayExecutor, .* docs/from-horovod.md"):
        horovod.ray.ElasticRayExecutor  # noqa: B018


@pytest.fixture
def spark(horovod: None, monkeypatch: pytest.MonkeyPatch) -> list[RankTask]:
    """Return the tasks, which are threads; there is a session with a parallelism of 2."""
    given: list[RankTask] = []

    def run_tasks(task: RankTask) -> list[RankEnd]:
        given.append(task)
        address = tasks.address_of("127.0.0.1", tasks.free_port())
        with ThreadPoolExecutor(task.size) as pool:
            return list(pool.map(lambda rank: task.run(rank, address), reversed(range(task.size))))

    pyspark = types.ModuleType("pyspark")
    context = types.SimpleNamespace(defaultParallelism=2)
    pyspark.SparkContext = types.SimpleNamespace(_active_spark_context=context)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "pyspark", pyspark)
    monkeypatch.setattr(clusters, "cluster", {"spark": run_tasks}.__getitem__)
    return given


@pytest.mark.launches
def test_spark(spark: list[RankTask], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOROVOD_FUSION_THRESHOLD", "65536")
    import horovod.spark
    import horovod.torch as horovod_torch

    def train(scale: float, *, plus: float) -> tuple[int, float]:
        horovod_torch.init()
        x = torch.full((2,), scale * (horovod_torch.rank() + 1))
        total = horovod_torch.allreduce(x, op=horovod_torch.Sum, name="x")[0].item()
        assert horovod_torch.gloo_enabled()
        assert not horovod_torch.mpi_enabled()
        return horovod_torch.rank(), total + plus

    found = horovod.spark.run(train, (0.5,), {"plus": 1}, start_timeout=77, env=ENV)
    assert found == [(0, 2.5), (1, 2.5)]
    (task,) = spark
    assert task.env["HORO_LITE_START_TIMEOUT_S"] == "77"
    assert task.env["HOROVOD_FUSION_THRESHOLD"] == "65536"
    run: Callable[..., Any] = horovod.spark.run
    for options, words in (
        ({"use_mpi": True}, "without MPI"),
        ({"stdout": sys.stdout}, "logs of the executors"),
    ):
        with pytest.raises(ValueError, match=words):
            run(train, **options)
    sys.modules["pyspark"].SparkContext._active_spark_context = None
    with pytest.raises(hvd.LauncherError, match="no SparkContext"):
        run(train)


def test_aliases_are_pickled_by_name(horovod: None) -> None:
    import pickle

    import horovod.common.util

    assert pickle.loads(pickle.dumps(horovod.common.util)) is horovod.common.util
    assert horovod.common.util.__name__ in aliases.SOURCES
