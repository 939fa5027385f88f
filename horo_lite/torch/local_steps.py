"""op=Adasum as in Horovod for PyTorch: each rank takes its own step, and these are combined."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, NoReturn

import torch

from horo_lite.errors import MismatchError
from horo_lite.torch.exchange import GradientExchange
from horo_lite.torch.slots import Slot, SlotAdapter


class LocalSteps(GradientExchange):
    """Exchanges the changes that each rank's optimizer makes in step(), instead of gradients.

    Gradients, momenta and all other state are each rank's own. In Horovod's terms, for each
    parameter:

        start = current.copy()
        step()
        delta = current - start
        allreduce_(delta)          # with Adasum
        start += delta
        current = start
    """

    def _make_adapter(self) -> SlotAdapter:
        self._deltas: dict[int, Any] = {}
        return _Deltas(self._deltas)

    def _add_hooks(self) -> None:
        """Add no hooks: backward() sends nothing."""

    def flush(self) -> None:
        """Do nothing: gradients are not exchanged."""

    def check_scaling(self, is_fused: bool) -> None:
        """Raise unless the step is fused, which all ranks take, without effect if it finds inf."""
        if self.active and not is_fused:
            raise ValueError(
                "GradScaler skips the steps that overflow on one rank, while the others wait for "
                'them: with op=Adasum, pass adasum_of="gradients", or train in bfloat16'
            )

    def skipping(self) -> NoReturn:
        raise RuntimeError(
            "skip_synchronize() would leave every rank with its own step: with op=Adasum, steps "
            "are combined instead of gradients. Clip between backward() and a plain step(), which "
            'clips each rank\'s own gradients, or pass adasum_of="gradients"'
        )

    def step(
        self,
        step: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        weight: float | None,
    ) -> Any:
        """Combine all ranks' steps in the parameters; return this rank's result of `step`."""
        if weight is not None:
            self.set_weight(weight)  # raises, and says why
        if not self.active or os.getpid() != self._pid:
            return step(*args, **kwargs)
        self.look_at_parameters()
        start = {
            slot.index: slot.parameter.detach().clone() for slot in self.slots if _may_change(slot)
        }
        try:
            result = step(*args, **kwargs)
            self._combine(start)
        except BaseException:  # also if only this rank's step fails: it may take another instead
            for i, value in start.items():
                self._value(i).copy_(value)
            raise
        finally:
            self._deltas.clear()
        self._stepped()
        return result

    def _combine(self, start: dict[int, Any]) -> None:
        """Set the parameters to their values at the start plus the combined steps."""
        self._deltas |= {i: self._value(i) - value for i, value in start.items()}
        try:
            self.reducer.finish()
        except MismatchError:  # as in the exchange of gradients
            self.reset_counts()
            raise
        for i, delta in self._deltas.items():
            value = self._value(i)
            torch.add(start.get(i, value), delta, out=value)

    def _value(self, i: int) -> Any:
        """Return the parameter's current memory, which an optimizer may have replaced."""
        return self.slots[i].parameter.detach()


def _may_change(slot: Slot) -> bool:
    return slot.parameter.requires_grad or slot.parameter.grad is not None


class _Deltas(SlotAdapter):
    """The changes of each parameter by a rank's step, in place of gradients."""

    def __init__(self, deltas: dict[int, Any]) -> None:
        self._deltas = deltas

    def gradient(self, slot: Any) -> Any:
        return self._deltas.get(slot.index)

    def set_gradient(self, slot: Any, array: Any) -> None:
        self._deltas[slot.index] = array
