"""Whether all ranks are about to do the same thing; and if not, who has what."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from horo_lite import _native
from horo_lite.errors import MismatchError

if TYPE_CHECKING:
    from horo_lite.transports import Header, Transport

Recipe: TypeAlias = "Callable[[Sequence[int]], tuple[float, bytes]]"
"""How ranks that have joined, whose numbers it is given, take part in an operation: the weight of
what they contribute, and what `horo_lite.join` makes their part from. MismatchError where they
cannot."""


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
    recipe: Recipe | None = None,
) -> list[Header]:
    """Everyone's header, now that all ranks do the same thing; MismatchError if they do not.

    Ranks that have joined do it, too, where there is a `recipe`.
    """
    digest = digest_of(contract)
    while True:
        headers = transport.agree(digest, count, weight, label=label)
        if all(header.digest == digest for header in headers):
            return headers
        here = not_joined(headers)
        ranks = [transport.ranks[r] for r in here]
        if any(headers[r].digest != digest for r in here):
            texts = told(transport, describe())
            raise MismatchError(explain(label, [texts[r] for r in here], ranks))
        joined = sorted(set(transport.ranks) - set(ranks))
        try:
            mine = _POSSIBLE + (recipe or needs_all(label))(joined)[1].hex()
        except MismatchError as refusal:
            mine = str(refusal)
        said = told(transport, mine)[here[0]]
        if not said.startswith(_POSSIBLE):
            raise MismatchError(said)


JOINED = digest_of("join()")
_POSSIBLE = "recipe "


def not_joined(headers: Sequence[Header]) -> list[int]:
    """The ranks, as the transport counts them, that do not meet the others in join()."""
    return [r for r, header in enumerate(headers) if header.digest != JOINED]


def recipe_in(text: str) -> bytes:
    """What a rank that has joined is to do now; nothing if that is to meet again."""
    found, _, recipe = text.partition(_POSSIBLE)
    return b"" if found else bytes.fromhex(recipe)


def needs_all(label: str) -> Recipe:
    """The recipe of what cannot be done while a rank has joined."""

    def refuse(joined: Sequence[int]) -> tuple[float, bytes]:
        who = ", ".join(map(str, joined))
        raise MismatchError(
            f"{label} needs every rank, but rank {who} has no more batches and waits in join(). "
            "Do this before the first rank joins, or after the last one has. Until then there are "
            "reductions (minima, maxima and products without prescale_factor), allgathers, "
            "broadcasts from ranks that have not joined, and barriers; on GPUs none of them."
        )

    return refuse


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
