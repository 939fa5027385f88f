"""The gradients of one optimizer's parameters, and the state of each."""

from __future__ import annotations

from typing import Any

import torch

from horo_lite.adapters.torch import TorchAdapter
from horo_lite.torch import bucket_views
from horo_lite.torch.passes import graph_task

# An attribute of a dense gradient that was made of a sparse one. It stays with the tensor, to which
# later passes add, also after zero_grad(set_to_none=False).
_SPARSE_DIM = "_horo_lite_sparse_dim"


class Slot:
    """One parameter, and the state of its gradient."""

    __slots__ = ("attributes", "exchanged", "hook", "index", "is_copied", "is_result", "last_pass",
                 "name", "parameter", "passes", "seen", "task", "touched", "view",
                 "zeros_hook")  # fmt: skip

    def __init__(self, name: str, parameter: Any) -> None:
        self.name = name
        self.parameter = parameter
        self.index = 0
        self.hook: Any = None
        self.zeros_hook: Any = None
        self.attributes: Any = None  # the parameter's, when its hook was registered
        self.passes = 0  # since the last exchange, step() or zero_grad()
        self.last_pass: Any = None  # the last of these passes
        self.seen: Any = None  # the gradient after the last pass, and its version
        self.touched = False  # since the last exchange
        self.exchanged = False  # since the last step() or zero_grad(): equal on all ranks
        self.is_result = False  # it was exchanged and not set to zero since, perhaps in past steps
        self.task = -1  # the graph task in which it was exchanged; -1: in none
        self.view: Any = None  # the tensor in shared memory for the gradient
        self.is_copied = False  # the gradient cannot be there: a copy is exchanged

    def restore_hook(self) -> None:
        """Register the hook again after torch.utils.swap_tensors() has swapped the parameter.

        Module.to() and load_state_dict() call that if
        torch.__future__.set_swap_module_params_on_conversion() is set. It swaps everything except
        the object and its table of hooks, which must be passed to C++ again.
        """
        parameter = self.parameter
        if self.hook is not None and parameter.__dict__ is not self.attributes:
            self.attributes = parameter.__dict__
            parameter._post_accumulate_grad_hooks = parameter._post_accumulate_grad_hooks

    def begin(self) -> None:
        self.passes = 0
        self.seen = self.last_pass = None
        self.touched = self.exchanged = self.is_copied = False

    def begin_another(self) -> None:
        """Begin another gradient: the last one has been set to None or zero."""
        self.begin()
        self.is_result = False

    def end_exchange(self) -> None:
        """Record that the gradient has been exchanged: what is added now is pending again."""
        self.passes = 0
        self.seen = self.last_pass = None
        self.exchanged = self.is_result = True
        self.task = graph_task()
        self.copy_back()
        self.touched = False
        if self.parameter.grad is not None:  # perhaps saved for a backward(), and overwritten
            torch.autograd.graph.increment_version(self.parameter.grad)

    @property
    def sparse_dim(self) -> int:
        """The number of sparse dimensions; also of a gradient that `make_dense` has made dense."""
        gradient = self.parameter.grad
        if is_sparse(gradient):
            return int(gradient.sparse_dim())
        return int(getattr(gradient, _SPARSE_DIM, 0))

    def make_dense(self) -> bool:
        """Make a sparse gradient dense; return whether it was sparse."""
        gradient = self.parameter.grad
        if not is_sparse(gradient):
            return False
        self.parameter.grad = gradient.to_dense()
        setattr(self.parameter.grad, _SPARSE_DIM, gradient.sparse_dim())
        return True

    def see(self) -> None:
        """Record the gradient and its version, after an addition by a pass."""
        gradient = self.parameter.grad
        self.seen = gradient, gradient._version

    def has_changed(self, travels: bool, additions: int = 0) -> bool:
        """Return whether the gradient has been changed, except by that many additions of autograd.

        If it `travels`, also whether it has been replaced.
        """
        gradient, version = self.seen or (None, 0)
        if gradient is None or gradient is not self.parameter.grad:
            return travels
        return bool(gradient._version != version + additions)

    def move_to_shared_memory(self) -> Any:
        """Move the gradient to its place in shared memory, if it has one, and return it."""
        gradient, view = self.parameter.grad, self.view
        self.is_copied = False
        if view is None or gradient is view or not bucket_views.fits(gradient, view):
            return gradient
        if gradient.requires_grad:  # from backward(create_graph=True): keep its history
            bucket_views.move(gradient.detach(), view)
            self.is_copied = True
            return gradient
        bucket_views.move(gradient, view)
        setattr(view, _SPARSE_DIM, getattr(gradient, _SPARSE_DIM, 0))
        self.parameter.grad = view
        return view

    def copy_back(self) -> None:
        """Copy the result to the gradient, if a copy was exchanged."""
        if self.is_copied:
            self.is_copied = False
            self.parameter.grad.detach().copy_(self.view)


class SlotAdapter(TorchAdapter):
    """The touched gradients, in slots."""

    def gradient(self, slot: Any) -> Any:
        if slot.is_copied:
            return slot.view
        gradient = slot.parameter.grad if slot.touched else None
        if gradient is None or gradient.layout is not torch.strided:
            return None
        return gradient.detach() if gradient.requires_grad else gradient

    def set_gradient(self, slot: Any, array: Any) -> None:
        is_own, slot.touched = slot.touched, True
        gradient = slot.parameter.grad
        if gradient is array or (is_own and is_sparse(gradient)):  # sparse.exchange raises an error
            return
        # A gradient of its own could not be written in place, nor an expanded or sparse tensor.
        if gradient is None or is_own or is_sparse(gradient) or 0 in gradient.stride():
            slot.parameter.grad = self.from_numpy(array, slot.parameter)
        else:
            gradient.detach().copy_(array)

    def held(self, slot: Any, dtype: str, shape: tuple[int, ...]) -> Any | None:
        gradient = slot.parameter.grad if slot.exchanged else None
        if gradient is not None and is_sparse(gradient):
            slot.parameter.grad = gradient = gradient.to_dense()
        if gradient is None or (str(gradient.dtype)[6:], tuple(gradient.shape)) != (dtype, shape):
            return None
        gradient = slot.move_to_shared_memory()
        return slot.view if slot.is_copied else gradient.detach()

    def missing(self, slot: Any, dtype: str, shape: tuple[int, ...]) -> Any:
        view = slot.view
        if view is not None and (str(view.dtype)[6:], tuple(view.shape)) == (dtype, shape):
            return view.zero_()
        # In the parameter's layout, as from autograd: it must be the same on all ranks.
        parameter = slot.parameter.detach()
        return torch.zeros_like(parameter, dtype=getattr(torch, dtype))

    def value(self, slot: Any) -> Any:
        return super().value(slot.parameter)

    def zeros_like(self, x: Any) -> Any:
        return torch.zeros_like(x.detach())


def is_sparse(gradient: Any) -> bool:
    """Return whether a gradient has a layout other than strided."""
    return gradient is not None and gradient.layout is not torch.strided
