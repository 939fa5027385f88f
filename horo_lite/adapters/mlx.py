"""MLX: lazy, immutable arrays, and optimizers that receive gradients as arguments."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.nn import Module
from mlx.optimizers import MultiOptimizer, Optimizer
from mlx.utils import tree_flatten, tree_unflatten

from horo_lite.adapters.object import Adapter, Array, Named


class MlxAdapter(Adapter):
    """mlx.core arrays, mlx.nn modules (which are updated with new arrays) and mlx.optimizers."""

    mutable = False
    face = "horo_lite.mlx"
    steps = ("update", "apply_gradients")  # `step` is a number
    array_types = (mx.array,)

    def matches(self, obj: object) -> bool:
        return isinstance(obj, (mx.array, Module, Optimizer))

    def parameters(self, owner: Any) -> Named:
        return []  # optimizers receive parameters as arguments, too

    def flattened(self, tree: Any) -> tuple[Named, Callable[[Iterable[Any]], Any]] | None:
        if not isinstance(tree, Module):
            return None
        named = tree_flatten(tree.parameters())
        names = [name for name, _ in named]
        return named, lambda new: tree.update(tree_unflatten(list(zip(names, new, strict=True))))

    def replica(self, owner: Any, buffers: bool) -> Named | None:
        if not isinstance(owner, Module):
            return None
        found: Named = tree_flatten(owner.parameters() if buffers else owner.trainable_parameters())
        return found

    def state(self, optimizer: Any) -> Any | None:
        is_divided = hasattr(optimizer, "is_sharded")
        if not is_divided and not isinstance(optimizer, MultiOptimizer):
            return None  # found in its attributes
        leaves = tree_flatten(optimizer.whole_state() if is_divided else optimizer.state)
        return {name: np.array(self.value(x)) for name, x in leaves}

    def set_state(self, optimizer: Any, state: Any) -> None:
        optimizer.state = tree_unflatten([(k, self.from_numpy(x, None)) for k, x in state.items()])

    def compute(self, parameters: Sequence[Any]) -> None:
        _compute([p.grad for p in parameters if isinstance(p.grad, mx.array)])

    def value(self, parameter: Any) -> Array:
        if isinstance(parameter, Optimizer):
            raise TypeError("an MLX optimizer has no parameters: pass the model, or its .state")
        _compute([parameter])
        if parameter.dtype == mx.bfloat16:
            import ml_dtypes

            memory = np.asarray(parameter.view(mx.uint16)).view(ml_dtypes.bfloat16)
        else:
            memory = np.asarray(parameter)
        # Writing is possible, but would change lazy arrays that are still to be computed from it.
        memory.flags.writeable = False
        return memory

    def from_numpy(self, array: np.ndarray[Any, Any], like: object) -> Any:
        if array.dtype.name == "bfloat16":
            return mx.array(array.view(np.uint16)).view(mx.bfloat16)
        dtype = mx.bool_ if array.dtype == np.bool_ else getattr(mx, array.dtype.name)
        return mx.array(array, dtype)


def _compute(arrays: list[mx.array]) -> None:
    try:
        mx.eval(arrays)
    except ValueError as error:
        raise RuntimeError(
            "this exchange is inside mx.compile or mx.vmap, where arrays have no values: compile "
            "the function that computes gradients and the one that applies them separately, and "
            "exchange in between"
        ) from error


ADAPTER = MlxAdapter()
