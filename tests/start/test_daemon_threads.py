"""A program ends normally while one of its daemon threads still waits for other ranks."""

from __future__ import annotations

import pytest
from launch import run_ranks

SCRIPT = """\
import sys, threading, time
import numpy as np
import horo_lite as hvd

(what,) = sys.argv[1:]
rank = hvd.init(device="cpu", stall_warn_s=0).rank
transport = hvd.world().group.transport
x = np.ones(10)


def again():
    while True:
        try:
            hvd.allreduce(x)
        except hvd.HoroLiteError:
            pass


operations = {"allreduce": lambda: hvd.allreduce(x), "recv": lambda: hvd.recv(x, 1), "again": again}
hvd.barrier()
if rank == 0:
    threading.Thread(target=operations[what], daemon=True).start()
    time.sleep(0.3)  # until it waits; it does not matter if it does not yet
else:
    while not transport.members.has_left(0, 0):  # rank 0 ends first
        time.sleep(0.01)
print("end", flush=True)
"""


@pytest.mark.launches
@pytest.mark.parametrize("hosts", ["", pytest.param("1,1", marks=pytest.mark.mpi)])
@pytest.mark.parametrize("what", ["allreduce", "recv", "again"])
def test_a_daemon_thread_that_waits_does_not_spoil_the_end(what: str, hosts: str) -> None:
    env = {"HORO_LITE_TEST_HOSTS": hosts}
    result = run_ranks(SCRIPT, 2, args=(what,), env=env).check()
    assert result.stdout.count("end") == 2, str(result)
    assert "Error" not in result.stderr, str(result)
