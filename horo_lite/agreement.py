"""Whether all ranks are about to do the same thing; and if not, who has what."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from horo_lite import _native
from horo_lite.errors import MismatchError

if TYPE_CHECKING:
    from horo_lite.transports import Header, Transport


def digest_of(contract: object) -> int:
    """63 bits of everything that must be alike on all ranks."""
    return _native.hash64(repr(contract).encode())


def agree(
    transport: Transport,
    label: str,
    contract: object,
    describe: Callable[[], str],
    count: int = 0,
    weight: float = 1.0,
) -> list[Header]:
    """Everyone's header, now that all ranks do the same thing; MismatchError if they do not."""
    digest = digest_of(contract)
    headers = transport.agree(digest, count, weight, label=label)
    if any(header.digest != digest for header in headers):
        raise MismatchError(explain(label, told(transport, describe()), transport.ranks))
    return headers


def told(transport: Transport, text: str) -> list[str]:
    """What every rank says after digests differed: all do it in this way."""
    mine = text.encode()
    headers = transport.agree(0, len(mine), label="an explanation")
    sizes = [header.count for header in headers]
    return [words.decode() for words in exchange_bytes(transport, mine, sizes)]


def exchange_bytes(transport: Transport, mine: bytes, sizes: Sequence[int]) -> list[bytes]:
    """What every rank has to say, in rank order; all know the sizes."""
    parts = [np.empty(size, np.uint8) for size in sizes]
    parts[transport.rank] = np.frombuffer(mine, np.uint8)
    tensors = [_native.Tensors([part], writable=False) for part in parts]
    transport.host.allgather(tensors[transport.rank], tensors)
    return [part.tobytes() for part in parts]


def explain(label: str, descriptions: Sequence[str], ranks: Sequence[int] = ()) -> str:
    """The text of a MismatchError, from one description a rank: the first line that differs.

    `ranks` are the world's numbers of the ranks, where not all of them take part.
    """
    lines = [description.split("\n") for description in descriptions]
    longest = max(map(len, lines))
    for i in range(longest):
        said = [line[i] if i < len(line) else "nothing more" for line in lines]
        if len(set(said)) > 1:
            break
    whose: dict[str, list[int]] = {}
    for rank, text in enumerate(said):
        whose.setdefault(text, []).append(ranks[rank] if ranks else rank)
    who = "; ".join(
        f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}: {text}"
        for text, ranks in whose.items()
    )
    return (
        f"the ranks do not agree in {label}. First difference: {who}. "
        "Every rank must make the same calls in the same order with the same options."
    )
