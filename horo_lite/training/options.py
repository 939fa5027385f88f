"""The options of everything that averages gradients: their meaning, defaults and checks.

Each framework's DistributedOptimizer takes them as its own keywords, so that editors complete them
and type checkers find typos, and combines them in an `Options`.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from horo_lite import settings
from horo_lite.adapters import Adapter
from horo_lite.arguments import QUANTIZED
from horo_lite.collectives.compression import (
    COMPRESSORS,
    AutoCompressor,
    Compression,
    Compressor,
)
from horo_lite.collectives.reductions import Adasum, AnyOp, Average, Sum
from horo_lite.ops import ranks_of
from horo_lite.state.drift import check_reaction
from horo_lite.training.plan import DEFAULT_BUCKET_BYTES
from horo_lite.training.reducer import Reducer

if TYPE_CHECKING:
    from horo_lite.collectives.group import Group


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options that must be the same on every rank.

    See `horo_lite.torch.DistributedOptimizer` for all others, of which not every framework has all.

    Attributes:
        group: The ranks: a Group, or a `ProcessSet`, which is looked up in the current world; None
            for all of its ranks.
        takes_adasum: Whether `op` may be Adasum.
    """

    op: AnyOp = Average
    compression: Compressor = Compression.none
    group: Any = None
    bucket_bytes: int | None = None
    backward_passes_per_step: int = 1
    check_every: int | None = None
    on_drift: str = "raise"
    check_finite: str | None = None
    gradient_predivide_factor: float = 1.0
    num_groups: int = 0
    groups: int | Sequence[Sequence[Any]] | None = None
    sparse_as_dense: bool = False
    gradient_as_bucket_view: bool = False
    shard_state: bool | str = False
    shared_parameters: bool = False
    shard_gradients: bool = False
    adasum_of: str = "steps"
    takes_adasum: bool = False

    def __post_init__(self) -> None:
        self._check_reduction()
        passes = checked_passes(self.backward_passes_per_step)
        object.__setattr__(self, "backward_passes_per_step", passes)
        check_reaction(self.on_drift)
        if self.shard_state not in (False, True, "elements", "parameters"):
            raise ValueError(
                'shard_state must be True or False, or "elements" or "parameters" for an optimizer '
                f"that horo_lite does not know, not {self.shard_state!r}"
            )
        if self.shared_parameters and not self.shard_state:
            raise ValueError(
                "shared_parameters=True needs shard_state=True: otherwise each rank would update "
                "all parameters in the memory that all ranks of the host share"
            )
        if self.shard_gradients and not self.shard_state:
            raise ValueError(
                "shard_gradients=True needs shard_state=True: otherwise each rank updates all "
                "parameters, and needs all averages"
            )
        rounds = self.wire.wire in QUANTIZED or isinstance(self.compression, AutoCompressor)
        if self.shard_gradients and rounds:
            raise ValueError(
                f"shard_gradients=True takes no compression {self.compression.name}: what int8 and "
                "int4 round away is added to results that all ranks receive. Use fp16 or bf16"
            )
        if self.shard_state and self.combines_steps:
            raise ValueError(
                "op=Adasum combines steps that each rank takes with its own state, so that state "
                'cannot be sharded: use adasum_of="gradients", or op=Average'
            )
        if self.check_finite not in (None, "raise", "warn"):
            raise ValueError(
                f'check_finite must be "raise", "warn" or None, not {self.check_finite!r}'
            )
        n_bytes = settings.bucket_bytes(self.bucket_bytes) or DEFAULT_BUCKET_BYTES
        object.__setattr__(self, "bucket_bytes", n_bytes)
        object.__setattr__(self, "check_every", settings.check_every(self.check_every))
        self._check_groups(self.num_groups, self.groups)

    def _check_reduction(self) -> None:
        allowed = (Average, Sum, Adasum) if self.takes_adasum else (Average, Sum)
        if self.op not in allowed:
            names = (
                "op=Average, op=Sum or op=Adasum" if self.takes_adasum else "op=Average or op=Sum"
            )
            raise ValueError(f"gradients take {names}, not {getattr(self.op, 'name', self.op)}")
        if self.adasum_of not in ("steps", "gradients"):
            raise ValueError(f'adasum_of must be "steps" or "gradients", not {self.adasum_of!r}')
        factor = self.gradient_predivide_factor
        if not factor > 0:
            raise ValueError(f"gradient_predivide_factor must be more than 0, not {factor}")
        if factor != 1 and self.op is not Average:
            raise ValueError("gradient_predivide_factor needs op=Average")
        if not isinstance(self.compression, Compressor):
            raise ValueError(f"compression must be {COMPRESSORS}, not {self.compression!r}")

    @staticmethod
    def _check_groups(n: Any, groups: Any) -> None:
        if not isinstance(n, int) or n < 0:
            raise ValueError(f"num_groups must be a number (0 or more), not {n!r}")
        if groups is None or (isinstance(groups, int) and groups >= 0):
            return
        if not isinstance(groups, (list, tuple)) or not all(
            isinstance(group, (list, tuple)) for group in groups
        ):
            what = groups if isinstance(groups, int) else f"this {type(groups).__name__}"
            raise ValueError(
                f"groups must be a number (0 or more) or a list of lists of parameters, not {what}"
            )
        place_of: dict[int, str] = {}
        for g, group in enumerate(groups):
            for i, parameter in enumerate(group):
                here = f"groups[{g}][{i}]"
                if place_of.setdefault(id(parameter), here) != here:
                    raise ValueError(
                        f"{here} is the same parameter as {place_of[id(parameter)]}: list it once"
                    )

    @property
    def ranks(self) -> Group:
        return ranks_of(self.group.group() if hasattr(self.group, "group") else self.group)

    @property
    def combines_steps(self) -> bool:
        """Whether the ranks exchange their optimizers' steps instead of gradients."""
        return self.op is Adasum and self.adasum_of == "steps"

    @property
    def wire(self) -> Compressor:
        """How gradients travel: the compression, or none if that is an `OwnCompressor`."""
        return self.compression.compressed(())[0]

    @property
    def compared(self) -> list[tuple[str, str]]:
        """The options that the ranks of an optimizer compare, beside those of its Reducer."""
        return [
            ("op", f"Adasum of {self.adasum_of}" if self.op is Adasum else self.op.name),
            ("gradient_predivide_factor", str(float(self.gradient_predivide_factor))),
            ("sparse_as_dense", str(bool(self.sparse_as_dense))),
            ("check_every", str(self.check_every)),
            ("on_drift", self.on_drift),
            ("gradient_as_bucket_view", str(bool(self.gradient_as_bucket_view))),
            ("shard_state", str(self.shard_state)),
            ("shared_parameters", str(bool(self.shared_parameters))),
            ("shard_gradients", str(bool(self.shard_gradients))),
        ]

    def reducer(
        self,
        adapter: Adapter,
        named: Sequence[tuple[str, Any]],
        group: Group | None = None,
        **other: Any,
    ) -> Reducer:
        """Return a Reducer for the gradients of these parameters, with `other` arguments.

        Its `group` is by default that of `ranks`.
        """
        given: dict[str, Any] = {
            "op": self.op,
            "compression": self.wire,
            "bucket_bytes": self.bucket_bytes,
            "passes": self.backward_passes_per_step,
            "check_finite": self.check_finite,
            # Ranks that combine their steps exchange only after the first one.
            "checks_start": self.check_every != 0 and not self.combines_steps,
        }
        return Reducer(self.ranks if group is None else group, adapter, named, **(given | other))


def checked_passes(passes: Any) -> int:
    """Return the number of backward passes per step; raise ValueError if it is invalid."""
    if not hasattr(passes, "__index__") or operator.index(passes) < 1:
        raise ValueError(f"backward_passes_per_step must be 1 or more, not {passes}")
    return operator.index(passes)
