"""Checks for every cluster."""

from __future__ import annotations

import hashlib
import os

import numpy as np
import pytest
from horovod_scripts import figures, run_script

import horo_lite as hvd

N = 3
ENV = {"HORO_LITE_TEST_HOSTS": "2,1", "HORO_LITE_DEVICE": "cpu"}


class NoDataError(Exception):
    """Raised by a rank."""


def check_jobs(on: str) -> None:
    """The bits of a job under mpiexec, twice on the same workers, and an exception in between."""

    def train(scale: float) -> tuple[int, int, str]:
        world = hvd.init()
        assert world.transport in ("gloo", "mpi"), world
        rng = np.random.default_rng(world.rank)
        mine = (rng.standard_normal(5000) * 2.0 ** rng.integers(-9, 9, 5000)).astype(np.float32)
        total = hvd.allreduce(mine * np.float32(scale), op=hvd.Sum)
        return world.rank, os.getpid(), hashlib.sha256(total.tobytes()).hexdigest()

    def fail() -> None:
        hvd.init()
        if hvd.rank() == 1:
            raise ValueError("share 1 is missing")
        hvd.barrier()

    def fail_before_init() -> None:
        if os.environ["HORO_LITE_RANK"] == "1":
            raise NoDataError("share 1 is missing")
        hvd.init()

    expected = {digest for *_, digest in hvd.run(train, (0.3,), np=N, env=ENV)}
    assert len(expected) == 1
    pids = set()
    for _ in range(2):
        found = hvd.run(train, (0.3,), np=N, on=on, env=ENV)
        assert [rank for rank, *_ in found] == list(range(N))
        assert {digest for *_, digest in found} == expected
        pids |= {pid for _, pid, _ in found}
        with pytest.raises(ValueError, match="share 1 is missing") as raised:
            hvd.run(fail, np=2, on=on)
        assert "on rank 1 of 2" in str(raised.value.__cause__)
        # The others must not learn of it by a time-out.
        too_long = {"HORO_LITE_START_TIMEOUT_S": "1000"}
        with pytest.raises(NoDataError, match="share 1 is missing"):
            hvd.run(fail_before_init, np=2, on=on, env=too_long)
    assert len(pids) == 2 * N, "a process was the rank of two jobs"


def check_script(script: str, n_option: str) -> None:
    """Two ranks give the result of one, in a script that starts the cluster itself."""

    def run(n: int, *options: object) -> list[float]:
        args = (n_option, n, *options)
        env = {"HORO_LITE_DEVICE": "cpu"}
        return figures(run_script(script, 1, *args, timeout_s=240, env=env), n)

    whole = run(1, "--batch-size", 64, "--lr", 0.08)
    assert whole[1] < whole[0]
    assert run(2) == pytest.approx(whole, rel=1e-4)
