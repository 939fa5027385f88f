"""The options of everything that averages gradients: their meaning, defaults and checks.

Each framework's DistributedOptimizer takes them as its own keywords, so that editors complete them
and type checkers find typos, and combines them in an `Options`.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import TYPE_CHECKING, Any

import numpy as np

from horo_lite import settings
from horo_lite.adapters import Adapter, from_numpy, to_host
from horo_lite.collectives.compression import Compression, Compressor
from horo_lite.collectives.reductions import Average, Op, Sum
from horo_lite.ops import ranks_of
from horo_lite.state.drift import check_reaction
from horo_lite.training.plan import DEFAULT_BUCKET_BYTES
from horo_lite.training.reducer import Reducer

if TYPE_CHECKING:
    from horo_lite.collectives.group import Group


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options that must be the same on every rank.

    Attributes:
        op: Average or Sum.
        compression: The wire format; `Compression.fp16` halves the bytes.
        group: The ranks; None for all ranks of the current world.
        bucket_bytes: Size of the buckets in which gradients travel, on the wire; None for
            HORO_LITE_BUCKET_BYTES or 25 MiB.
        backward_passes_per_step: How many passes add to the gradients before they travel.
        check_every: How many steps to take between comparisons of parameters; None for
            HORO_LITE_CHECK_EVERY, 0 for never.
        on_drift: What to do if parameters differ: "raise", "warn" or "heal".
        check_finite: "raise" or "warn" if a gradient contains NaN or inf; None for no check.
    """

    op: Op = Average
    compression: Compressor = Compression.none
    group: Group | None = None
    bucket_bytes: int | None = None
    backward_passes_per_step: int = 1
    check_every: int | None = None
    on_drift: str = "raise"
    check_finite: str | None = None

    def __post_init__(self) -> None:
        self._check_reduction()
        passes = checked_passes(self.backward_passes_per_step)
        object.__setattr__(self, "backward_passes_per_step", passes)
        check_reaction(self.on_drift)
        if self.check_finite not in (None, "raise", "warn"):
            raise ValueError(
                f'check_finite must be "raise", "warn" or None, not {self.check_finite!r}'
            )
        n_bytes = settings.bucket_bytes(self.bucket_bytes) or DEFAULT_BUCKET_BYTES
        object.__setattr__(self, "bucket_bytes", n_bytes)
        object.__setattr__(self, "check_every", settings.check_every(self.check_every))

    def _check_reduction(self) -> None:
        if self.op not in (Average, Sum):
            raise ValueError(f"gradients take op=Average or op=Sum, not {self.op}")
        if not isinstance(self.compression, Compressor):
            raise ValueError(
                "compression must be hvd.Compression.none, .fp16 or .bf16, not "
                f"{self.compression!r}"
            )

    @property
    def ranks(self) -> Group:
        return ranks_of(self.group)

    @property
    def on_parameters(self) -> list[tuple[str, str]]:
        """Return the options of the parameters' comparison, for the ranks to compare."""
        return [("check_every", str(self.check_every)), ("on_drift", self.on_drift)]

    def reducer(self, adapter: Adapter, named: Sequence[tuple[str, Any]], **other: Any) -> Reducer:
        """Return a Reducer for the gradients of these parameters, with `other` arguments."""
        given: dict[str, Any] = {
            "op": self.op,
            "compression": self.compression,
            "bucket_bytes": self.bucket_bytes,
            "passes": self.backward_passes_per_step,
            "check_finite": self.check_finite,
        }
        return Reducer(other.pop("group", None) or self.ranks, adapter, named, **(given | other))


def checked_passes(passes: Any) -> int:
    """Return the number of backward passes per step; raise ValueError if it is invalid."""
    if not hasattr(passes, "__index__") or operator.index(passes) < 1:
        raise ValueError(f"backward_passes_per_step must be 1 or more, not {passes}")
    return operator.index(passes)


def averaging(
    closure: Callable[..., Any],
    exchange: Callable[[], None],
    *,
    group: Group,
    op: Op,
    weight: Callable[[], float | None],
    like: Callable[[Any, Any], Any] = from_numpy,
) -> Callable[..., Any]:
    """Return `closure`, followed by averaging of gradients and loss.

    Args:
        closure: Computes gradients and returns the loss, a number in any form. Any other result is
            returned as it is, since no optimizer can base a decision on it.
        exchange: Averages the gradients.
        group: The ranks.
        op: Average or Sum, for the loss as for the gradients.
        weight: Returns this rank's number of samples, or None on every rank, as used by
            `exchange`.
        like: Converts a float64 array to an object like the second argument, a loss.
    """

    @wraps(closure)
    def averaged(*args: Any, **kwargs: Any) -> Any:
        loss = closure(*args, **kwargs)
        exchange()
        try:
            value = to_host(loss)
            if not isinstance(value, (np.ndarray, np.generic)):  # on a GPU, or bfloat16
                value = float(loss)
            value = np.array(value, np.float64).reshape(())
        except (TypeError, ValueError):
            return loss
        name = "the closure's loss"
        group.exchange([value], names=[name], label=name, op=op, weight=weight())
        return like(value, loss)

    return averaged
