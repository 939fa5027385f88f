"""Jobs on several hosts: namespaces of this machine, joined by links that are cut and restored."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest
from launch import PATIENCE, Job, Result, mpi_name, mpiexec_path, run_ranks, start_ranks
from network import Network, environment, unavailable

pytestmark = [
    pytest.mark.two_at_a_time,
    pytest.mark.mpi,
    pytest.mark.skipif(bool(unavailable()), reason=unavailable()),
]

BITS = Path(__file__).with_name("bits_ranks.py")
ENDS = Path(__file__).with_name("ends_ranks.py")
STEPS = Path(__file__).with_name("steps_ranks.py")
ABORT_S = 3.0
needs_ulfm = pytest.mark.skipif(mpi_name() != "openmpi", reason="Open MPI's fault tolerance")
FT = ["--with-ft", "ulfm"]


@contextlib.contextmanager
def start_on(
    network: Network,
    ranks: Sequence[int],
    script: Path | str,
    *,
    args: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
    options: Sequence[str] = (),
) -> Iterator[Job]:
    """Yield a job with the given number of ranks per host that runs during the block."""
    mpi = mpi_name()
    command = [*network.launch(mpi, mpiexec_path(), ranks), *options]
    own = environment(mpi) | dict(env or {})
    with start_ranks(script, args=args, env=own, launcher=False, np=1, prefix=command) as job:
        yield job


def wait_for_ranks_to_end(job: Job, timeout_s: float) -> None:
    """Return when no rank lives any more, whatever the launcher does."""
    until = time.monotonic() + PATIENCE * timeout_s
    while ranks := job.ranks():
        assert time.monotonic() < until, f"ranks {sorted(ranks)} still run:\n{job.result()}"
        time.sleep(0.05)


def test_bits_are_those_of_simulated_hosts() -> None:
    shape = [1, 2, 1]
    line = re.compile(r"rank (\d) at (\S+ \S+) on (\S+): ([0-9a-f]{64})")
    with Network(len(shape)) as network, start_on(network, shape, BITS) as job:
        real = sorted(line.findall(job.wait(60).check().stdout))
    places = ["0/1 0/3", "0/2 1/3", "1/2 0/1", "0/1 2/3"]
    hosts = ["host0", "host1", "host1", "host2"]
    assert [(place, host) for _, place, host, _ in real] == list(zip(places, hosts, strict=True))
    env = {"HORO_LITE_TEST_HOSTS": ",".join(map(str, shape))}
    simulated = line.findall(run_ranks(BITS, 4, env=env, timeout_s=60).check().stdout)
    assert len(simulated) == 4
    assert len({digest for *_, digest in real + simulated}) == 1, (real, simulated)


def test_a_broadcast_sends_its_bytes_to_each_host_once() -> None:
    script = """
    from pathlib import Path
    import numpy as np
    import horo_lite as hvd
    sent = Path("/sys/class/net/eth0/statistics/tx_bytes")
    hvd.init(device="cpu")
    x = np.arange(2_000_000, dtype=np.float32)
    for root in range(hvd.size()):
        hvd.barrier()
        before = int(sent.read_text())
        assert (hvd.broadcast(x * (hvd.rank() + 1), root) == x * (root + 1)).all()
        hvd.barrier()
        print(f"sent {(int(sent.read_text()) - before) / x.nbytes:.2f} times", flush=True)
    """
    with Network(3) as network, start_on(network, [2, 1, 2], script) as job:
        result = job.wait(60).check()
    found = [float(times) for times in re.findall(r"sent (\S+) times", result.stdout)]
    assert len(found) == 25, str(result)
    assert max(found) < 1.2, found  # packet headers count too


@pytest.mark.skipif(
    mpi_name() != "mpich", reason="only MPICH's UCX reports messages that were not received"
)
@pytest.mark.parametrize("how", ["together", "late"])
def test_mpi_finds_no_message_that_nobody_has_received(how: str) -> None:
    with Network(2) as network, start_on(network, [2, 2], ENDS, args=[how]) as job:
        result = job.wait(30).check()
    assert result.stdout.count("the end") == 4, str(result)
    assert "UCX" not in result.stdout + result.stderr, str(result)  # it warns on stdout


def test_a_job_goes_on_after_a_link_was_cut_for_2_seconds(tmp_path: Path) -> None:
    with (
        Network(2, rate_mbit=1000) as network,
        start_on(network, [2, 2], STEPS, args=[str(tmp_path)]) as job,
    ):
        job.wait_for("begun", count=4)
        network.cut(network.hosts[1])
        time.sleep(2)
        network.mend(network.hosts[1])
        (tmp_path / "enough").touch()
        result = job.wait(30).check()
    longest = re.findall(r"rank \d of 4: longest step (\S+) s", result.stdout)
    assert len(longest) == 4, str(result)
    assert all(float(seconds) > 1.9 for seconds in longest), str(result)


def test_a_link_that_is_cut_for_good_ends_the_ranks_on_both_sides(tmp_path: Path) -> None:
    """Every host's ranks name the lost ranks. Open MPI's launcher may wait much longer."""
    args = [str(tmp_path), f"abort_after={ABORT_S}"]
    with (
        Network(2, rate_mbit=1000) as network,
        start_on(network, [2, 2], STEPS, args=args) as job,
    ):
        job.wait_for("begun", count=4)
        network.cut(network.hosts[1])
        wait_for_ranks_to_end(job, ABORT_S + 15)
    for host, lost in ((0, 1), (1, 0)):
        said = "".join((tmp_path / f"rank-{2 * host + r}").read_text() for r in range(2))
        theirs = f"rank [{2 * lost}{2 * lost + 1}]"
        assert re.search(
            rf"StallError: nothing has moved for 3\.0 s \(stall_abort_s\): (rank|ranks) .*"
            rf"{theirs} \(pid \d+ on host{lost}\) is late, or its host cannot be reached",
            said,
        ), said


def check_that_the_launcher_gave_up(result: Result) -> None:
    """Open MPI's may exit with 0 after it has lost a whole host: see docs/jobs.md."""
    gave_up = mpi_name() == "openmpi" and "terminate the job" in result.stdout + result.stderr
    assert result.returncode != 0 or gave_up, str(result)


def test_a_host_that_vanishes_ends_the_job(tmp_path: Path) -> None:
    with (
        Network(2, rate_mbit=1000) as network,
        start_on(network, [2, 2], STEPS, args=[str(tmp_path)]) as job,
    ):
        job.wait_for("begun", count=4)
        network.hosts[1].vanish()
        result = job.wait(15)
        wait_for_ranks_to_end(job, 15)
    check_that_the_launcher_gave_up(result)


@needs_ulfm
def test_the_ranks_of_a_host_vanish_and_the_others_go_on(tmp_path: Path) -> None:
    """With fault tolerance, while Open MPI's daemon on that host lives.

    The others are stopped until both have died: Open MPI may crash if a second death is noticed
    while the others make new communicators (docs/elastic.md), and a busy machine takes time to end
    a process.
    """
    with (
        Network(2, rate_mbit=1000) as network,
        start_on(network, [2, 2], STEPS, args=[str(tmp_path), "elastic"], options=FT) as job,
    ):
        job.wait_for("begun", count=4)
        pids = job.ranks()
        for rank in range(4):
            os.kill(pids[rank], signal.SIGSTOP if rank < 2 else signal.SIGKILL)
        until = time.monotonic() + PATIENCE * 15
        while {2, 3} & job.ranks().keys() and time.monotonic() < until:
            time.sleep(0.05)
        time.sleep(3)  # until the daemons have notified each other
        for rank in range(2):
            os.kill(pids[rank], signal.SIGCONT)
        while "2 ranks continue" not in (tmp_path / "rank-0").read_text():
            if job.launcher.poll() is not None or time.monotonic() > until:
                job.show_stacks()
                said = "\n".join((tmp_path / f"rank-{rank}").read_text() for rank in range(4))
                pytest.fail(f"the others do not continue: {job.result()}\n{said}")
            time.sleep(0.05)
        (tmp_path / "enough").touch()
        result = job.wait(15).check()
    assert result.stdout.count(" of 2: longest step") == 2, str(result)
    assert "lost ranks 2 and 3 of 4" in (tmp_path / "rank-0").read_text()


@needs_ulfm
def test_a_host_that_vanishes_with_its_daemon_ends_the_job_even_with_fault_tolerance(
    tmp_path: Path,
) -> None:
    """Open MPI 5's launcher cannot continue without one of its daemons: see docs/elastic.md."""
    args = [str(tmp_path), "elastic"]
    with (
        Network(2, rate_mbit=1000) as network,
        start_on(network, [2, 2], STEPS, args=args, options=FT) as job,
    ):
        job.wait_for("begun", count=4)
        network.hosts[1].vanish()
        result = job.wait(15)
        wait_for_ranks_to_end(job, 15)
    check_that_the_launcher_gave_up(result)
    assert "host1" in result.stdout + result.stderr, str(result)
