"""Worlds of several hosts without MPI, which transfer data with PyTorch's gloo.

Properties of all worlds without MPI are tested in test_store.py, for these, too.
"""

from __future__ import annotations

import hashlib
import os
import re
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import checks
import numpy as np
import pytest
from launch import PATIENCE
from oracle import bfloat16, sample
from without_mpi import by_address, ended, started
from worlds import on_ranks

import horo_lite as hvd
from horo_lite.start.entries import signature, signed_store
from horo_lite.transports.gloo.connections import GlooConnections, Waiters, _Stream

torch = pytest.importorskip("torch")


def on_hosts(hosts: str, **env: str) -> dict[str, str]:
    return {"HORO_LITE_TEST_HOSTS": hosts, **env}


@pytest.mark.served
def test_every_collective() -> None:
    said = on_ranks(checks.in_a_world, 3, 3, hosts="2,1", env=by_address(), timeout_s=60)
    assert said == [f"{len(checks.CHECKS)} checks passed over gloo"] * 3


def digest_of_sums() -> tuple[str, str]:
    world = hvd.init()
    bits = hashlib.sha256()
    for name in ("none", "fp16", "bf16", "int8", "int4"):
        wire = getattr(hvd.Compression, name)
        for dtype in (np.float32, np.float64, np.float16, bfloat16):
            for shape in ((), (3, 1001), (700_001,)):
                x = sample(world.rank, shape, dtype, seed=len(shape))
                for op in (hvd.Average, hvd.Sum):
                    bits.update(np.asarray(hvd.allreduce(x, op, compression=wire)).tobytes())
    return world.transport, bits.hexdigest()


@pytest.mark.served
def test_the_bits_are_those_of_the_same_hosts_over_mpi() -> None:
    (by_gloo,) = set(on_ranks(digest_of_sums, 3, hosts="2,1", env=by_address()))
    (by_mpi,) = set(on_ranks(digest_of_sums, 3, hosts="2,1"))
    assert (by_gloo[0], by_mpi[0]) == ("gloo", "mpi")
    assert by_gloo[1] == by_mpi[1]


def count_messages() -> tuple[int, int]:
    """Return how many MiB this rank sends, in how many messages."""
    from horo_lite.transports.gloo.carrier import GlooChannel

    sizes: list[int] = []
    begin = GlooChannel.begin

    def counted(self: Any, receive: Any, send: Any) -> Any:
        sizes.extend(memory.nbytes for _, _, memory in send)
        return begin(self, receive, send)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GlooChannel, "begin", counted)
        world = hvd.init()
        ones = np.ones(4 << 20, np.float32)
        assert (hvd.allreduce(ones, op=hvd.Sum) == 2).all()
        assert (hvd.broadcast(ones * world.rank, 1) == 1).all()
    return sum(sizes) >> 20, len(sizes)


@pytest.mark.served
def test_messages_are_large_since_each_needs_the_gil() -> None:
    """Next to a busy training thread this takes a millisecond, as windows of 1 MiB showed."""
    # Its half of each of 4 windows, and the sum of that; rank 1 its whole windows, too.
    found = on_ranks(count_messages, 2, hosts="1,1", env=by_address())
    assert found == [(16, 8), (32, 12)]


def test_two_threads_receive_from_one_channel() -> None:
    from horo_lite.transports.gloo.carrier import GlooChannel

    class Connections:
        rank = 0

        def add(self, channel: GlooChannel) -> None:
            pass

    class Taken(deque[Any]):
        """Not empty when one thread looks, but when it takes, since the other was faster."""

        def __bool__(self) -> bool:
            return True

    channel = GlooChannel(cast("Any", Connections()), [0, 1], 1)
    channel._received = Taken()
    channel.deliver(1, 1, b"text")
    assert channel.receive() == [(1, 1, b"text")]


def use_groups() -> None:
    world = hvd.init()
    kept = {}
    for _ in range(3):
        for ranks in ([0, 2], [2, 1], [1, 0, 2], [2]):
            group = hvd.new_group(ranks)
            if group:
                kept[tuple(ranks)] = group
                want = sum(10**r for r in ranks)
                x = np.full(5000, 10.0**world.rank)
                assert (hvd.allreduce(x, hvd.Sum, group=group) == want).all()
                handle = hvd.allreduce_async(x, hvd.Sum, name="x", group=group)
                assert (handle.wait() == want).all()
                hvd.free_group(group)


@pytest.mark.served
def test_groups_come_and_go() -> None:
    """Overlapping groups, made in different numbers by different ranks, with ranks in any order."""
    on_ranks(use_groups, 3, hosts="1,2", env=by_address())


# --- ends -----------------------------------------------------------------------------------------


WAITS = """
import os, sys, threading, time
import numpy as np
import horo_lite as hvd

world = hvd.init()
hvd.barrier()
print(f"pid of rank {world.rank}: {os.getpid()};", flush=True)
"""
IN_TRANSFERS = WAITS + "while True: hvd.allreduce(np.ones(10_000_000, np.float32))"
IN_THE_ENGINE = (
    WAITS + "if world.rank < 2: hvd.allreduce_async(1.0, name='a').wait()\ntime.sleep(600)"
)


@pytest.mark.launches
@pytest.mark.parametrize("code", [IN_TRANSFERS, IN_THE_ENGINE])
def test_a_rank_that_dies_is_named_on_the_other_host_at_once(tmp_path: Path, code: str) -> None:
    with started(code, 3, tmp_path, env=on_hosts("2,1")) as job:
        job.wait_for("pid of rank", count=3)
        time.sleep(0.5)
        pids = re.findall(r"pid of rank 2: (\d+)", job.stdout())
        os.kill(int(pids[0]), signal.SIGKILL)
        result = job.wait(5)
    assert result.returncode != 0
    # One rank per host reports.
    (line,) = re.findall(r"rank [01] of 3 .*PeerLostError: (.*)", result.stderr)
    assert re.match(r"(rank [01] .* gave up .*)?rank 2 \(pid \d+ on \S+\) died", line), str(result)


@pytest.mark.launches
def test_those_that_are_left_can_go_on_in_a_group_of_their_own(tmp_path: Path) -> None:
    """The connections between them survive the failure in the world."""
    code = f"""{WAITS}
part = hvd.new_group([0, 1])
if world.rank == 2:
    threading.Timer(1.0, os.kill, (os.getpid(), 9)).start()
try:
    while True:
        hvd.alltoall(np.ones(9_000_000))
except hvd.PeerLostError:
    for _ in range(3):
        total = hvd.allreduce(np.ones(3_000_000), hvd.Sum, group=part)
        assert (total == 2).all()
    print("goes on", flush=True)
"""
    result = ended(code, 3, tmp_path, env=on_hosts("1,1,1"))
    assert result.stdout.count("goes on") == 2, str(result)


@pytest.mark.launches
@pytest.mark.parametrize("late", ["", "1"])
def test_a_death_while_the_hosts_are_connected_is_noticed_at_once(
    tmp_path: Path, late: str
) -> None:
    """Not by gloo, which would wait for two minutes, and blame the network.

    The other rank may not check before rank 0 does: then it first notices that the store is gone.
    """
    code = f"""
    import os
    import horo_lite as hvd
    from horo_lite.transports.gloo import connections

    if os.environ["RANK"] == "2":
        connections._connect = lambda *_: os.kill(os.getpid(), 9)
    if os.environ["RANK"] == "{late}":
        connections.asked = lambda question, look: question()
    hvd.init()
    """
    result = ended(code, 3, tmp_path, env=on_hosts("2,1"))
    assert result.returncode != 0
    told = re.findall(r"PeerLostError: .*rank 2 \(pid .*\) died in init\(\), while", result.stderr)
    assert len(told) == 2, str(result)
    assert "terminate called" not in result.stderr, str(result)


ENDINGS: dict[str, tuple[str, Callable[[str], bool]]] = {
    "it raises": ("raise ValueError('out of data')", lambda text: "out of data" in text),
    "it is interrupted": (
        "threading.Timer(0.5, os.kill, (os.getpid(), 2)).start(); hvd.recv(np.zeros(1), 0)",
        lambda text: "KeyboardInterrupt" in text,
    ),
}


@pytest.mark.launches
@pytest.mark.parametrize("ending", ENDINGS)
def test_a_rank_that_ends_gives_its_reason(tmp_path: Path, ending: str) -> None:
    """To the other host, where a peer that waits for it raises PeerLostError."""
    how, is_right = ENDINGS[ending]
    code = f"""{WAITS}
if world.rank == 0:
    try:
        hvd.allreduce(np.ones(10))
    except hvd.PeerLostError as error:
        print("told:", error, flush=True)
        raise
{how}
"""
    result = ended(code, 2, tmp_path, env=on_hosts("1,1"))
    assert result.returncode != 0
    (told,) = re.findall("told: (.*)", result.stdout)
    assert "rank 1 (pid" in told
    assert is_right(told), str(result)


@pytest.mark.launches
def test_what_a_rank_has_sent_arrives_though_it_ends_at_once(tmp_path: Path) -> None:
    """Through operations that its peers are still in, and messages that they receive later."""
    code = """
    import time
    import numpy as np
    import horo_lite as hvd

    world = hvd.init()
    x = np.full(30_000_000, world.rank + 1.0, np.float32)
    if world.rank == 1:
        hvd.send(np.arange(300.0), 0)
    total = hvd.allreduce(x, hvd.Sum)
    assert (total == 3).all()
    if world.rank == 0:
        time.sleep(1)
        got = np.zeros(300)
        hvd.recv(got, 1)
        assert (got == np.arange(300)).all()
        try:
            hvd.barrier()
        except hvd.PeerLostError as error:
            assert "rank 1 (pid" in str(error) and "has left (its program ended; " in str(error)
            print("all is here", flush=True)
    """
    assert "all is here" in ended(code, 2, tmp_path, env=on_hosts("1,1")).check().stdout


POLLS = Path(__file__).parents[1] / "collectives" / "poll_ranks.py"


@pytest.mark.launches
@pytest.mark.parametrize("hosts", ["", "1,1,1"])
@pytest.mark.parametrize(("how", "size"), [("ends", 3), ("dies", 2)])
def test_whoever_asks_learns_that_a_rank_is_lost(
    tmp_path: Path, how: str, size: int, hosts: str
) -> None:
    """Without MPI's launcher, which would end all ranks when one dies."""
    env = on_hosts(hosts[: 2 * size - 1]) if hosts else {}
    with started(POLLS, size, tmp_path, env=env, args=[how]) as job:
        job.wait_for("all are lost", timeout_s=60)
        result = job.wait(30)
    assert (result.returncode == 0) == (how == "ends"), str(result)


@pytest.mark.launches
@pytest.mark.parametrize("then", [signal.SIGCONT, signal.SIGKILL])
def test_messages_to_a_stopped_rank_arrive_or_are_an_error(tmp_path: Path, then: int) -> None:
    code = f"""{WAITS}
if world.rank == 1:
    os.kill(os.getpid(), 19)
for i in range(60):
    x = np.full(300, float(i))
    hvd.recv(x := 0 * x, 0) if world.rank else hvd.send(x, 1, tag=0)
    assert (x == i).all(), x
hvd.shutdown()
print("all of them", flush=True)
"""
    env = on_hosts("1,1", HORO_LITE_STALL_WARN_S="0.5")
    undelivered = "waited in shutdown(), after send to rank 1 (tag 0) that has not arrived"
    with started(code, 2, tmp_path, env=env) as job:
        job.wait_for("that has not arrived for rank 1", on_stderr=True)
        os.kill(int(re.findall(r"pid of rank 1: (\d+)", job.stdout())[0]), then)
        result = job.wait(30)
    if then == signal.SIGCONT:
        assert result.check().stdout.count("all of them") == 2
    else:
        assert result.returncode != 0
        (told,) = re.findall(r"rank 0 of 2 .*PeerLostError: (rank 1 .*)", result.stderr)
        assert "died" in told, told
        assert undelivered in told, told


@pytest.mark.launches
def test_a_stopped_peer_does_not_keep_a_rank_from_ending(tmp_path: Path) -> None:
    code = WAITS + "\nif world.rank == 1: os.kill(os.getpid(), 19)\ntime.sleep(1); hvd.shutdown()"
    code += "\nprint('over', flush=True)"
    code = "import horo_lite.transports.gloo.connections as it; it._LINGER_S = 1.0\n" + code
    with started(code, 2, tmp_path, env=on_hosts("1,1")) as job:
        job.wait_for("over", timeout_s=20)
        assert job.stdout().count("over") == 1


@pytest.mark.launches
def test_stragglers_are_reported_and_limits_hold(tmp_path: Path) -> None:
    code = WAITS + "\nif world.rank == 1: time.sleep(600)\nhvd.barrier()"
    env = on_hosts("1,1", HORO_LITE_STALL_WARN_S="0.5", HORO_LITE_STALL_ABORT_S="3")
    with started(code, 2, tmp_path, env=env) as job:
        job.wait_for("StallError", on_stderr=True)
        assert re.search("rank 0 has waited .* in barrier for rank 1", job.stderr()), job.stderr()


@pytest.mark.parametrize(
    ("theirs", "during", "set_meanwhile", "after"),
    [
        (5e-3, 1e-3, None, 5e-3),
        (5e-4, 5e-4, None, 5e-4),
        (5e-3, 1e-3, 2e-3, 2e-3),
    ],
)
def test_threads_get_the_gil_sooner_while_there_are_connections(
    theirs: float, during: float, set_meanwhile: float | None, after: float
) -> None:
    before = sys.getswitchinterval()
    try:
        sys.setswitchinterval(theirs)
        connections = GlooConnections(torch.distributed.HashStore(), 0, 1, "localhost:1", 5)
        try:
            assert sys.getswitchinterval() == pytest.approx(during)
            if set_meanwhile is not None:
                sys.setswitchinterval(set_meanwhile)
        finally:
            connections.close()
        assert sys.getswitchinterval() == pytest.approx(after)
    finally:
        sys.setswitchinterval(before)


def forged(key: str) -> str:
    return f"{key} is forged"


def test_what_gloo_reads_from_the_store_is_verified_first() -> None:
    """Planted addresses made it crash."""
    inner = torch.distributed.HashStore()
    mine, theirs = (signed_store(inner, "p", secret, forged) for secret in (b"a", b"b"))
    mine.set("x", b"address")
    assert mine.get("x") == b"address"
    with pytest.raises(hvd.LauncherError, match="p/x is forged"):
        theirs.get("x")
    inner.set("p/y", inner.get("p/x"))
    for planted in ("0/1", "x", "y"):
        if planted != "y":
            inner.set(f"p/{planted}", b" " + bytes(range(64)))
        with pytest.raises(hvd.LauncherError, match=f"p/{planted} is forged"):
            mine.get(planted)
    with pytest.raises(hvd.LauncherError, match="p/0/1 is forged"):
        GlooConnections(mine, 0, 2, "localhost:1", 5)


@pytest.mark.parametrize("is_stranger", [False, True])
def test_a_rank_proves_that_it_is_one(is_stranger: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gloo accepts whoever connects to a rank's port. Ranks that close at once do not linger."""
    lingers_s = 30.0 * PATIENCE
    monkeypatch.setattr("horo_lite.transports.gloo.connections._LINGER_S", lingers_s)
    store = torch.distributed.HashStore()

    def connect(rank: int) -> GlooConnections | Exception:
        def proof(sender: int, receiver: int) -> bytes:
            secret = b"another" if is_stranger and rank == 1 else b"secret"
            return signature(secret, f"{sender} to {receiver}", b"")

        try:
            return GlooConnections(store, rank, 2, "localhost:1", 30, proof=proof)
        except Exception as error:
            return error

    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(connect, range(2)))
        began = time.monotonic()
        list(pool.map(lambda one: isinstance(one, Exception) or one.close(), found))
        assert time.monotonic() - began < lingers_s
    for rank, one in enumerate(found):
        assert isinstance(one, hvd.LauncherError if is_stranger else GlooConnections), one
        assert not is_stranger or f"is not rank {1 - rank} has connected to rank {rank}" in str(one)


def test_without_gloo(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("torch.distributed.ProcessGroupGloo")
    with pytest.raises(hvd.LauncherError, match=r"several hosts.*pip install torch.*mpiexec"):
        GlooConnections(torch.distributed.HashStore(), 0, 2, "localhost:1", 5)


def test_an_interface_that_does_not_exist_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nosuch0")
    with pytest.raises(hvd.LauncherError, match=r"nosuch0.*GLOO_SOCKET_IFNAME"):
        GlooConnections(torch.distributed.HashStore(), 0, 2, "localhost:1", 5)


class Connections:
    """Connections on which nothing arrives."""

    def __init__(self) -> None:
        self.posted: list[bytes] = []
        self.ended: set[int] = set()

    def post(self, peer: int, tag: int, memory: Any, *, receive: bool) -> int:
        if receive:
            raise RuntimeError("the connection has ended")
        self.posted.append(memory.tobytes())
        return len(self.posted)


def nested(outer: Callable[[], Any], function: Any, inner: Callable[[], Any]) -> Any:
    """Call `outer`, and `inner` at every line of `function`, as a signal's handler might be."""

    def at_line(frame: Any, event: str, _: Any) -> Any:
        if event == "line":
            inner()
        return at_line

    sys.settrace(lambda frame, *_: at_line if frame.f_code is function.__code__ else None)
    try:
        return outer()
    finally:
        sys.settrace(None)


def test_a_signal_handler_in_the_middle_of_sending_sends_too() -> None:
    connections = Connections()
    stream, numbers = _Stream(cast("GlooConnections", connections), 1), list[int]()

    def send() -> None:
        numbers.append(stream.send(1, 1, b""))

    nested(send, _Stream.send, send)
    assert len(numbers) > 4
    assert len(connections.posted) == len(numbers) == max(numbers)
    stream._forget(len(numbers))
    assert not stream._sent


def test_a_signal_handler_in_the_middle_of_a_transfer_has_a_thread_for_its_own() -> None:
    waiters, ends = Waiters(), threading.Event()

    class Transfer:
        def __init__(self) -> None:
            self.is_waited_for = threading.Event()

        def wait(self) -> None:
            self.is_waited_for.set()
            ends.wait()

    transfers: list[Transfer] = []

    def begin() -> None:
        transfers.append(Transfer())
        waiters.add(cast("Any", transfers[-1]))

    nested(begin, Waiters.add, begin)
    assert len(transfers) > 4
    assert all(transfer.is_waited_for.wait(30) for transfer in transfers)
    ends.set()
    waiters.close()
