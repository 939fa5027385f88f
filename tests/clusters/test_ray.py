"""Ray: `hvd.run(on="ray")`, and a backend of Ray Train."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import ray
from cluster_checks import N, check_jobs, check_script

import horo_lite as hvd


@pytest.fixture(autouse=True, scope="module")
def cluster() -> Iterator[None]:
    """One for all tests: Ray allows a node 30 s to start, which is too little on a busy machine."""
    ray.init(num_cpus=N + 1, include_dashboard=False)
    yield
    ray.shutdown()


def test_run() -> None:
    check_jobs("ray")


def test_a_cluster_that_is_too_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HORO_LITE_START_TIMEOUT_S", "2")
    with pytest.raises(hvd.LauncherError, match=r"99 ranks on Ray .*total: 4"):
        hvd.run(int, np=99, on="ray")


class Model:
    """An object that every worker of a RayExecutor makes."""

    def __init__(self, start: int, *, step: int = 1) -> None:
        self.value, self.step = start, step

    def train(self) -> int:
        self.value += self.step
        return self.value


def test_horovods_executor(monkeypatch: pytest.MonkeyPatch) -> None:
    import horo_lite.horovod

    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    horo_lite.horovod.install(replace=True)
    import horovod.torch as horovod_torch
    import torch
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
    settings = RayExecutor.create_settings(timeout_s=1000, placement_group_timeout_s=30)
    executor = RayExecutor(settings, num_workers=N)
    executor.start(Model, [10], {"step": 2}, extra_env_vars={"HORO_LITE_DEVICE": "cpu"})
    first = executor.run(train, args=[0.5], kwargs={"plus": 1})
    assert [(rank, total) for rank, _, total, _ in first] == [(r, 4.0) for r in range(N)]
    again = ray.get(executor.run_remote(train, [0.5], {"plus": 2}))
    assert again == [(rank, pid, 5.0, False) for rank, pid, *_ in first]
    assert executor.execute(lambda model: model.train()) == [12] * N
    assert executor.execute_single(lambda model: model.train()) == 14
    assert executor.execute(lambda model: model.value) == [14, 12, 12]
    for late in (False, True):
        with pytest.raises(ValueError, match="share 1 is missing"):
            executor.run(fail, [late])
        after = executor.run(train, [1.0], {"plus": 0})
        assert after == [(rank, pid, 6.0, True) for rank, pid, *_ in first]
    for failing in (0, 1):
        executor.run(horovod_torch.shutdown)
        with pytest.raises(ValueError, match="share 1 is missing"):
            executor.run(fail_before_init, [failing])
        after = executor.run(train, [1.0], {"plus": 0})
        assert after == [(rank, pid, 6.0, True) for rank, pid, *_ in first]
    executor.shutdown()
    until = time.monotonic() + 60
    while any(Path("/proc", str(pid)).exists() for _, pid, *_ in first):
        assert time.monotonic() < until, "workers still run"
        time.sleep(0.1)
    until = time.monotonic() + 60
    while ray.available_resources().get("CPU") != N + 1:  # reserved CPUs are free again
        assert time.monotonic() < until
        time.sleep(0.1)


def test_horovods_executor_in_the_group_of_its_task() -> None:
    """Its workers run in the placement group that, for example, a trial of Tune has reserved."""
    from ray.util import placement_group, placement_group_table, remove_placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    def trial() -> tuple[list[int], int]:
        import horo_lite.torch
        from horo_lite.horovod.ray import RayExecutor

        executor = RayExecutor(None, num_workers=2)
        executor.start(extra_env_vars={"HORO_LITE_DEVICE": "cpu"})
        ranks = executor.run(lambda: horo_lite.torch.init().rank)
        groups = placement_group_table().values()
        n_groups = sum(group["state"] != "REMOVED" for group in groups)
        executor.shutdown()
        return ranks, n_groups

    group = placement_group([{"CPU": 1}] * 3, strategy="PACK")
    assert group.wait(60)
    place = PlacementGroupSchedulingStrategy(group, placement_group_capture_child_tasks=True)
    found = ray.remote(num_cpus=1)(trial).options(scheduling_strategy=place).remote()
    try:
        assert ray.get(found, timeout=240) == ([0, 1], 1)
    finally:
        remove_placement_group(group)


def test_a_script_for_horovod_runs_as_it_is() -> None:
    check_script("ray_digits.py", "--num-workers")


def test_ray_train(tmp_path: Path) -> None:
    from ray.train import RunConfig, ScalingConfig
    from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer

    from horo_lite.ray import HoroLiteConfig

    def train() -> None:
        from ray import train as ray_train

        world = hvd.init()
        context = ray_train.get_context()
        assert (world.rank, world.size) == (context.get_world_rank(), context.get_world_size())
        total = hvd.allreduce(np.full(3, world.rank + 1.0), op=hvd.Sum)
        assert total.tolist() == [3.0] * 3
        (tmp_path / f"rank-{world.rank}").write_text(str(total))

    trainer = DataParallelTrainer(
        train,
        backend_config=HoroLiteConfig(),
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(storage_path=str(tmp_path / "storage")),
    )
    trainer.fit()
    assert {file.name for file in tmp_path.glob("rank-*")} == {"rank-0", "rank-1"}
