"""One rank's program to test the stand-in: `checks.py RANK SIZE FOLDER NAME…`, with ctypes only.

Ranks exchange a unique id through a file in FOLDER. A failed assertion ends the rank with a
traceback.
"""

from __future__ import annotations

import ctypes as c
import faulthandler
import os
import queue
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.generic]

SUCCESS, SYSTEM_ERROR, INVALID_ARGUMENT, INVALID_USAGE, REMOTE_ERROR, IN_PROGRESS = 0, 2, 4, 5, 6, 7
TYPES = {
    np.dtype(name): number
    for number, name in enumerate(
        ["i1", "u1", "i4", "u4", "i8", "u8", "f2", "f4", "f8", ml_dtypes.bfloat16]
    )
}
OPS = {"sum": np.add, "prod": np.multiply, "max": np.maximum, "min": np.minimum}

WORK = c.CFUNCTYPE(None, c.c_void_p)
ENQUEUE = c.CFUNCTYPE(None, c.c_void_p, c.c_void_p, c.c_void_p)
TOUCH = c.CFUNCTYPE(None, c.c_void_p, c.c_void_p, c.c_size_t, c.c_bool, c.c_char_p)
CAPTURE = c.CFUNCTYPE(c.c_bool, c.c_void_p, c.c_void_p, c.c_void_p)


class Id(c.Structure):
    _fields_ = [("bytes", c.c_char * 128)]


class Config(c.Structure):
    _fields_ = [
        ("size", c.c_size_t),
        ("magic", c.c_uint),
        ("version", c.c_uint),
        ("blocking", c.c_int),
        ("more", c.c_int * 3),
        ("net_name", c.c_char_p),
        ("split_share", c.c_int),
    ]

    def __init__(self, blocking: int) -> None:
        undefined = -(2**31)
        super().__init__(48, 0xCAFEBEEF, 21800, blocking, (undefined,) * 3, None, undefined)


class Stream:
    """A FakeStreamHead, and the thread that executes the work queued on it."""

    def __init__(self) -> None:
        self.works: queue.Queue[Callable[[], None]] = queue.Queue()
        self._enqueue = ENQUEUE(
            lambda _, work, argument: self.works.put(lambda: WORK(work)(argument))
        )
        self._touch = TOUCH(lambda *_: None)
        self._capture = CAPTURE(lambda *_: False)
        self._head = (c.c_void_p * 3)(
            *(c.cast(f, c.c_void_p) for f in (self._enqueue, self._touch, self._capture))
        )
        self.address = c.addressof(self._head)
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while True:
            self.works.get()()

    def record(self) -> threading.Event:
        """Return an event that is set once all work queued so far is done."""
        event = threading.Event()
        self.works.put(event.set)
        return event

    def hold(self) -> threading.Event:
        """Return an event that later work waits for."""
        event = threading.Event()
        self.works.put(lambda: finish(event))
        return event


def finish(event: threading.Event) -> None:
    assert event.wait(10), "what should have ended has not"


lib = c.CDLL(os.environ["HORO_LITE_NCCL_LIB"])
for name in ("Broadcast", "AllReduce", "ReduceScatter"):
    types = [c.c_void_p, c.c_void_p, c.c_size_t, c.c_int, c.c_int, c.c_void_p, c.c_void_p]
    getattr(lib, f"nccl{name}").argtypes = types
for name in ("Send", "Recv"):
    types = [c.c_void_p, c.c_size_t, c.c_int, c.c_int, c.c_void_p, c.c_void_p]
    getattr(lib, f"nccl{name}").argtypes = types
lib.ncclCommInitRankConfig.argtypes = [c.c_void_p, c.c_int, Id, c.c_int, c.c_void_p]
lib.ncclGetLastError.restype = c.c_char_p


class Comm:
    """One rank's communicator. Methods return the library's results."""

    def __init__(self, handle: c.c_void_p) -> None:
        self.handle = handle

    @property
    def state(self) -> int:
        state = c.c_int(-1)
        assert lib.ncclCommGetAsyncError(self.handle, c.byref(state)) == SUCCESS
        return state.value

    def settle(self, timeout_s: float = 30.0) -> int:
        end = time.monotonic() + timeout_s
        while self.state == IN_PROGRESS and time.monotonic() < end:
            time.sleep(0.001)
        return self.state

    def all_reduce(
        self, x: Array, stream: Stream, op: str = "sum", out: Array | None = None
    ) -> int:
        to = (x if out is None else out).ctypes.data
        arguments = (x.size, TYPES[x.dtype], list(OPS).index(op), self.handle, stream.address)
        return lib.ncclAllReduce(x.ctypes.data, to, *arguments)

    def reduce_scatter(self, x: Array, out: Array, stream: Stream, op: str = "sum") -> int:
        arguments = (out.size, TYPES[x.dtype], list(OPS).index(op), self.handle, stream.address)
        return lib.ncclReduceScatter(x.ctypes.data, out.ctypes.data, *arguments)

    def broadcast(self, x: Array, root: int, stream: Stream) -> int:
        at = x.ctypes.data
        return lib.ncclBroadcast(at, at, x.size, TYPES[x.dtype], root, self.handle, stream.address)

    def send(self, x: Array, peer: int, stream: Stream) -> int:
        where = (peer, self.handle, stream.address)
        return lib.ncclSend(x.ctypes.data, x.size, TYPES[x.dtype], *where)

    def recv(self, x: Array, peer: int, stream: Stream) -> int:
        where = (peer, self.handle, stream.address)
        return lib.ncclRecv(x.ctypes.data, x.size, TYPES[x.dtype], *where)

    def abort(self) -> int:
        return lib.ncclCommAbort(self.handle)

    def destroy(self) -> int:
        return lib.ncclCommDestroy(self.handle)


class Rank:
    def __init__(self, rank: int, size: int, folder: Path) -> None:
        self.rank = rank
        self.size = size
        self.folder = folder
        self.n_ids = 0

    def data(self, n: int, dtype: np.dtype, seed: int = 0) -> list[Array]:
        """Return the contributions of all ranks; products of small integers stay small."""
        rng = np.random.default_rng(seed)
        if dtype.kind in "iu":
            return [rng.integers(1, 4, n).astype(dtype) for _ in range(self.size)]
        return [rng.standard_normal(n).astype(dtype) for _ in range(self.size)]

    def meet(self, name: str) -> None:
        """Wait for all ranks, without the library."""
        (self.folder / f"{name}.{self.rank}").touch()
        self.wait_for(lambda: all((self.folder / f"{name}.{r}").exists() for r in range(self.size)))

    def wait_for(self, done: Callable[[], bool]) -> None:
        end = time.monotonic() + 30
        while not done():
            assert time.monotonic() < end, "a peer is missing"
            time.sleep(0.005)

    def start(self, blocking: int) -> tuple[int, Comm]:
        """Return result and handle of a communicator of all ranks, with its own id."""
        self.n_ids += 1
        path = self.folder / f"id{self.n_ids}"
        unique = Id()
        if self.rank == 0:
            assert lib.ncclGetUniqueId(c.byref(unique)) == SUCCESS
            path.with_suffix(".new").write_bytes(bytes(unique))
            path.with_suffix(".new").rename(path)
        else:
            self.wait_for(path.exists)
            unique = Id.from_buffer_copy(path.read_bytes())
        handle = c.c_void_p()
        result = lib.ncclCommInitRankConfig(
            c.byref(handle), self.size, unique, self.rank, c.byref(Config(blocking))
        )
        return result, Comm(handle)

    def comm(self, blocking: int = 1) -> Comm:
        _, comm = self.start(blocking)
        assert comm.settle() == SUCCESS
        return comm


def reductions(me: Rank) -> None:
    """Every type and op, in rank order with the type's own rounding after each step."""
    comm, stream = me.comm(), Stream()
    for dtype in TYPES:
        for op, combine in OPS.items():
            for n in (0, 1, 1000, 3 * (1 << 20) // dtype.itemsize + 8 if op == "sum" else 7):
                parts = me.data(n, dtype, seed=n)
                expected = parts[0]
                for part in parts[1:]:
                    expected = combine(expected, part).astype(dtype)
                mine = parts[me.rank].copy()
                if n == 1000:  # not in place
                    out = np.zeros_like(mine)
                    assert comm.all_reduce(mine, stream, op, out) == SUCCESS
                else:
                    out = mine
                    assert comm.all_reduce(mine, stream, op) == SUCCESS
                finish(stream.record())
                assert out.tobytes() == expected.tobytes(), (dtype, op, n)
                assert n != 1000 or mine.tobytes() == parts[me.rank].tobytes()
                if n % me.size == 0:
                    scattered(me, comm, stream, op, parts, expected)
    # In another order, the same on all ranks.
    os.environ["HORO_LITE_FAKE_NCCL_SEED"] = "1"
    parts = me.data(10_000, np.dtype("f4"))
    mine = parts[me.rank].copy()
    assert comm.all_reduce(mine, stream) == SUCCESS
    finish(stream.record())
    assert np.allclose(mine, sum(parts), atol=1e-5)
    assert me.size == 2 or np.any(mine != sum(parts))
    least, most = mine.copy(), mine.copy()
    assert comm.all_reduce(least, stream, "min") == comm.all_reduce(most, stream, "max") == SUCCESS
    finish(stream.record())
    assert least.tobytes() == most.tobytes()
    del os.environ["HORO_LITE_FAKE_NCCL_SEED"]
    assert comm.destroy() == SUCCESS


def scattered(
    me: Rank, comm: Comm, stream: Stream, op: str, parts: list[Array], expected: Array
) -> None:
    """Each rank receives the part of its number, in place or elsewhere; nothing else changes."""
    n = len(expected) // me.size
    own = slice(n * me.rank, n * (me.rank + 1))
    for is_in_place in (False, True):
        mine = parts[me.rank].copy()
        out = mine[own] if is_in_place else np.zeros_like(mine[own])
        assert comm.reduce_scatter(mine, out, stream, op) == SUCCESS
        finish(stream.record())
        assert out.tobytes() == expected[own].tobytes(), (mine.dtype, op, n)
        others = np.delete(np.arange(len(mine)), own if is_in_place else [])
        assert mine[others].tobytes() == parts[me.rank][others].tobytes()
    if n > 1:
        wrong = mine[n * me.rank + 1 :][:n] if me.rank == 0 else mine[n * me.rank - 1 :][:n]
        assert comm.reduce_scatter(mine, wrong, stream, op) == INVALID_ARGUMENT


def broadcasts(me: Rank) -> None:
    comm, stream = me.comm(), Stream()
    for root in range(me.size):
        parts = me.data(400_000, np.dtype("f8"), seed=root)
        mine = parts[me.rank].copy()
        assert comm.broadcast(mine, root, stream) == SUCCESS
        finish(stream.record())
        assert np.array_equal(mine, parts[root])


def messages(me: Rank) -> None:
    """All send to all, including themselves, twice, in one group, with different sizes."""
    comm, stream = me.comm(), Stream()

    def message(source: int, to: int, turn: int) -> Array:
        n = [0, 3, 50_000][(source + 2 * to + turn) % 3]
        return np.random.default_rng([source, to, turn]).standard_normal(n).astype("f4")

    received = {}
    assert lib.ncclGroupStart() == SUCCESS
    for turn in range(2):
        for peer in range(me.size):
            received[peer, turn] = np.zeros_like(message(peer, me.rank, turn))
            assert comm.recv(received[peer, turn], peer, stream) == SUCCESS
    outgoing = [message(me.rank, peer, turn) for turn in range(2) for peer in range(me.size)]
    for i, x in enumerate(outgoing):
        assert comm.send(x, i % me.size, stream) == SUCCESS
    assert lib.ncclGroupEnd() == SUCCESS
    finish(stream.record())
    for (peer, turn), got in received.items():
        assert np.array_equal(got, message(peer, me.rank, turn)), (peer, turn)

    # Around a ring, without groups.
    x = np.array([me.rank], "i8")
    if me.rank > 0:
        assert comm.recv(x, me.rank - 1, stream) == SUCCESS
        finish(stream.record())
        x += 1
    if me.rank < me.size - 1:
        assert comm.send(x, me.rank + 1, stream) == SUCCESS
    finish(stream.record())
    assert x[0] == me.rank


def order(me: Rank) -> None:
    """Data is read when the stream reaches the call; calls keep their order across streams."""
    comm, first, second = me.comm(), Stream(), Stream()
    x, y = np.full(5, 1.0), np.full(5, 1.0)
    gate = first.hold()
    assert comm.all_reduce(x, first) == SUCCESS
    assert comm.all_reduce(y, second) == SUCCESS
    x += me.rank
    later = second.record()
    assert not later.wait(0.1), "the second call overtook the first"
    assert np.all(x == 1 + me.rank)
    gate.set()
    finish(first.record())
    finish(later)
    assert np.all(x == sum(1 + r for r in range(me.size)))
    assert np.all(y == me.size)

    # Calls between GroupStart and GroupEnd are queued at the end, or not at all.
    assert lib.ncclGroupStart() == SUCCESS
    assert comm.all_reduce(x, first) == SUCCESS
    finish(first.record())
    assert np.all(x == sum(1 + r for r in range(me.size)))
    assert comm.broadcast(y, me.size, first) == INVALID_ARGUMENT
    assert lib.ncclGroupEnd() == INVALID_ARGUMENT
    finish(first.record())
    assert np.all(x == sum(1 + r for r in range(me.size)))
    assert lib.ncclGroupEnd() == INVALID_USAGE
    assert comm.all_reduce(y, first) == SUCCESS  # the next is not affected
    finish(first.record())
    assert np.all(y == me.size**2)


def splits(me: Rank, blocking: int) -> None:
    parent, stream = me.comm(blocking), Stream()
    last = me.size - 1
    color = -1 if me.rank == last and me.size > 2 else me.rank % 2
    child = c.c_void_p(1)
    seen = me.folder / "the split has begun"
    if not blocking and me.rank == 0:
        me.wait_for(seen.exists)
    arguments = (color, -me.rank, c.byref(child), None)
    result = lib.ncclCommSplit(parent.handle, *arguments)
    if blocking:
        assert result == SUCCESS
    else:
        assert result == SUCCESS, "although it has only begun"
        if me.rank == 1:
            assert child.value is None
            assert parent.state == IN_PROGRESS
            assert parent.all_reduce(np.ones(1), stream) == INVALID_ARGUMENT
            seen.touch()
        assert parent.settle() == SUCCESS
    members = [r for r in reversed(range(me.size)) if r % 2 == color and (r < last or me.size == 2)]
    if color < 0:
        assert child.value is None
    else:
        comm = Comm(child)
        assert comm.settle() == SUCCESS
        x = np.array([me.rank], "i4")
        comm.broadcast(x, 0, stream)
        assert comm.settle() == SUCCESS
        finish(stream.record())
        assert x[0] == members[0], "the key determines the order"
        comm.all_reduce(x, stream)
        assert comm.settle() == SUCCESS
        finish(stream.record())
        assert x[0] == members[0] * len(members)
        assert comm.destroy() == SUCCESS
    y = np.ones(3, "f4")
    parent.all_reduce(y, stream)
    assert parent.settle() == SUCCESS
    finish(stream.record())
    assert np.all(y == me.size), "the parent continues"


def splits_blocking(me: Rank) -> None:
    splits(me, 1)


def splits_non_blocking(me: Rank) -> None:
    splits(me, 0)


def late_peer(me: Rank) -> None:
    """A non-blocking communicator is in progress until all are there; so is one that operates."""
    stream = Stream()
    if me.rank == 1:
        me.wait_for((me.folder / "go").exists)
    result, comm = me.start(blocking=0)
    assert result == IN_PROGRESS
    if me.rank == 0:
        time.sleep(0.1)
        assert comm.state == IN_PROGRESS
        assert comm.all_reduce(np.ones(1), stream) == INVALID_ARGUMENT
        assert b"before the previous operation" in lib.ncclGetLastError(None)
        assert lib.ncclCommDestroy(comm.handle) == INVALID_ARGUMENT
        (me.folder / "go").touch()
    assert comm.settle() == SUCCESS

    x = np.ones(4)
    launched_later = os.environ["HORO_LITE_FAKE_NCCL_VERSION"] == "22707"
    assert comm.all_reduce(x, stream) == (IN_PROGRESS if launched_later else SUCCESS)
    assert comm.settle() == SUCCESS
    finish(stream.record())
    assert np.all(x == me.size)

    assert lib.ncclCommFinalize(comm.handle) == IN_PROGRESS
    assert comm.settle() == SUCCESS
    assert lib.ncclCommFinalize(comm.handle) == INVALID_ARGUMENT
    assert comm.all_reduce(x, stream) == INVALID_USAGE
    assert comm.destroy() == SUCCESS
    assert comm.destroy() == INVALID_ARGUMENT


def abort(me: Rank) -> None:
    """An abort releases ranks that wait for a missing peer, and nothing is written."""
    comm, stream = me.comm(), Stream()
    x = np.full(3, 5.0)
    if me.rank == 0:
        assert comm.all_reduce(x, stream) == SUCCESS
        assert comm.all_reduce(x, stream) == SUCCESS
        done = stream.record()
        assert not done.wait(0.2)
        assert comm.abort() == SUCCESS
        finish(done)
        assert np.all(x == 5)
    me.meet("aborted")
    if me.rank != 0:
        assert comm.abort() == SUCCESS

    # During its creation.
    if me.rank == 0:
        result, half = me.start(blocking=0)
        assert result == IN_PROGRESS
        assert half.abort() == SUCCESS
        assert half.abort() == INVALID_ARGUMENT
    else:
        me.n_ids += 1


def mismatch(me: Rank) -> None:
    """Ranks with different calls hang until they are aborted."""
    big, ints, stream = np.ones(8), np.ones(8, "i8"), Stream()
    calls: list[Callable[[Comm], int]] = [
        lambda comm: comm.all_reduce(big[: 4 + me.rank], stream),
        lambda comm: comm.all_reduce(big if me.rank else ints, stream),
        lambda comm: comm.all_reduce(big, stream, "max" if me.rank else "sum"),
        lambda comm: comm.broadcast(big, me.rank, stream),
        lambda comm: comm.all_reduce(big, stream) if me.rank else comm.broadcast(big, 0, stream),
        lambda comm: comm.send(big[:3], 0, stream) if me.rank else comm.recv(big[:4], 1, stream),
    ]
    comms = [me.comm() for _ in calls]
    for i, (call, comm) in enumerate(zip(calls, comms, strict=True)):
        assert call(comm) == SUCCESS
        done = stream.record()
        assert not done.wait(0.1), f"case {i}"
        me.meet(f"case{i}")
        assert comm.abort() == SUCCESS
        finish(done)
    assert np.all(big == 1)
    assert np.all(ints == 1)


def init_fails(me: Rank) -> None:
    """Rank 1's first communicator fails, its second does not; the others wait meanwhile."""
    result, comm = me.start(blocking=0)
    assert result == IN_PROGRESS
    if me.rank == 1:
        assert comm.settle() == SYSTEM_ERROR
        assert b"INIT_FAILS" in lib.ncclGetLastError(None)
    else:
        assert comm.settle(0.2) == IN_PROGRESS
    assert comm.abort() == SUCCESS
    me.comm(blocking=0)


def init_hangs(me: Rank) -> None:
    result, comm = me.start(blocking=0)
    assert result == IN_PROGRESS
    assert comm.settle(0.2) == IN_PROGRESS
    me.meet("waited")
    assert comm.abort() == SUCCESS
    me.comm(blocking=0)


def operation_fails(me: Rank) -> None:
    """The third operation of rank 1 fails, on its stream, and the others hang."""
    comm, stream = me.comm(), Stream()
    x = np.ones(2)
    for _ in range(2):
        assert comm.all_reduce(x, stream) == SUCCESS
    two = stream.record()
    assert comm.all_reduce(x, stream) == SUCCESS
    done = stream.record()
    finish(two)
    if me.rank == 1:
        me.wait_for(lambda: comm.state != SUCCESS)
        assert comm.state == REMOTE_ERROR
        assert comm.all_reduce(x, stream) == REMOTE_ERROR
        assert comm.destroy() == REMOTE_ERROR
    assert not done.wait(0.1)
    assert np.all(x == me.size**2)
    assert comm.state == (REMOTE_ERROR if me.rank == 1 else SUCCESS)
    me.meet("seen")
    assert comm.abort() == SUCCESS
    finish(done)
    again = me.comm()
    assert again.all_reduce(x, stream) == SUCCESS
    finish(stream.record())
    assert np.all(x == me.size**3)


def registers(me: Rank) -> None:
    comm, memory, handle, window = me.comm(), c.c_void_p(), c.c_void_p(), c.c_void_p()
    assert lib.ncclMemAlloc(c.byref(memory), c.c_size_t(10_000)) == SUCCESS
    assert memory.value is not None
    assert memory.value % 4096 == 0
    n_bytes = c.c_size_t(8192)
    results = [
        lib.ncclCommRegister(comm.handle, memory, n_bytes, c.byref(handle)),
        lib.ncclCommWindowRegister(comm.handle, memory, n_bytes, c.byref(window), 1),
    ]
    failure = os.environ.get("HORO_LITE_FAKE_NCCL_REGISTER_FAILS")
    assert results == [SYSTEM_ERROR if failure == "1" else SUCCESS] * 2
    assert (handle.value is None) == (window.value is None) == (failure is not None)
    if failure != "1":
        assert lib.ncclCommDeregister(comm.handle, handle) == SUCCESS
        assert lib.ncclCommWindowDeregister(comm.handle, window) == SUCCESS
    if failure is None:
        assert lib.ncclCommDeregister(comm.handle, handle) == INVALID_ARGUMENT
    assert lib.ncclMemFree(memory) == SUCCESS


def leaves_nothing(me: Rank) -> None:
    """No descriptors or mappings remain after a communicator and its split are destroyed."""
    comm, child = me.comm(), c.c_void_p()
    assert lib.ncclCommSplit(comm.handle, 0, 0, c.byref(child), None) == SUCCESS
    assert "fake_nccl (deleted)" in Path("/proc/self/maps").read_text()
    assert Comm(child).destroy() == SUCCESS
    assert comm.destroy() == SUCCESS
    assert "fake_nccl (deleted)" not in Path("/proc/self/maps").read_text()
    links = [fd.readlink() for fd in Path("/proc/self/fd").iterdir() if fd.is_symlink()]
    assert not [link for link in links if "fake_nccl" in link.name]


if __name__ == "__main__":
    _, rank, size, folder, *checks = sys.argv
    faulthandler.dump_traceback_later(150, exit=True)  # if it hangs
    me = Rank(int(rank), int(size), Path(folder))
    for check in checks:
        globals()[check](me)
    os._exit(0)  # the streams' threads still exist
