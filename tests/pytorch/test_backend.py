"""torch.distributed on the backend "horo_lite": collectives, wrappers, launchers, failures.

Observed from outside: the ranks are processes, which check their results themselves.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from launch import Job, environment, run_ranks
from without_mpi import started
from worlds import script_on_ranks

pytestmark = pytest.mark.launches

torch = pytest.importorskip("torch")
HERE = Path(__file__).parent
ROOT = HERE.parents[1]


TORCHRUN = "-m torch.distributed.run --standalone --local-addr localhost --nproc-per-node 2"


def test_collectives_as_gloo_does_them(tmp_path: Path) -> None:
    with started(HERE / "backend_ranks.py", 3, tmp_path) as job:
        assert job.wait(90).check().stdout.count("right") == 3


@pytest.mark.served
@pytest.mark.mpi
def test_collectives_between_hosts() -> None:
    env = {"HORO_LITE_TEST_HOSTS": "2,1"}
    result = script_on_ranks(HERE / "backend_ranks.py", 3, env=env, timeout_s=90)
    assert result.stdout.count("right") == 3


def test_collectives_where_only_one_thread_may_call_mpi() -> None:
    env = {"MPI4PY_RC_THREAD_LEVEL": "single"}
    result = run_ranks(HERE / "backend_ranks.py", 2, env=env, timeout_s=90).check()
    assert result.stdout.count("right") == 2


def test_ddp_zero_fsdp_and_checkpoints(tmp_path: Path) -> None:
    """Started by torch.multiprocessing.spawn, with a file as the store."""
    job = Job([sys.executable, str(HERE / "backend_ddp_ranks.py")], environment(), tmp_path)
    try:
        assert job.wait(90).check().stdout.count("right") == 2
    finally:
        job.close()


@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        ("mismatch", ["MismatchError: ranks disagree on torch.distributed collective", "[3]"]),
        ("kill", ["PeerLostError: rank 1", "was killed by signal 9"]),
        ("stop", ["StallError: nothing has moved for 8.0 s", "rank 1 is late", "it is stopped"]),
    ],
)
def test_what_ddp_shows_of_a_fault(fault: str, expected: list[str], tmp_path: Path) -> None:
    script = HERE / "backend_faults_ranks.py"
    with started(script, 2, tmp_path, args=[fault]) as job:
        if fault == "stop":  # nothing ends the stopped rank
            job.wait_for("ends the job with an exception", on_stderr=True)
        else:
            assert job.wait(40).returncode != 0
        assert job.stdout().split() == ["now"]
        for text in expected:
            assert text in job.stderr(), job.result()


def test_a_wait_for_each_other_in_two_groups_of_the_same_ranks_names_the_groups() -> None:
    script = """
        import torch
        from torch import distributed as dist
        import horo_lite.torch
        from stall_limits import limit_waits

        dist.init_process_group("horo_lite", init_method="horo-lite://")
        groups = [dist.new_group([0, 1]) for _ in range(2)]
        rank = dist.get_rank()
        limit_waits(3)
        print(rank, "in", groups[rank].group_name, flush=True)
        dist.all_reduce(torch.ones(3), group=groups[rank])
    """
    result = run_ranks(script, 2)
    assert result.returncode != 0
    names = dict(re.findall(r"^(\d) in (\S+)$", result.stdout, re.M))
    assert names["0"] != names["1"]
    for rank in "01":
        told = rf"rank {rank} has waited \S+ s in torch.distributed collective 1 of group (\S+) for"
        assert set(re.findall(told, result.stderr)) == {names[rank]}, result


def test_a_collective_in_a_signal_handler_that_interrupts_another_one(tmp_path: Path) -> None:
    """Lightning's handler of SIGTERM broadcasts a flag, whatever the process is doing."""
    script = """
        import signal
        import torch
        from torch import distributed as dist
        import horo_lite.torch

        dist.init_process_group("horo_lite")
        rank = dist.get_rank()
        flag = torch.tensor([rank])
        group = dist.group.WORLD.group
        submit = group.submit

        def interrupted(*args):
            group.submit = submit
            signal.raise_signal(signal.SIGTERM)
            return submit(*args)

        signal.signal(signal.SIGTERM, lambda *_: dist.broadcast(flag, src=1))
        group.submit = interrupted
        dist.all_reduce(x := torch.tensor([rank + 1.0]))
        assert (x.item(), flag.item()) == (3.0, 1)
        dist.destroy_process_group()
        print("right", flush=True)
    """
    with started(script, 2, tmp_path) as job:
        assert job.wait(20).check().stdout.count("right") == 2


def test_nothing_needs_importing(tmp_path: Path) -> None:
    """Once installed, the package is found by `import torch`, which remains as fast as before."""
    project = (ROOT / "pyproject.toml").read_text()
    ((name, target),) = re.findall(r'entry-points."torch.backends"\]\n(\S+) = "(\S+)"', project)
    info = tmp_path / "horo_lite_again-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: horo_lite_again\nVersion: 0\n")
    (info / "entry_points.txt").write_text(f"[torch.backends]\n{name} = {target}\n")
    script = tmp_path / "script.py"
    script.write_text("""
import sys
import torch
from torch import distributed as dist

loaded = {name for name in sys.modules if name.partition(".")[0] == "horo_lite"}
assert loaded == {"horo_lite", "horo_lite.autoload"}, loaded
dist.init_process_group("horo_lite")
x = torch.tensor([dist.get_rank() + 1.0])
dist.all_reduce(x)
assert x.item() == 3.0, x
dist.destroy_process_group()
print("right", flush=True)
""")
    path = environment()["PYTHONPATH"]
    command = [sys.executable, *TORCHRUN.split()]
    env = {"PYTHONPATH": f"{tmp_path}:{path}"}
    with started(script, 2, tmp_path, command, env) as job:
        assert job.wait(40).check().stdout.count("right") == 2
    # An error in the package must not affect programs that do not use it.
    broken = tmp_path / "horo_lite"
    broken.mkdir()
    (broken / "__init__.py").touch()
    (broken / "autoload.py").write_text((ROOT / "horo_lite" / "autoload.py").read_text())
    script.write_text("""
import horo_lite
import torch
from torch import distributed as dist

assert dist.is_backend_available("horo_lite") and not hasattr(horo_lite, "init")
""")
    broken_env = environment({"PYTHONPATH": str(tmp_path)})
    job = Job([sys.executable, str(script)], broken_env, tmp_path)
    try:
        job.wait(40).check()
    finally:
        job.close()
