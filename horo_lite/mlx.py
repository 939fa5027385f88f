"""MLX on several ranks: `import horo_lite.mlx as hvd`.

    world = hvd.init()
    hvd.broadcast_parameters(model)
    optimizer = hvd.DistributedOptimizer(optim.Adam(learning_rate=1e-3))

    loss, gradients = nn.value_and_grad(model, loss_of)(model, x, y)
    optimizer.update(model, gradients)

Each rank is a separate process; nothing here needs `mx.distributed`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from mlx.optimizers import Optimizer
from mlx.utils import tree_flatten, tree_map_with_path, tree_unflatten

# ruff: noqa: F403
from horo_lite import *
from horo_lite import Average, Compression, Compressor, Group, Op, average_gradients
from horo_lite.adapters import from_numpy, to_host
from horo_lite.ops import ranks_of
from horo_lite.state.wrapper import DividedState, Sharing, sharing
from horo_lite.training.options import Options
from horo_lite.training.sharding import (
    changing,
    check_not_lost,
    check_not_torn,
    collected,
    compare_division,
    owners_of,
    receive_values,
)


def DistributedOptimizer(  # noqa: N802 (Horovod's name)
    optimizer: Optimizer,
    *,
    op: Op = Average,
    compression: Compressor = Compression.none,
    name: str | None = None,
    group: Group | None = None,
    shard_state: bool = False,
) -> Any:
    """Return an optimizer whose `update` and `apply_gradients` first average over all ranks.

    Every rank creates it with the same options and calls these methods the same number of times,
    outside `mx.compile`. It has the same class as `optimizer`, and shares its state, settings and
    schedules.

    Both methods take `weight=`, this rank's number of samples, on every rank or on none: the
    average is then the mean over all samples, however uneven the batches. The gradients that are
    passed are not changed. See `average_gradients` for options and errors.

    With shard_state=True, each rank has the state of its share of the parameters only, which are
    dealt whole, by size; `whole_state` collects it. See docs/how-to/shard-state.md.
    """
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"{optimizer!r} is not an optimizer of mlx.optimizers")
    Options(op=op, compression=compression, group=group)  # checks them

    def average(gradients: Any, parameters: Any, weight: float | None) -> Any:
        return average_gradients(
            gradients,
            op=op,
            compression=compression,
            weight=weight,
            name=name,
            group=group,
            parameters=parameters,
        )

    if not shard_state:
        return sharing(optimizer, Averaging, _average=average)
    return sharing(
        optimizer,
        ShardedAveraging,
        _average=average,
        _asked=group,
        _owners=None,
        _is_compared=False,
        is_torn=False,
    )


def whole_state(optimizer: Any) -> Any:
    """Return the state of an optimizer with shard_state=True, as it would be without.

    Every rank calls it, and receives all of it. To continue, in a job with any number of ranks, set
    `optimizer.state` to it on every rank.

    Args:
        optimizer: What `DistributedOptimizer` has returned; of others, it is `optimizer.state`.
    """
    if not isinstance(optimizer, ShardedAveraging):
        return optimizer.state
    return optimizer.whole_state()


class Averaging(Sharing):
    """Base class of a wrapped optimizer, in addition to its own class."""

    _average: Callable[[Any, Any, float | None], Any]

    def update(self, model: Any, gradients: Any, *, weight: float | None = None) -> None:
        model.update(self.apply_gradients(gradients, model, weight=weight))

    def apply_gradients(
        self, gradients: Any, parameters: Any, *, weight: float | None = None
    ) -> Any:
        averages = self._average(gradients, parameters, weight)
        return super().apply_gradients(averages, parameters)  # type: ignore[misc]


class ShardedAveraging(DividedState, Averaging):
    """Base class of a wrapped optimizer with shard_state=True.

    Its state has nothing for the parameters of other ranks. Before `init` or the first step, and
    after a state was set, it is whole, and `_owners` is None.
    """

    _asked: Group | None
    _group: Group
    _owners: dict[str, int] | None
    _is_compared: bool
    is_torn: bool

    _cannot_be_copied = (
        "an optimizer with shard_state=True cannot be copied or pickled, since this rank has a "
        "share of its state only: copy or save what hvd.whole_state(optimizer) returns"
    )

    @property
    def _divided_between(self) -> Group | None:
        return None if self._owners is None else self._group

    @property
    def state(self) -> Any:
        """This rank's share of the state, in place of which that of all ranks can be set."""
        return super(ShardedAveraging, type(self)).state.fget(self)  # type: ignore[misc]

    @state.setter
    def state(self, state: Any) -> None:
        self._set_state(state)
        self._owners, self._is_compared, self.is_torn = None, False, False

    def _set_state(self, state: Any) -> None:
        super(ShardedAveraging, type(self)).state.fset(self, state)  # type: ignore[misc]

    def init(self, parameters: Any) -> None:
        """Make the state of this rank's share of the parameters."""
        named = tree_flatten(parameters)
        self._group = ranks_of(self._asked)
        owners = self._deal(named, self._group)
        leaves = tree_flatten(self.state)
        kept = [(name, x) for name, x in leaves if self._is_kept(name, owners)]
        if len(kept) < len(leaves):
            self._set_state(tree_unflatten(kept))
        super().init(_tree((name, x) for name, x in named if owners[name] == self._group.rank))  # type: ignore[misc]
        self._owners = owners

    def apply_gradients(
        self, gradients: Any, parameters: Any, *, weight: float | None = None
    ) -> Any:
        check_not_torn(self, "a whole_state()")
        averages = self._average(gradients, parameters, weight)
        named = tree_flatten(averages)
        values = dict(tree_flatten(parameters))
        label = f"parameters of a {type(self).__name__} with shard_state=True"
        group = ranks_of(self._asked)
        if self.is_sharded:
            check_not_lost(self._group, group, "a whole_state()")
        owners = self._owners or self._deal(named, group)
        if not self._is_compared:  # before init() drops the other ranks' part of the state
            state = {} if self.is_sharded else dict(tree_flatten(self.state))
            dealt = [f"{name!r}: rank {owner}" for name, owner in owners.items()]
            compared = [(name, values[name]) for name, _ in named]
            compare_division(group, label, dealt, compared, lambda: state)
        if not self.is_sharded:
            self.init(averages)
        self._is_compared = True
        for name, _ in named:
            if name not in owners:
                raise ValueError(
                    f"{name!r} is not among the parameters between which shard_state=True has "
                    "divided the state: make a DistributedOptimizer of all parameters that are "
                    "trained, or set optimizer.state to what hvd.whole_state() returns"
                )
        mine = _tree((name, x) for name, x in named if owners[name] == group.rank)
        places = [owners[name] for name, _ in named]
        with changing(self):
            # Not that of Averaging, which would average again.
            updated = super(Averaging, self).apply_gradients(mine, parameters)  # type: ignore[misc]
            values.update(tree_flatten(updated))
            results = [(name, values[name]) for name, _ in named]
            received = receive_values(group, label, places, results)
        values = {name: x for (name, _), x in zip(named, received, strict=True)}
        return tree_map_with_path(lambda path, _: values[path], averages)

    def whole_state(self) -> Any:
        """Return the state of all parameters. Collective if it is divided."""
        leaves = tree_flatten(self.state)
        owners = self._owners
        check_not_torn(self, "a whole_state()")
        if owners is None:
            return self.state
        check_not_lost(self._group, ranks_of(self._asked), "a whole_state()")
        mine = {name: to_host(x) for name, x in leaves if _parameter_of(name, owners)}
        label = f"whole_state() of a {type(self).__name__} with shard_state=True"
        like = next((x for _, x in leaves), None)
        everything = dict(leaves)
        for name, x in collected(self._group, label, mine).items():
            everything.setdefault(name, from_numpy(x, like))
        return tree_unflatten(sorted(everything.items()))

    def _deal(self, named: Any, group: Group) -> dict[str, int]:
        """Return which rank has the state of each parameter."""
        dealt = owners_of([math.prod(x.shape) for _, x in named], group.size)
        owners = dict(zip((name for name, _ in named), dealt, strict=True))
        known = {_parameter_of(name, owners) for name, _ in tree_flatten(self.state)} - {None}
        missing = [name for name in owners if name not in known]
        if known and missing:
            raise ValueError(
                f"the state of this {type(self).__name__} has nothing for the parameter "
                f"{missing[0]!r}: set the state of all ranks, which hvd.whole_state() returns"
            )
        return owners

    def _is_kept(self, name: str, owners: dict[str, int]) -> bool:
        parameter = _parameter_of(name, owners)
        return parameter is None or owners[parameter] == self._group.rank


def _tree(named: Any) -> Any:
    """Return the tree of these leaves; empty places in its lists are empty dicts."""
    leaves = list(named)
    return tree_unflatten(leaves) if leaves else {}


def _parameter_of(leaf: str, owners: dict[str, int]) -> str | None:
    """Return the parameter to which a leaf of the state belongs, by their paths; None for all.

    A leaf of the parameter "layers.0.weight" is "layers.0.weight.m", and of a MultiOptimizer
    "states.1.layers.0.weight.m".
    """
    parts = leaf.split(".")
    for first in (0, 2):
        for last in range(len(parts) - 1, first, -1):
            name = ".".join(parts[first:last])
            if name in owners and (first == 0 or parts[0] == "states"):
                return name
    return None
