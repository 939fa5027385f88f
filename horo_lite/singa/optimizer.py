"""DistributedOptimizer: SINGA's DistOpt, with gradients that travel during backward()."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray
from singa import autograd, tensor

from horo_lite import ops
from horo_lite.adapters.object import Adapter, Array, name_leaves
from horo_lite.adapters.singa import array_of, new_tensor, write
from horo_lite.collectives.compression import Compression, Compressor
from horo_lite.collectives.group import Group
from horo_lite.collectives.reductions import Average
from horo_lite.settings import check_every
from horo_lite.singa.communicator import Communicator
from horo_lite.singa.sparse import sparse_sum
from horo_lite.state.drift import DriftCheck
from horo_lite.state.trees import mapped
from horo_lite.training.options import Options
from horo_lite.training.reducer import Reducer

Tensor = Any
Pair = tuple[Tensor, Tensor]  # a parameter and its gradient
THRESHOLD = 2097152  # elements that travel together, as in SINGA


class DistributedOptimizer:
    """Wrap a SINGA optimizer `opt` so that it steps with the gradients of all ranks.

    Replaces `opt.DistOpt(opt, …)`, with the same methods and attributes; all others are those of
    the inner optimizer (`get_states`, `lr_value`). Every rank creates one with the same options and
    makes the same calls. Parameters are identified by their names, which must be the same on all
    ranks; names that SINGA generates (`Dummy#7`) are, if every rank creates the same tensors.

    Args:
        parameters: `model.get_params()`, or another dict or list of tensors: needed if some rank
            may lack a gradient in the first step, or if some tensors' names differ; the names of a
            dict take precedence.
        compression: the wire format of `backward_and_update`; `Compression.fp16` halves the bytes.
        group: the ranks; by default all.
        nccl_id, local_rank, world_size, buffSize: see `Communicator`.
        gpu_num, gpu_per_node: SINGA's earlier names for local_rank and world_size.

    If gradients or options differ between ranks, every rank raises MismatchError, which names the
    first difference; a gradient missing on some ranks counts as zeros there.
    """

    def __init__(
        self,
        opt: Any,
        nccl_id: Any = None,
        local_rank: int | None = None,
        world_size: int | None = None,
        buffSize: int = 4194304,
        *,
        gpu_num: int | None = None,
        gpu_per_node: int | None = None,
        parameters: Any = None,
        compression: Compressor = Compression.none,
        group: Group | None = None,
    ) -> None:
        local_rank = _renamed("gpu_num", gpu_num, "local_rank", local_rank)
        world_size = _renamed("gpu_per_node", gpu_per_node, "world_size", world_size)
        arguments = (buffSize,) if nccl_id is None else (local_rank, world_size, nccl_id, buffSize)
        self.opt = opt
        self.communicator = Communicator(*arguments, group=group)
        self.world_size = self.communicator.world_size
        self.local_rank = self.rank_in_local = self.communicator.local_rank
        self.global_rank = self.rank_in_global = self.communicator.global_rank
        self.partial = 0  # which part of the parameters was averaged last
        self._group = self.communicator.group
        self._compression = compression
        self._known: dict[int, _Gradient] = {}  # by id(): tensors compare element by element
        self._reducers: dict[tuple[Compressor, int], Reducer] = {}
        self._drift = DriftCheck(check_every(), "raise")
        self._group.counting.add(self._drift)
        if isinstance(parameters, Mapping):
            self._know(list(parameters.items()))
        elif parameters is not None:
            self._know([(_name(p, i), p) for i, (_, p) in enumerate(name_leaves(parameters, ""))])

    def __call__(self, loss: Tensor, weight: float | None = None) -> None:
        self.backward_and_update(loss, weight=weight)

    def __getattr__(self, name: str) -> Any:
        if name == "opt":  # the object is being copied, and not complete yet
            raise AttributeError(name)
        return getattr(self.opt, name)

    def backward_and_update(
        self, loss: Tensor, threshold: int = THRESHOLD, weight: float | None = None
    ) -> None:
        """Update every parameter with the average of all ranks' gradients.

        From the second step on, gradients leave in buckets of `threshold` elements during
        backward(). `weight` is the rank's number of samples, given on every rank or on none: the
        average is then the mean over all samples, however uneven the batches. A rank without
        samples calls it with `loss=None` and `weight=0`.
        """
        self._update(loss, threshold, weight, self._compression)

    def backward_and_update_half(
        self,
        loss: Tensor,
        threshold: int = THRESHOLD,
        clipping: bool = False,
        clip_Value: float = 100,
        weight: float | None = None,
    ) -> None:
        """Like `backward_and_update`, with scaled float16 on the wire: see `Compression.fp16`.

        With `clipping`, every rank's gradients are first clipped to ±`clip_Value`.
        """
        self._update(loss, threshold, weight, Compression.fp16, clip_Value if clipping else None)

    def backward_and_partial_update(self, loss: Tensor, threshold: int = THRESHOLD) -> None:
        """Update every parameter with this rank's gradient; then average a part of the parameters.

        A part is a parameter of more than `threshold` elements, or several smaller ones. Each step
        averages the next part, and the first one again after the last. Replicas differ in between.
        """

        def updated() -> Iterator[Pair]:
            for p, g in _backward(loss):
                self._apply(p, g)
                yield p, g

        self.partial += 1
        k, handle = 0, None
        for k, part in enumerate(_parts(updated(), threshold), 1):
            if k == self.partial:
                parameters = [p for p, _ in part]
                values = [array_of(p.data) for p in parameters]
                handle = self._group.exchange_async(
                    values,
                    names=[self._gradient_of(p).name for p in parameters],
                    label=self.communicator.label(f"part {k} of the parameters"),
                    op=Average,
                    compression=self._compression,
                )
        if handle is not None:
            self._group.synchronize(handle)
            for p, value in zip(parameters, values, strict=True):
                write(p.data, value)
        if self.partial >= k:
            self.partial = 0
        self.opt.step()

    def backward_and_sparse_update(
        self,
        loss: Tensor,
        threshold: int = THRESHOLD,
        spars: float = 0.05,
        topK: bool = False,
        corr: bool = True,
    ) -> None:
        """Update every parameter with the large elements of the ranks' gradients.

        Of each part of the gradients (parts as in `backward_and_partial_update`), the elements sent
        are (see `sparse_sum`) the fraction `spars` with `topK`, otherwise those of at least
        `spars`. With `corr`, the rest is kept for each parameter and added to its next gradient.
        """
        self._forget()
        for k, part in enumerate(_parts(_backward(loss), threshold), 1):
            gradients = [self._gradient_of(p).receive(g) for p, g in part]
            arrays = [gradient.array for gradient in gradients]
            sparse_sum(
                self._group,
                arrays,
                [gradient.not_sent() for gradient in gradients] if corr else [],
                names=[f"corr {corr}, gradient {gradient.name!r}" for gradient in gradients],
                spars=spars,
                top_k=topK,
                label=self.communicator.label(f"part {k} of the gradients"),
            )
            for array in arrays:
                array /= self.world_size
        self._step()

    def update(self, param: Tensor, grad: Tensor) -> None:
        """Update `param` with `grad`, a sum over the ranks, divided by their number."""
        grad /= self.world_size
        self._apply(param, grad)

    # Operations for your own training loop, as in DistOpt: see `Communicator`.

    def all_reduce(self, tensor: Any) -> None:
        self.communicator.synch(tensor)

    def all_reduce_half(self, tensor: Any) -> None:
        self.communicator.synchHalf(tensor)

    def fused_all_reduce(self, tensor: list[Any], send: bool = True) -> None:
        self.communicator.fusedSynch(tensor, send)

    def fused_all_reduce_half(self, tensor: list[Any], send: bool = True) -> None:
        self.communicator.fusedSynchHalf(tensor, send)

    def sparsification(self, tensor: Any, accumulation: Any, spars: float, topK: bool) -> None:
        rest = () if accumulation is None else (accumulation,)
        self.communicator.sparsification(tensor, *rest, spars, topK)

    def fused_sparsification(
        self, tensor: list[Any], accumulation: Any, spars: float, topK: bool
    ) -> None:
        rest = () if accumulation is None else (accumulation,)
        self.communicator.fusedSparsification(tensor, *rest, spars, topK)

    def wait(self) -> None:
        self.communicator.wait()

    # How the gradients travel.

    def _update(
        self,
        loss: Tensor,
        threshold: int,
        weight: float | None,
        compression: Compressor,
        clip: float | None = None,
    ) -> None:
        self._forget()
        reducer = self._reducer(compression, threshold, weight) if self._known else None
        for p, g in _backward(loss):
            if reducer is not None and id(p) not in self._known:
                raise RuntimeError(
                    f"on rank {self.global_rank}, the first gradient of {p.name!r} appeared after "
                    "others had been sent: pass parameters=model.get_params() to "
                    "DistributedOptimizer, so that it knows all parameters from the beginning"
                )
            gradient = self._gradient_of(p).receive(g, clip)
            if reducer is not None:
                reducer.ready(gradient.place)
        if reducer is None:
            reducer = self._reducer(compression, threshold, weight)
        reducer.finish()
        self._step()
        self._drift.stepped(
            lambda: [
                (known.name, array_of(known.parameter.data)) for known in self._known.values()
            ],
            self._group,
        )

    def _reducer(self, compression: Compressor, threshold: int, weight: float | None) -> Reducer:
        # Reversed: buckets begin with the last parameters, and so does backward().
        named = [(gradient.name, gradient) for gradient in reversed(self._known.values())]
        for place, (_, gradient) in enumerate(named):
            gradient.place = place
        key = compression, threshold
        if key not in self._reducers:
            options = Options(
                compression=compression, bucket_bytes=4 * threshold, group=self._group
            )
            self._reducers[key] = options.reducer(_GradientAdapter(), named)
        reducer = self._reducers[key]
        reducer.bind(named)
        reducer.weight = weight
        return reducer

    def _know(self, named: list[tuple[str, Tensor]]) -> None:
        for name, p in reversed(named):
            self._known[id(p)] = _Gradient(name, p)

    def _gradient_of(self, p: Tensor) -> _Gradient:
        if id(p) not in self._known:
            self._know([(_name(p, len(self._known)), p)])
        return self._known[id(p)]

    def _step(self) -> None:
        """Step the inner optimizer with the averaged gradients."""
        for gradient in self._known.values():
            if gradient.array is not None:
                self._apply(gradient.parameter, gradient.averaged())
        self._forget()
        self.opt.step()

    def _forget(self) -> None:
        """Discard all gradients, also in flight, of this step or one that failed."""
        for reducer in self._reducers.values():
            reducer.abandon()
        for gradient in self._known.values():
            gradient.array = gradient.given = None

    def _apply(self, p: Tensor, g: Tensor) -> None:
        if hasattr(self.opt, "apply"):
            if p.name is None:
                p.name = id(p)
            self.opt.apply(p.name, p, g)
        else:  # before version 3
            self.opt.update(p, g)


class _Gradient:
    """A parameter's gradient, in our own memory while it travels."""

    def __init__(self, name: str, parameter: Tensor) -> None:
        self.name = name
        self.parameter = parameter
        self.place = 0  # its index in the reducer
        self.given: Tensor | None = None
        self.array: Array = None
        self.left_over: NDArray[Any] | None = None

    def receive(self, given: Tensor, clip: float | None = None) -> _Gradient:
        self.given = given
        self.array = array_of(given.data)
        if clip is not None:
            np.clip(self.array, -clip, clip, out=self.array)
        return self

    def not_sent(self) -> NDArray[Any]:
        """Return the part of the gradients that sparse updates have not sent so far."""
        if self.left_over is None:
            self.left_over = np.zeros(int(self.parameter.size()), np.float32)
        return self.left_over

    def averaged(self) -> Tensor:
        """Return the averaged gradient, from `array`, as a tensor for the optimizer."""
        # Never transposed, so that all ranks compute the same, whether they had a gradient or not:
        # SINGA adds weight decay wrongly to a transposed tensor (seen in 3.0.0.dev1).
        if self.given is None or self.given.data.transpose():
            return new_tensor(self.array, self.parameter.device)
        write(self.given.data, self.array)
        return self.given


class _GradientAdapter(Adapter):
    def gradient(self, parameter: _Gradient) -> Array | None:
        return parameter.array

    def set_gradient(self, parameter: _Gradient, array: Array) -> None:
        parameter.array = array

    def value(self, parameter: _Gradient) -> Array:
        return array_of(parameter.parameter.data)


def broadcast_optimizer_state(
    optimizer: Any, root_rank: int = 0, *, group: Group | None = None
) -> None:
    """Copy the optimizer's state (momenta, step count) from rank `root_rank` to all ranks.

    Collective; for SINGA's optimizers and a DistributedOptimizer. The root's `get_states()` is
    passed to the other ranks' `set_states()`, with tensors in host memory. SINGA stores momenta by
    the names of parameters, which must be the same on all ranks.
    """
    group = ops.ranks_of(group)
    states = ops.broadcast_made(
        lambda: mapped(optimizer.get_states(), _portable), root_rank, group=group
    )
    if group.rank != root_rank:
        optimizer.set_states(mapped(states, _local))


def _renamed(old: str, by_old: int | None, new: str, by_new: int | None) -> int | None:
    """Return the argument `new`, which may have been passed by either of its two names."""
    if by_old is not None and by_new is not None:
        raise TypeError(f"{old} is the earlier name of {new}: pass only one of them")
    return by_new if by_old is None else by_old


def _portable(x: Any) -> Any:
    return array_of(x.data) if isinstance(x, tensor.Tensor) else x


def _local(x: Any) -> Any:
    return new_tensor(x, None) if isinstance(x, np.ndarray) else x


def _backward(loss: Tensor | None) -> Iterator[Pair]:
    """Yield parameters and their gradients, as they become ready; nothing without a loss."""
    return iter(()) if loss is None else autograd.backward(loss)


def _parts(pairs: Iterator[Pair], threshold: int) -> Iterator[list[Pair]]:
    """Yield what travels together: a large parameter alone, small ones until `threshold`."""
    small: list[Pair] = []
    n_elements = 0
    for pair in pairs:
        size = int(pair[0].size())
        if size > threshold:
            yield [pair]
            continue
        small.append(pair)
        n_elements += size
        if n_elements > threshold:
            yield small
            small, n_elements = [], 0
    if small:
        yield small


def _name(p: Tensor, i: int) -> str:
    return p.name if isinstance(p.name, str) else f"parameter {i}"
