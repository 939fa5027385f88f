"""The gradients of one optimizer's parameters, each with what has happened to it."""

from __future__ import annotations

from typing import Any

import torch

from horo_lite.adapters.torch import HAS_TABLE, TorchAdapter
from horo_lite.errors import MismatchError
from horo_lite.torch import bucket_views


class Slot:
    """One parameter, and what has happened to its gradient."""

    __slots__ = ("attributes", "exchanged", "home", "hook", "index", "is_away", "last_pass", "name",
                 "parameter", "passes", "seen", "touched", "travels")  # fmt: skip

    def __init__(self, name: str, parameter: Any) -> None:
        self.name = name
        self.parameter = parameter
        self.index = 0
        self.hook: Any = None
        self.attributes: Any = None  # the parameter's, when it was hooked
        self.passes = 0  # since the last step() or zero_grad()
        self.last_pass = 0  # the number of the last one that touched it
        self.seen: Any = None  # the gradient that the last pass has left, and its version
        self.touched = False  # since the last exchange
        self.travels = False  # announced to the reducer: not to be changed any more
        self.exchanged = False  # since the last step() or zero_grad()
        self.home: Any = None  # where the gradient is to live, in shared memory
        self.is_away = False  # it cannot live there, and a copy travels

    def restore_hook(self) -> None:
        """The hook acts, although torch.utils.swap_tensors() has changed what the parameter is.

        Module.to() and load_state_dict() call that where
        torch.__future__.set_swap_module_params_on_conversion() says so. It swaps all but the object
        and its table of hooks, which C++ has to be told of again.
        """
        parameter = self.parameter
        if self.hook is not None and parameter.__dict__ is not self.attributes:
            self.attributes = parameter.__dict__
            parameter._post_accumulate_grad_hooks = parameter._post_accumulate_grad_hooks

    def begin(self) -> None:
        self.passes = 0
        self.seen = None
        self.touched = self.exchanged = self.is_away = False

    def see(self) -> None:
        """A pass has added to the gradient, which is where it is to live."""
        gradient = self.parameter.grad
        self.seen = gradient, gradient._version

    def has_changed(self, additions: int = 0) -> bool:
        """Whether somebody has changed it since, apart from that many additions of autograd's.

        Only of a gradient that may have left, also whether somebody has replaced it.
        """
        gradient, version = self.seen or (None, 0)
        if gradient is None or gradient is not self.parameter.grad:
            return self.travels
        return bool(gradient._version != version + additions)

    def move_to_shared_memory(self) -> Any:
        """The gradient, which now lives where it is to live."""
        gradient, home = self.parameter.grad, self.home
        self.is_away = False
        if home is None or gradient is home or not bucket_views.fits(gradient, home):
            return gradient
        if gradient.requires_grad:  # of backward(create_graph=True): its history is not to be lost
            bucket_views.move(gradient.detach(), home)
            self.is_away = True
            return gradient
        bucket_views.move(gradient, home)
        self.parameter.grad = home
        return home

    def copy_back(self) -> None:
        """The gradient has the result, wherever it lives."""
        if self.is_away:
            self.is_away = False
            self.parameter.grad.detach().copy_(self.home)


class SlotAdapter(TorchAdapter):
    """The gradients that were touched, in slots."""

    def gradient(self, slot: Any) -> Any:
        if slot.is_away:
            return slot.home
        gradient = slot.parameter.grad if slot.touched else None
        if gradient is None or gradient.layout is not torch.strided:
            return None
        if gradient.requires_grad:  # of backward(create_graph=True)
            gradient = gradient.detach()
        return gradient if HAS_TABLE else super().gradient(slot.parameter)

    def set_gradient(self, slot: Any, array: Any) -> None:
        slot.touched = True
        gradient = slot.parameter.grad
        if gradient is None:
            slot.parameter.grad = array
        elif gradient is array:
            pass
        elif is_sparse(gradient):
            raise MismatchError(
                f"the gradient of {slot.name!r} is sparse on this rank and dense on others: make "
                "it one of the two on all of them, or pass sparse_as_dense=True"
            )
        else:
            gradient.detach().copy_(array)

    def missing(self, slot: Any, dtype: str, shape: tuple[int, ...]) -> Any:
        home = slot.home
        if home is not None and (str(home.dtype)[6:], tuple(home.shape)) == (dtype, shape):
            return home.zero_()
        # In the parameter's layout, as autograd makes them: on the way it is the same on all ranks.
        parameter = slot.parameter.detach()
        return torch.zeros_like(parameter, dtype=getattr(torch, dtype))

    def value(self, slot: Any) -> Any:
        return super().value(slot.parameter)

    def zeros_like(self, x: Any) -> Any:
        return torch.zeros_like(x.detach())


def is_sparse(gradient: Any) -> bool:
    """Whether a gradient has another layout than memory that is strided."""
    return gradient is not None and gradient.layout is not torch.strided
