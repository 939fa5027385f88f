"""Ray Train's workers as ranks: `DataParallelTrainer(train, backend_config=HoroLiteConfig())`.

The training function calls `init()`, and its ranks are those of Ray Train. They find each other
without MPI, which needs PyTorch. `hvd.run(fn, np=4, on="ray")` does not need this module.
"""

from __future__ import annotations

import os
import secrets
from typing import Any

from ray.train.backend import Backend, BackendConfig

# ruff: noqa: F403
from horo_lite import *
from horo_lite.launch.on_ray import here
from horo_lite.launch.tasks import address_of
from horo_lite.start.launcher import JOB_TOKEN


class HoroLiteConfig(BackendConfig):
    """The backend of a `DataParallelTrainer` whose function trains with horo_lite.

    It has no settings: the number of ranks is that of the trainer's `ScalingConfig`, and everything
    else is set by variables `HORO_LITE_…` or arguments of `init()`.

        trainer = DataParallelTrainer(
            train, backend_config=HoroLiteConfig(), scaling_config=ScalingConfig(num_workers=4)
        )
        trainer.fit()
    """

    @property
    def backend_cls(self) -> type[Backend]:
        """The class that Ray Train instantiates."""
        return _Backend


class _Backend(Backend):
    def on_start(self, worker_group: Any, backend_config: BackendConfig) -> None:
        """Tell every worker which rank it is; Ray calls it before the training function."""
        node, port, _ = worker_group.execute_single(0, here)
        world = {
            "HORO_LITE_SIZE": str(len(worker_group)),
            "HORO_LITE_ADDRESS": address_of(node, port),
            JOB_TOKEN: secrets.token_hex(16),
        }
        for rank in range(len(worker_group)):
            worker_group.execute_single(rank, _become, world | {"HORO_LITE_RANK": str(rank)})


def _become(rank: dict[str, str]) -> None:
    os.environ.update(rank)
