"""Submission of operations on torch tensors, and their handles."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.autograd import forward_ad

from horo_lite import arguments, ops
from horo_lite.adapters import changed
from horo_lite.collectives import arithmetic
from horo_lite.collectives.adasum import check_size
from horo_lite.collectives.calls import Part
from horo_lite.collectives.compression import Compressor, OwnCompressor, compressor_of
from horo_lite.collectives.group import Group
from horo_lite.collectives.handle import Handle as Submitted
from horo_lite.collectives.reductions import Adasum, AllReduce, AnyOp, ReduceScatter
from horo_lite.errors import warn
from horo_lite.horovod.process_sets import ProcessSet, group_of, root_in
from horo_lite.torch.compression import Compression

Set: TypeAlias = "ProcessSet | Group | None"


class Handle:
    """An operation in flight, for one `synchronize` and, before that, any number of `poll`."""

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
    """Wait until the operation is complete; return its result or raise its error.

    Raises:
        ValueError: The handle has already been synchronized.
    """
    finish = _unfinished(handle)
    results, errors = [], []
    for part in handle._parts:  # all of them: none may write after this
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
        del parts  # the objects that they hold were in use until now


def poll(handle: Handle) -> bool:
    """Return whether `synchronize(handle)` would return or raise at once."""
    _unfinished(handle)
    return all(handle._group.poll(part) for part in handle._parts)


def _unfinished(handle: Handle) -> Callable[[list[Any]], Any]:
    if not isinstance(handle, Handle):
        raise ValueError(f"{handle!r} is not a handle of an asynchronous operation")
    if handle._finish is None:
        raise ValueError(f"the handle of {handle.kind} {handle.name!r} was already synchronized")
    return handle._finish


def submit_reduction(
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
    """Submit an all-reduce or a reduce-scatter, `kind`, of all tensors together."""
    tensors = listed(tensors)
    group = group_of(process_set)
    sources = checked(tensors)
    scatters = kind == "reducescatter"
    if scatters and any(source.dim() == 0 for source in sources):
        raise ValueError("reducescatter needs tensors with at least one dimension")
    compression = compressor_of(compression)
    if op is Adasum:
        check_size(group.size)
        if not isinstance(compression, OwnCompressor):
            compression = none_instead_of(compression, group)
    wire, sent, restored = compression.compressed(sources)
    work = [
        x if in_place and x is source and _is_plain(source) else _copy(x)
        for source, x in zip(sources, sent, strict=True)
    ]
    with _value_errors():
        memory = group.memory(work, asynchronous=True)
        before = arguments.factor("prescale_factor", prescale_factor)
        after = arguments.factor("postscale_factor", postscale_factor)
        arithmetic.check(memory.tensors, op.value, before, after)
    name = name_of(group, kind, name)
    with submitting(group, kind, name):
        how = op, wire, prescale_factor, postscale_factor
        call: AllReduce
        if not scatters:
            call = AllReduce(name, *how)
        elif wire is compression:
            call = ReduceScatter(name, *how)
        else:  # a user's decompress() may need all of what compress() returned
            call = AllReduce(f"{kind} {name}", *how)
        part = group.submit(call, Part(memory), lambda _: work)

    def finish(_: list[Any]) -> Any:
        results = restored(work)
        if scatters:
            results = [x[group.part_of(x)].clone() for x in results]
        if in_place:
            results = _written(tensors, results)
        return results[0] if single else results

    return Handle(kind, name, group, [part], finish)


def submit_allgather(
    tensors: Sequence[Tensor], name: str | None, process_set: Set, *, single: bool = False
) -> Handle:
    """Submit an all-gather of all ranks' rows; the result is a list unless `single`."""
    tensors = listed(tensors)
    group = group_of(process_set)
    sources = checked(tensors)
    name = name_of(group, "allgather", name)
    several = len(sources) > 1
    with submitting(group, "allgather", name):
        parts = [
            ops.allgather_async(
                x.resolve_neg(), name=f"{name}[{i}]" if several else name, group=group
            )
            for i, x in enumerate(sources)
        ]
    return Handle(
        "allgather", name, group, parts, lambda results: results[0] if single else results
    )


def submit_broadcast(
    tensor: Tensor, root_rank: int, name: str | None, process_set: Set, *, in_place: bool
) -> Handle:
    """Submit a broadcast of the root's tensor, into a new tensor unless `in_place`."""
    group = group_of(process_set)
    (source,) = checked([tensor])
    root = root_in(group, root_rank)
    if in_place and _is_plain(source):
        work = source
    elif group.rank == root:
        work = _copy(source)
    else:
        work = torch.empty_like(source, memory_format=torch.contiguous_format)
    name = name_of(group, "broadcast", name)
    with submitting(group, "broadcast", name):
        part = ops.broadcast_async_(work, root, name=name, group=group)

    def finish(_: list[Any]) -> Tensor:
        return _written([tensor], [work])[0] if in_place else work

    return Handle("broadcast", name, group, [part], finish)


def listed(tensors: Any) -> list[Tensor]:
    """Return the tensors of an iterable as a list; raise ValueError for anything else."""
    if isinstance(tensors, Tensor):
        raise ValueError("a grouped operation takes a list of tensors, not one tensor")
    with _value_errors():
        return arguments.several(tensors)


def checked(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return the tensors detached; raise ValueError if one cannot be sent, and say why."""
    for i, tensor in enumerate(tensors):
        which = f"tensor {i}: " if len(tensors) > 1 else ""
        if not isinstance(tensor, Tensor):
            raise ValueError(
                f"{which}operations take torch tensors, not a {type(tensor).__name__}: convert "
                "numbers and NumPy arrays with torch.as_tensor(), pass a list of tensors to a "
                "grouped operation, and other objects to broadcast_object or allgather_object"
            )
        if tensor.device != tensors[0].device:
            raise ValueError(
                f"{which}it is on {tensor.device}, but tensor 0 on {tensors[0].device}: the "
                "tensors of one call must be on one device"
            )
        refuse_opaque(tensor, which)
        if tensor.layout is not torch.strided:
            raise ValueError(
                f"{which}it is sparse ({tensor.layout}): use sparse_allreduce_async or .to_dense()"
            )
    return [tensor.detach() for tensor in tensors]


def refuse_opaque(tensor: Tensor, which: str = "") -> None:
    """Raise ValueError for tensors whose memory does not contain all of their numbers as such."""
    if tensor.is_nested:
        what, remedy = "nested", "exchange x.values() of the jagged layout, or each of x.unbind()"
    elif tensor.is_quantized:
        what, remedy = "quantized", "exchange x.int_repr() and its scales, or x.dequantize()"
    elif tensor.is_mkldnn:
        what, remedy = "of MKL-DNN's layout", "exchange x.to_dense()"
    elif hasattr(tensor, "__tensor_flatten__"):
        what, remedy = f"a {type(tensor).__name__}", "exchange its contents, such as x.to_local()"
    elif tensor.layout is torch.strided and _has_tangent(tensor):
        what = "a dual tensor of forward-mode differentiation, whose tangent would be lost"
        remedy = "exchange the two parts that forward_ad.unpack_dual(x) returns"
    elif tensor.is_meta:
        what, remedy = "on the meta device, without memory", "exchange one that has memory"
    else:
        return
    raise ValueError(f"{which}it is {what}: {remedy}")


def _has_tangent(tensor: Tensor) -> bool:
    return forward_ad._current_level >= 0 and forward_ad.unpack_dual(tensor).tangent is not None


def none_instead_of(compression: Compressor, group: Group) -> Compressor:
    """Return no compression, and warn: Horovod's scripts may request Adasum and compression."""
    if group.rank == 0 and compression.name != "none":
        warn(f"op=Adasum does not compress: compression {compression.name} is ignored")
    return Compression.none


_UNNAMED = "noname."  # Horovod's prefix of the number


@contextmanager
def submitting(group: Group, kind: str, name: str) -> Iterator[None]:
    """Raise a ValueError if submission fails, and reuse the number of the operation."""
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
    """Turn errors about unusable dtypes and memory into ValueError."""
    try:
        yield
    except (TypeError, BufferError) as error:
        raise ValueError(str(error)) from None


def submit_alltoall(
    tensor: Tensor, splits: Tensor | Sequence[int] | None, name: str | None, process_set: Set
) -> Handle:
    """Submit an all-to-all; the result is the rows and the number received from each rank."""
    group = group_of(process_set)
    (source,) = checked([tensor])
    if source.dim() == 0:
        raise ValueError("alltoall needs a tensor with at least one dimension")
    counts: Any = splits.tolist() if isinstance(splits, Tensor) else splits
    if isinstance(counts, (list, tuple)):  # perhaps of numbers on a GPU, which NumPy cannot read
        counts = [n.tolist() if isinstance(n, Tensor) else n for n in counts]
    if counts is None and len(source) % group.size == 0:  # otherwise the call raises an error
        counts = [len(source) // group.size] * group.size
    name = name_of(group, "alltoall", name)
    with submitting(group, "alltoall", name):
        part = ops.alltoall_async(source.resolve_neg(), counts, name=name, group=group)

    def finish(parts: list[Any]) -> Any:
        result, received = parts[0]
        where = splits.device if isinstance(splits, Tensor) else "cpu"
        return result, torch.tensor(received.tolist(), dtype=torch.int32, device=where)

    return Handle("alltoall", name, group, [part], finish)


def _is_plain(x: Tensor) -> bool:
    """Return whether the memory contains the numbers in C order, as on other ranks."""
    return x.is_contiguous() and not x.is_neg()


def _copy(x: Tensor) -> Tensor:
    return x.resolve_neg().clone(memory_format=torch.contiguous_format)


def _written(tensors: Sequence[Tensor], results: Sequence[Tensor]) -> list[Tensor]:
    """Write the results into the caller's tensors, tell autograd, and return them."""
    for tensor, result in zip(tensors, results, strict=True):
        own = tensor.detach()
        if own.data_ptr() != result.data_ptr() or not _is_plain(own):
            own.copy_(result)
    changed(tensors)
    return list(tensors)


def name_of(group: Group, kind: str, name: str | None) -> str:
    """Return the operation's name, or a numbered one as in Horovod if none is given."""
    return f"{_UNNAMED}{group.unnamed(kind)}" if name is None else str(name)
