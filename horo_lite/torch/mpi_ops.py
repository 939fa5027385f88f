"""Operations on torch tensors, with Horovod's names, arguments and meaning.

Every operation, also one that waits for its result, is matched among the ranks by its kind and
name, so ranks may come to different operations in different orders. Without `name` they are
numbered, for each kind and process set. `…_async` gives a handle for `poll` and `synchronize`.
Tensors may lie anywhere in memory, on the CPU or on this rank's GPU; results are new tensors on the
same device, or, for forms with an underscore at the end, the given ones. The out-of-place forms
that wait are differentiable, with Horovod's gradients, which are not always the derivative of the
sum of all ranks' losses (that, the adjoint, is what `horo_lite.jax` has). Of N ranks in the set:

    allreduce       the allreduce of the upstream gradients with the same op and factors
    allgather       this rank's rows of the average of the upstream gradients: 1/N of the adjoint
    broadcast       on the root the average of the upstream gradients, 1/N of the adjoint; else 0
    reducescatter   the upstream gradients gathered, times N if op is Sum, times both factors: N
                    times the adjoint
    alltoall        the upstream gradients, sent back: the adjoint

Scripts that were tuned with Horovod depend on these numbers. Those of Min, Max, Product and Adasum,
which Horovod reduces with the same op, are no gradients: here they are a RuntimeError.

ValueError at the call: wrong arguments, dtypes that cannot be reduced or sent, a name that is in
flight already, no `init()` yet. MismatchError (a RuntimeError, and a HorovodInternalError) on every
rank where the ranks differ; the world can be used afterwards. PeerLostError where a rank is gone.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch
from torch import Tensor

from horo_lite import _native, ops
from horo_lite.adapters.object import NO_ORDER
from horo_lite.collectives import compression as core
from horo_lite.collectives.calls import Barrier, Part
from horo_lite.collectives.group import Group
from horo_lite.collectives.handle import Handle as Submitted
from horo_lite.collectives.reductions import (
    AllReduce,
    Average,
    Max,
    Min,
    Op,
    Product,
    ReduceScatter,
    Sum,
)
from horo_lite.torch.adasum import Adasum, AdasumOp, adasum_async_
from horo_lite.torch.compression import Compression
from horo_lite.torch.process_sets import ProcessSet, global_process_set, group_of, root_in

__all__ = [
    "Adasum",
    "Average",
    "Handle",
    "Max",
    "Min",
    "Product",
    "Sum",
    "allgather",
    "allgather_async",
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "alltoall",
    "alltoall_async",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "grouped_allgather",
    "grouped_allgather_async",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "grouped_reducescatter",
    "grouped_reducescatter_async",
    "join",
    "poll",
    "reducescatter",
    "reducescatter_async",
    "sparse_allreduce_async",
    "synchronize",
]

Set: TypeAlias = "ProcessSet | Group | None"
AnyOp: TypeAlias = "Op | AdasumOp"


class Handle:
    """An operation in flight: `synchronize` takes it once, `poll` any number of times before."""

    __slots__ = ("__weakref__", "_finish", "_group", "_parts", "kind", "name")

    def __init__(
        self,
        kind: str,
        name: str,
        group: Group,
        parts: Sequence[Submitted],
        finish: Callable[[list[Any]], Any],
    ) -> None:
        self.kind = kind
        self.name = name
        self._group = group
        self._parts = parts
        self._finish: Callable[[list[Any]], Any] | None = finish

    def __call__(self) -> Any:
        return synchronize(self)

    def __repr__(self) -> str:
        return (
            f"<{'synchronized' if self._finish is None else 'operation'} {self.kind} {self.name!r}>"
        )


def synchronize(handle: Handle) -> Any:
    """The operation is complete, and its result is returned; or what went wrong is raised.

    ValueError where the handle has been synchronized before.
    """
    finish = _unfinished(handle)
    results, errors = [], []
    for part in handle._parts:  # all of them: none may still be writing afterwards
        try:
            results.append(handle._group.synchronize(part))
        except Exception as error:
            errors.append(error)
    parts, handle._parts, handle._finish = handle._parts, (), None
    if errors:
        raise errors[0]
    try:
        return finish(results)
    finally:
        del parts  # what they hold was in use until now


def poll(handle: Handle) -> bool:
    """Whether `synchronize(handle)` would not have to wait."""
    _unfinished(handle)
    return all(handle._group.poll(part) for part in handle._parts)


def _unfinished(handle: Handle) -> Callable[[list[Any]], Any]:
    if not isinstance(handle, Handle):
        raise ValueError(f"{handle!r} is not a handle of an asynchronous operation")
    if handle._finish is None:
        raise ValueError(f"the handle of {handle.kind} {handle.name!r} was synchronized already")
    return handle._finish


# All-reduce.


def allreduce(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: Any = Compression.none,
    op: AnyOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: Set = global_process_set,
) -> Tensor:
    """A new tensor holds the op (by itself the average) over all ranks' `tensor`.

    Every rank of the set calls it, with the same shape, dtype and options. `prescale_factor`
    multiplies what a rank contributes, `postscale_factor` the result. Averages of integers are cut
    towards zero. Differentiable for Sum and Average.
    """
    op = _op(average, op)
    (result,) = grouped_allreduce(
        [tensor],
        None,
        name,
        compression,
        op,
        prescale_factor,
        postscale_factor,
        process_set,
    )
    return result


def allreduce_async(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: AnyOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: Set = global_process_set,
    compression: Any = Compression.none,
) -> Handle:
    """`synchronize(handle)` returns what `allreduce` would."""
    op = _op(average, op)
    return _reduce(
        "allreduce",
        [tensor],
        op,
        name,
        compression,
        prescale_factor,
        postscale_factor,
        process_set,
        single=True,
    )


def allreduce_(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: AnyOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: Set = global_process_set,
    compression: Any = Compression.none,
) -> Tensor:
    """`tensor` itself holds the op over all ranks' `tensor`, and is returned. See `allreduce`.

    Autograd does not see the change: as under torch.no_grad().
    """
    op = _op(average, op)
    return synchronize(
        allreduce_async_(
            tensor,
            None,
            name,
            op,
            prescale_factor,
            postscale_factor,
            process_set,
            compression,
        )
    )


def allreduce_async_(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: AnyOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: Set = global_process_set,
    compression: Any = Compression.none,
) -> Handle:
    """`synchronize(handle)` returns `tensor`, changed; not to be touched until then."""
    op = _op(average, op)
    return _reduce(
        "allreduce",
        [tensor],
        op,
        name,
        compression,
        prescale_factor,
        postscale_factor,
        process_set,
        in_place=True,
        single=True,
    )


def grouped_allreduce(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    compression: Any = Compression.none,
    op: AnyOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: Set = global_process_set,
) -> list[Tensor]:
    """New tensors hold the op over all ranks' `tensors`, which are reduced as one.

    See `allreduce`; dtypes may be mixed, devices may not.
    """
    options = _op(average, op), name, compression, prescale_factor, postscale_factor, process_set
    if _differentiable(tensors):
        return list(_Allreduce.apply(options, *tensors))
    results: list[Tensor] = synchronize(_reduce("allreduce", tensors, *options))
    return results


def grouped_allreduce_async(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: AnyOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: Set = global_process_set,
    compression: Any = Compression.none,
) -> Handle:
    """`synchronize(handle)` returns what `grouped_allreduce` would."""
    op = _op(average, op)
    return _reduce(
        "allreduce",
        tensors,
        op,
        name,
        compression,
        prescale_factor,
        postscale_factor,
        process_set,
    )


def grouped_allreduce_(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: AnyOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: Set = global_process_set,
    compression: Any = Compression.none,
) -> list[Tensor]:
    """`tensors` themselves hold the op over all ranks' `tensors`, and are returned."""
    op = _op(average, op)
    results: list[Tensor] = synchronize(
        grouped_allreduce_async_(
            tensors,
            None,
            name,
            op,
            prescale_factor,
            postscale_factor,
            process_set,
            compression,
        )
    )
    return results


def grouped_allreduce_async_(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: AnyOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: Set = global_process_set,
    compression: Any = Compression.none,
) -> Handle:
    """`synchronize(handle)` returns `tensors`, changed; not to be touched until then."""
    op = _op(average, op)
    return _reduce(
        "allreduce",
        tensors,
        op,
        name,
        compression,
        prescale_factor,
        postscale_factor,
        process_set,
        in_place=True,
    )


def sparse_allreduce_async(
    tensor: Tensor,
    name: str | None = None,
    op: AnyOp | None = None,
    process_set: Set = global_process_set,
) -> Handle:
    """`synchronize(handle)`, or `handle()`, returns the op over all ranks' sparse COO `tensor`.

    Sum or Average. What all ranks have is gathered and added up: a rank receives every rank's
    elements, and different ranks may have different numbers of them.
    """
    op = _op(None, op)
    if not isinstance(tensor, Tensor) or tensor.layout is not torch.sparse_coo:
        raise ValueError("sparse_allreduce_async takes a sparse COO tensor: see Tensor.to_sparse")
    if op not in (Sum, Average):
        raise ValueError(f"sparse tensors are reduced with hvd.Sum or hvd.Average, not {op!r}")
    group = group_of(process_set)
    name = _name(group, "sparse_allreduce", name)
    local = tensor.detach().coalesce()
    shape = f"{op.name} of {tuple(tensor.shape)}"
    with _submitting(group, "sparse_allreduce", name):
        parts = [
            ops.allgather_async(part, name=f"{name}.{what} ({shape})", group=group)
            for what, part in (
                ("indices", local.indices().t().contiguous()),
                ("values", local.values()),
            )
        ]

    def finish(parts: list[Any]) -> Tensor:
        indices, values = parts
        total = torch.sparse_coo_tensor(
            indices.t(), values, tensor.shape, check_invariants=False
        ).coalesce()
        return total / group.size if op is Average else total

    return Handle("sparse_allreduce", name, group, parts, finish)


# Reduce-scatter.


def reducescatter(
    tensor: Tensor,
    name: str | None = None,
    compression: Any = Compression.none,
    op: AnyOp = Average,
    process_set: Set = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Tensor:
    """This rank's rows of `allreduce(tensor)`; the first ranks get one more where it must be.

    Differentiable for Sum and Average: the upstream gradients of all ranks one after the other,
    times the number of ranks if op is Sum, as in Horovod.
    """
    (result,) = grouped_reducescatter(
        [tensor], name, compression, op, process_set, prescale_factor, postscale_factor
    )
    return result


def reducescatter_async(
    tensor: Tensor,
    name: str | None = None,
    op: AnyOp = Average,
    process_set: Set = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    compression: Any = Compression.none,
) -> Handle:
    """`synchronize(handle)` returns what `reducescatter` would."""
    return _reduce(
        "reducescatter",
        [tensor],
        _op(None, op),
        name,
        compression,
        prescale_factor,
        postscale_factor,
        process_set,
        single=True,
    )


def grouped_reducescatter(
    tensors: Sequence[Tensor],
    name: str | None = None,
    compression: Any = Compression.none,
    op: AnyOp = Average,
    process_set: Set = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[Tensor]:
    """This rank's rows of each of `grouped_allreduce(tensors)`. See `reducescatter`."""
    options = _op(None, op), name, compression, prescale_factor, postscale_factor, process_set
    if _differentiable(tensors):
        return list(_Reducescatter.apply(options, *tensors))
    results: list[Tensor] = synchronize(_reduce("reducescatter", tensors, *options))
    return results


def grouped_reducescatter_async(
    tensors: Sequence[Tensor],
    name: str | None = None,
    op: AnyOp = Average,
    process_set: Set = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    compression: Any = Compression.none,
) -> Handle:
    """`synchronize(handle)` returns what `grouped_reducescatter` would."""
    return _reduce(
        "reducescatter",
        tensors,
        _op(None, op),
        name,
        compression,
        prescale_factor,
        postscale_factor,
        process_set,
    )


# Moving tensors.


def allgather(
    tensor: Tensor, name: str | None = None, process_set: Set = global_process_set
) -> Tensor:
    """A new tensor of all ranks' `tensor`, one after the other along the first dimension.

    Only the first dimension may differ between ranks; a 0-dimensional tensor is one row.
    Differentiable: this rank's rows of the average of all ranks' upstream gradients, as in Horovod.
    """
    (result,) = grouped_allgather([tensor], name, process_set)
    return result


def allgather_async(
    tensor: Tensor, name: str | None = None, process_set: Set = global_process_set
) -> Handle:
    """`synchronize(handle)` returns what `allgather` would."""
    return _allgather([tensor], name, process_set, single=True)


def grouped_allgather(
    tensors: Sequence[Tensor], name: str | None = None, process_set: Set = global_process_set
) -> list[Tensor]:
    """What `allgather` gives of each."""
    if _differentiable(tensors):
        return list(_Allgather.apply(name, process_set, *tensors))
    results: list[Tensor] = synchronize(_allgather(tensors, name, process_set))
    return results


def grouped_allgather_async(
    tensors: Sequence[Tensor], name: str | None = None, process_set: Set = global_process_set
) -> Handle:
    """`synchronize(handle)` returns what `grouped_allgather` would."""
    return _allgather(tensors, name, process_set)


def broadcast(
    tensor: Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: Set = global_process_set,
) -> Tensor:
    """A new tensor of what `tensor` is on rank `root_rank`, which the world's number names.

    Same shape and dtype on every rank. Differentiable: the root's gradient is the average of all
    ranks' upstream gradients, as in Horovod, and that of the others 0.
    """
    if _differentiable([tensor]):
        result: Tensor = _Broadcast.apply(tensor, root_rank, name, process_set)
        return result
    return synchronize(broadcast_async(tensor, root_rank, name, process_set))


def broadcast_async(
    tensor: Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: Set = global_process_set,
) -> Handle:
    """`synchronize(handle)` returns what `broadcast` would."""
    return _broadcast(tensor, root_rank, name, process_set, in_place=False)


def broadcast_(
    tensor: Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: Set = global_process_set,
) -> Tensor:
    """`tensor` itself holds what it is on rank `root_rank`, and is returned."""
    return synchronize(broadcast_async_(tensor, root_rank, name, process_set))


def broadcast_async_(
    tensor: Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: Set = global_process_set,
) -> Handle:
    """`synchronize(handle)` returns `tensor`, changed; not to be touched until then."""
    return _broadcast(tensor, root_rank, name, process_set, in_place=True)


def alltoall(
    tensor: Tensor,
    splits: Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: Set = global_process_set,
) -> Any:
    """The rows that all ranks of the set had for this one, in rank order.

    `splits[r]` rows, in order, go to rank r of the set; without `splits` each gets as many. With
    `splits`, the result is the tensor and the number of rows received from each rank.
    Differentiable.
    """
    if _differentiable([tensor]):
        result, received = _Alltoall.apply(tensor, splits, name, process_set)
        return result if splits is None else (result, received)
    result, received = synchronize(alltoall_async(tensor, splits, name, process_set))
    return result if splits is None else (result, received)


def alltoall_async(
    tensor: Tensor,
    splits: Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: Set = global_process_set,
) -> Handle:
    """`synchronize(handle)` returns the tensor and the number of rows received from each rank.

    Both also without `splits`, as in Horovod. See `alltoall`.
    """
    group = group_of(process_set)
    (source,) = _checked([tensor])
    if source.dim() == 0:
        raise ValueError("alltoall needs a tensor with at least one dimension")
    counts = _splits(splits)
    if counts is None and len(source) % group.size == 0:  # otherwise the call says what is wrong
        counts = [len(source) // group.size] * group.size
    name = _name(group, "alltoall", name)
    with _submitting(group, "alltoall", name):
        part = ops.alltoall_async(source.resolve_neg(), counts, name=name, group=group)

    def finish(parts: list[Any]) -> Any:
        result, received = parts[0]
        where = splits.device if isinstance(splits, Tensor) else "cpu"
        return result, torch.tensor(received.tolist(), dtype=torch.int32, device=where)

    return Handle("alltoall", name, group, [part], finish)


def barrier(process_set: Set = global_process_set) -> None:
    """All ranks of the set have called this."""
    group = group_of(process_set)
    part = group.submit(Barrier("all ranks"), Part())
    synchronize(Handle("barrier", "barrier", group, [part], lambda parts: None))


def join(device: int = -1) -> int:
    """All ranks have called this; the number of the last one that did. See `horo_lite.join`.

    `device` is Horovod's, and not needed.
    """
    return ops.join()


# How they run.


def _reduce(
    kind: str,
    tensors: Sequence[Tensor],
    op: AnyOp,
    name: str | None,
    compression: Any,
    prescale_factor: float,
    postscale_factor: float,
    process_set: Set,
    *,
    in_place: bool = False,
    single: bool = False,
) -> Handle:
    group = group_of(process_set)
    sources = _checked(tensors)
    scatters = kind == "reducescatter"
    if scatters and any(source.dim() == 0 for source in sources):
        raise ValueError("reducescatter needs tensors with at least one dimension")
    wire, compress, decompress = _compression(compression)
    contexts: list[Any] = []
    work = []
    for source in sources:
        if compress is not None:
            small, context = compress(source)
            contexts.append(context)
            source = small.clone() if small.data_ptr() == source.data_ptr() else small.contiguous()
        elif not (in_place and _is_plain(source)):
            source = _copy(source)
        work.append(source)
    _check_reducible(work, op)
    name = _name(group, kind, name)
    with _submitting(group, kind, name):
        if isinstance(op, AdasumOp):
            part = adasum_async_(group, work, (), name, prescale_factor, postscale_factor, kind)
        else:
            call = (ReduceScatter if scatters else AllReduce)(
                name, op, wire, prescale_factor, postscale_factor
            )
            part = group.submit(call, Part(group.memory(work, asynchronous=True)), lambda _: work)

    def finish(_: list[Any]) -> Any:
        results = list(work)
        if decompress is not None:
            results = [decompress(x, c) for x, c in zip(results, contexts, strict=True)]
        if scatters:
            results = [x[_part_of(group, len(x))].clone() for x in results]
        if in_place:
            results = _written(tensors, results)
        return results[0] if single else results

    return Handle(kind, name, group, [part], finish)


def _allgather(
    tensors: Sequence[Tensor], name: str | None, process_set: Set, *, single: bool = False
) -> Handle:
    group = group_of(process_set)
    sources = _checked(tensors)
    name = _name(group, "allgather", name)
    several = len(sources) > 1
    with _submitting(group, "allgather", name):
        parts = [
            ops.allgather_async(
                x.resolve_neg(), name=f"{name}[{i}]" if several else name, group=group
            )
            for i, x in enumerate(sources)
        ]
    return Handle(
        "allgather", name, group, parts, lambda results: results[0] if single else results
    )


def _broadcast(
    tensor: Tensor, root_rank: int, name: str | None, process_set: Set, *, in_place: bool
) -> Handle:
    group = group_of(process_set)
    (source,) = _checked([tensor])
    root = root_in(group, root_rank)
    if in_place and _is_plain(source):
        work = source
    elif group.rank == root:
        work = _copy(source)
    else:
        work = torch.empty_like(source, memory_format=torch.contiguous_format)
    name = _name(group, "broadcast", name)
    with _submitting(group, "broadcast", name):
        part = ops.broadcast_async_(work, root, name=name, group=group)

    def finish(_: list[Any]) -> Tensor:
        return _written([tensor], [work])[0] if in_place else work

    return Handle("broadcast", name, group, [part], finish)


def _op(average: bool | None, op: AnyOp | None) -> AnyOp:
    if average is not None:
        if op is not None:
            raise ValueError("average and op are two names for one thing: give op alone")
        warnings.warn(
            "average= is Horovod's old name: say op=hvd.Average or op=hvd.Sum",
            DeprecationWarning,
            stacklevel=3,
        )
        return Average if average else Sum
    if op is None:
        return Average
    if not isinstance(op, (Op, AdasumOp)):
        raise ValueError(
            f"op is hvd.Average, hvd.Sum, hvd.Adasum, hvd.Min, hvd.Max or hvd.Product, not {op!r}"
        )
    return op


def _checked(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The tensors without their history. ValueError says what cannot be sent, and why."""
    if isinstance(tensors, Tensor):
        raise ValueError("a grouped operation takes a list of tensors, not one tensor")
    for i, tensor in enumerate(tensors):
        which = f"tensor {i}: " if len(tensors) > 1 else ""
        if not isinstance(tensor, Tensor):
            raise ValueError(
                f"{which}operations take torch tensors, not {tensor!r}: wrap numbers in "
                "torch.tensor(), and send other objects with broadcast_object or allgather_object"
            )
        if tensor.layout is not torch.strided:
            raise ValueError(
                f"{which}it is sparse ({tensor.layout}): use sparse_allreduce_async or .to_dense()"
            )
        if tensor.device != tensors[0].device:
            raise ValueError(
                f"{which}it lies on {tensor.device}, and tensor 0 on {tensors[0].device}: the "
                "tensors of one call lie on one device"
            )
    return [tensor.detach() for tensor in tensors]


def _check_reducible(tensors: Sequence[Tensor], op: AnyOp) -> None:
    with _value_errors():
        native = _native.Tensors(tensors, stream=NO_ORDER)
        if isinstance(op, Op):
            _native.check_reducible(native, op.value)


_UNNAMED = "noname."  # Horovod's, before the number


@contextmanager
def _submitting(group: Group, kind: str, name: str) -> Iterator[None]:
    """What cannot be submitted is a ValueError, and its number is not used up."""
    try:
        with _value_errors():
            yield
    except ValueError:
        unnamed = name.removeprefix(_UNNAMED)
        if unnamed != name and unnamed.partition(" ")[0].isdigit():
            group.give_back(kind, unnamed)
        raise


@contextmanager
def _value_errors() -> Iterator[None]:
    """A dtype or a kind of memory that cannot be used is a wrong argument in this face."""
    try:
        yield
    except (TypeError, BufferError) as error:
        raise ValueError(str(error)) from error


def _compression(given: Any) -> tuple[core.Compressor, Any, Any]:
    """The core's compressor, or what to call before and after."""
    if isinstance(given, core.Compressor):
        return given, None, None
    if callable(getattr(given, "compress", None)) and callable(getattr(given, "decompress", None)):
        return Compression.none, given.compress, given.decompress
    raise ValueError(
        "compression is hvd.Compression.none, .fp16, .bf16, or has compress() and decompress(), "
        f"not {given!r}"
    )


def _splits(splits: Tensor | Sequence[int] | None) -> list[int] | None:
    if splits is None:
        return None
    counts = splits.tolist() if isinstance(splits, Tensor) else list(splits)
    if not isinstance(counts, list) or not all(
        hasattr(n, "__index__") and not isinstance(n, bool) for n in counts
    ):
        raise ValueError(f"splits are numbers of rows, one a rank, not {splits!r}")
    return [int(n) for n in counts]


def _is_plain(x: Tensor) -> bool:
    """Whether the memory is what the numbers are, in C order, as other ranks' will be."""
    return x.is_contiguous() and not x.is_neg()


def _copy(x: Tensor) -> Tensor:
    return x.resolve_neg().clone(memory_format=torch.contiguous_format)


def _written(tensors: Sequence[Tensor], results: Sequence[Tensor]) -> list[Tensor]:
    """The caller's tensors, which hold the results; autograd knows that they have changed."""
    for tensor, result in zip(tensors, results, strict=True):
        own = tensor.detach()
        if own.data_ptr() != result.data_ptr() or not _is_plain(own):
            own.copy_(result)
        elif not tensor.is_inference():
            torch.autograd.graph.increment_version(tensor)
    return list(tensors)


def _part_of(group: Group, n_rows: int) -> slice:
    rows, more = divmod(n_rows, group.size)
    begin = group.rank * rows + min(group.rank, more)
    return slice(begin, begin + rows + (group.rank < more))


def _name(group: Group, kind: str, name: str | None) -> str:
    return f"{_UNNAMED}{group.unnamed(kind)}" if name is None else str(name)


# Gradients.


def _differentiable(tensors: Sequence[Tensor]) -> bool:
    return torch.is_grad_enabled() and any(getattr(x, "requires_grad", False) for x in tensors)


def _check_linear(op: AnyOp) -> None:
    if op not in (Sum, Average):
        raise RuntimeError(
            f"there is no gradient of a reduction with {op.name}: use hvd.Sum or hvd.Average, or "
            "call it under torch.no_grad() or on tensor.detach()"
        )


class _Allreduce(torch.autograd.Function):  # type: ignore[misc]
    """What every rank gets depends on every rank's tensor: gradients are reduced likewise."""

    @staticmethod
    def forward(ctx: Any, options: tuple[Any, ...], *tensors: Tensor) -> tuple[Tensor, ...]:
        op, name, compression, prescale, postscale, process_set = options
        group = group_of(process_set)
        name = _name(group, "allreduce", name)
        ctx.options = op, f"{name} gradient", Compression.none, prescale, postscale, group
        return tuple(
            synchronize(
                _reduce("allreduce", tensors, op, name, compression, prescale, postscale, group)
            )
        )

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        op, name, compression, prescale, postscale, group = ctx.options
        _check_linear(op)
        return None, *grouped_allreduce(
            grads, None, name, compression, op, prescale, postscale, group
        )


class _Reducescatter(torch.autograd.Function):  # type: ignore[misc]
    """Every rank's tensor gets the gradients of all parts, N times as large if op is Sum."""

    @staticmethod
    def forward(ctx: Any, options: tuple[Any, ...], *tensors: Tensor) -> tuple[Tensor, ...]:
        op, name, compression, prescale, postscale, process_set = options
        group = group_of(process_set)
        name = _name(group, "reducescatter", name)
        ctx.options = op, f"{name} gradient", prescale * postscale, group
        return tuple(
            synchronize(
                _reduce("reducescatter", tensors, op, name, compression, prescale, postscale, group)
            )
        )

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        op, name, factor, group = ctx.options
        _check_linear(op)
        factor = factor * group.size if op is Sum else factor
        return None, *(grad * factor for grad in grouped_allgather(grads, name, group))


class _Allgather(torch.autograd.Function):  # type: ignore[misc]
    """A rank's rows are seen by all: their gradients are averaged."""

    @staticmethod
    def forward(
        ctx: Any, name: str | None, process_set: Set, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        group = group_of(process_set)
        name = _name(group, "allgather", name)
        ctx.options = f"{name} gradient", group, [x.shape for x in tensors]
        return tuple(synchronize(_allgather(tensors, name, group)))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        name, group, shapes = ctx.options
        n_rows = torch.tensor([[shape[0] if shape else 1 for shape in shapes]])
        before = allgather(n_rows, f"{name} rows", group)[: group.rank].sum(0).tolist()
        means = grouped_allreduce(grads, None, name, op=Average, process_set=group)
        return (
            None,
            None,
            *(
                mean[begin : begin + (shape[0] if shape else 1)].reshape(shape)
                for mean, begin, shape in zip(means, before, shapes, strict=True)
            ),
        )


class _Broadcast(torch.autograd.Function):  # type: ignore[misc]
    """The root's tensor is seen by all: the gradients are averaged there."""

    @staticmethod
    def forward(
        ctx: Any, tensor: Tensor, root_rank: int, name: str | None, process_set: Set
    ) -> Tensor:
        group = group_of(process_set)
        name = _name(group, "broadcast", name)
        ctx.options = f"{name} gradient", group, root_in(group, root_rank)
        result: Tensor = synchronize(broadcast_async(tensor, root_rank, name, group))
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        name, group, root = ctx.options
        mean = allreduce(grads[0], None, name, op=Average, process_set=group)
        return mean if group.rank == root else torch.zeros_like(mean), None, None, None


class _Alltoall(torch.autograd.Function):  # type: ignore[misc]
    """Gradients go back where the rows came from."""

    @staticmethod
    def forward(
        ctx: Any, tensor: Tensor, splits: Any, name: str | None, process_set: Set
    ) -> tuple[Tensor, Tensor]:
        group = group_of(process_set)
        name = _name(group, "alltoall", name)
        result, received = synchronize(alltoall_async(tensor, splits, name, group))
        ctx.options = f"{name} gradient", group, received.tolist()
        ctx.mark_non_differentiable(received)
        return result, received

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        name, group, received = ctx.options
        grad, _ = alltoall(grads[0], received, name, group)
        return grad, None, None, None
