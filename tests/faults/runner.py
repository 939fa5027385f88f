"""One fault in one real job: how the job ends, its messages, and what it leaves behind."""

from __future__ import annotations

import os
import re
import textwrap
import time
from collections.abc import Sequence
from dataclasses import dataclass

from launch import PATIENCE, Job, Result, mpi_name, start_ranks, that_leave_survivors

LIMIT_S = PATIENCE * 5.0  # from the fault to the end of the job

ALLREDUCE = "hvd.allreduce(np.ones(1000), name='w')"
ASYNCHRONOUS = "hvd.synchronize(hvd.allreduce_async(np.ones(1000), name='w'))"

SCRIPT = """\
import atexit, os, signal, socket, sys, threading, time
import numpy as np
import horo_lite as hvd

def fault():
    print("FAULT", time.monotonic(), os.getpid(), socket.gethostname(), flush=True)

def fail():
    raise ValueError("no such file")

{before}
world = hvd.init()
rank, size = world.rank, world.size
hvd.allreduce(np.ones(10))
if rank == {rank}:
    time.sleep(0.2)
    {fault}
{does}
else:
{others}
"""
BEFORE_INIT = """\
if (os.environ.get("OMPI_COMM_WORLD_RANK") or os.environ.get("PMI_RANK")) == "{rank}":
    time.sleep(0.2)
    fault()
{does}
"""
# What a launcher prints after a rank has failed, and what MPI leaves in /dev/shm after a crash.
LAUNCHERS_WORDS = re.compile(
    r"prterun|mpiexec|MPI_ABORT|BAD TERMINATION|application called MPI_Abort"
)
OTHERS_SHM = re.compile(
    r"vader_segment|sm_segment|mpich_sh|osc_rdma|psm|ucx|pmix|prrte|torch_|Intel_MPI|sem\.|mp-"
)


@dataclass(frozen=True)
class Fault:
    """One row of the table."""

    name: str
    does: str
    """The faulty rank's code, after a call of `fault()`, which records the moment."""
    says: Sequence[str] = ()
    """Must be on stderr; {rank}, {pid} and {host} are the faulty rank's."""
    code: int | None = None
    """None: any but 0."""
    messages: int | None = 1
    """The number of ranks that print messages; None: any."""
    others: str = ALLREDUCE
    """The code of the other ranks."""
    rank: int = 1
    ranks: int = 3
    hosts: str = ""
    before_init: bool = False
    late: bool = False
    """`does` itself calls fault()."""
    by_signal: bool = False
    """Only the peers can report it, and MPICH's launcher kills them before they can."""
    by_exit: bool = False
    """Only the peers can report it, if options make the launcher let them, as here."""
    needs: str = ""
    """A package that this needs."""

    def script(self) -> str:
        does = textwrap.indent(textwrap.dedent(self.does).strip("\n"), "    ")
        others = textwrap.indent(textwrap.dedent(self.others).strip("\n"), "    ")
        before = BEFORE_INIT.format(rank=self.rank, does=does) if self.before_init else ""
        return SCRIPT.format(
            before=before,
            rank=self.rank,
            fault="pass" if self.late else "fault()",
            does="    pass" if self.before_init else does,
            others=others,
        )


def run(fault: Fault) -> Result:
    """Run the job of a fault, check what holds for all faults, and return how it ended."""
    before = named_segments()
    env = {"HORO_LITE_TEST_HOSTS": fault.hosts}
    options = that_leave_survivors() if fault.by_exit else []
    with start_ranks(fault.script(), fault.ranks, env=env, options=options) as job:
        result = end_of(job)
    assert named_segments() <= before
    if fault.code is None:
        assert result.returncode != 0, str(result)
    else:
        assert result.returncode == fault.code, str(result)
    return result


def check_words(fault: Fault, result: Result) -> None:
    """Assert that the row's messages were printed, before the launcher's own messages."""
    if fault.by_signal and mpi_name() == "mpich":
        return
    rank, host = str(fault.rank), moment(result)[2]
    for text in fault.says:
        said = text.format(rank=rank, pid=moment(result)[1], host=host)
        assert said in result.stderr, f"{said!r} is missing: {result}"
        launchers = LAUNCHERS_WORDS.search(result.stderr)
        assert launchers is None or result.stderr.index(said) < launchers.start(), str(result)
    if fault.messages is not None:
        assert result.stderr.count("[horo_lite] rank") == fault.messages, str(result)


def moment(result: Result) -> tuple[float, str, str]:
    """Return when the fault happened, in which process, on which host."""
    found = re.search(r"FAULT (\S+) (\d+) (\S+)", result.stdout)
    assert found, f"the fault did not happen: {result}"
    return float(found[1]), found[2], found[3]


def end_of(job: Job, since: float | None = None) -> Result:
    """Return the job's end, within the limit after its fault; assert that no process remains."""
    result = job.wait(40)
    took = time.monotonic() - (since or moment(result)[0])
    assert took < LIMIT_S, f"the job ended {took:.1f} s after the fault: {result}"
    until = (
        time.monotonic() + PATIENCE * 1
    )  # MPICH's launcher may end before the ranks it has killed
    while job.processes() and time.monotonic() < until:
        time.sleep(0.01)
    assert not job.processes(), f"processes are left: {result}"
    return result


def named_segments() -> set[str]:
    """Return the names in /dev/shm, except those of MPI and frameworks."""
    return {name for name in os.listdir("/dev/shm") if not OTHERS_SHM.search(name)}
