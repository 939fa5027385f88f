"""The hooks by which a failure of a rank ends the job."""

from __future__ import annotations

import sys
import threading
import weakref
from typing import Any

import pytest
from launch import run_ranks

from horo_lite.start import ending


class Waiting:
    """Stands for a transport in which others may wait for this rank."""


def test_hooks_on_top_keep_nothing_of_a_world_that_has_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Like torch.distributed's excepthook, of which each init_process_group() installs one more."""
    for module, name in (sys, "excepthook"), (threading, "excepthook"), (sys, "exit"):
        monkeypatch.setattr(module, name, getattr(module, name))
    transport: Any = Waiting()
    gone = weakref.ref(transport)
    ending.install(0, 2, None)
    ending.watch([transport])
    earlier = sys.excepthook
    sys.excepthook = lambda *error: earlier(*error)
    ending.uninstall()
    del transport
    assert gone() is None


@pytest.mark.launches
@pytest.mark.parametrize("mark", ["HYDI_CONTROL_FD", "I_MPI_HYDRA_UUID"])
def test_a_failure_before_init_ends_the_job_under_hydra(mark: str) -> None:
    """Intel MPI's Hydra obeys the commands of MPICH's, but sets other variables."""
    code = f"""
    import os, socket, subprocess, sys
    with open("/proc/self/comm", "w") as name:
        name.write("hydra_pmi_proxy")
    launcher, rank = socket.socketpair()
    pmi = {{"PMI_FD": str(rank.fileno()), "PMI_RANK": "1", "PMI_SIZE": "2", "{mark}": "7"}}
    command = [sys.executable, "-c", "import sys, horo_lite; sys.exit(3)"]
    subprocess.run(command, env=os.environ | pmi, pass_fds=[rank.fileno()], timeout=60)
    launcher.setblocking(False)
    print(launcher.recv(100))
    """
    result = run_ranks(code, 1, launcher=False)
    assert result.stdout == "b'cmd=abort exitcode=3\\n'\n"
    assert "rank 1 of 2" in result.stderr
    assert "ends the job before init(): sys.exit(3)" in result.stderr
