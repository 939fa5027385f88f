"""What Horovod's options do to the gradients of a Keras optimizer or a TensorFlow tape.

With N ranks and the gradients g of one variable:

    op=Average          sum(g) / N
    gradient_predivide_factor=f
                        sum(g / f) * (f / N): the same except for rounding and overflow
    op=Adasum           for two ranks with gradients a and b,
                        (1 - a·b / 2|a|²) a + (1 - a·b / 2|b|²) b: see horo_lite.collectives.adasum
    local variables     this rank's own g, divided by N (scale_local_gradients) or as it is
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from horo_lite.adapters.object import named_variables
from horo_lite.collectives.compression import compressor_of
from horo_lite.collectives.group import Group
from horo_lite.collectives.reductions import Adasum
from horo_lite.errors import warn
from horo_lite.horovod.process_sets import Set, group_of_member, ranks_given
from horo_lite.horovod.reductions import named_op
from horo_lite.training.options import Options
from horo_lite.training.transform import Transform


def options_of(
    op: Any,
    compression: Any,
    process_set: Set,
    group: Group | None,
    gradient_predivide_factor: float,
    num_groups: int,
    groups: Any,
) -> Options:
    """Return the checked options."""
    if num_groups:
        warn("num_groups is Horovod's old name: use groups=", DeprecationWarning)
    options = Options(
        op=named_op(op),
        adasum_of="gradients",
        takes_adasum=True,
        compression=compressor_of(compression),
        group=ranks_given(process_set, group),
        gradient_predivide_factor=gradient_predivide_factor,
        num_groups=num_groups,
        groups=groups,
    )
    if options.op is Adasum and options.compression.wire != "none":
        raise ValueError("op=Adasum does not compress: leave compression out")
    return options


class GradientAverager:
    """Averages the gradients of one optimizer or tape, except those of local variables.

    Args:
        transform: The transformation that averages them.
        scale_local: Whether gradients of local variables are divided by the number of ranks.
    """

    def __init__(self, transform: Transform, scale_local: bool) -> None:
        self._transform = transform
        self._scale_local = scale_local
        self._local: dict[int, Any] = {}

    @property
    def group(self) -> Any:
        """The ranks, as they were given."""
        return self._transform.options.group

    def register_local(self, variables: Iterable[Any]) -> None:
        """Do not average the gradients of these variables."""
        for variable in variables:
            self._local[id(identity(variable))] = variable  # kept alive, so its id stays unique

    def __call__(
        self,
        variables: Sequence[Any],
        gradients: Sequence[Any],
        weight: Any = None,
        like: Any = None,
        values: Sequence[Any] | None = None,
        names: Sequence[str] = (),
    ) -> list[Any]:
        """Return the gradients that the optimizer is to apply; every rank calls it.

        Those of a rank that has none of its own are arrays like `like`. `values`, by default the
        variables themselves, are compared between the ranks from time to time; nothing if empty.

        A rank outside the process set keeps its own gradients, as in Horovod.
        """
        results = list(gradients)
        options = self._transform.options
        if group_of_member(options.group) is None:
            return results
        averaged = [i for i, v in enumerate(variables) if id(identity(v)) not in self._local]
        if self._scale_local and len(averaged) < len(results):
            n_ranks = options.ranks.size
            for i in {*range(len(results))}.difference(averaged):
                results[i] = scaled(results[i], 1 / n_ranks)
        factor = float(options.gradient_predivide_factor)
        _, sent, restored = options.compression.compressed(
            [scaled(results[i], 1 / factor) for i in averaged]
        )
        names = names or [name for name, _ in named_variables(variables)]
        of = [names[i] for i in averaged]

        known = variables if values is None else values

        def compared() -> list[tuple[str, Any]]:
            return [(names[i], known[i]) for i in averaged]

        averages = restored(
            self._transform(of, sent, weight, like, compared if len(known) else None)
        )
        for i, average in zip(averaged, averages, strict=True):
            results[i] = scaled(average, factor)
        return results


def scaled(gradient: Any, factor: float) -> Any:
    """Return the gradient times a number; for TensorFlow's IndexedSlices, multiply the values."""
    if gradient is None or factor == 1:
        return gradient
    if hasattr(gradient, "indices") and hasattr(gradient, "dense_shape"):
        return type(gradient)(gradient.values * factor, gradient.indices, gradient.dense_shape)
    return gradient * factor


def identity(variable: Any) -> Any:
    """Return an object that identifies a variable: for Keras on TensorFlow, the tf.Variable inside.

    A tape accepts either of the two. On JAX, variables get a new array with every step.
    """
    inner = getattr(variable, "_value", None)
    return inner if hasattr(inner, "assign") else variable
