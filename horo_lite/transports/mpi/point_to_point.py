"""Messages over a communicator without Python: the MPI functions that mpi4py has loaded."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

from horo_lite import _native

if TYPE_CHECKING:
    from mpi4py import MPI

_FUNCTIONS = (
    "MPI_Isend",
    "MPI_Irecv",
    "MPI_Iallgather",
    "MPI_Testall",
    "MPI_Iprobe",
    "MPI_Recv",
    "MPI_Get_count",
    "MPI_Finalized",
    "MPI_Error_string",
)


def largest_message() -> int | None:
    """Return the MPI library's best size of messages in bytes; None if there is no limit.

    Open MPI sends more than 64 KiB by rendezvous, and over TCP the answer queues behind data that
    is being sent: all-reduces took 1.8 times as long.
    """
    from mpi4py import MPI

    return 60 << 10 if MPI.Get_library_version().startswith("Open MPI") else None


def point_to_point(comm: MPI.Comm) -> _native.MpiPointToPoint:
    """Return an object that calls MPI without Python; for threads that may call MPI."""
    from mpi4py import MPI

    library = ctypes.CDLL(MPI.__file__)  # finds them in the library that mpi4py is linked to
    functions = [
        ctypes.cast(getattr(library, name), ctypes.c_void_p).value or 0 for name in _FUNCTIONS
    ]
    # Their offsets in a status differ between libraries.
    source, tag = 1234567, 7654321
    status = MPI.Status()
    status.Set_source(source)
    status.Set_tag(tag)

    def in_memory(of: MPI.Comm | MPI.Datatype | MPI.Status) -> bytes:
        return ctypes.string_at(MPI._addressof(of), MPI._sizeof(of))

    def place(number: int) -> int:
        return in_memory(status).index(bytes(ctypes.c_int(number)))

    return _native.MpiPointToPoint.over(
        functions,
        in_memory(comm),
        in_memory(MPI.BYTE),
        MPI.ANY_SOURCE,
        MPI.ANY_TAG,
        MPI._sizeof(MPI.Status),
        place(source),
        place(tag),
        largest_message(),
    )
