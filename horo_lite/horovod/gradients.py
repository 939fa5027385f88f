"""What Horovod's options do to the gradients of a Keras optimizer or a TensorFlow tape.

With N ranks and the gradients g of one variable:

    op=Average          sum(g) / N
    gradient_predivide_factor=f
                        sum(g / f) * (f / N): the same except for rounding and overflow
    op=Adasum           for two ranks with gradients a and b,
                        (1 - a·b / 2|a|²) a + (1 - a·b / 2|b|²) b: see horo_lite.horovod.adasum
    local variables     this rank's own g, divided by N (scale_local_gradients) or as it is
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from horo_lite.adapters import Adapter
from horo_lite.collectives.compression import Compression, Compressor
from horo_lite.collectives.group import Group
from horo_lite.collectives.reductions import Average
from horo_lite.horovod.adasum import AdasumView, check_adasum
from horo_lite.horovod.process_sets import Set, group_of, group_of_member, ranks_given
from horo_lite.horovod.reductions import Adasum, AnyOp, named_op
from horo_lite.training.options import Options
from horo_lite.training.reducer import Reducer
from horo_lite.training.transform import Transform


@dataclass(frozen=True, kw_only=True)
class SetOptions(Options):
    """Options whose ranks are a process set, looked up in the current world.

    `op` may be Adasum.
    """

    op: Any = Average

    def _check_reduction(self) -> None:
        if self.op is not Adasum:
            super()._check_reduction()
        elif getattr(self.compression, "wire", "") != "none":
            raise ValueError("op=Adasum does not compress: leave compression out")

    @property
    def ranks(self) -> Group:
        return group_of(self.group)

    def reducer(self, adapter: Adapter, named: Sequence[tuple[str, Any]], **other: Any) -> Reducer:
        if self.op is not Adasum:
            return super().reducer(adapter, named, **other)
        ranks = self.ranks
        check_adasum(ranks, ())
        view = _views.setdefault(ranks, AdasumView(ranks))
        # The view decides how to exchange; the option makes ranks without Adasum a mismatch.
        options = [*other.pop("options", ()), ("op", "Adasum")]
        return super().reducer(
            adapter, named, **(other | {"group": view, "op": Average, "options": options})
        )


# One per group, since it numbers the reducers of each.
_views: weakref.WeakKeyDictionary[Group, AdasumView] = weakref.WeakKeyDictionary()


def options_of(
    op: Any,
    compression: Any,
    process_set: Set,
    group: Group | None,
    gradient_predivide_factor: float,
    num_groups: int,
    groups: Any,
) -> tuple[SetOptions, Any]:
    """Return the checked options, and the user's own compression, if one was given."""
    op = named_op(op)
    check_predivide_factor(gradient_predivide_factor, op)
    if num_groups:
        warnings.warn("num_groups is Horovod's old name: use groups=", DeprecationWarning, 3)
    groups = num_groups if groups is None else groups
    if not isinstance(groups, (list, tuple)) and (not isinstance(groups, int) or groups < 0):
        raise ValueError(f"groups must be a number (0 or more) or a list of lists, not {groups!r}")
    own = None if isinstance(compression, Compressor) else checked_compression(compression)
    options = SetOptions(
        op=op,
        compression=compression if own is None else Compression.none,
        group=ranks_given(process_set, group),
    )
    return options, own


def check_predivide_factor(factor: float, op: AnyOp) -> None:
    """Raise ValueError if gradients cannot be divided by `factor` before they are reduced."""
    if not factor > 0:
        raise ValueError(f"gradient_predivide_factor must be more than 0, not {factor}")
    if factor != 1 and op is not Average:
        raise ValueError("gradient_predivide_factor needs op=Average")


def checked_compression(given: Any) -> Any:
    """Return the user's own compression; raise ValueError if it lacks the methods of one."""
    if all(callable(getattr(given, name, None)) for name in ("compress", "decompress")):
        return given
    raise ValueError(
        "compression must be hvd.Compression.none, .fp16 or .bf16, or have compress() and "
        f"decompress(), not {given!r}"
    )


class Exchange:
    """Exchanges the gradients of one optimizer or tape.

    Args:
        transform: The transformation that averages them.
        own_compression: An object with `compress` and `decompress`, or None.
        predivide_factor: Horovod's gradient_predivide_factor.
        scale_local: Whether gradients of local variables are divided by the number of ranks.
    """

    def __init__(
        self,
        transform: Transform,
        own_compression: Any,
        predivide_factor: float,
        scale_local: bool,
    ) -> None:
        self._transform = transform
        self._compression = own_compression
        self._factor = float(predivide_factor)
        self._scale_local = scale_local
        self._local: dict[int, Any] = {}

    def register_local(self, variables: Iterable[Any]) -> None:
        """Do not exchange the gradients of these variables."""
        for variable in variables:
            self._local[id(_identity(variable))] = variable  # kept alive, so its id stays unique

    def __call__(
        self,
        variables: Sequence[Any],
        names: Sequence[str],
        gradients: Sequence[Any],
        weight: Any = None,
    ) -> list[Any]:
        """Return the gradients that the optimizer is to apply; every rank calls it.

        A rank outside the process set keeps its own gradients, as in Horovod.
        """
        results = list(gradients)
        if group_of_member(self._transform.options.group) is None:
            return results
        away = [i for i, v in enumerate(variables) if id(_identity(v)) not in self._local]
        if self._scale_local and len(away) < len(results):
            n_ranks = self._transform.options.ranks.size
            for i in {*range(len(results))}.difference(away):
                results[i] = scaled(results[i], 1 / n_ranks)
        travelling, contexts = [scaled(results[i], 1 / self._factor) for i in away], []
        if self._compression is not None:
            pairs = [(g, None) if g is None else self._compression.compress(g) for g in travelling]
            travelling, contexts = [g for g, _ in pairs], [context for _, context in pairs]
        averages = self._transform([names[i] for i in away], travelling, weight)
        if self._compression is not None:
            averages = [
                None if g is None else self._compression.decompress(g, context)
                for g, context in zip(averages, contexts, strict=True)
            ]
        for i, average in zip(away, averages, strict=True):
            results[i] = scaled(average, self._factor)
        return results


def scaled(gradient: Any, factor: float) -> Any:
    """Return the gradient times a number; for TensorFlow's IndexedSlices, multiply the values."""
    if gradient is None or factor == 1:
        return gradient
    if hasattr(gradient, "indices") and hasattr(gradient, "dense_shape"):
        return type(gradient)(gradient.values * factor, gradient.indices, gradient.dense_shape)
    return gradient * factor


def _identity(variable: Any) -> Any:
    """Return an object that identifies a variable: for Keras on TensorFlow, the tf.Variable inside.

    A tape accepts either of the two. On JAX, variables get a new array with every step.
    """
    inner = getattr(variable, "_value", None)
    return inner if hasattr(inner, "assign") else variable
