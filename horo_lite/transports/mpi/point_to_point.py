"""Messages over a communicator, for the all-reduce in C++."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from horo_lite import _native

if TYPE_CHECKING:
    from mpi4py import MPI

    from horo_lite.transports.mpi.executor import MainThreadExecutor


def _largest_message() -> int | None:
    """Return what the MPI library sends best.

    Open MPI announces what is larger than 64 KiB with its header, and over TCP the answer queues
    behind what is being sent: all-reduces took 1.8 times as long.
    """
    from mpi4py import MPI

    return 60 << 10 if MPI.Get_library_version().startswith("Open MPI") else None


def point_to_point(comm: MPI.Comm) -> _native.MpiPointToPoint:
    """Return what calls MPI's functions itself, without Python; for threads that may."""
    from mpi4py import MPI

    library = ctypes.CDLL(MPI.__file__)  # finds them in the library that mpi4py is linked to
    names = ("MPI_Isend", "MPI_Irecv", "MPI_Iallgather", "MPI_Testall", "MPI_Error_string")
    functions = [ctypes.cast(getattr(library, name), ctypes.c_void_p).value or 0 for name in names]

    def handle(of: MPI.Comm | MPI.Datatype) -> bytes:
        return ctypes.string_at(MPI._addressof(of), MPI._sizeof(of))

    return _native.MpiPointToPoint.over(
        functions,
        handle(comm),
        handle(MPI.BYTE),
        MPI._sizeof(MPI.Status),
        _largest_message(),
    )


def executed_point_to_point(
    comm: MPI.Comm, executor: MainThreadExecutor, serves: bool
) -> _native.PointToPoint:
    """Return the same where only one thread may call MPI.

    It is that thread if it `serves` others, which it then does while it waits.
    """
    from mpi4py import MPI

    call: Callable[..., Any] = executor.call

    def post(
        receive: Sequence[tuple[int, int, int, int]], send: Sequence[tuple[int, int, int, int]]
    ) -> list[MPI.Request]:
        def memory(address: int, n_bytes: int) -> Any:
            return [MPI.buffer.fromaddress(address, n_bytes), MPI.BYTE]

        receiving = [comm.Irecv(memory(at, n), peer, tag) for peer, tag, at, n in receive]
        return receiving + [comm.Isend(memory(at, n), peer, tag) for peer, tag, at, n in send]

    def start(
        receive: Sequence[tuple[int, int, int, int]], send: Sequence[tuple[int, int, int, int]]
    ) -> Callable[[], bool]:
        requests = call(post, receive, send)

        def done() -> bool:
            if serves:
                executor.serve(0.0)
            return bool(call(MPI.Request.Testall, requests))

        return done

    return _native.PointToPoint.calling(start, _largest_message())
