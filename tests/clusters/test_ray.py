"""Ray: `hvd.run(on="ray")`, and a backend of Ray Train."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import ray
from cluster_checks import N, check_jobs

import horo_lite as hvd


@pytest.fixture(autouse=True)
def cluster() -> Iterator[None]:
    ray.init(num_cpus=N + 1, include_dashboard=False)
    yield
    ray.shutdown()


def test_run() -> None:
    check_jobs("ray")


def test_a_cluster_that_is_too_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HORO_LITE_START_TIMEOUT_S", "2")
    with pytest.raises(hvd.LauncherError, match=r"99 ranks on Ray .*in all: 4"):
        hvd.run(int, np=99, on="ray")


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
