"""Processes that a rank has started, with its launcher's variables: they are not ranks."""

from __future__ import annotations

import pytest
from launch import run_ranks

pytestmark = pytest.mark.mpi

SPAWNED = """
    import multiprocessing
    import sys

    import horo_lite as hvd

    world = hvd.init()  # also in the child, which runs the script again
    print(hvd.allreduce(float(world.rank)))
    child = multiprocessing.get_context(sys.argv[1]).Process(target=print)
    try:
        child.start()
        child.join()
        assert child.exitcode == 1, child.exitcode
    except ConnectionError:
        # From Python 3.14 on the fork server has run the script before there is a child.
        assert sys.argv[1] == "forkserver"
    print("went on", hvd.allreduce(float(world.rank)))
"""

STARTED = """
    import os
    import subprocess
    import sys

    import horo_lite as hvd

    world = hvd.init()
    program = "import horo_lite as hvd; print('alone', hvd.init().size)"
    if world.rank == 0:
        child = subprocess.run([sys.executable, "-c", program])
        assert child.returncode == 1, child.returncode
        launchers = ("OMPI_", "PMIX_", "PMI_", "HYDI_", "MPIR_CVAR_")
        env = {k: v for k, v in os.environ.items() if not k.startswith(launchers)}
        subprocess.run([sys.executable, "-c", program], env=env, check=True)
    print("went on", hvd.allreduce(float(world.rank)))
"""


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_a_script_that_a_child_runs_again_is_told_what_to_guard(method: str) -> None:
    result = run_ranks(SPAWNED, 2, args=(method,)).check()
    assert result.stdout.count("went on 0.5") == 2
    assert result.stderr.count("is not a rank: it has inherited") == 2
    assert "if __name__ == '__main__':" in result.stderr


def test_a_program_that_a_rank_starts_takes_nobodys_place() -> None:
    result = run_ranks(STARTED, 2).check()
    assert result.stdout.count("went on 0.5") == 2
    assert result.stderr.count("is not a rank: it has inherited") == 1
    assert "alone 1" in result.stdout
