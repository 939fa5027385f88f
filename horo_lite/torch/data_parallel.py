"""DistributedDataParallel: for scripts that wrap the model, as with that of torch or Apex."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.modules.batchnorm import _NormBase

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
    """Wrap `module` so that its gradients are averaged over the ranks during backward().

        model = hvd.DistributedDataParallel(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)     # a plain one

    Every rank wraps an equal module, which gets the parameters and buffers of rank 0. When a
    backward() that used its parameters returns, their `.grad` are the averages over the ranks, as
    with torch's DistributedDataParallel: if there were gradients before (no zero_grad()), the
    average of the sums. The optimizer is a plain one; for the other features of
    `DistributedOptimizer`, such as uneven batches, use that instead, with a plain model.

    A gradient missing on some ranks counts as zeros there, without `find_unused_parameters`; one
    missing on all stays None. As with torch, keys of `state_dict()` begin with "module.".

    Args:
        module: The model, already on the CPU or on this rank's GPU.
        device_ids: torch's argument, which has no effect here: gradients may be on any device.
        output_device: torch's argument, which has no effect here.
        dim: torch's argument, which has no effect here.
        broadcast_buffers: Whether to copy the buffers of rank 0, such as running statistics, before
            every forward pass in training, except inside `no_sync()`. All ranks must then run the
            same number of these passes.
        init_sync: False if the ranks' parameters and buffers are already equal.
        process_group: The ranks, as a `ProcessSet`; by default all.
        bucket_cap_mb: Size of the buckets in which gradients travel, in MiB; by default that of
            HORO_LITE_BUCKET_BYTES, or 25. It does not affect results.
        find_unused_parameters: torch's argument, which has no effect here.
        check_reduction: torch's argument, which has no effect here.
        gradient_as_bucket_view: As for `DistributedOptimizer`.
        static_graph: torch's argument, which has no effect here.
        compression: The wire format; `Compression.fp16` halves the bytes.
        op: Average, Sum or Adasum of gradients.

    Raises:
        ValueError: A parameter belongs to a `DistributedOptimizer` or to another wrapped model, so
            that it would be averaged twice.
        MismatchError: On every rank, here or in backward(), if the modules or options differ.
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
        """Return the module's result."""
        exchange = self._exchange
        if any(
            parameters.get(name) is not parameter or (parameter.requires_grad and is_frozen)
            for parameters, name, parameter, is_frozen in self._places
        ):
            self._look_at_module()
        if not torch.compiler.is_compiling():
            _restore_hooks(self)
        if self.broadcast_buffers and self.training and torch.is_grad_enabled():
            buffers = _buffers_of(self.module)
            if buffers and exchange.active and not exchange.is_paused:
                broadcast_parameters(buffers, self._root(), self._ranks)
        return self.module(*inputs, **kwargs)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """Convert the module, as `to()` and `half()` do; compiled, `forward` restores no hooks."""
        super()._apply(fn, recurse)
        _restore_hooks(self)
        return self

    def _look_at_module(self) -> None:
        """Update the parameters to the module's current ones.

        Some may no longer be frozen, or may have been replaced, as by loading a state_dict with
        assign=True.
        """
        self._places = _places_of(self.module)
        known = {id(p) for p in self._owner.param_groups[0]["params"]}
        named = dict(self.module.named_parameters())
        self._owner.param_groups[0]["params"] = [
            p for p in named.values() if p.requires_grad or id(p) in known
        ]
        self._exchange.rename(named)
        self._exchange.look_at_parameters()

    # Copies wrap copies of the module. As long as one is not used, other ranks need none.

    def __deepcopy__(self, memo: dict[int, Any]) -> DistributedDataParallel:
        return _wrapped(copy.deepcopy(self.module, memo), self.training, self._arguments())

    def __reduce_ex__(self, protocol: Any) -> Any:
        arguments = self._arguments()
        if arguments.pop("process_group") not in (None, global_process_set):
            raise TypeError(
                "a DistributedDataParallel with a process set of its own cannot be pickled: save "
                "model.module or model.state_dict()"
            )
        return _wrapped, (self.module, self.training, arguments)

    def _arguments(self) -> dict[str, Any]:
        options = self._exchange.options
        bucket_bytes = options.bucket_bytes
        return {
            "broadcast_buffers": self.broadcast_buffers,
            "process_group": options.process_set,
            "bucket_cap_mb": None if bucket_bytes is None else bucket_bytes / 2**20,
            "gradient_as_bucket_view": options.gradient_as_bucket_view,
            "compression": options.compression,
            "op": options.op,
        }

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Disable the exchange for backward passes inside the block: gradients add up in `.grad`.

        The first backward() outside exchanges the sums of all gradients that these passes touched.
        Run both forward and backward inside, on every rank in the same way.
        """
        before, self._exchange.is_paused = self._exchange.is_paused, True
        try:
            yield
        finally:
            self._exchange.is_paused = before

    def _root(self) -> int:
        """Return the rank whose parameters and buffers are copied to all, by its world number."""
        group = self._exchange.group
        return 0 if group is None else next(iter(group.transport.ranks))


def _wrapped(module: Any, training: bool, arguments: dict[str, Any]) -> DistributedDataParallel:
    """Return a copied module in a wrapper like that of the original."""
    wrapper = DistributedDataParallel(module, init_sync=False, **arguments)
    wrapper.training = training
    return wrapper


def _restore_hooks(wrapper: DistributedDataParallel, *_: object) -> None:
    for slot in wrapper._exchange.slots:
        slot.restore_hook()


def _places_of(module: torch.nn.Module) -> list[tuple[Any, str, Any, bool]]:
    """Return the dict that contains each parameter, its name, and whether it is frozen."""
    return [
        (each._parameters, name, parameter, not parameter.requires_grad)
        for each in module.modules()
        for name, parameter in each._parameters.items()
        if parameter is not None
    ]


def _buffers_of(module: torch.nn.Module) -> dict[str, Any]:
    """Return the buffers by name, to be overwritten.

    Running statistics are written as BatchNorm writes them, without telling autograd, so that
    several forward passes before one backward() are possible: in training, it does not read them.
    """
    norms = [each for each in module.modules() if isinstance(each, _NormBase)]
    running = {id(buffer) for norm in norms for buffer in norm.buffers(recurse=False)}
    return {
        name: buffer.data if id(buffer) in running else buffer
        for name, buffer in module.named_buffers()
    }


class _Owner:
    """The parameters in the form in which an optimizer has them."""

    def __init__(self, parameters: list[Any]) -> None:
        self.param_groups = [{"params": parameters}]


class _ModuleExchange(GradientExchange):
    """An exchange that does not see step() or zero_grad(): every backward() begins a new step."""

    is_paused = False

    def rename(self, named: dict[str, Any]) -> None:
        """Set the parameters' names."""
        self._names = {parameter: name for name, parameter in named.items()}

    def touch(self, slot: Slot) -> None:
        if self.is_paused:
            slot.touched = True  # take part in the next exchange, even if not touched again
        else:
            super().touch(slot)

    def enter(self, task: int) -> bool:
        if not self.tasks:
            self.begin(keeps_pending=True)
        return super().enter(task)
