"""A signal to one rank is heard by all after the same step; any number of ranks may go on."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from worlds import on_ranks

import horo_lite as hvd
from horo_lite import elastic
from horo_lite.errors import HoroLiteError

N_STEPS = 12


def train(path: str, who: int, when: int) -> tuple[int, str]:
    """Train to the end, or until rank `who` has received a signal; return the step and a hash."""
    world = hvd.init(threads=1)
    weights, target = np.zeros(5, np.float32), np.linspace(0, 1, 5, dtype=np.float32)
    micro_batches = hvd.MicroBatches(8)
    state = elastic.State(weights=weights, step=0, checkpoint=path)
    state.read_checkpoint()
    state.sync()
    preemption = elastic.Preemption()
    while state.step < N_STEPS:
        for batch in micro_batches(state.step):
            noise = batch.rng.standard_normal(5).astype(np.float32)
            batch.gradients = 2 * (weights - target + noise)
            if (world.rank, state.step) == (who, when):
                os.kill(os.getpid(), signal.SIGUSR1)
        weights -= np.float32(0.1) * micro_batches.gradients
        state.step += 1
        if preemption.requested():
            state.commit()
            break
    preemption.close()
    return state.step, hvd.fingerprint(weights)


@pytest.mark.served
def test_the_model_is_that_of_a_job_that_was_not_preempted(tmp_path: Path) -> None:
    (alone,) = on_ranks(train, 1, str(tmp_path / "alone"), -1, 0)
    assert alone[0] == N_STEPS
    path = str(tmp_path / "commits")
    for size, who, when in ((3, 1, 3), (2, 0, 7), (4, 3, 9)):
        found = on_ranks(train, size, path, who, when)
        assert found == [(when + 1, found[0][1])] * size
        assert found[0] != alone
    assert on_ranks(train, 3, path, -1, 0) == [alone] * 3


def signals() -> None:
    hvd.init()
    heard: list[int] = []
    before: Any = signal.signal(signal.SIGUSR2, lambda number, _: heard.append(number))
    try:
        preemption = elastic.Preemption([signal.SIGUSR2])
        assert not preemption.requested()
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGUSR2)
            assert preemption.requested()
        # Made anew, by a function that is repeated, it knows of them; one mistake installs nothing.
        again = elastic.Preemption([signal.SIGUSR2, signal.SIGUSR2])
        assert again.requested()
        with pytest.raises(OSError, match="Invalid argument"):
            elastic.Preemption([signal.SIGUSR1, signal.SIGKILL])
        assert signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL
        preemption.close()
        assert again.requested()
        again.close()
        assert not heard
        os.kill(os.getpid(), signal.SIGUSR2)
        assert heard == [signal.SIGUSR2]
    finally:
        signal.signal(signal.SIGUSR2, before)


@pytest.mark.served
def test_afterwards_signals_do_what_they_did_before() -> None:
    on_ranks(signals, 1)


def test_only_the_main_thread_handles_signals() -> None:
    raised: list[BaseException] = []

    def make() -> None:
        try:
            elastic.Preemption()
        except HoroLiteError as error:
            raised.append(error)

    thread = threading.Thread(target=make)
    thread.start()
    thread.join()
    assert "main thread" in str(raised[0])
