"""shard_state for optax: each rank has the optimizer's state of its share of the parameters.

Parameters are dealt whole, by size. `optax.masked` restricts the inner transformation to this
rank's, so its state has nothing of the others. Then every rank receives all updates from their
owners.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import compress
from math import prod
from typing import TYPE_CHECKING, Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import GetAttrKey, keystr, register_pytree_with_keys_class

from horo_lite import ops
from horo_lite.adapters.jax import is_key
from horo_lite.collectives.group import Group
from horo_lite.jax.calls import AllgatherInPlace
from horo_lite.jax.dependences import sources_of_updates
from horo_lite.jax.primitive import bind, is_traced
from horo_lite.state.wrapper import DividedState
from horo_lite.training.sharding import check_not_lost, collected, owners_of

if TYPE_CHECKING:
    import optax

__all__ = ["divided_state", "shard_state", "whole_state"]

Tree = TypeVar("Tree")

_LABEL = "the state of an optax transformation with shard_state"


def shard_state(
    optimizer: optax.GradientTransformation, *, name: str | None = None, group: Group | None = None
) -> optax.GradientTransformationExtraArgs:
    """Divide the state of an optax transformation, and its work, between the ranks.

    Each rank has the state of its share of the parameters, which are dealt whole, by size, and
    computes their updates; then all ranks receive all updates. These are, to the bit, those of
    `optimizer` itself. All ranks must pass equal gradients, so use it inside DistributedOptimizer:
    its `shard_state=True` does that, and this function, where only a part of a chain can be
    divided:

        hvd.DistributedOptimizer(
            optax.chain(optax.clip_by_global_norm(1.0), hvd.shard_state(optax.adam(1e-3)))
        )

    `init` needs no communication; `update` is collective, inside or outside jit. Save what
    `whole_state` returns.

    Args:
        optimizer: What optax.adam and similar functions return, in which the update of a parameter
            depends on no other one, nor on its place among them, as noise does.
        name: For messages.
        group: The ranks; by default all.

    Raises:
        ValueError: From `init`: the updates of `optimizer` depend on other parameters.
        RuntimeError: From `update`: ranks that had a part of the state are lost.
    """
    import optax

    inner = optax.with_extra_args_support(optimizer)
    dtypes: dict[Any, list[Any]] = {}

    def init(params: Any) -> Any:
        _check_each_on_its_own(inner, params)
        leaves, structure = jax.tree.flatten(params)
        shapes = [jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x)) for x in leaves]
        division = _Division(structure, tuple(shapes), ops.ranks_of(group), group, inner.init)
        whole = None if is_traced(leaves) else lambda: inner.init(params)
        return ShardedState(division.mine(params), division, whole)

    def update(
        updates: Any, state: Any, params: Any = None, **extra: Any
    ) -> tuple[Any, ShardedState]:
        if not isinstance(state, ShardedState):
            raise TypeError(
                f"the state for shard_state must be what its init() or divided_state() returns, "
                f"not a {type(state).__name__}"
            )
        division = state.division
        check_not_lost(division.group, ops.ranks_of(group), "a whole_state()")
        is_mine, structure = division.is_mine(updates), jax.tree.structure(updates)
        types = map(jnp.result_type, jax.tree.leaves((updates, params)))
        given = division, structure, tuple(types)
        if given not in dtypes:  # other ranks' updates have those that the transformation returns
            state_like = division.like(division.init, structure)
            results = jax.eval_shape(
                lambda *args: inner.update(*args, **extra)[0], updates, state_like, params
            )
            dtypes[given] = [x.dtype for x in jax.tree.leaves(results)]
        mine, masked = optax.masked(inner, is_mine).update(
            updates, optax.MaskedState(state.inner_state), params, **extra
        )
        return (
            division.received(mine, dtypes[given], name),
            ShardedState(masked.inner_state, division),
        )

    return optax.GradientTransformationExtraArgs(init, update)


def whole_state(state: Tree) -> Tree:
    """Return an optimizer's state with all ranks' shares: that of the same one without shard_state.

    Collective, outside jit; every rank receives all of it.

    Args:
        state: Any pytree in which shard_state's are, such as that of a chain or a TrainState.
    """
    found: Tree = jax.tree.map(
        lambda x: x.whole() if isinstance(x, ShardedState) else x, state, is_leaf=_is_sharded
    )
    return found


def divided_state(whole: Any, like: Tree) -> Tree:
    """Return this rank's share of what `whole_state` has returned, in a job of any size.

    Args:
        whole: An optimizer's state, the same on all ranks. It may be of one without shard_state.
        like: What `init` returns for the parameters in this job.

    Raises:
        ValueError: `whole` is the state of other parameters, or of another optimizer.
    """

    def taken(old: Any, new: Any) -> Any:
        if not isinstance(old, ShardedState):
            return new
        return ShardedState(*old.shares(_by_path(new)))

    found: Tree = jax.tree.map(taken, like, whole, is_leaf=_is_sharded)
    return found


def _is_sharded(x: Any) -> bool:
    return isinstance(x, ShardedState)


@dataclass(frozen=True)
class _Division:
    """Which parameters belong to which rank; compared by value, since JAX compiles for it.

    Attributes:
        structure: The structure of the parameters.
        shapes: Their shapes and dtypes.
        group: The ranks.
        asked: The `group` that was passed to `shard_state`.
        init: That of the transformation.
    """

    structure: Any
    shapes: tuple[jax.ShapeDtypeStruct, ...]
    group: Group
    asked: Group | None
    init: Callable[[Any], Any] = field(compare=False)

    @property
    def owners(self) -> list[int]:
        """The owner of each parameter."""
        return owners_of([prod(x.shape) for x in self.shapes], self.group.size)

    def is_mine(self, tree: Any) -> Any:
        """Return a tree like this with whether each leaf is of this rank: a mask of optax."""
        structure: Any = jax.tree.structure(tree)
        if structure.num_leaves != len(self.shapes):
            raise ValueError(
                f"shard_state has divided {len(self.shapes)} parameters, which init() was given, "
                f"and not {structure.num_leaves}: call init() anew for other parameters"
            )
        mine = [owner == self.group.rank for owner in self.owners]
        return jax.tree.unflatten(structure, mine)

    def like(self, init: Callable[[Any], Any], structure: Any = None) -> Any:
        """Return what `init` returns for the parameters, with shapes instead of arrays.

        `structure` is that of the parameters: flax.nnx takes them out of their variables in steps.
        """
        structure = self.structure if structure is None else structure
        return jax.eval_shape(init, jax.tree.unflatten(structure, self.shapes))

    def mine(self, params: Any) -> Any:
        """Return the state of this rank's parameters only."""
        import optax

        inner = optax.GradientTransformation(self.init, optax.identity().update)
        return optax.masked(inner, self.is_mine).init(params).inner_state

    def received(self, updates: Any, dtypes: Sequence[Any], name: str | None) -> Any:
        """Return all updates, each as its owner has it."""
        paths, structure = jax.tree_util.tree_flatten_with_path(updates)
        all_owners, leaves = self.owners, [x for _, x in paths]
        # That of an integer has no content: float0.
        sent = [i for i, dtype in enumerate(dtypes) if dtype != jax.dtypes.float0]
        names = tuple(keystr(paths[i][0], simple=True, separator=".") for i in sent)
        owners = tuple(all_owners[i] for i in sent)
        xs = [
            leaves[i] if owner == self.group.rank else jnp.zeros(jnp.shape(leaves[i]), dtypes[i])
            for i, owner in zip(sent, owners, strict=True)
        ]
        call = AllgatherInPlace(name or "updates", self.asked, owners, names).here()
        for i, x in zip(sent, bind(call, xs), strict=True):
            leaves[i] = x
        return jax.tree.unflatten(structure, leaves)


@register_pytree_with_keys_class
class ShardedState(DividedState):
    """This rank's share of a transformation's state. A pytree, whose leaves differ between ranks.

    Attributes:
        inner_state: The transformation's state, with nothing for the parameters of other ranks.
        division: Which parameters belong to which rank.
    """

    def __init__(
        self, inner_state: Any, division: _Division, whole: Callable[[], Any] | None = None
    ) -> None:
        self.inner_state, self.division = inner_state, division
        self._whole = whole  # returns it without communication; JAX makes objects without it

    _cannot_be_copied = (
        "an optimizer's state with shard_state cannot be copied or pickled, since this rank has "
        "its share only: copy or save what whole_state() returns"
    )

    @property
    def _divided_between(self) -> Group | None:
        return self.division.group if self._whole is None else None

    def whole(self) -> Any:
        """Return the state of all parameters. Collective after a step."""
        return _filled(self.division.like(self.division.init), self.state_dict())

    # For elastic.State, which keeps commits of objects with these methods, and loads them in place.

    def state_dict(self) -> dict[str, Any]:
        """Return the arrays of `whole()` by path, in host memory. Collective after a step."""
        if self._whole is not None:
            return _by_path(self._whole())
        group = self.division.group
        check_not_lost(group, group, "a whole_state()")
        return collected(group, _LABEL, _by_path(self.inner_state))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take what `state_dict()` has returned, in a job with any number of ranks."""
        self.inner_state, self.division, self._whole = self.shares(state)

    def shares(self, state: Mapping[str, Any]) -> tuple[Any, _Division, Callable[[], Any]]:
        """Return the attributes of this rank's share of what `state_dict()` has returned."""
        old = self.division
        now = _Division(old.structure, old.shapes, ops.ranks_of(old.asked), old.asked, old.init)
        whole = _filled(now.like(now.init), state)
        like = self.inner_state if now == old else now.like(now.mine)
        return _filled(like, state), now, lambda: whole

    def tree_flatten_with_keys(self) -> tuple[Any, _Division]:
        return [(GetAttrKey("inner_state"), self.inner_state)], self.division

    @classmethod
    def tree_unflatten(cls, division: _Division, children: Sequence[Any]) -> ShardedState:
        return cls(children[0], division)

    def __repr__(self) -> str:
        return f"ShardedState({self.inner_state!r})"


def _by_path(state: Any) -> dict[str, Any]:
    """Return a state's arrays in host memory, by their paths."""
    return {
        _name(path): np.asarray(jax.random.key_data(x) if is_key(x) else x)
        for path, x in jax.tree_util.tree_flatten_with_path(state)[0]
    }


def _name(path: Any) -> str:
    """Return the path as text: of an array in a variable of flax.nnx, that of the variable."""
    return keystr(path).removesuffix(".value")


def _filled(like: Any, arrays: Mapping[str, Any]) -> Any:
    """Return a state like this with the arrays that have its paths; there may be more."""

    def array(path: Any, like: Any) -> Any:
        x = arrays.get(_name(path))
        is_random = jnp.issubdtype(like.dtype, jax.dtypes.prng_key)
        if x is None or (x.shape != like.shape and not is_random):
            found = "nothing" if x is None else f"an array of shape {list(x.shape)}"
            raise ValueError(
                f"the optimizer's state needs an array of shape {list(like.shape)} at "
                f"{_name(path)}, where what was given has {found}: it is the state of other "
                "parameters, or of another optimizer"
            )
        if is_random:
            return jax.random.wrap_key_data(jnp.asarray(x), impl=jax.random.key_impl(like))
        return jnp.asarray(x, like.dtype)

    return jax.tree_util.tree_map_with_path(array, like)


def _check_each_on_its_own(inner: Any, params: Any) -> None:
    """Raise ValueError if the update of a parameter depends on another, or on its place among them.

    What JAX traces shows what depends on other parameters, in every step. What state there is with
    either half of them belongs to no parameter, so it must depend on none, since every rank has its
    own. Places are tried, with small parameters: every other one is left out, as on a rank that has
    the rest, and the updates of the rest must stay the same, which random numbers do not.
    """
    import optax

    paths, structure = jax.tree_util.tree_flatten_with_path(params)
    places = range(len(paths))

    def small(seed: float) -> Any:
        leaves = []
        for i, (_, x) in enumerate(paths):
            shape = tuple(min(n, 2) for n in jnp.shape(x))
            one = np.cos(seed + i + np.arange(prod(shape))).reshape(shape)
            leaves.append(one.astype(jnp.result_type(x)))
        return jax.tree.unflatten(structure, leaves)

    def two_steps(inner: Any) -> tuple[list[Any], Any]:
        updates, params = small(1), small(2)
        first, state = inner.update(updates, inner.init(params), params)
        second, state = inner.update(updates, state, params)
        return [jax.tree.leaves(first), jax.tree.leaves(second)], state

    kept = [[i % 2 == parity for i in places] for parity in ((0, 1) if len(places) > 1 else (1,))]
    try:
        sources, state_sources = sources_of_updates(inner, params)
        with jax.ensure_compile_time_eval():
            found, _ = two_steps(inner)
            halves = [
                two_steps(optax.masked(inner, jax.tree.unflatten(structure, k))) for k in kept
            ]
    except Exception as error:
        raise ValueError(
            "shard_state tries an optimizer with small parameters, to see whether the update of "
            f"each depends on no other one, but that failed ({error}): {_DIVIDE_A_PART}"
        ) from error
    for i, (path, _) in enumerate(paths):
        if sources[i] - {i}:
            raise ValueError(
                "shard_state needs an optimizer in which the update of a parameter depends "
                f"on no other one, but that of {keystr(path)} does, as with "
                f"clipping by a global norm, or apply_if_finite: {_DIVIDE_A_PART}"
            )
    in_both = set.intersection(*(set(_by_path(half.inner_state)) for _, half in halves))
    for at, depends_on in state_sources.items():
        if len(depends_on) > (at.removesuffix(".value") not in in_both):
            raise ValueError(
                f"shard_state needs an optimizer whose state belongs to parameters, but {at} "
                "belongs to none and depends on gradients or values, as with apply_if_finite: "
                + _DIVIDE_A_PART
            )
    for (some, _), is_kept in zip(halves, kept, strict=True):
        for whole, part in zip(found, some, strict=True):
            for i in compress(places, is_kept):
                one, other = whole[i], part[i]
                # XLA rounds by what it compiles together.
                is_inexact = jnp.issubdtype(one.dtype, jnp.inexact)
                rounding = 100 * float(jnp.finfo(one.dtype).eps) if is_inexact else 0.0
                if not jnp.allclose(one, other, rounding, rounding * 1e-3, equal_nan=True):
                    raise ValueError(
                        "shard_state needs an optimizer in which the update of a parameter depends "
                        f"on no other one, but that of {keystr(paths[i][0])} depends on its place "
                        f"among the others, as with add_noise: {_DIVIDE_A_PART}"
                    )


_DIVIDE_A_PART = (
    "divide only that part of the chain which keeps a state for each parameter, as in "
    "DistributedOptimizer(optax.chain(optax.clip_by_global_norm(1.0), "
    "shard_state(optax.adam(1e-3))))"
)
