"""Arrays in GPU memory, without a GPU: the fake device, and the stand-in for NCCL."""

from __future__ import annotations

import fake_nccl
import gpu_checks
import pytest
from launch import run_ranks


def environment(ranks: int, hosts: str = "", gpus: str = "own") -> dict[str, str]:
    return {
        "HORO_LITE_TEST_SIZE": str(ranks),
        "HORO_LITE_TEST_HOSTS": hosts,
        "HORO_LITE_TEST_GPUS": gpus,
        "HORO_LITE_NCCL_LIB": fake_nccl.compiled(),
        "HORO_LITE_BUCKET_BYTES": "65536",
        "HORO_LITE_FAKE_NCCL_SEED": "1",  # NCCL's order of sums depends on much
    }


# Cases that the launcher or its MPI library could affect run with both MPIs.
@pytest.mark.launches
@pytest.mark.parametrize(
    ("ranks", "hosts", "gpus", "transport"),
    [
        (2, "", "a,b", "nccl"),
        (3, "", "own", "nccl"),
        (4, "", "own", "nccl"),
        pytest.param(3, "2,1", "own", "nccl", marks=pytest.mark.mpi),
        (2, "", "a", "staged"),
        pytest.param(3, "1,2", "a", "staged", marks=pytest.mark.mpi),
    ],
)
def test_processes(ranks: int, hosts: str, gpus: str, transport: str) -> None:
    result = run_ranks(
        "import gpu_checks; gpu_checks.main()",
        ranks,
        env=environment(ranks, hosts, gpus),
        timeout_s=100,
    ).check()
    words = f"{len(gpu_checks.CHECKS)} checks passed over {transport}"
    assert result.stdout.count(words) == ranks
    assert result.stdout.count("told 1 times") == (transport == "staged")


@pytest.mark.launches
def test_buckets_that_differ_are_told_before_the_gpus_wait_for_ever() -> None:
    result = run_ranks(
        """
        import os
        rank = os.environ.get("OMPI_COMM_WORLD_RANK") or os.environ["PMI_RANK"]
        os.environ["HORO_LITE_BUCKET_BYTES"] = str(65536 << int(rank))
        import numpy as np
        import fake_device
        import horo_lite as hvd
        device = hvd.init().device.index
        try:
            hvd.allreduce(fake_device.array(np.ones(100_000), device=device))
        except hvd.MismatchError as error:
            print("told:", error)
        """,
        2,
        env=environment(2, gpus="a,b"),
        timeout_s=30,
    ).check()
    assert result.stdout.count("told:") == 2
    assert "rank 1: HORO_LITE_BUCKET_BYTES 131072" in result.stdout


@pytest.mark.launches
def test_one_process() -> None:
    result = run_ranks(
        "import gpu_checks; gpu_checks.main()",
        1,
        env=environment(1, gpus="a"),
        launcher=False,
        timeout_s=60,
    ).check()
    assert "checks passed over staged, told 0 times" in result.stdout


MISSING_ORDER = {
    "after what the caller has queued": "GpuMemory.begin = lambda self, reads_sources=False: None",
    "before what the caller queues next": "GpuMemory.end = lambda self: None",
    "of memory that is freed while a result is read": "_native.DeviceQueue.hold = lambda *_: None",
    # Graphs use the same buffer as other calls: docs/gpu.md.
    "of graphs and other calls": "replayed_on = fake_device.new_stream",
}


@pytest.mark.launches
@pytest.mark.parametrize("planted", MISSING_ORDER.values(), ids=list(MISSING_ORDER))
def test_missing_order_is_found_whenever_things_run(planted: str) -> None:
    """So the checks of this file show that nothing on the GPU depends on luck."""
    result = run_ranks(
        f"""
        import numpy as np
        import fake_device
        import horo_lite as hvd
        from horo_lite import _native
        from horo_lite.collectives.arrays import GpuMemory
        replayed_on = fake_device.stream
        {planted}
        device = hvd.init().device.index
        for _ in range(3):
            x = fake_device.array(np.ones(1000), device=device)
            hvd.allreduce_(x)
            x.add(1)
            handles = [hvd.allgather_async(x) for _ in range(3)]
            fake_device.stream().call(lambda: None)
            for handle in handles:
                hvd.synchronize(handle)
        x, y = (fake_device.array(np.ones((20, 20)), device=device) for _ in range(2))
        with fake_device.capture() as replay:
            hvd.allreduce_(x, weight=1.0)
        for _ in range(2):
            replay(replayed_on())
            hvd.allreduce_(y, weight=1.0)
        """,
        2,
        env=environment(2, gpus="a,b"),
        timeout_s=30,
    )
    assert result.returncode != 0, str(result)
    assert "the fake GPU: a race" in result.stderr, str(result)
