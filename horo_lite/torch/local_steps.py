"""op=Adasum as in Horovod for PyTorch: each rank takes its own step, and these are combined."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch

from horo_lite.torch.exchange import IN_SYNCHRONIZE, GradientExchange
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

    A step that cannot be combined is undone, parameters and state, on the ranks that took it.
    """

    def _make_adapter(self) -> SlotAdapter:
        self._deltas: dict[int, Any] = {}
        return _Deltas(self._deltas)

    def _add_hooks(self) -> None:
        """Add no hooks: backward() sends nothing."""

    def flush(self, where: int = IN_SYNCHRONIZE) -> None:
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
        if not self.takes_part:
            return step(*args, **kwargs)
        self.look_at_parameters()
        start = {
            slot.index: slot.parameter.detach().clone() for slot in self.slots if _may_change(slot)
        }
        state = self._copy_of_state()
        try:
            result = step(*args, **kwargs)
            self._combine(start)
        except BaseException:  # also if only this rank's step fails: it may take another instead
            for i, value in start.items():
                self._value(i).copy_(value)
            self._restore_state(*state)
            raise
        finally:
            self._deltas.clear()
        self._stepped()
        return result

    def _combine(self, start: dict[int, Any]) -> None:
        """Set the parameters to their values at the start plus the combined steps."""
        self._deltas |= {i: self._value(i) - value for i, value in start.items()}
        try:
            self.reducer.finish(numbers=self._hyperparameters())
        except Exception:  # as in the exchange of gradients
            self._count_anew()
            raise
        for i, delta in self._deltas.items():
            value = self._value(i)
            torch.add(start.get(i, value), delta, out=value)

    def _copy_of_state(self) -> tuple[dict[Any, Any], list[dict[str, Any]]]:
        """Return copies of the optimizer's state and of its options, which some optimizers change.

        This takes memory for the state until the step ends.
        """
        state = {p: _copy_of(own) for p, own in self._optimizer.state.items()}
        return state, [
            {key: value if key == "params" else _copy_of(value) for key, value in options.items()}
            for options in self._optimizer.param_groups
        ]

    def _restore_state(self, state: dict[Any, Any], groups: list[dict[str, Any]]) -> None:
        own = self._optimizer.state
        own.clear()
        own.update(state)
        for options, before in zip(self._optimizer.param_groups, groups, strict=True):
            options.clear()
            options.update(before)

    def _value(self, i: int) -> Any:
        """Return the parameter's current memory, which an optimizer may have replaced."""
        return self.slots[i].parameter.detach()


def _may_change(slot: Slot) -> bool:
    return slot.parameter.requires_grad or slot.parameter.grad is not None


def _copy_of(value: Any) -> Any:
    """Return a copy of state: of its containers and tensors, except parameters."""
    if isinstance(value, torch.Tensor):
        return value if isinstance(value, torch.nn.Parameter) else value.detach().clone()
    if type(value) is dict:
        return {key: _copy_of(each) for key, each in value.items()}
    return [_copy_of(each) for each in value] if type(value) is list else value


class _Deltas(SlotAdapter):
    """The changes of each parameter by a rank's step, in place of gradients."""

    def __init__(self, deltas: dict[int, Any]) -> None:
        self._deltas = deltas

    def gradient(self, slot: Any) -> Any:
        return self._deltas.get(slot.index)

    def set_gradient(self, slot: Any, array: Any) -> None:
        self._deltas[slot.index] = array
