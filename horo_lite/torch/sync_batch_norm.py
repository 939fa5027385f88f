"""SyncBatchNorm: batch normalization over the samples of all ranks."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.autograd.function import once_differentiable
from torch.nn.modules.batchnorm import _BatchNorm, _LazyNormBase

from horo_lite.collectives.group import Group
from horo_lite.collectives.reductions import Sum
from horo_lite.horovod.process_sets import ProcessSet, global_process_set, group_of
from horo_lite.torch.exchange import weight_in_backward


class SyncBatchNorm(_BatchNorm):
    """BatchNorm1d to BatchNorm3d with the statistics of the whole batch of all ranks.

    Collective while training: every rank of `process_set` calls such layers the same number of
    times, in the same order, and runs the same number of backward passes through them. Ranks may
    have different numbers of samples, also none, and images of different sizes; all ranks together
    need at least two values per channel. Outputs, input gradients and running statistics are those
    of the whole batch; gradients of weight and bias are those of this rank's part of it, which the
    optimizer combines like any others. With `optimizer.set_weight`, ranks count with their weights
    in input gradients, too. In evaluation, it is a plain BatchNorm and exchanges nothing, so one
    rank may evaluate alone: without running statistics, it normalizes by this rank's samples, like
    torch.nn.SyncBatchNorm, while Horovod's uses those of all ranks.

    Input: `[samples, num_features, ...]`, 2-D to 5-D. Half-precision inputs are normalized in
    float32. The arguments are those of BatchNorm, and `process_set`, the ranks that take part.

    Costs one exchange of 2 * num_features + 1 float64 per rank in the forward pass, and one of
    2 * num_features in the backward pass. Means and squared deviations, not sums of squares, are
    exchanged and combined as in Chan, Golub, LeVeque (1979), so channels far from zero lose no
    digits.

    Raises:
        MismatchError: On every rank, if layers, numbers of features, dtypes, eps or momentum
            differ between ranks.
        ValueError: On every rank, if there is only one value per channel.
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        process_set: ProcessSet | Group | None = global_process_set,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats)
        self.process_set = process_set

    @classmethod
    def convert_sync_batchnorm(
        cls,
        module: torch.nn.Module,
        process_set: ProcessSet | Group | None = global_process_set,
    ) -> torch.nn.Module:
        """Make every BatchNorm of a model a SyncBatchNorm; the counterpart of PyTorch's.

        PyTorch's own SyncBatchNorm layers, too: without a process group of torch.distributed they
        are plain BatchNorms. The layers remain the same objects, with the same parameters, so an
        optimizer that was created before remains valid.

        Args:
            module: The model, or one layer.
            process_set: The ranks that take part.

        Returns:
            `module`.

        Raises:
            ValueError: A layer is lazy, or does more than a BatchNorm. Nothing has changed.
        """
        layers = [(n, m) for n, m in module.named_modules() if isinstance(m, _BatchNorm)]
        for name, layer in layers:
            if isinstance(layer, _LazyNormBase):
                raise ValueError(
                    f"layer {name!r} is lazy and does not know its number of features yet: call "
                    "the model with a batch first, on every rank"
                )
            known = _BatchNorm.forward, torch.nn.SyncBatchNorm.forward, cls.forward
            if type(layer).forward not in known:
                raise ValueError(
                    f"layer {name!r} is a {type(layer).__name__}, whose forward() is not that of a "
                    "BatchNorm and would be lost: replace it yourself"
                )
        for _, layer in layers:
            layer.__class__ = cls  # with its parameters, hooks and attributes
            layer.process_set = process_set  # type: ignore[assignment]
        return module

    def _check_input_dim(self, input: torch.Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"expected input of at least 2 dimensions, got {input.dim()}")
        if input.size(1) != self.num_features:
            raise ValueError(
                f"expected input with {self.num_features} features, got {input.size(1)}"
            )

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if not self.training:
            return super().forward(input)
        group = group_of(self.process_set)
        if group.size == 1:
            return super().forward(input)
        self._check_input_dim(input)
        return self._over_ranks(input, group)

    # Only Python knows which call of which layer this is.
    @torch._disable_dynamo
    def _over_ranks(self, input: torch.Tensor, group: Group) -> torch.Tensor:
        call = _Call(self, input, group)
        with torch.no_grad():
            count, mean, variance = _statistics(input, call)
            self._track(count, mean, variance)
            invstd = (variance + self.eps).rsqrt().to(_statistics_dtype(input))
            mean, variance = mean.to(invstd.dtype), variance.to(invstd.dtype)
        result: torch.Tensor = _Normalize.apply(
            input, self.weight, self.bias, count, mean, variance, invstd, call
        )
        return result

    def _track(self, count: torch.Tensor, mean: torch.Tensor, variance: torch.Tensor) -> None:
        """Update the running statistics with this batch."""
        if not self.track_running_stats:
            return
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
        if self.running_mean is None or self.running_var is None:
            return
        share = self.momentum
        if share is None:
            assert self.num_batches_tracked is not None
            share = 1.0 / float(self.num_batches_tracked)
        unbiased = variance * (count / (count - 1))
        for running, new in ((self.running_mean, mean), (self.running_var, unbiased)):
            running.mul_(1 - share).add_(new.to(running.dtype), alpha=share)


class _Call:
    """One call of one layer, the same on all ranks, which gives its exchanges their names."""

    def __init__(self, layer: SyncBatchNorm, x: torch.Tensor, group: Group) -> None:
        self.group = group
        self.eps = layer.eps
        self._layer = layer
        self._layers = group.kept.setdefault(_Layers, _Layers())
        group.counting.add(self._layers)
        self._number, n_calls = self._layers.known.get(layer, (self._layers.n_seen + 1, 0))
        self._n_calls = n_calls + 1
        self.label = (
            f"SyncBatchNorm number {self._number}, call {self._n_calls}: {layer.num_features} "
            f"features of {x.dtype}, eps {layer.eps}, momentum {layer.momentum}"
        )

    def add_up(self, x: torch.Tensor, what: str) -> None:
        """Replace `x` by its sum over all ranks."""
        # Not by the progress thread, where it would wait for the gradients in flight.
        self.group.exchange([x], names=[what], label=f"{self.label}, {what}", op=Sum)

    def weighted_sums(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sums over all ranks of gradients that an optimizer will weight later.

        What this rank computes from them will be multiplied by its own weight, others by theirs.
        """
        weight = weight_in_backward(self.group)
        if weight is None:
            self.add_up(x, "gradients")
            return x
        x = x * weight
        self.add_up(x, "weighted gradients")
        return x / weight if weight else torch.zeros_like(x)

    def count(self) -> None:
        """Count this call. It is not called after an error, on any rank."""
        self._layers.n_seen = max(self._layers.n_seen, self._number)
        self._layers.known[self._layer] = self._number, self._n_calls


class _Layers:
    """The layers that a group has used, numbered in the order of their first use.

    The order of creation would not do: a rank may have created others, only for itself.
    """

    def __init__(self) -> None:
        self.n_seen = 0  # including deleted ones, which may still exist on another rank
        self.known: WeakKeyDictionary[SyncBatchNorm, tuple[int, int]] = WeakKeyDictionary()

    def reset_counts(self) -> None:
        """Start counting again: all ranks have joined, and may have used different layers."""
        self.n_seen = 0
        self.known.clear()


def _statistics(x: torch.Tensor, call: _Call) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return values per channel, mean and (biased) variance over all ranks, in float64."""
    n, channels = _values_a_channel(x), x.size(1)
    # Each rank's in its own row: adding zeros changes no bit.
    everyone = torch.zeros(
        (call.group.size, 1 + 2 * channels), dtype=torch.float64, device=x.device
    )
    if n:
        mine = everyone[call.group.rank]
        zeros = torch.zeros(channels, dtype=_statistics_dtype(x), device=x.device)
        mean, variance = torch.batch_norm_update_stats(x, zeros, zeros.clone(), 0.0)
        mine[0] = n
        mine[1 : 1 + channels] = mean
        mine[1 + channels :] = variance
    call.add_up(everyone, "statistics")
    counts, means, variances = everyone.split([1, channels, channels], dim=1)
    count = counts.sum()
    # If this rank has at least two, the total is sufficient: reading it would synchronize a GPU.
    if n < 2 and count < 2:
        raise ValueError(
            f"SyncBatchNorm needs more than one value per channel to train, and all "
            f"{call.group.size} ranks together have {int(count)} (here: {list(x.shape)})"
        )
    call.count()
    mean = (counts * means).sum(0) / count
    variance = (counts * (variances + (means - mean) ** 2)).sum(0) / count
    return count, mean, variance


class _Normalize(torch.autograd.Function):
    """BatchNorm with given statistics, through which gradients flow nevertheless."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        count: torch.Tensor,
        mean: torch.Tensor,
        variance: torch.Tensor,
        invstd: torch.Tensor,
        call: _Call,
    ) -> torch.Tensor:
        ctx.save_for_backward(x, weight, count, mean, invstd)
        ctx.call = call
        if not x.numel():
            return torch.empty_like(x)
        scale, offset = (None if p is None else p.to(mean.dtype) for p in (weight, bias))
        return torch.nn.functional.batch_norm(
            x, mean, variance, scale, offset, training=False, eps=call.eps
        )

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight, count, mean, invstd = ctx.saved_tensors
        shape = (1, -1) + (1,) * (x.dim() - 2)
        # Per channel: the sums of dy * (x - mean) * invstd and of dy, which are also the gradients
        # of weight and bias.
        sums = torch.zeros((2, x.size(1)), dtype=torch.float64, device=x.device)
        if x.numel():
            _, sums[0], sums[1] = torch.ops.aten.native_batch_norm_backward(
                dy, x, None, None, None, mean, invstd, True, ctx.call.eps, [False, True, True]
            )
        d_weight = d_bias = dx = None
        if weight is not None:
            # Not views of one tensor: an addition to one would count as a change of both.
            d_weight, d_bias = (each.to(weight.dtype, copy=True) for each in sums)
        if ctx.needs_input_grad[0]:
            means = (ctx.call.weighted_sums(sums) / count).to(mean.dtype)
            slope = (-means[0] * invstd).view(shape)
            scale = invstd if weight is None else invstd * weight
            dx = torch.addcmul(dy.to(mean.dtype), x - mean.view(shape), slope)
            dx = dx.sub_(means[1].view(shape)).mul_(scale.view(shape)).to(x.dtype)
        return dx, d_weight, d_bias, None, None, None, None, None


def _values_a_channel(x: torch.Tensor) -> int:
    return x.numel() // x.size(1) if x.size(1) else 0


def _statistics_dtype(x: torch.Tensor) -> torch.dtype:
    return torch.float64 if x.dtype is torch.float64 else torch.float32
