"""Check that all ranks are about to do the same thing; if not, report which ranks differ."""

from __future__ import annotations

import pickle
import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from horo_lite import _native
from horo_lite.errors import (
    GROUP_IS_LOST,
    RAISED_ALIKE,
    AllocationError,
    MismatchError,
    in_one_line,
    printable,
    ranks_by,
    ranks_in_words,
)

if TYPE_CHECKING:
    from horo_lite.transports.interface import Transport

T = TypeVar("T")

StandIn: TypeAlias = "tuple[int, float, bytes]"
"""How ranks that have joined take part in an operation: the count and the weight in their headers,
and what `Call.stand_in` pickled."""

Participation: TypeAlias = "Callable[[Sequence[int]], StandIn]"
"""Given the numbers of the ranks that have joined, return how they take part. Raise MismatchError
if they cannot."""


def digest_of(contract: object) -> int:
    """Return a 63-bit hash of everything that must be the same on all ranks."""
    return _native.hash64(repr(contract).encode())


def needs_all(label: str) -> Participation:
    """Return the participation of an operation that is impossible while a rank has joined."""

    def refuse(joined: Sequence[int]) -> StandIn:
        who = ", ".join(map(str, joined))
        raise MismatchError(
            f"{label} needs every rank, but rank {who} has no more batches and waits in join(). "
            "Do this before the first rank joins, or after the last one has. Until then only "
            "reductions (minima, maxima and products without prescale_factor), allgathers, "
            "broadcasts from ranks that have not joined, and barriers are possible; on GPUs none."
        )

    return refuse


def give_up_unless_alike(transport: Transport, error: BaseException) -> None:
    """Abandon the group if only this rank raises `error`, which ended an operation in progress.

    Otherwise the others would wait for this rank forever, or take its next operation for the rest
    of this one. They raise PeerLostError, and so does the next operation of this rank.
    """
    if not isinstance(error, (*RAISED_ALIKE, *GROUP_IS_LOST)):
        transport.members.abandon(in_one_line(error))


# A result of this size or more is allocated before the ranks begin to transfer data. Agreeing on
# the allocation costs no more than the transfer of such a result.
LARGE_BYTES = 1 << 20


def allocated(
    transport: Transport, label: str, n_bytes: Sequence[int], allocate: Callable[[], T]
) -> T:
    """Return the result of `allocate()`, once every rank has allocated its own.

    Every rank calls it, in an operation that all have agreed on. `n_bytes[r]` is the size of rank
    r's result, known to all. A rank that fails to allocate a small result abandons the group.

    Raises:
        AllocationError: A rank has no memory for its result; raised on every rank.
    """
    if max(n_bytes) < LARGE_BYTES:
        return allocate()
    failure, memory = "", None
    try:
        memory = allocate()
    except Exception as error:  # frameworks have their own errors for it
        failure = in_one_line(error)
    headers = transport.agree(0, int(bool(failure)), label=label)
    failed = [r for r, header in enumerate(headers) if header.count]
    if not failed:
        assert memory is not None
        return memory
    texts = allgather_texts(transport, failure)
    raise AllocationError(
        "; ".join(
            f"rank {transport.ranks[r]} could not allocate {in_units(n_bytes[r])} for the result "
            f"of {label} ({texts[r]})"
            for r in failed
        )
        + ". No data was moved on any rank, and the world remains usable"
    )


def in_units(n_bytes: int) -> str:
    """Return a human-readable number of bytes, such as "4.0 GiB"."""
    size = float(n_bytes)
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.{0 if unit == 'bytes' else 1}f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def allgather_objects(transport: Transport, mine: object) -> list[Any]:
    """Return every rank's object, in rank order, in an operation that all ranks execute."""
    pickled = pickle.dumps(mine)
    headers = transport.agree(0, len(pickled), label="an explanation")
    sizes = [header.count for header in headers]
    return [pickle.loads(one) for one in allgather_bytes(transport, pickled, sizes)]


def allgather_texts(transport: Transport, text: str) -> list[str]:
    """Return every rank's text, in rank order."""
    return allgather_objects(transport, printable(text))


def on_ranks(ranks: Sequence[int], texts: Sequence[str]) -> str:
    """Join the non-empty texts, each with its rank."""
    pairs = zip(ranks, texts, strict=True)
    return "; ".join(f"on rank {rank}, {text}" for rank, text in pairs if text)


def allgather_row(transport: Transport, row: NDArray[Any]) -> NDArray[Any]:
    """Return every rank's array as a row of a table; all have the same shape and dtype."""
    data = row.tobytes()
    everyone = allgather_bytes(transport, data, [len(data)] * transport.size)
    return np.array([np.frombuffer(one, row.dtype).reshape(row.shape) for one in everyone])


def allgather_bytes(
    transport: Transport, mine: bytes, sizes: Sequence[int], label: str = "an all-gather"
) -> list[bytes]:
    """Return every rank's bytes, in rank order; all know the sizes."""
    if not any(sizes):
        return [b""] * len(sizes)
    n_bytes = [sum(sizes)] * transport.size
    parts = allocated(
        transport, label, n_bytes, lambda: [np.empty(size, np.uint8) for size in sizes]
    )
    parts[transport.rank] = np.frombuffer(mine, np.uint8)
    tensors = [_native.Tensors([part], writable=False) for part in parts]
    transport.host.allgather(tensors[transport.rank], tensors)
    return [part.tobytes() for part in parts]


def explain(label: str, descriptions: Sequence[str], ranks: Sequence[int] = ()) -> str:
    """Return the text of a MismatchError: the first line in which the ranks' descriptions differ.

    `ranks` are the ranks' numbers in the world, if not all of them take part.
    """
    lines = [description.split("\n") for description in descriptions]
    longest = max(map(len, lines))
    for i in range(longest):
        texts = [line[i] if i < len(line) else "nothing more" for line in lines]
        if len(set(texts)) > 1:
            break
    whose = ranks_by(texts, ranks)
    who = "; ".join(f"{ranks_in_words(ranks)}: {text}" for text, ranks in whose.items())
    # Asynchronous operations are matched by name, in any order; the first line is the label.
    # Those without a name are numbered, in horo_lite.torch as Horovod's: 'noname.1'. What is in
    # quotes otherwise is the user's.
    if re.match(r"[^']*( number |'noname\.)\d", label):
        advice = (
            "Operations without a name are matched by their number: every rank must begin them "
            "in the same order, or give them names (name=)."
        )
    elif label.endswith("'") and i > 0:
        advice = (
            "Operations of one name must have the same shapes, dtypes and options on every rank."
        )
    else:
        advice = "Every rank must make the same calls in the same order with the same options."
    return f"ranks disagree on {label}: first difference: {who}. {advice}"
