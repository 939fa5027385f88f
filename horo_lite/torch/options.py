"""The options of torch's DistributedOptimizer, in addition to those of all others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from horo_lite.collectives.compression import Compressor
from horo_lite.collectives.reductions import Average, Sum
from horo_lite.horovod.gradients import check_predivide_factor, checked_compression
from horo_lite.horovod.process_sets import Set
from horo_lite.horovod.reductions import Adasum
from horo_lite.training.options import Options


@dataclass(frozen=True, kw_only=True)
class TorchOptions(Options):
    """See `DistributedOptimizer`. `op` may be Adasum, and compression the user's own."""

    op: Any = Average
    compression: Any = Options.compression
    gradient_predivide_factor: float = 1.0
    num_groups: int = 0
    groups: int | Sequence[Sequence[Any]] | None = None
    sparse_as_dense: bool = False
    process_set: Set = None
    gradient_as_bucket_view: bool = False
    adasum_of: str = "steps"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_predivide_factor(self.gradient_predivide_factor, self.op)
        self._check_groups(self.num_groups, self.groups)
        if self.adasum_of not in ("steps", "gradients"):
            raise ValueError(f'adasum_of must be "steps" or "gradients", not {self.adasum_of!r}')

    @property
    def combines_steps(self) -> bool:
        """Whether the ranks exchange their optimizers' steps instead of gradients."""
        return self.op is Adasum and self.adasum_of == "steps"

    def _check_reduction(self) -> None:
        if self.op not in (Average, Sum, Adasum):
            raise ValueError(
                "DistributedOptimizer needs op=Average, Sum or Adasum, not "
                f"{getattr(self.op, 'name', self.op)}"
            )
        if not isinstance(self.compression, Compressor):
            checked_compression(self.compression)

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

    def compared(self) -> list[tuple[str, str]]:
        """Return the options that the ranks compare, in addition to those that Reducer compares."""
        compression = self.compression
        return [
            ("op", f"Adasum of {self.adasum_of}" if self.op is Adasum else self.op.name),
            ("compression", getattr(compression, "name", type(compression).__name__)),
            ("gradient_predivide_factor", str(float(self.gradient_predivide_factor))),
            ("sparse_as_dense", str(bool(self.sparse_as_dense))),
            *self.on_parameters,
            ("gradient_as_bucket_view", str(bool(self.gradient_as_bucket_view))),
        ]
