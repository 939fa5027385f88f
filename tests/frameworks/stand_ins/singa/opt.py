"""SGD, and DistOpt: training on several processes, over `singa_wrap.Communicator`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from . import autograd, tensor
from . import singa_wrap as singa
from .tensor import Tensor

Pairs = list[tuple[Tensor, Tensor]]


class Optimizer:
    """It knows a parameter's name, value and gradient only from calls of `apply`."""

    def __init__(self, lr: float) -> None:
        self.lr_value = Tensor((1,)).set_value(lr)
        self.step_counter = Tensor((1,)).set_value(0)

    def get_states(self) -> dict[str, Any]:
        return {"step_counter": tensor.to_numpy(self.step_counter)[0]}

    def set_states(self, states: dict[str, Any]) -> None:
        self.step_counter.set_value(states["step_counter"])

    def __call__(self, loss: Tensor) -> None:
        for p, g in autograd.backward(loss):
            self.apply(p.name, p, g)
        self.step()

    def apply(self, param_name: str, param_value: Tensor, param_grad: Tensor) -> None:
        raise NotImplementedError

    def update(self, param: Tensor, grad: Tensor) -> None:
        self.apply(param.name, param, grad)

    def step(self) -> None:
        self.step_counter.data += 1


class SGD(Optimizer):
    def __init__(self, lr: float = 0.1, momentum: float = 0, weight_decay: float = 0) -> None:
        super().__init__(lr)
        self.momentum, self.weight_decay = momentum, weight_decay
        self.moments: dict[str, Tensor] = {}

    def apply(self, param_name: str, param_value: Tensor, param_grad: Tensor) -> None:
        assert param_value.shape == param_grad.shape
        if self.weight_decay:  # in place: the optimizer may change the gradient
            singa.Axpy(self.weight_decay, param_value.data, param_grad.data)
        if self.momentum:
            if param_name not in self.moments:
                self.moments[param_name] = tensor.zeros_like(param_value)
            buffer = self.moments[param_name]
            buffer *= self.momentum
            singa.Axpy(1.0, param_grad.data, buffer.data)
            param_grad = buffer
        minus_lr = self.lr_value.clone()
        minus_lr *= -1
        singa.Axpy(minus_lr.data, param_grad.data, param_value.data)

    def get_states(self) -> dict[str, Any]:
        return {**super().get_states(), "moments": self.moments}

    def set_states(self, states: dict[str, Any]) -> None:
        super().set_states(states)
        self.moments = states["moments"]


class DistOpt:
    """Each process computes gradients of its own batches; their sum over processes is applied."""

    def __init__(
        self,
        opt: Optimizer,
        nccl_id: Any = None,
        local_rank: int | None = None,
        world_size: int | None = None,
        buffSize: int = 4194304,
    ) -> None:
        self.opt = opt
        if nccl_id is None:
            self.communicator = singa.Communicator(buffSize)
        else:
            self.communicator = singa.Communicator(local_rank, world_size, nccl_id, buffSize)
        self.world_size = self.communicator.world_size
        self.local_rank = self.communicator.local_rank
        self.global_rank = self.communicator.global_rank

    def __call__(self, loss: Tensor) -> None:
        self.backward_and_update(loss)

    def update(self, param: Tensor, grad: Tensor) -> None:
        grad /= self.world_size
        self.opt.update(param, grad)

    def all_reduce(self, raw: singa.Tensor) -> None:
        self.communicator.synch(raw)

    def fused_all_reduce(self, raws: list[singa.Tensor], send: bool = True) -> None:
        self.communicator.fusedSynch(singa.VecTensor(raws), send)

    def all_reduce_half(self, raw: singa.Tensor) -> None:
        self.communicator.synchHalf(raw)

    def fused_all_reduce_half(self, raws: list[singa.Tensor], send: bool = True) -> None:
        self.communicator.fusedSynchHalf(singa.VecTensor(raws), send)

    def sparsification(self, raw: Any, accumulation: Any, spars: float, topK: bool) -> None:
        rest = () if accumulation is None else (accumulation,)
        self.communicator.sparsification(raw, *rest, spars, topK)

    def fused_sparsification(self, raws: Any, accumulation: Any, spars: float, topK: bool) -> None:
        rest = () if accumulation is None else (accumulation,)
        self.communicator.fusedSparsification(singa.VecTensor(raws), *rest, spars, topK)

    def wait(self) -> None:
        self.communicator.wait()

    def _plain(self, loss: Tensor, threshold: int, one: Any, fused: Any, clip: Any) -> None:
        pairs, small, filled = [], [], 0
        for p, g in autograd.backward(loss):
            if clip is not None:
                g = autograd.clip(g, -clip, clip)
            if g.size() > threshold:
                one(g.data)
            else:
                small.append(g.data)
                fused([g.data], send=False)  # copied into the buffer now, sent when it is full
                filled += g.size()
                if filled > threshold:
                    fused(small)
                    small, filled = [], 0
            pairs.append((p, g))
        if small:
            fused(small)
        self.wait()
        for p, g in pairs:
            self.update(p, g)
        self.opt.step()

    def backward_and_update(self, loss: Tensor, threshold: int = 2097152) -> None:
        self._plain(loss, threshold, self.all_reduce, self.fused_all_reduce, None)

    def backward_and_update_half(
        self,
        loss: Tensor,
        threshold: int = 2097152,
        clipping: bool = False,
        clip_Value: float = 100,
    ) -> None:
        clip = clip_Value if clipping else None
        self._plain(loss, threshold, self.all_reduce_half, self.fused_all_reduce_half, clip)

    def _parts(self, pairs: Iterator[tuple[Tensor, Tensor]], threshold: int) -> Iterator[Pairs]:
        """Yield groups of gradients: a large tensor alone, small ones until there are enough."""
        small: Pairs = []
        for pair in pairs:
            if pair[0].size() > threshold:
                yield [pair]
                continue
            small.append(pair)
            if sum(p.size() for p, _ in small) > threshold:
                yield small
                small = []
        if small:
            yield small

    def backward_and_partial_update(self, loss: Tensor, threshold: int = 2097152) -> None:
        """Apply each parameter's own gradient; then average one part of the parameters."""

        def updated() -> Iterator[tuple[Tensor, Tensor]]:
            for p, g in autograd.backward(loss):
                self.opt.update(p, g)
                yield p, g

        self.partial = getattr(self, "partial", 0) + 1
        reduced: Pairs = []
        for k, part in enumerate(self._parts(updated(), threshold), 1):
            if k == self.partial:
                raws = [p.data for p, _ in part]
                if part[0][0].size() > threshold:
                    self.all_reduce(raws[0])
                else:
                    self.fused_all_reduce(raws, send=False)
                    self.fused_all_reduce(raws)
                reduced = part
        self.wait()
        for p, _ in reduced:
            p /= self.world_size
        if k == self.partial:
            self.partial = 0
        self.opt.step()

    def backward_and_sparse_update(
        self,
        loss: Tensor,
        threshold: int = 2097152,
        spars: float = 0.05,
        topK: bool = False,
        corr: bool = True,
    ) -> None:
        """Exchange only the largest elements; with `corr`, the others are added next time."""
        first = not hasattr(self, "gradAccumulation")
        if first:
            self.gradAccumulation: list[Tensor] = []
        pairs: Pairs = []
        for k, part in enumerate(self._parts(autograd.backward(loss), threshold)):
            raws = [g.data for _, g in part]
            if first:
                n_elements = sum(g.size() for _, g in part)
                self.gradAccumulation.append(Tensor((n_elements,)).set_value(0))
            accumulation = self.gradAccumulation[k].data if corr else None
            if part[0][0].size() > threshold:
                self.sparsification(raws[0], accumulation, spars, topK)
            else:
                self.fused_sparsification(raws, accumulation, spars, topK)
            pairs += part
        self.wait()
        for p, g in pairs:
            self.update(p, g)
        self.opt.step()
