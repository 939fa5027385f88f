"""How gradients are represented while they travel between ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from horo_lite.arguments import WIRES

if TYPE_CHECKING:
    from horo_lite.collectives.arrays import Memory


class Ranks(Protocol):
    """The ranks of a step, for `Compressor.exchange`. Every rank makes the same calls."""

    size: int

    @property
    def share(self) -> float:
        """This rank's share of the average: 1 / size, or its weight over all weights. Collective.

        The shares of all ranks add up to 1. That of a rank that has joined is 0 if there are
        weights.
        """

    def average(self, arrays: Sequence[Any]) -> None:
        """Replace these arrays, in place, by their averages, weighted as gradients are."""

    def allgather(self, array: Any) -> list[Any]:
        """Return every rank's array, in rank order; their lengths may differ."""


class Compressor:
    """A wire dtype, and hooks that change gradients before and after they travel.

    `wire` is "none" (no conversion), "fp16", "bf16", "int8" or "int4". The core does the casting,
    fused with packing; with "fp16" and "bf16", only float32 and float64 tensors are ever narrowed,
    and products never. With "fp16" or "bf16", float16 tensors are sent as blocks with a scale, as
    float32 ones with "fp16" are. "int8" and "int4" change sums and averages of floats only, where
    they travel between hosts.

    For more (sparsification, error feedback), derive from this class and override `prepare` and
    `restore`, or `exchange`. An instance may keep state by tensor name; each optimizer then needs
    its own. Pass an equal one on every rank: `name` and `wire` are compared, and a difference
    raises MismatchError.
    """

    def __init__(self, name: str, wire: str = "none") -> None:
        if wire not in WIRES:
            known = ", ".join(map(repr, WIRES))
            raise ValueError(f"wire must be one of {known}, not {wire!r}")
        self.name = name
        self.wire = wire

    def for_steps(self) -> Compressor:
        """Return what compresses the gradients of one optimizer, step after step, by their names.

        That is this compressor, or one like it that has a state of its own.
        """
        return self

    def attach(self, memory: Memory, names: Sequence[str]) -> None:
        """Give the core what it needs of this compressor's state, before an operation."""

    def reset(self) -> None:
        """Forget the state, since steps failed, were repeated, or had results that overflowed."""

    def prepare(self, name: str, gradient: NDArray[Any]) -> None:
        """Change `gradient` of tensor `name`, in place, to what this rank contributes."""

    def restore(self, name: str, gradient: NDArray[Any]) -> None:
        """Change the reduced `gradient`, in place, to what the optimizer receives."""

    def exchange(self, names: Sequence[str], gradients: Sequence[Any], ranks: Ranks) -> None:
        """Replace the gradients, in place, by what the optimizer receives, such as averages.

        A compressor with this method makes the calls that its gradients need, at the end of a step;
        `prepare`, `restore` and `wire` are not used. It is for the steps of an optimizer only.

        Args:
            names: The tensors' names, the same on every rank.
            gradients: NumPy arrays over the gradients' memory; of a GPU, the framework's arrays.
            ranks: What the ranks can do together.
        """
        raise NotImplementedError

    @property
    def exchanges(self) -> bool:
        """Whether it has an `exchange` of its own."""
        return type(self).exchange is not Compressor.exchange

    @property
    def is_for_steps(self) -> bool:
        """Whether only the steps of an optimizer can use it."""
        return self.exchanges

    @property
    def resets(self) -> bool:
        """Whether it has a `reset` of its own."""
        return type(self).reset is not Compressor.reset

    def compressed(
        self, arrays: Sequence[Any], excluded: Callable[[Any], bool] = lambda x: x is None
    ) -> tuple[Compressor, list[Any], Callable[[Sequence[Any]], list[Any]]]:
        """Return how to send what, and a function that makes results of what is received.

        This compressor, and the arrays themselves, except with an `OwnCompressor`.
        """
        return self, list(arrays), list

    def __repr__(self) -> str:
        return f"Compression.{self.name}"


class Quantizer(Compressor):
    """Integers of a few bits between hosts; in the steps of an optimizer, with error feedback.

    Then what this rank's messages lack because of rounding is added to those of the next step.
    """

    def __init__(self, wire: str, *, keeps: bool = False) -> None:
        super().__init__(wire, wire)
        self._keeps = keeps
        self._residuals: dict[str, NDArray[np.float32]] = {}  # by tensor name

    def for_steps(self) -> Compressor:
        return Quantizer(self.wire, keeps=True)

    def attach(self, memory: Memory, names: Sequence[str]) -> None:
        if self._keeps and names:
            memory.keep_residuals([self._residual(memory, i, name) for i, name in enumerate(names)])

    def _residual(self, memory: Memory, i: int, name: str) -> NDArray[np.float32]:
        residual = self._residuals.get(name)
        n = memory.tensors.n_reals(i) if memory.tensors.is_float(i) else 0
        if residual is None or residual.size != n:
            residual = self._residuals[name] = np.zeros(n, np.float32)
        return residual

    def reset(self) -> None:
        self._residuals.clear()


class AutoCompressor(Compressor):
    """The choice between several, by trying each for a few steps: see `Compression.auto`."""

    def __init__(self, candidates: Sequence[Compressor]) -> None:
        super().__init__(f"auto({', '.join(one.name for one in candidates)})")
        self.candidates = tuple(candidates)

    @property
    def is_for_steps(self) -> bool:
        return True


class OwnCompressor(Compressor):
    """A user's object with Horovod's methods `compress` and `decompress`.

    They are called around an operation, on the framework's own arrays, and may change the dtype and
    the shape.
    """

    def __init__(self, own: Any) -> None:
        super().__init__(str(getattr(own, "name", type(own).__name__)))
        self._own = own

    def compressed(
        self, arrays: Sequence[Any], excluded: Callable[[Any], bool] = lambda x: x is None
    ) -> tuple[Compressor, list[Any], Callable[[Sequence[Any]], list[Any]]]:
        """Compress the arrays, except those that are `excluded`; the function decompresses."""
        kept = list(map(excluded, arrays))
        pairs = [
            (x, None) if keep else self._own.compress(x)
            for x, keep in zip(arrays, kept, strict=True)
        ]

        def restored(received: Sequence[Any]) -> list[Any]:
            return [
                x if keep else self._own.decompress(x, context)
                for x, keep, (_, context) in zip(received, kept, pairs, strict=True)
            ]

        return Compression.none, [x for x, _ in pairs], restored


COMPRESSORS = "hvd.Compression.none, .fp16, .bf16, .int8 or .int4"


def compressor_of(given: Any) -> Compressor:
    """Return the compressor that a Horovod script specifies; raise ValueError if it is none."""
    if isinstance(given, Compressor):
        return given
    if all(callable(getattr(given, name, None)) for name in ("compress", "decompress")):
        return OwnCompressor(given)
    raise ValueError(
        f"compression must be {COMPRESSORS}, or have compress() and decompress(), not {given!r}"
    )


class Compression:
    """The built-in compressors.

    none: no conversion. Sums are formed in float32 (float64 for float64), in rank order.

    fp16: half the bytes. Each block of at most 1,024 elements of a tensor travels as float16 with
    its own power-of-two scale, chosen from the block's largest finite magnitude on the way in and
    from the largest of all ranks on the way back, so compression itself never causes overflow or
    underflow. For an average x̄ over ranks' x_r on one host, with A the largest |x_r| in the block:

        |result - x̄| <= 2^-11 (mean |x_r| + |x̄|) + 2^-37 A      (up to float32 rounding)

    An inf or nan arrives as inf or nan, and affects no other element, so loss scalers see it.

    bf16: half the bytes, float32's range, 8 bits of precision: relative error 2^-8 per rounding.

    int8, int4: a quarter and an eighth of the bytes (3.94 and 7.76 times fewer), for slow links
    between hosts. Within a host, everything stays float32. What leaves a host is rounded to whole
    multiples of A / 127 (int8) or A / 7 (int4), with A the largest magnitude in a block of at most
    256 elements: each host's sum once, and the result once. The error of each rounding is at most
    half a multiple; an optimizer adds it to what the same rank sends in the next step. The result
    is the same to the bit on every rank. A block with an inf or nan arrives as nan. On one host,
    and between GPUs with NCCL, nothing is rounded.
    """

    none = Compressor("none", "none")
    fp16 = Compressor("fp16", "fp16")
    bf16 = Compressor("bf16", "bf16")
    int8 = Quantizer("int8")
    int4 = Quantizer("int4")

    @staticmethod
    @cache  # so that calls of average_gradients, each with an auto() of its own, try the same
    def auto(*wires: str) -> Compressor:
        """Return the choice between wire formats that an optimizer makes in its first steps.

        It tries each for 7 steps, and keeps the first whose median step takes at most 5 % longer
        than the fastest: name those first that round least. Rank 0 prints the times. All ranks
        choose the same, but another run may choose another.

        Args:
            wires: The names of formats; by default "none" and "fp16". Those that have no effect,
                such as "int8" on one host, are not tried.
        """
        unknown = [wire for wire in wires if wire not in WIRES]
        if unknown:
            raise ValueError(f"auto() takes {', '.join(map(repr, WIRES))}, not {unknown[0]!r}")
        names = wires or ("none", "fp16")
        return AutoCompressor([getattr(Compression, name) for name in names])
