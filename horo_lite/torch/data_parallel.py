"""DistributedDataParallel: for scripts that wrap the model, as with torch's or Apex's."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from horo_lite.collectives.compression import Compression
from horo_lite.collectives.reductions import Average, Op
from horo_lite.horovod.process_sets import global_process_set
from horo_lite.horovod.reductions import AdasumOp, named_op
from horo_lite.torch.exchange import GradientExchange
from horo_lite.torch.functions import broadcast_parameters
from horo_lite.torch.options import TorchOptions
from horo_lite.torch.slots import Slot
from horo_lite.torch.submission import Set


class DistributedDataParallel(torch.nn.Module):
    """The model `module`, whose gradients are averaged over the ranks while backward() runs.

        model = hvd.DistributedDataParallel(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)     # a plain one

    Every rank makes one, of equal modules; their parameters and buffers are then those of rank 0.
    Whenever a backward() returns that has touched its parameters, their `.grad` are the averages
    over the ranks, as torch's DistributedDataParallel leaves them: with gradients that were there
    before (no zero_grad()), the average of the sums. The optimizer is a plain one; for what else
    `DistributedOptimizer` can do, such as uneven batches, use that one instead, with a plain model.

    A gradient missing on some ranks counts as zeros there, without `find_unused_parameters`; one
    that is missing on all stays None. As with torch's, keys of `state_dict()` begin with "module.".

    Args:
        module: The model, on the CPU or on this rank's GPU already.
        device_ids: Torch's, and not needed: gradients are exchanged wherever they are.
        output_device: Torch's, and not needed.
        dim: Torch's, and not needed.
        broadcast_buffers: Every forward pass of training that is not inside `no_sync()` begins with
            the buffers of rank 0, such as running statistics. All ranks then need equally many.
        init_sync: False: the ranks' parameters and buffers are alike already.
        process_group: The ranks: a `ProcessSet`; default all.
        bucket_cap_mb: How many MiB of gradients travel together; default HORO_LITE_BUCKET_BYTES, or
            25. Results do not depend on it.
        find_unused_parameters: Torch's, and not needed.
        check_reduction: Torch's, and not needed.
        gradient_as_bucket_view: As for `DistributedOptimizer`.
        static_graph: Torch's, and not needed.
        compression: What travels; `Compression.fp16` halves the bytes.
        op: Average, Sum or Adasum, of gradients.

    Raises:
        ValueError: A parameter belongs to a `DistributedOptimizer` or to another model that is
            wrapped, so that it would be averaged twice.
        MismatchError: On every rank: the modules or options differ; from here or from backward().
    """

    def __init__(
        self,
        module: torch.nn.Module,
        device_ids: Any = None,
        output_device: Any = None,
        dim: int = 0,
        broadcast_buffers: bool = True,
        init_sync: bool = True,
        process_group: Set = None,
        bucket_cap_mb: float | None = None,
        find_unused_parameters: bool = False,
        check_reduction: bool = False,
        gradient_as_bucket_view: bool = False,
        static_graph: bool = False,
        *,
        compression: Any = Compression.none,
        op: Op | AdasumOp = Average,
    ) -> None:
        super().__init__()
        if not isinstance(module, torch.nn.Module):
            raise TypeError(
                f"DistributedDataParallel wraps a module, not a {type(module).__name__}"
            )
        parameters = [p for p in module.parameters() if p.requires_grad]
        if not parameters:
            raise ValueError("this module has no parameter that needs a gradient: use it as it is")
        ranks = global_process_set if process_group is None else process_group
        options = TorchOptions(
            op=named_op(op),
            adasum_of="gradients",
            compression=compression,
            bucket_bytes=None if bucket_cap_mb is None else max(1, int(bucket_cap_mb * 2**20)),
            check_every=0,
            process_set=ranks,
            gradient_as_bucket_view=gradient_as_bucket_view,
        )
        self.module = module
        self.broadcast_buffers = broadcast_buffers
        self._ranks = ranks
        self._owner = _Owner(parameters)
        named = dict(module.named_parameters())
        self._exchange = _ModuleExchange(self._owner, list(named.items()), options)
        self._places = _places_of(module)
        self.register_load_state_dict_post_hook(_restore_hooks)
        if init_sync and self._exchange.active:
            # Not state_dict(), which lacks buffers that are not saved.
            broadcast_parameters(named | dict(module.named_buffers()), self._root(), ranks)

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """What the module returns."""
        exchange = self._exchange
        if any(
            parameters.get(name) is not parameter or (parameter.requires_grad and is_frozen)
            for parameters, name, parameter, is_frozen in self._places
        ):
            self._look_at_module()
        if not torch.compiler.is_compiling():
            _restore_hooks(self)
        if self.broadcast_buffers and self.training and torch.is_grad_enabled():
            buffers = dict(self.module.named_buffers())
            if buffers and exchange.active and not exchange.is_paused:
                broadcast_parameters(buffers, self._root(), self._ranks)
        return self.module(*inputs, **kwargs)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """Convert the module, as `to()` and `half()` do; compiled, `forward` restores no hooks."""
        super()._apply(fn, recurse)
        _restore_hooks(self)
        return self

    def _look_at_module(self) -> None:
        """The parameters are those of the module as it is now.

        Some are no longer frozen, or others have taken their places, as where a module is loaded
        with assign=True.
        """
        self._places = _places_of(self.module)
        known = {id(p) for p in self._owner.param_groups[0]["params"]}
        named = dict(self.module.named_parameters())
        self._owner.param_groups[0]["params"] = [
            p for p in named.values() if p.requires_grad or id(p) in known
        ]
        self._exchange.rename(named)
        self._exchange.look_at_parameters()

    def __deepcopy__(self, memo: dict[int, Any]) -> DistributedDataParallel:
        """A wrapper of a copy of the module; other ranks need not make one, as long as it rests."""
        options = self._exchange.options
        copied = DistributedDataParallel(
            copy.deepcopy(self.module, memo),
            broadcast_buffers=self.broadcast_buffers,
            init_sync=False,
            process_group=options.process_set,
            bucket_cap_mb=None if options.bucket_bytes is None else options.bucket_bytes / 2**20,
            gradient_as_bucket_view=options.gradient_as_bucket_view,
            compression=options.compression,
            op=options.op,
        )
        copied.training = self.training
        return copied

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes inside are this rank's alone: their gradients add up in `.grad`.

        The first backward() outside of it exchanges the sums of all that any of them has touched.
        Forward and backward both belong inside, on every rank alike.
        """
        before, self._exchange.is_paused = self._exchange.is_paused, True
        try:
            yield
        finally:
            self._exchange.is_paused = before

    def _root(self) -> int:
        """Whose parameters and buffers are everyone's: the world's number of the first rank."""
        group = self._exchange.group
        return 0 if group is None else next(iter(group.transport.ranks))


def _restore_hooks(wrapper: DistributedDataParallel, *_: object) -> None:
    for slot in wrapper._exchange.slots:
        slot.restore_hook()


def _places_of(module: torch.nn.Module) -> list[tuple[Any, str, Any, bool]]:
    """Where each parameter is kept, by what name, and whether it is frozen."""
    return [
        (each._parameters, name, parameter, not parameter.requires_grad)
        for each in module.modules()
        for name, parameter in each._parameters.items()
        if parameter is not None
    ]


class _Owner:
    """The parameters in the form in which an optimizer holds them."""

    def __init__(self, parameters: list[Any]) -> None:
        self.param_groups = [{"params": parameters}]


class _ModuleExchange(GradientExchange):
    """An exchange that learns of no step() or zero_grad(): every backward() begins anew."""

    is_paused = False

    def rename(self, named: dict[str, Any]) -> None:
        """These are the parameters' names."""
        self._names = {id(parameter): name for name, parameter in named.items()}

    def touch(self, slot: Slot) -> None:
        if self.is_paused:
            slot.touched = True  # the next exchange has it, whether or not it is touched again
        else:
            super().touch(slot)

    def enter(self, task: int) -> bool:
        if not self.tasks:
            waiting = [slot for slot in self.slots if slot.touched]
            self.begin()
            for slot in waiting:
                slot.touched = True
        return super().enter(task)
