"""op=Adasum as Horovod means it in PyTorch: ranks take steps of their own, which are combined."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, NoReturn

import torch

from horo_lite.errors import MismatchError
from horo_lite.torch.exchange import GradientExchange
from horo_lite.torch.slots import Slot, SlotAdapter


class LocalSteps(GradientExchange):
    """Gradients stay a rank's own; what its optimizer makes of them is exchanged, in step().

    In Horovod's words, of each parameter, with momenta and all other state a rank's own:

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
        """None: backward() has nothing to send."""

    def flush(self) -> None:
        """Nothing: gradients are not exchanged."""

    def check_scaling(self, is_fused: bool) -> None:
        """A fused step is taken on all ranks, and adds nothing on those that find inf."""
        if self.active and not is_fused:
            raise ValueError(
                "GradScaler skips the steps that overflow on one rank, and the others wait for "
                'them: with op=Adasum pass adasum_of="gradients", or train in bfloat16'
            )

    def skipping(self) -> NoReturn:
        raise RuntimeError(
            "skip_synchronize() would leave every rank with its own step: with op=Adasum steps are "
            "combined, and not gradients. Clip between backward() and a plain step(), which clips "
            'each rank\'s own gradients, or pass adasum_of="gradients"'
        )

    def step(
        self,
        step: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        weight: float | None,
    ) -> Any:
        """What `step` returns, of this rank; the parameters are those of all ranks."""
        if weight is not None:
            self.set_weight(weight)  # says why not
        if not self.active or os.getpid() != self._pid:
            return step(*args, **kwargs)
        self.look_at_parameters()
        start = {
            slot.index: slot.parameter.detach().clone() for slot in self.slots if _may_change(slot)
        }
        try:
            result = step(*args, **kwargs)
            self._combine(start)
        except BaseException:  # also one of this rank's step alone: it may take another instead
            for i, value in start.items():
                self._value(i).copy_(value)
            raise
        finally:
            self._deltas.clear()
        self._stepped()
        return result

    def _combine(self, start: dict[int, Any]) -> None:
        """The parameters are what they were at the start, and what all ranks' steps add to that."""
        self._deltas |= {i: self._value(i) - value for i, value in start.items()}
        try:
            self.reducer.finish()
        except MismatchError:  # as where gradients are exchanged
            self.reset_counts()
            raise
        for i, delta in self._deltas.items():
            value = self._value(i)
            torch.add(start.get(i, value), delta, out=value)

    def _value(self, i: int) -> Any:
        """The parameter's memory as it is now: an optimizer may have given it another."""
        return self.slots[i].parameter.detach()


def _may_change(slot: Slot) -> bool:
    return slot.parameter.requires_grad or slot.parameter.grad is not None


class _Deltas(SlotAdapter):
    """What a rank's step has added to each parameter, in place of gradients."""

    def __init__(self, deltas: dict[int, Any]) -> None:
        self._deltas = deltas

    def gradient(self, slot: Any) -> Any:
        return self._deltas.get(slot.index)

    def set_gradient(self, slot: Any, array: Any) -> None:
        self._deltas[slot.index] = array
