"""Local SGD: the ranks train on their own, and average their parameters every some steps."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator, Mapping
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

import numpy as np

from horo_lite import ops
from horo_lite._native import Tensors
from horo_lite.adapters import adapter_of, from_numpy, to_host
from horo_lite.adapters.object import NO_ORDER
from horo_lite.collectives.compression import COMPRESSORS, Compression, Compressor
from horo_lite.errors import warn
from horo_lite.state import drift
from horo_lite.state.broadcast import NOT_ARRAYS, Places
from horo_lite.state.optimizer_state import in_host_memory
from horo_lite.training.gradient_memory import hash_of
from horo_lite.training.options import Options

if TYPE_CHECKING:
    from horo_lite.collectives.group import Group


class LocalSGD:
    """Average the ranks' parameters every some steps, instead of their gradients in each.

        hvd.broadcast_parameters(model)
        local = hvd.LocalSGD(model, every=20)
        for batch in loader:
            ...
            optimizer.step()        # this rank's own, not a DistributedOptimizer
            local.step()            # every 20th call averages
        local.average()             # at the end, if steps are left over

    It sends 1/`every` of the bytes of averaged gradients, and waits for the other ranks as rarely.
    Between averages, each rank trains on its own samples only.

    The average of the ranks' changes since the last one is the step of an outer optimizer, SGD with
    Nesterov's momentum; with the default, no momentum and a rate of 1, the parameters become the
    ranks' average. DiLoCo is `outer_lr=0.7, outer_momentum=0.9` with AdamW as the rank's own
    optimizer. The rank's own optimizer keeps its state. Moving statistics, such as BatchNorm's,
    become the ranks' average.

    `state_dict()` and `load_state_dict()` make it a part of checkpoints and of `elastic.State`.
    When a rank dies or joins there, the others average first what they have changed, so that only
    the steps of the lost rank are lost. Count a step in the state before `step()`, in which ranks
    are noticed to be lost: otherwise all go back to the last commit.

    Args:
        params: A module, an optimizer, or a tree of parameters, as for `broadcast_parameters`, with
            equal values on all ranks.
        every: The number of steps between averages, the same on all ranks.
        outer_lr: How far the parameters go along the average change.
        outer_momentum: The factor of Nesterov's momentum, at least 0 and less than 1.
        compression: The wire format of the changes.
        group: The ranks; by default all.
    """

    def __init__(
        self,
        params: Any,
        *,
        every: int,
        outer_lr: float = 1.0,
        outer_momentum: float = 0.0,
        compression: Compressor = Compression.none,
        group: Group | None = None,
    ) -> None:
        if operator.index(every) < 1:
            raise ValueError(f"every must be a number of steps, at least 1, not {every!r}")
        if not 0 < outer_lr < math.inf or not 0 <= outer_momentum < 1:
            raise ValueError(
                "outer_lr must be positive and outer_momentum at least 0 and less than 1, not "
                f"{outer_lr!r} and {outer_momentum!r}"
            )
        Options(compression=compression, group=group)  # checks them
        if compression.is_for_steps:
            raise ValueError(
                f"LocalSGD takes {COMPRESSORS}: compression {compression.name} is for the "
                "gradients of an optimizer's steps"
            )
        params = list(params) if isinstance(params, Iterator) else params
        self.every, self.outer_lr, self.outer_momentum = every, outer_lr, outer_momentum
        self._compression, self._group, self._params = compression.for_steps(), group, params
        self._n_steps, self._averaged_at, self._weight = 0, 0, 0.0
        self._is_passed = False
        found = _Found(params)
        self._names = found.names
        self._anchors = [_copy(x) for x in found.values]
        self._momenta = [_copy(x) for x in self._anchors] if outer_momentum else []
        for momentum in self._momenta:
            momentum[...] = 0

    def step(self, params: Any = None, *, weight: float = 1.0) -> Any:
        """Count a step of this rank; average in every `every`-th. Collective then.

        Args:
            params: The parameters after the step, where they are new objects, as in JAX.
            weight: How much the step counts, usually its number of samples; 0 without any.

        Returns:
            `params`, or those passed to LocalSGD; with new arrays if they cannot be written.
        """
        if not 0 <= weight < math.inf:
            raise ValueError(f"weight must be a number of samples (0 or more), not {weight!r}")
        self._n_steps += 1
        self._weight += weight
        self._is_passed |= params is not None
        if self._n_steps % self.every:
            return self._params if params is None else params
        return self.average(params)

    def average(self, params: Any = None) -> Any:
        """Average now what the ranks have changed since the last time. Collective.

        Without a step since then, it does nothing.

        Args:
            params: As for `step`.

        Returns:
            As `step` does.

        Raises:
            DriftError: The parameters were not equal on all ranks when training began, or those of
                the last average are not.
            MismatchError: The ranks have taken different numbers of steps, or have different
                parameters, or some that share memory on one rank only.
        """
        self._is_passed |= params is not None
        found = _Found(self._params if params is None else params)
        if found.names != self._names:
            raise ValueError(
                "the parameters are not those that LocalSGD was made for: "
                + _first_difference(self._names, found.names)
            )
        if self._n_steps == self._averaged_at:
            return found.written()
        group = ops.ranks_of(self._group)
        before = list(zip(found.places(), self._anchors, strict=True))
        drift.compare(before, group=group, on_drift="raise", needs_all=False)
        self._average(found, group, self._weight, f"local steps up to {self._n_steps}")
        return found.written()

    @property
    def averaged_at(self) -> int:
        """The number of this rank's steps at its last average."""
        return self._averaged_at

    def merge_ranks(self, root: int, *, is_new: bool) -> None:
        """Average what ranks have changed, after one was lost or has joined. Collective.

        Afterwards the root's parameters, which all ranks are to receive, have what all ranks have
        learned that have taken part in as many averages. It does nothing where parameters are
        passed to `step`.

        Args:
            root: A rank that is not new.
            is_new: Whether this rank has just joined.
        """
        if self._group is not None:
            return
        group = ops.ranks_of(None)
        mine = (-1 if is_new else self._averaged_at, self._weight, self._is_passed)
        everyone = ops.allgather_object(mine, group=group)
        latest = everyone[root][0]
        # A rank whose last average was cut short is part of it, if others have completed it.
        weights = [weight if at == latest else 0.0 for at, weight, _ in everyone]
        cannot = any(is_passed or at > latest for at, _, is_passed in everyone)
        if not cannot and sum(weights) > 0:
            found = _Found(self._params)
            self._average(found, group, weights[group.rank], "local steps of the ranks that remain")
            found.written()

    def _average(self, found: _Found, group: Group, weight: float, label: str) -> None:
        changes = [_copy(x) for x in found.values]
        for change, old in zip(changes, self._anchors, strict=True):
            change -= old
        try:
            for places in found.by_device():
                ops.grouped_allreduce_(
                    [changes[i] for i in places],
                    name=label,
                    compression=self._compression,
                    names=[self._names[i] for i in places],
                    weight=weight,
                    group=group,
                )
        except BaseException:
            self._compression.reset()  # what it keeps is of changes that no rank may have received
            raise
        if not self._averaged_at and not hash_of(changes, group) and group.rank == 0:
            warn(
                f"no parameter has changed on any rank in {label}, as LocalSGD sees them: if the "
                "optimizer makes new arrays, pass them to step(), or give LocalSGD the object, "
                "dict or list that holds them"
            )
        for i, (x, change) in enumerate(zip(found.values, changes, strict=True)):
            if found.is_trained[i]:
                change = self._outer(i, change)
            x[...] = self._anchors[i] + change
            self._anchors[i][...] = x
        self._averaged_at, self._weight = self._n_steps, 0.0

    def _outer(self, i: int, change: Any) -> Any:
        """Return the outer optimizer's step along an average change."""
        if self.outer_momentum:
            momentum = self._momenta[i]
            momentum *= self.outer_momentum
            momentum += change
            change = change + self.outer_momentum * momentum
        return self.outer_lr * change

    def state_dict(self) -> dict[str, Any]:
        """Return the count of steps, and the parameters and momenta of the last average."""
        kept = {"anchors": self._anchors, "momenta": self._momenta}
        return {
            "n_steps": self._n_steps,
            "averaged_at": self._averaged_at,
            "weight": self._weight,
            **{
                key: dict(zip(self._names, in_host_memory(list(map(_copy, arrays))), strict=False))
                for key, arrays in kept.items()
            },
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take what `state_dict()` has returned.

        Raises:
            ValueError: It is the state of other parameters; nothing is changed.
        """
        counts = state["n_steps"], state["averaged_at"], state["weight"]
        pairs = []
        for key, kept in (("anchors", self._anchors), ("momenta", self._momenta)):
            ours = [f"{name} {list(x.shape)}" for name, x in zip(self._names, kept, strict=False)]
            theirs = [f"{name} {list(x.shape)}" for name, x in state[key].items()]
            if ours != theirs:
                raise ValueError(
                    f"the state is that of another LocalSGD: in its {key}, "
                    + _first_difference(ours, theirs)
                )
            pairs += list(zip(kept, state[key].values(), strict=True))
        for x, saved in pairs:
            x[...] = from_numpy(saved, x)
        self._compression.reset()
        self._n_steps, self._averaged_at, self._weight = counts


class _Found:
    """The floating-point arrays of a tree, where they can be changed.

    Attributes:
        names: Their names.
        values: Their memory, or copies if it cannot be written.
        is_trained: Whether each is a parameter, and not a moving statistic.
    """

    def __init__(self, params: Any) -> None:
        self._tree, _ = drift.tree_of(params, True)
        trained = {name for name, _ in drift.tree_of(params, False)[0].named}
        named = self._tree.named
        self._at = [i for i, (_, leaf) in enumerate(named) if _is_floating(leaf)]
        chosen = [named[i] for i in self._at]
        if not chosen:
            raise ValueError(
                f"there are no floating-point arrays in this {type(params).__name__} that LocalSGD "
                "could average: pass the model, or its parameters"
            )
        self.names = [name or "params" for name, _ in chosen]
        self.is_trained = [name in trained for name, _ in chosen]
        self._places = Places(chosen)
        self.values = self._places.targets

    def by_device(self) -> list[list[int]]:
        return [places for places in self._places.by_device() if places]

    def places(self) -> list[str]:
        """Return the names, and which of the arrays are in the memory of others (tied weights).

        An array shared on one rank and separate on another cannot hold the same values.
        """
        places = list(self.names)
        for chosen in self.by_device():
            tensors = Tensors([self.values[i] for i in chosen], stream=NO_ORDER)
            for first, second, distance, _ in tensors.overlaps():
                places[chosen[second]] += f", {distance} bytes from {self.names[chosen[first]]}"
        return places

    def written(self) -> Any:
        """Return the tree with what is in `values` now."""
        new = dict(zip(self._at, self._places.received([False] * len(self._at)), strict=True))
        return self._tree.written(new.get(i, leaf) for i, (_, leaf) in enumerate(self._tree.named))


def _first_difference(ours: list[str], theirs: list[str]) -> str:
    pairs = zip_longest(ours, theirs, fillvalue="nothing")
    place, (one, other) = next((i, pair) for i, pair in enumerate(pairs) if pair[0] != pair[1])
    return f"number {place} is {one!r} here, and {other!r} in what was given"


def _is_floating(leaf: Any) -> bool:
    if isinstance(leaf, (bool, int, *NOT_ARRAYS)):
        return False
    dtype = str(to_host(leaf).dtype).removeprefix("torch.")
    return dtype.startswith(("float", "bfloat", "complex"))


def _copy(x: Any) -> Any:
    return np.array(x) if isinstance(x, np.ndarray) else adapter_of(x).copy(x)
