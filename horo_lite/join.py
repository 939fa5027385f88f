"""join(): ranks without more batches take part in what the others do, with nothing of their own.

A rank that has joined waits in two places: where the ranks meet in direct calls, and in its engine.
In both it hears what the others are about to do, as a recipe: a function of this file or of another
one, and what to call it with. That makes the same call as the others, with zeros or no rows, and is
compared, matched and carried out as any call is.
"""

from __future__ import annotations

import pickle
import sys
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from horo_lite.agreement import JOINED, Recipe, needs_all, recipe_in, told
from horo_lite.compression import Compressor
from horo_lite.errors import HoroLiteError, MismatchError
from horo_lite.transports.shm import memory_of

if TYPE_CHECKING:
    from horo_lite.arrays import Array, GpuArrays, HostArrays
    from horo_lite.collectives import Group, Op, _Reduction

Look = tuple[str, tuple[int, ...]]
"""The dtype and the shape of an array."""


def join() -> int:
    """All ranks have called this; the number of the last one that did, alike on all of them.

    For uneven numbers of batches: a rank that has no more calls it, and until all have, it takes
    part in what the others do without changing it. In sums and averages it counts as zeros, and
    averages are still divided by the number of all ranks, as Horovod has it; one that is weighted
    by numbers of samples, only by those that there are. In allgathers it has no rows, and of
    broadcasts from others it sees nothing. What needs it (a broadcast from it, alltoall,
    reducescatter, objects, a new process set, so far whatever has arrays on a GPU) is a
    MismatchError for those that call it.

    Its own parameters stay behind meanwhile; the last rank's have seen every step:

        for batch in batches:
            ...
        last = hvd.join()
        hvd.broadcast_parameters(model, root_rank=last)

    The optimizer's state, and what else a step changes, has to be broadcast likewise. Afterwards
    everything is as before, and a next epoch may end in another join(). It is also a barrier.
    PeerLostError where a rank ends or fails meanwhile.
    """
    from horo_lite.world import groups, world

    everyone, *parts = groups()
    if parts and not world().thread_multiple:
        raise HoroLiteError(
            "join() waits in every group of ranks at once, and MPI was initialised without "
            "THREAD_MULTIPLE: let horo_lite.init() initialise it, or do without process sets"
        )
    errors: list[BaseException] = []

    def join_part(part: Group) -> None:
        try:
            join_group(part)
        except BaseException as error:
            errors.append(error)

    # The others may operate among part of the ranks at any time, and wait for this one there.
    threads = [threading.Thread(target=join_part, args=(part,), daemon=True) for part in parts]
    for thread in threads:
        thread.start()
    last = join_group(everyone)
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return everyone.transport.ranks[last]


def join_group(group: Group) -> int:
    """All ranks of the group have called this; the place in it of the last one."""
    group.check_usable()
    if group.size == 1:
        return 0
    assert group._engine is not None
    with group._lock:
        job = group._engine.submit_join(lambda recipe: _follow(group, recipe, True))
        transport = group.transport
        n_met = 0
        while True:
            job.begin_wait()
            try:
                headers = transport.agree(JOINED, n_met, 0.0, label="join()")
            except MismatchError:  # the others have queued something on their GPUs, and know
                n_met += 1
                continue
            present = [r for r, header in enumerate(headers) if header.digest != JOINED]
            if not present:
                break
            n_met += 1
            recipe = recipe_in(told(transport, "join()")[present[0]])
            if recipe:
                _follow(group, recipe, False)
        job.wait()
        # Of those that the same meetings have found here, the engines know the order.
        order: Any = job.value()
        group.begin_anew()
    return max(range(group.size), key=lambda r: (-headers[r].count, order[r]))


def _follow(group: Group, recipe: bytes, asynchronous: bool) -> None:
    function, what = pickle.loads(recipe)
    function(group, asynchronous, **what)


def how(function: Callable[..., None], weight: float = 1.0, **what: Any) -> tuple[float, bytes]:
    """What ranks that have joined are to call; `function` is one of a module."""
    return weight, pickle.dumps((function, what))


# Of each kind of operation, the recipe, and what is made of it.


def recipe_of_reduction(asked: _Reduction) -> Recipe:
    """How ranks that have joined take part in this reduction."""

    def recipe(joined: Sequence[int]) -> tuple[float, bytes]:
        scaled = asked.op.value in ("min", "max", "product") and asked.prescale != 1.0
        if asked.kind == "reducescatter" or scaled or asked.memory.lane is not None:
            return needs_all(asked.label)(joined)
        return how(
            _reduce,
            1.0 if asked.weight is None else 0.0,
            kind=asked.kind,
            label=asked.label,
            names=tuple(asked.names),
            op=asked.op,
            compression=(str(asked.compression.name), asked.compression.wire),
            factors=(asked.prescale, asked.postscale),
            weighted=asked.weight is not None,
            looks=looks_of(asked.memory),
            shared=None if asked.shared is None else (asked.shared.number, asked.offsets),
        )

    return recipe


def _reduce(
    group: Group,
    asynchronous: bool,
    *,
    kind: str,
    label: str,
    names: Sequence[str],
    op: Op,
    compression: tuple[str, str],
    factors: tuple[float, float],
    weighted: bool,
    looks: Sequence[Look],
    shared: tuple[int, Sequence[int]] | None,
) -> None:
    from horo_lite.collectives import _Reduction

    place = None if shared is None else memory_of(group, shared[0])
    if shared is not None and place is not None:  # what lies there is this rank's part
        nothing = [
            place.arrays[offset] if 0 not in shape else _nothing((dtype, shape))
            for offset, (dtype, shape) in zip(shared[1], looks, strict=True)
        ]
        for array in nothing:
            array[...] = 0
    else:
        nothing = [_nothing(look, op.value) for look in looks]
    memory = group._memory(nothing, asynchronous=asynchronous)
    mine = _Reduction(
        kind, None, memory, op, Compressor(*compression), *factors, names=names, label=label
    )
    mine.weight = 0.0 if weighted else None
    mine.look_in(place)
    if asynchronous:
        group._submit_reduction(mine, lambda: None)
    else:
        group._reduce(mine)


def recipe_of_allgather(rows: HostArrays | GpuArrays, name: str | None, label: str = "") -> Recipe:
    """The same for an allgather; `label` is that of an asynchronous one."""

    def recipe(joined: Sequence[int]) -> tuple[float, bytes]:
        if rows.lane is not None:
            return needs_all(label or "allgather")(joined)
        ((dtype, shape),) = looks_of(rows)
        return how(_allgather, label=label, name=name, look=(dtype, (0, *shape[1:])))

    return recipe


def _allgather(
    group: Group, asynchronous: bool, *, label: str, name: str | None, look: Look
) -> None:
    nothing = _nothing(look)
    rows = group._rows(nothing, asynchronous=asynchronous)
    if asynchronous:
        group._submit_allgather(label, name, rows, nothing)
    else:
        group.allgather(nothing, name=name)


def recipe_of_broadcast(
    memory: HostArrays | GpuArrays,
    root: int,
    ranks: Sequence[int],
    name: str | None,
    names: Sequence[str] = (),
    label: str = "",
) -> Recipe:
    """The same for a broadcast from the one of `ranks` that is `root`."""

    def recipe(joined: Sequence[int]) -> tuple[float, bytes]:
        if ranks[root] in joined or memory.lane is not None:
            return needs_all(f"{label or 'broadcast'} from rank {ranks[root]}")(joined)
        return how(
            _broadcast,
            label=label,
            name=name,
            names=tuple(names),
            root=root,
            looks=looks_of(memory),
        )

    return recipe


def _broadcast(
    group: Group,
    asynchronous: bool,
    *,
    label: str,
    name: str | None,
    names: Sequence[str],
    root: int,
    looks: Sequence[Look],
) -> None:
    memory = group._memory([_nothing(look) for look in looks], asynchronous=asynchronous)
    if asynchronous:
        group._submit_broadcast(label, name, memory, root, lambda: None)
    else:
        group._run(lambda t: group._broadcast(t, memory, root, name, names), memory.lane)()


def recipe_of_barrier(joined: Sequence[int]) -> tuple[float, bytes]:
    """The recipe of a barrier."""
    return how(_barrier)


def _barrier(group: Group, asynchronous: bool) -> None:
    group.barrier()


# Arrays that change nothing.


def looks_of(memory: HostArrays | GpuArrays) -> list[Look]:
    """What each of the arrays looks like."""
    tensors = memory.tensors
    return [
        (tensors.describe(i).partition("[")[0], tuple(tensors.shape(i)))
        for i in range(len(tensors))
    ]


def _nothing(look: Look, op: str = "sum") -> Array:
    """An array that looks so, and does not change what others have."""
    name, shape = look
    if name == "bfloat16" and "torch" in sys.modules:  # unknown to NumPy
        torch = sys.modules["torch"]
        return torch.full(shape, _neutral(op, -np.inf, np.inf), dtype=torch.bfloat16)
    if name == "bfloat16":
        from ml_dtypes import bfloat16

        return np.full(shape, _neutral(op, -np.inf, np.inf), bfloat16)
    dtype = np.dtype(name)
    if dtype.kind in "iu":
        limits = np.iinfo(dtype)
        return np.full(shape, _neutral(op, limits.min, limits.max), dtype)
    return np.full(shape, _neutral(op, -np.inf, np.inf), dtype)


def _neutral(op: str, least: float, greatest: float) -> float:
    return {"min": greatest, "max": least, "product": 1}.get(op, 0)
