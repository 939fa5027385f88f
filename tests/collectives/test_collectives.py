"""Every collective against the oracle: ranks as threads, and as processes over every transport."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from typing import Any

import checks
import numpy as np
import pytest
from launch import run_ranks, run_threads
from oracle import Array, same_bits
from worlds import on_ranks

import horo_lite as hvd
from horo_lite import _native, ops
from horo_lite.collectives.calls import AllGather, Part
from horo_lite.collectives.group import Group
from horo_lite.transports import Transport
from horo_lite.transports.agreement import explain


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("name", checks.CHECKS)
def test_threads(name: str, size: int) -> None:
    run_threads(size, checks.CHECKS[name])


@pytest.mark.parametrize("instruction_set", ["portable", "avx2", "avx512"])
def test_every_instruction_set_gives_the_same_bits(instruction_set: str) -> None:
    best = _native.instruction_set()
    random = np.random.default_rng(0)
    tensors = []
    for n in (1, 15, 16, 17, 1024, 5003):
        for scale in (1e-30, 1e-7, 1.0, 1e6, 1e30):
            tensors.append((random.standard_normal(n) * scale).astype(np.float32))
    tensors[3][::5] = np.nan
    tensors[8][::7] = np.inf

    def reduce(group: hvd.Group) -> list[Array]:
        mine = [x * np.float32(1 + group.rank / 4) for x in tensors]
        return [
            out
            for wire in checks.WIRES.values()
            for op in (hvd.Average, hvd.Sum, hvd.Max)
            for out in ops.grouped_allreduce(mine, op, compression=wire, group=group)
        ]

    expected = run_threads(3, reduce)
    try:
        _native.use_instruction_set(instruction_set)
    except ValueError:
        pytest.skip(f"this machine has no {instruction_set}")
    try:
        assert _native.instruction_set() == instruction_set
        got = run_threads(3, reduce)
    finally:
        _native.use_instruction_set(best)
    for a, b in zip(expected[0], got[2], strict=True):
        assert same_bits(a, b)


@pytest.mark.parametrize("name", ["allreduce", "allgather", "broadcast", "reducescatter"])
def test_only_a_mismatch_of_unnamed_operations_advises_their_order(name: str) -> None:
    """Named asynchronous operations are matched in any order."""

    def rank(group: hvd.Group) -> list[str]:
        x = np.ones((2, 3 + group.rank), np.float32)
        root = (0,) if name == "broadcast" else ()
        texts = []
        for options in ({"name": "g"}, {}):
            handle = getattr(ops, f"{name}_async")(x, *root, group=group, **options)
            with pytest.raises(hvd.MismatchError) as error:
                ops.synchronize(handle, group=group)
            texts.append(str(error.value))
        return texts

    for named, unnamed in run_threads(2, rank):
        assert "Operations of one name must have the same shapes" in named
        assert "in the same order" not in named
        assert "in the same order, or give them names" in unnamed
    # As horo_lite.torch names them.
    assert "give them names" in explain("allreduce 'noname.1'", ["", "float32[2]"])
    assert "Operations of one name" in explain("allreduce 'layer number 1'", ["\na", "\nb"])


def test_unnamed_calls_of_a_signal_handler_in_the_middle_of_one_have_numbers_of_their_own() -> None:
    def rank(group: hvd.Group) -> list[Any]:
        handles: list[Any] = []

        def trace(frame: Any, event: str, _: Any) -> Any:
            if frame.f_code is Group.new_number.__code__:
                return at_line
            return None

        def at_line(frame: Any, event: str, _: Any) -> Any:
            if event == "line":  # as if a signal's handler were called there
                handles.append(ops.allreduce_async(len(handles) + 1.0, hvd.Sum, group=group))
            return at_line

        sys.settrace(trace)
        try:
            handles.append(ops.allreduce_async(100.0, hvd.Sum, group=group))
        finally:
            sys.settrace(None)
        return [float(ops.synchronize(handle, group=group)) for handle in handles]

    for results in run_threads(2, rank):
        assert len(results) > 4
        assert results == [2.0 * k for k in range(1, len(results))] + [200.0]


def test_a_blocking_call_and_an_asynchronous_one_that_wait_for_each_other_are_an_error() -> None:
    """On every rank, about its own call, without any patience; and all can go on."""

    def rank(group: hvd.Group) -> str:
        handle = ops.allreduce_async(1.0, name="a", group=group) if group.rank == 1 else None
        with pytest.raises(hvd.MismatchError) as error:
            ops.synchronize(handle, group=group) if handle else ops.barrier(group=group)
        assert ops.allreduce(1.0, hvd.Sum, group=group) == 3
        return str(error.value)

    zero, one, two = run_threads(3, rank)
    assert zero == two
    assert zero.startswith(
        "barrier was called by ranks 0, 2 but not by rank 1, and every rank is waiting, rank 1 in "
        "allreduce 'a': none can continue. Look for a call that some ranks do not make"
    )
    assert one.startswith(
        "allreduce 'a' was submitted by rank 1 but not by ranks 0, 2, and every rank is waiting, "
        "rank 0 in barrier, rank 2 in barrier: none can continue. Look for"
    )


def test_a_deadlock_is_found_also_behind_operations_that_take_their_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The ranks count as blocked before the last of these, in the handshake between them."""
    real = AllGather.move

    def move(self: AllGather, part: Part, transport: Transport, headers: Any) -> Any:
        time.sleep(0.2)
        return real(self, part, transport, headers)

    monkeypatch.setattr(AllGather, "move", move)

    def rank(group: hvd.Group) -> None:
        handles = [ops.allgather_async(np.ones(1), name=name, group=group) for name in "abc"]
        alone = ops.allreduce_async(1.0, name=f"of rank {group.rank}", group=group)
        with pytest.raises(hvd.MismatchError, match="every rank is waiting"):
            ops.synchronize(alone, group=group)
        for handle in handles:
            assert ops.synchronize(handle, group=group).tolist() == [1, 1]

    run_threads(2, rank)


@pytest.mark.parametrize("waits_first", ["the training thread", "another thread"])
def test_the_training_thread_waits_whatever_other_threads_wait_for_the_same(
    waits_first: str,
) -> None:
    """As with a torch.distributed Work, for which the thread of futures may wait, too."""

    def rank(group: hvd.Group) -> str:
        if group.rank == 1:
            time.sleep(0.5)  # until both threads wait
            with pytest.raises(hvd.MismatchError) as raised:
                ops.barrier(group=group)
            return str(raised.value)
        handle = ops.allreduce_async(1.0, name="a", group=group)

        def wait() -> None:
            time.sleep(0.0 if waits_first == "another thread" else 0.2)
            with pytest.raises(hvd.MismatchError):
                group.synchronize(handle, beside=True)

        other = threading.Thread(target=wait)
        other.start()
        time.sleep(0.2 if waits_first == "another thread" else 0.0)
        with pytest.raises(hvd.MismatchError) as raised:
            group.synchronize(handle)
        other.join()
        return str(raised.value)

    zero, one = run_threads(2, rank)
    assert zero.startswith("allreduce 'a' was submitted by rank 0 but not by rank 1")
    assert one.startswith("barrier was called by rank 1 but not by rank 0")


def test_one_thread_may_wait_for_an_operation_while_another_one_makes_a_blocking_call() -> None:
    """Even if the first one has waited for so long that its rank counts as blocked."""
    has_waited = threading.Event()

    def rank(group: hvd.Group) -> None:
        def call() -> None:
            if group.rank == 0:
                time.sleep(0.3)
                has_waited.set()
            assert ops.allreduce(1.0, hvd.Sum, group=group) == 2

        def wait() -> None:
            handle = ops.allreduce_async(1.0, hvd.Sum, name="a", group=group)
            assert ops.synchronize(handle, group=group) == 2

        if group.rank == 0:
            other = threading.Thread(target=call)
            other.start()
            wait()
            other.join()
        else:
            has_waited.wait()
            time.sleep(0.1)  # the other rank's call waits for the end of a round
            call()
            wait()

    run_threads(2, rank)


def test_a_call_inside_an_asynchronous_operation_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Such as one of a finalizer, which Python may run in any thread."""
    groups: dict[int, hvd.Group] = {}
    real = AllGather.move

    def move(self: AllGather, part: Part, transport: Transport, headers: Any) -> Any:
        with pytest.raises(hvd.HoroLiteError, match="while this thread was in 'allgather 'a'': by"):
            ops.barrier(group=groups[transport.rank])
        return real(self, part, transport, headers)

    monkeypatch.setattr(AllGather, "move", move)

    def rank(group: hvd.Group) -> list[float]:
        groups[group.rank] = group
        handle = ops.allgather_async(np.ones(1), name="a", group=group)
        result: list[float] = ops.synchronize(handle, group=group).tolist()
        return result

    assert run_threads(2, rank) == [[1, 1]] * 2


def test_a_group_is_closed_inside_an_asynchronous_operation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By a finalizer, which Python may run in any thread: what is in flight fails."""
    groups: dict[int, hvd.Group] = {}
    closed = threading.Event()
    real = AllGather.move

    def move(self: AllGather, part: Part, transport: Transport, headers: Any) -> Any:
        if transport.rank == 0:
            with contextlib.suppress(hvd.PeerLostError):  # unless the wait below has raised it
                groups[0].close()
            closed.set()
        return real(self, part, transport, headers)

    monkeypatch.setattr(AllGather, "move", move)

    def rank(group: hvd.Group) -> None:
        groups[group.rank] = group
        handle = ops.allgather_async(np.ones(1), name="a", group=group)
        if group.rank == 0:
            with pytest.raises(hvd.PeerLostError, match="in the middle of an asynchronous operati"):
                handle.wait()
            closed.wait(20)
        else:
            closed.wait(20)
            with contextlib.suppress(hvd.PeerLostError):  # its part may be complete
                handle.wait()
            with pytest.raises(hvd.PeerLostError, match="rank 0 gave up"):
                ops.barrier(group=group)

    run_threads(2, rank)
    assert closed.is_set()


@pytest.mark.parametrize("name", ["allreduce_", "grouped_allreduce_", "broadcast_"])
def test_ranks_may_hold_an_array_in_different_memory_orders(name: str) -> None:
    """Elements are matched by index, by blocking and by asynchronous calls."""

    def rank(group: hvd.Group) -> None:
        order = "CF"[group.rank]
        mine = np.array([[1, 2, 3], [4, 5, 6]], np.float32, order=order) * (1 + group.rank)
        for way in (name, f"{name}async_"):
            x = mine.copy(order="K")
            given = [x] if name.startswith("grouped") else x
            options = {"root_rank": 0} if name == "broadcast_" else {"op": hvd.Sum}
            result = getattr(ops, way)(given, group=group, **options)
            if way != name:
                ops.synchronize(result, group=group)
            factor = 1 if name == "broadcast_" else 3
            wanted = factor * np.array([[1, 2, 3], [4, 5, 6]], np.float32)
            assert x.flags["F_CONTIGUOUS"] == (group.rank == 1)
            np.testing.assert_array_equal(x, wanted, err_msg=way)

    run_threads(2, rank)


def test_an_error_of_one_rank_in_an_operation_under_way_is_reported_to_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The handle raises the error itself; other handles, later calls and peers name its origin."""
    real = AllGather.move

    def fails(call: AllGather, part: Part, transport: Transport, headers: Any) -> Any:
        if transport.rank == 0:
            raise RuntimeError("no memory left in the allocator")
        return real(call, part, transport, headers)

    monkeypatch.setattr(AllGather, "move", fails)

    def rank(group: hvd.Group) -> list[tuple[type, str]]:
        names = ("first", "second")
        handles = [ops.allgather_async(np.ones(3), name=name, group=group) for name in names]
        seen = []
        for handle in (*handles, *handles):
            with pytest.raises(hvd.HoroLiteError if group.rank else RuntimeError) as caught:
                group.synchronize(handle)
            seen.append((caught.type, str(caught.value)))
        assert seen[:2] == seen[2:]
        with pytest.raises(hvd.PeerLostError) as late:
            ops.allreduce_async(np.ones(3), group=group)
        return [*seen[:2], (late.type, str(late.value))]

    zero, one = run_threads(2, rank)
    assert zero[0] == (RuntimeError, "no memory left in the allocator")
    for kind, text in (*zero[1:], *one):
        assert kind is hvd.PeerLostError
        assert "allgather 'first' raised RuntimeError: no memory left in the allocator" in text
    assert "in flight: allgather 'second'" in zero[1][1]
    assert all("rank 0 gave up" in text for _, text in one)


# (number of ranks, ranks of each host, transport); for MPI's library, layouts of hosts are alike
WORLDS = [
    pytest.param(2, "", "shm", marks=pytest.mark.quick),
    pytest.param(3, "", "shm", marks=pytest.mark.quick),
    (4, "", "shm"),
    pytest.param(2, "1,1", "mpi", marks=[pytest.mark.quick, pytest.mark.mpi]),
    (3, "1,1,1", "mpi"),
    pytest.param(3, "2,1", "mpi", marks=[pytest.mark.quick, pytest.mark.mpi]),
    (4, "2,2", "mpi"),
    (4, "1,3", "mpi"),
]


@pytest.mark.served
@pytest.mark.parametrize(("ranks", "hosts", "transport"), WORLDS)
def test_processes(ranks: int, hosts: str, transport: str) -> None:
    env = {"HORO_LITE_OVERLAP": "always"}  # some checks look at what is sent early
    said = on_ranks(checks.in_a_world, ranks, ranks, hosts=hosts, env=env, timeout_s=60)
    assert said == [f"{len(checks.CHECKS)} checks passed over {transport}"] * ranks


@pytest.mark.mpi
@pytest.mark.parametrize("launcher", [False, True])
def test_one_process(launcher: bool) -> None:
    script = "import checks; print(checks.in_a_world(1))"
    result = run_ranks(script, 1, launcher=launcher, timeout_s=60).check()
    assert "over solo" in result.stdout
