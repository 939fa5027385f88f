"""shard_state=True for Keras 3: each rank has the slots (momenta, variances) of its share only.

Variables are dealt whole, by size. `build()` makes no slots for those of other ranks, and each rank
updates its own. All else that `apply()` does, such as clipping and accumulation, sees all averages,
as without it. Then all ranks receive all variables.

From the first step on, the state is divided. Before that, and after it was loaded or collected,
each rank knows all of it without communication: its own variables, and `_Division.rest`.
"""

from __future__ import annotations

import math
import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING, Any

import numpy as np

from horo_lite.adapters.object import named_variables
from horo_lite.context import is_initialized
from horo_lite.horovod.process_sets import group_of_member
from horo_lite.keras.base import keras
from horo_lite.state.wrapper import DividedState
from horo_lite.training.sharding import (
    check_not_lost,
    check_not_torn,
    collected,
    compare_division,
    owners_of,
    receive_values,
)
from horo_lite.training.transform import is_traced

if TYPE_CHECKING:
    from horo_lite.collectives.group import Group
    from horo_lite.training.options import Options

_READERS = ("save_optimizer_weights_to_hdf5_group", "get_state_tree", "set_state_tree")
"""What in Keras takes `optimizer.variables` for the whole state."""


@dataclass
class _Division:
    """What this rank has of the state.

    Attributes:
        group: The ranks; None on a rank outside of the process set, which has all.
        owners: The owner of each variable, by its id().
        before: The variables that the optimizer had before `build()`.
        slots: Those of this rank's variables.
        gradients: Accumulated gradients, which are not divided.
        shared: What `build()` has made beside them, for all variables together.
        left_out: For each slot that other ranks have, its shape, and the number of variables that
            `build()` had made before it.
        rest: The values of others' slots, by their places in the whole state; None if divided.
        is_new: Whether `rest` is what `build()` would have made.
        known_at: The iterations' array while `rest` was true. JAX replaces it in each step.
        updated: The variables that the step in progress has updated on some rank.
        is_torn: Whether a step has begun to change variables, and not ended.
    """

    group: Group | None
    owners: dict[int, int]
    before: list[Any]
    slots: list[Any] = field(default_factory=list)
    gradients: list[Any] = field(default_factory=list)
    shared: list[Any] = field(default_factory=list)
    left_out: list[tuple[tuple[int, ...], int]] = field(default_factory=list)
    rest: dict[int, Any] | None = field(default_factory=dict)
    is_new: bool = True
    known_at: Any = None
    updated: list[Any] = field(default_factory=list)
    is_torn: bool = False

    @property
    def rank(self) -> int:
        return 0 if self.group is None else self.group.rank

    @property
    def is_outdated(self) -> bool:
        """Whether there are other ranks now."""
        return self.group is not None and self.group.is_closed and is_initialized()

    @property
    def named_shared(self) -> list[tuple[str, Any]]:
        """What all variables share; Keras' own names of these depend on what has been built."""
        return [(f"what all variables share, {i}", x) for i, x in enumerate(self.shared)]

    def has(self, variable: Any) -> bool:
        """Return whether this rank updates the variable."""
        return self.owners[id(variable)] == self.rank


class ShardedState(DividedState):
    """Mixin of a wrapped optimizer whose state is divided."""

    _options: Options
    _division: _Division | None
    _passes: int
    _is_averaged: bool
    _variables: list[Any]
    _trainable_variables: list[Any]
    _iterations: Any

    # Dividing it.

    def build(self, variables: Sequence[Any]) -> None:
        if self.built:  # type: ignore[has-type]
            return
        variables, ranks = list(variables), self._ranks()
        sizes = [math.prod(variable.shape) for variable in variables]
        dealt = owners_of(sizes, 1 if ranks is None else ranks.size)
        owners = dict(zip(map(id, variables), dealt, strict=True))
        division = _Division(ranks, owners, list(self._variables))
        vars(self)["_division"] = division
        super().build(variables)  # type: ignore[misc]
        known = set(map(id, (*division.before, *division.slots, *division.gradients)))
        division.shared = [v for v in self._variables if id(v) not in known]
        for variable in division.shared:
            if len(variable.shape):
                self.built = False
                raise ValueError(
                    f"shard_state=True cannot divide the state of {self._kind}: its build() "
                    f"makes {variable.path!r} without add_variable_from_reference(), so that it "
                    "is not known to which variable of the model it belongs"
                )
        division.known_at = self._iterations._value

    def add_variable_from_reference(
        self, reference_variable: Any, name: str | None = None, initializer: Any = "zeros"
    ) -> Any:
        division = self._division
        make = super().add_variable_from_reference  # type: ignore[misc]
        if division is None or id(reference_variable) not in division.owners:
            return make(reference_variable, name, initializer)
        is_gradient = name == "gradient_accumulator"
        if not is_gradient and not division.has(reference_variable):
            n_made = len(self._variables) - len(division.before)
            division.left_out.append((tuple(reference_variable.shape), n_made))
            return None  # as Keras itself has it for variables that need no slot
        made = make(reference_variable, name, initializer)
        (division.gradients if is_gradient else division.slots).append(made)
        return made

    def divide_built(self) -> None:
        """Divide the state that an optimizer has before it is wrapped."""
        first = (self._iterations, self._learning_rate)  # type: ignore[attr-defined]
        whole = [np.array(variable.numpy()) for variable in self._variables]
        self._build_anew([v for v in self._variables if any(v is x for x in first)])
        self.set_whole_state(whole)

    def _build_anew(self, before: Sequence[Any]) -> None:
        kept = set(map(id, before))
        for variable in self._variables[:]:
            if id(variable) not in kept:
                self._untrack_variable(variable)  # type: ignore[attr-defined]
        self.built = False
        self.build(self._trainable_variables)

    def _follow(self) -> None:
        """Divide a state that is whole between the ranks of now, or forget what others' was."""
        division = self._division
        if division is None or division.rest is None:
            return
        if self.is_sharded:
            division.rest = None
        elif division.is_outdated:
            if division.is_new:
                self._build_anew(division.before)
            else:
                self.set_whole_state(self.whole_state())

    def _ranks(self) -> Group | None:
        given = self._options.group
        return None if group_of_member(given) is None else self._options.ranks

    @property
    def _kind(self) -> str:
        return str(self.__class__.__name__)

    def _label(self, what: str) -> str:
        return f"{what} of a {self._kind} with shard_state=True"

    # A step.

    def apply(self, grads: Any, trainable_variables: Any = None, *, weight: Any = None) -> None:
        self._follow()
        if self._division is not None:
            self._division.updated = []
        super().apply(grads, trainable_variables, weight=weight)  # type: ignore[misc]
        if self._division is not None:
            self._receive(self._division.updated)
            self._division.is_torn = False

    def _backend_apply_gradients(self, grads: Any, trainable_variables: Any) -> None:
        division = self._division
        assert division is not None
        if division.group is not None:
            self._begin(division, division.group, is_traced(grads))
        every = self.ema_overwrite_frequency if self.use_ema else None  # type: ignore[attr-defined]
        own = vars(self)
        own["ema_overwrite_frequency"] = None  # JAX's needs the averages of all variables
        try:
            super()._backend_apply_gradients(grads, trainable_variables)  # type: ignore[misc]
        finally:
            own["ema_overwrite_frequency"] = every
        if every:
            is_time = (self.iterations + 1) % every == 0  # type: ignore[attr-defined]
            for variable, average in self._averages():
                variable.assign(keras.ops.where(is_time, average.value, variable.value))
        if self.use_ema:  # type: ignore[attr-defined]
            division.updated = self._trainable_variables

    def _averages(self) -> list[tuple[Any, Any]]:
        averages = self._model_variables_moving_average  # type: ignore[attr-defined]
        pairs = zip(self._trainable_variables, averages, strict=True)
        return [pair for pair in pairs if pair[1] is not None]

    def _begin(self, division: _Division, group: Group, is_compiled: bool) -> None:
        check_not_torn(division, "a saved model")
        if is_compiled or division.rest is None:
            check_not_lost(group, self._ranks(), "a saved model")
            return
        named = named_variables(self._trainable_variables)
        dealt = [f"{name!r}: rank {division.owners[id(v)]}" for name, v in named]
        label = self._label("division")
        compare_division(group, label, dealt, named, self._common_state, is_new=division.is_new)
        division.rest = None

    def _common_state(self) -> list[Any]:
        """Return the part of `whole_state()` that all ranks have alike."""
        division = self._division
        # With backward_passes_per_step, each rank adds up its own gradients.
        own = [] if division is None or self._passes == 1 else division.gradients
        of_rank = set(map(id, own))
        pairs = zip(self.whole_state(), self.layout(), strict=True)
        return [value for value, variable in pairs if id(variable) not in of_rank]

    def _apply_weight_decay(self, variables: Sequence[Any]) -> None:
        division = self._division
        assert division is not None
        # stateless_apply() changes no variables.
        division.is_torn = bool(division.group) and not self._is_averaged
        uses = self._use_weight_decay  # type: ignore[attr-defined]
        mine = [v for v in variables if division.has(v) and uses(v)]
        if mine:
            super()._apply_weight_decay(mine)  # type: ignore[misc]

    def _backend_update_step(self, grads: Any, trainable_variables: Any, rate: Any) -> None:
        division = self._division
        assert division is not None
        division.updated = list(trainable_variables)
        pairs = zip(grads, trainable_variables, strict=True)
        mine = [pair for pair in pairs if division.has(pair[1])]
        if mine:
            super()._backend_update_step(*map(list, zip(*mine, strict=True)), rate)  # type: ignore[misc]

    def _receive(self, variables: Sequence[Any]) -> None:
        """Give all ranks the variables as their owners have updated them."""
        division = self._division
        if division is None or division.group is None or not variables:
            return
        owners = [division.owners[id(variable)] for variable in variables]
        # The first one's owner has updated what all variables share.
        owners += [owners[0]] * len(division.shared)
        named = [*named_variables(variables), *division.named_shared]
        label = self._label("variables")
        if keras.backend.backend() != "jax":
            receive_values(division.group, label, owners, named)
            return
        calls, primitive = (import_module(f"horo_lite.jax.{x}") for x in ("calls", "primitive"))
        asked = None if self._options.group is None else division.group
        names = tuple(name for name, _ in named)
        call = calls.AllgatherInPlace(label, asked, tuple(owners), names).here()
        values = primitive.bind(call, [variable.value for _, variable in named])
        for (_, variable), value in zip(named, values, strict=True):
            variable.assign(value)

    def finalize_variable_values(self, var_list: Sequence[Any]) -> None:
        super().finalize_variable_values(var_list)  # type: ignore[misc]
        if self.use_ema:  # type: ignore[attr-defined]
            self._receive(var_list)

    def register_local_var(self, var: Any) -> None:
        raise ValueError(
            f"{var.path!r} cannot be a local variable of an optimizer with shard_state=True, "
            "of which each rank updates its share only: give local variables an optimizer of "
            "their own"
        )

    # The state.

    @property
    def _divided_between(self) -> Group | None:
        division = self._division
        if division is None:
            return None
        is_known = division.rest is not None and division.known_at is self._iterations._value
        return None if is_known else division.group

    @property
    def variables(self) -> list[Any]:
        """This rank's: those of its share, and those that all ranks have."""
        if (reader := sys._getframe(1).f_code.co_name) in _READERS:
            raise ValueError(
                f"{reader}() takes the variables of one rank for the state of the optimizer, which "
                "shard_state=True divides between the ranks: use files that end with .keras, or "
                "save_weights(), on every rank, or hvd.save_model()"
            )
        self._follow()
        return super().variables  # type: ignore[misc]

    @property
    def common_variables(self) -> list[tuple[str, Any]]:
        """Those that are the same on all ranks, with names."""
        division = self._division
        if division is None:
            return [(f"variables[{i}]", variable) for i, variable in enumerate(self._variables)]
        before = [v for v in self._variables if any(v is x for x in division.before)]
        known = [(f"variables[{i}]", variable) for i, variable in enumerate(before)]
        return known + division.named_shared

    def layout(self) -> list[Any]:
        """Return the variables of an undivided optimizer, None for slots of others."""
        division = self._division
        if division is None:
            return list(self._variables)
        before = set(map(id, division.before))
        first = [v for v in self._variables if id(v) in before]
        made = [v for v in self._variables if id(v) not in before]
        for i, (_, n_made) in enumerate(division.left_out):
            made.insert(n_made + i, None)
        return first + made

    def whole_state(self) -> list[Any]:
        """Return the values of an undivided optimizer's variables. Collective if divided."""
        division, layout = self._division, self.layout()
        values = [None if v is None else np.array(v.numpy()) for v in layout]
        if division is None or division.group is None:
            return values
        if self.is_sharded:
            check_not_torn(division, "a saved model")
            check_not_lost(division.group, self._ranks(), "a saved model")
            slots = set(map(id, division.slots))
            mine = {i: values[i] for i, v in enumerate(layout) if id(v) in slots}
            division.rest = collected(
                division.group, self._label("state, which every rank reads or saves,"), mine
            )
            division.is_new, division.known_at = False, self._iterations._value
        rest = division.rest
        assert rest is not None
        if division.is_new and division.left_out:
            plain = self.__class__.from_config(self.__class__.get_config(self))  # type: ignore[attr-defined]
            plain.build(self._trainable_variables)
            rest = dict(enumerate(np.array(variable.numpy()) for variable in plain.variables))
        return [rest[i] if v is None else values[i] for i, v in enumerate(layout)]

    def set_whole_state(self, values: Sequence[Any]) -> None:
        """Set the values of an undivided optimizer's variables. On this rank only."""
        if self._division is not None and self._division.is_outdated:
            self._build_anew(self._division.before)
        division, layout = self._division, self.layout()
        shapes = iter([] if division is None else [shape for shape, _ in division.left_out])
        wanted = [next(shapes) if v is None else tuple(v.shape) for v in layout]
        found = [tuple(np.shape(value)) for value in values]
        if wanted != found:
            raise ValueError(
                f"this is not the state of the {self._kind}: it needs arrays of shapes {wanted}, "
                f"and what was given has {found}"
            )
        rest = {}
        for i, (variable, value) in enumerate(zip(layout, values, strict=True)):
            if variable is None:
                rest[i] = np.array(value)
            else:
                variable.assign(value)
        if division is not None:
            division.rest, division.is_new, division.is_torn = rest, False, False
            division.known_at = self._iterations._value

    # For broadcast_parameters, which gives this the common variables before.

    def state_to_send(self) -> list[Any] | None:
        """Return the state if this rank knows all; nothing if it is new, None if it is divided."""
        if self.is_sharded:
            return None
        if self._division is None or not self._division.is_new:
            return self.whole_state()
        # As others will, since Keras counts variables for their names.
        self._build_anew(self._division.before)
        return []

    def receive_state(self, values: list[Any] | None) -> None:
        """Take what another rank's `state_to_send` has returned."""
        if values:
            self.set_whole_state(values)
        elif self._division is None:
            return
        elif values is not None:
            self._build_anew(self._division.before)
        elif not self.is_sharded and self._division.group is not None:
            raise RuntimeError(
                f"the root's state of a {self._kind} is divided between the ranks "
                "(shard_state=True), and this rank's has been set or loaded since the last step: "
                "load it on every rank, or broadcast from a rank that has loaded it"
            )

    def set_weights(self, weights: Sequence[Any]) -> None:
        self.set_whole_state(weights)

    def save_own_variables(self, store: Any) -> None:
        self.save_values(store, self.layout(), self.whole_state())  # type: ignore[attr-defined]

    def load_own_variables(self, store: Any) -> None:
        n = len(self.layout())
        if len(store.keys()) == n:
            self.set_whole_state([np.array(store[str(i)]) for i in range(n)])
            return
        warnings.warn(
            f"Skipping variable loading for optimizer '{self.name}', because it has {n} variables "  # type: ignore[attr-defined]
            f"whereas the saved optimizer has {len(store.keys())}",
            stacklevel=2,
        )
