"""Whether another process still runs, and who asks."""

from __future__ import annotations

import os
import resource
import subprocess
from contextlib import nullcontext
from types import SimpleNamespace

import pytest

from horo_lite.elastic import consensus
from horo_lite.errors import PeerLostError
from horo_lite.processes import lives
from horo_lite.start import arrivals


@pytest.fixture
def ended():
    """A process that has ended, and whose status its parent has not read."""
    process = subprocess.Popen(["true"])
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    yield process
    process.wait()


@pytest.mark.launches
@pytest.mark.quick
def test_who_has_ended(ended: subprocess.Popen[bytes]) -> None:
    assert lives(os.getpid())
    assert not lives(ended.pid)
    ended.wait()
    assert not lives(ended.pid)


def test_lack_of_descriptors_is_nobodys_end() -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))
    try:
        alive = lives(os.getpid())
        with pytest.raises(OSError, match="Too many open files"):
            arrivals._is_living_child(os.getpid(), os.getppid())
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert alive


@pytest.mark.parametrize(
    ("left", "ends"),
    [
        ([3] * 8, False),
        ([None] * 8, False),  # the launcher is not visible, as in a container
        ([1, 1, 1, 1, 2, 2, 2, 3, 3], False),  # ranks are still being started
        ([3, 3, 2, 2, 2, 2], True),
        ([2] * 9, True),
    ],
)
def test_a_rank_in_mpi_init_sees_that_another_has_ended(
    left: list[int | None], ends: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0
    monkeypatch.setattr(arrivals, "time", SimpleNamespace(monotonic=lambda: now))
    monkeypatch.setattr(arrivals, "_n_started", lambda environ: 3)
    watch = arrivals.Watch()
    with pytest.raises(PeerLostError, match=r"ended before init\(\)") if ends else nullcontext():
        for n in left:
            monkeypatch.setattr(arrivals, "_n_left", lambda n=n: n)
            for _ in range(20):
                now += 0.05
                watch.look()


@pytest.mark.parametrize(
    ("parent", "is_launcher"),
    [("mpirun.openmpi", True), ("prte", True), ("hydra_pmi_proxy", True), ("sh", False)],
)
def test_only_a_launchers_children_are_counted_as_ranks(
    parent: str, is_launcher: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arrivals, "launcher_process", os.getppid)
    monkeypatch.setattr(arrivals, "name_of", lambda pid: parent)
    assert bool(arrivals._n_left()) == is_launcher


@pytest.mark.launches
@pytest.mark.quick
def test_a_rank_whose_parent_has_not_noticed_its_end_is_missing(
    ended: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    members = SimpleNamespace(peer_pids=lambda silent: [ended.pid, os.getpid()])
    world = SimpleNamespace(group=SimpleNamespace(transport=SimpleNamespace(members=members)))
    monkeypatch.setattr(consensus, "world", lambda: world)
    gone = consensus._check_missing(PeerLostError("rank 1 died"), set())
    assert gone == {ended.pid}
    with pytest.raises(PeerLostError, match="with their own status"):
        consensus._check_missing(PeerLostError("rank 1 died"), gone)
