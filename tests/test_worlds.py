"""Ranks that serve many tests: what they return, and which mistakes of a test they find."""

from __future__ import annotations

import os
import threading
import time

import numpy as np
import pytest
from worlds import RankError, on_ranks, script_on_ranks

import horo_lite as hvd

pytestmark = pytest.mark.served


def sums(factor: int) -> tuple[int, str, list[float]]:
    world = hvd.init()
    total = hvd.allreduce(np.full(2, factor * (world.rank + 1.0)), op=hvd.Sum)
    return os.getpid(), world.transport, total.tolist()


@pytest.mark.mpi
def test_the_same_ranks_make_one_world_after_another() -> None:
    found = [on_ranks(sums, 2, 3, hosts=hosts) for hosts in ("", "1,1", "")]
    pids = [[pid for pid, _, _ in ranks] for ranks in found]
    assert pids[0] == pids[1] == pids[2]
    assert len({os.getpid(), *pids[0]}) == 3
    for ranks, transport in zip(found, ("shm", "mpi", "shm"), strict=True):
        assert [rest for _, *rest in ranks] == [[transport, [9.0, 9.0]]] * 2


@pytest.mark.mpi
def test_a_script_has_its_arguments_variables_and_an_empty_folder() -> None:
    code = """
    import os, sys
    import horo_lite as hvd
    hvd.init()
    print(hvd.rank(), sys.argv[1:], os.environ["HORO_LITE_BUCKET_BYTES"], os.listdir("."))
    """
    env = {"HORO_LITE_BUCKET_BYTES": "99"}
    result = script_on_ranks(code, 2, args=["a"], env=env)
    assert sorted(result.stdout.splitlines()) == [
        f"{rank} ['a'] 99 ['script.py']" for rank in range(2)
    ]
    with pytest.raises(RankError, match="SystemExit: 3"):
        script_on_ranks("raise SystemExit(3)", 2)


def fails(how: str) -> None:
    if hvd.init().rank == 1:
        threshold = 41.5
        if how == "raises":
            raise ValueError(f"beyond {threshold}")
        if how == "hangs":
            time.sleep(3600)
        if how == "ends":
            os._exit(7)
        threading.Thread(target=time.sleep, args=(3600,), name="left", daemon=True).start()
    if how != "leaves a thread":
        hvd.barrier()


@pytest.mark.parametrize(
    ("how", "told"),
    [
        ("raises", r"rank 0: (?s:.*)PeerLostError: rank 1(?s:.*)rank 1: (?s:.*)threshold = 41.5"),
        ("hangs", r"rank 1 still ran after"),
        ("ends", r"rank 1: the process ended"),
        ("leaves a thread", r"rank 1: left behind: Python threads: .*'left'"),
    ],
)
def test_what_goes_wrong_on_one_rank_is_told_and_the_next_test_has_new_ranks(
    how: str, told: str
) -> None:
    with pytest.raises(RankError, match=told):
        on_ranks(fails, 2, how, timeout_s=1 if how == "hangs" else 30)
    assert [total for _, _, total in on_ranks(sums, 2, 1)] == [[3.0, 3.0]] * 2
