"""torch.distributed's process group, implemented with a group of horo_lite.

Each method becomes a Call for the progress thread. torch matches the collectives of a group by
position, so their names are numbers, and the contract of the Call holds everything else. Process
groups are made by their members alone, by messages, since torch does not involve other ranks; the
default one uses the world's group.
"""

# Torch's stubs list several signatures for each method. Its own functions use only that with opts.
# mypy: disable-error-code="override,assignment"

from __future__ import annotations

import contextlib
import functools
import itertools
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from horo_lite import _native, context
from horo_lite.collectives import arithmetic
from horo_lite.collectives.arrays import Memory
from horo_lite.collectives.calls import Call, Part
from horo_lite.collectives.compression import Compression, Compressor
from horo_lite.collectives.group import Group
from horo_lite.collectives.handle import Handle
from horo_lite.collectives.reductions import AllReduce, Op
from horo_lite.start import groups, session, stall
from horo_lite.torch.distributed.arguments import (
    ArgumentError,
    Options,
    check_alike,
    check_root,
    described,
    listed,
    nested,
    only,
    only_list,
    own_part,
    row_sizes,
    some,
)
from horo_lite.torch.distributed.memory import Staged, as_bytes, memory_of
from horo_lite.torch.distributed.operations import (
    AllGather,
    AllToAll,
    Barrier,
    Broadcast,
    Buffers,
    Collective,
    Gather,
    GatherSparse,
    ReduceScatter,
    Scatter,
)
from horo_lite.torch.distributed.work import AllOf, Receive, Waiter, Work
from horo_lite.torch.uncompiled import all_uncompiled
from horo_lite.transports.interface import Reduction
from horo_lite.transports.shm import SharedMemory

NAME = "horo_lite"

_OPS = {
    "SUM": Op.Sum,
    "AVG": Op.Average,
    "PREMUL_SUM": Op.Sum,
    "MIN": Op.Min,
    "MAX": Op.Max,
    "PRODUCT": Op.Product,
}
# Reductions of truth values, one byte each, are the same as these.
_BOOL_OPS = {
    "SUM": Op.Max,
    "MAX": Op.Max,
    "BOR": Op.Max,
    "MIN": Op.Min,
    "PRODUCT": Op.Min,
    "BAND": Op.Min,
}
_LINEAR = ("SUM", "AVG", "PREMUL_SUM")
_BITWISE = {
    "BAND": torch.bitwise_and,
    "BOR": torch.bitwise_or,
    "BXOR": torch.bitwise_xor,
}
_LOCALLY: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    **dict.fromkeys(_LINEAR, torch.add),
    "MIN": torch.minimum,
    "MAX": torch.maximum,
    "PRODUCT": torch.mul,
    **_BITWISE,
}
_COUNTER = "torch.distributed's collectives"  # in Group.kept

_named = torch._C._profiler._RecordFunctionFast


@all_uncompiled
class ProcessGroup(dist.ProcessGroup):
    """A process group whose collectives are executed by horo_lite's progress thread.

    As torch requires, all ranks issue the collectives of a process group in the same order: they
    are matched by their numbers. Operation, dtypes, sizes and root must be the same on all ranks;
    if they differ, every rank raises MismatchError.

    Args:
        rank: This rank's number in the group.
        size: The number of ranks.
        group: The ranks.
        group_name: Its name in torch, the same on its ranks.
        timeout_s: Seconds that a rank may wait for another.
        owns_world: Whether the world ends with this process group.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        group: Group,
        group_name: str,
        timeout_s: float,
        *,
        owns_world: bool = False,
    ) -> None:
        base: Any = super()
        base.__init__(rank, size)  # not in torch's type stubs
        self.group = group
        self._timeout_s = timeout_s
        self._owns_world = owns_world
        self._is_whole = group is context.world().group
        self._messages = context.messages()
        self._world_ranks = list(group.transport.ranks)
        self._group_name, self._group_desc = group_name, "undefined"
        # Distinguishes this group's messages from those of others, and from horo_lite's own.
        channel = f"torch.distributed {group_name} {self._world_ranks}"
        self._channel = _native.hash64(channel.encode())
        self._is_open = True
        self._of_group = "" if self._is_whole else f" of group {group_name}"
        # Continues counting if another process group has used the same ranks before.
        self._numbers = group.kept.setdefault(_COUNTER, itertools.count(1))
        self._order = threading.RLock()  # a signal handler may issue one in the middle of another
        self._waiter = Waiter()
        self._message_waiter = Waiter()
        self._coalescing: list[Work] | None = None

    # Properties that torch queries.

    def getBackendName(self) -> str:  # noqa: N802
        """Return the backend's name, as passed to `init_process_group`."""
        return NAME

    name = getBackendName
    _get_backend_name = getBackendName

    # Torch stores these two in the backends of a process group, but this one has no backends.

    def getGroupName(self) -> str:  # noqa: N802
        """Return the process group's name in torch."""
        return self._group_name

    def setGroupName(self, name: str) -> None:  # noqa: N802
        """Set the process group's name in torch."""
        self._group_name = name

    def getGroupDesc(self) -> str:  # noqa: N802
        """Return the user's description of the process group."""
        return self._group_desc

    def setGroupDesc(self, desc: str) -> None:  # noqa: N802
        """Set the user's description of the process group."""
        self._group_desc = desc

    group_name = property(getGroupName)
    group_desc = property(getGroupDesc)
    _set_group_name = setGroupName
    _set_group_desc = setGroupDesc

    @property
    def _device_types(self) -> list[torch.device]:
        # None while torch creates the group: from 2.15 on, it would have the backend of a device
        # in C++ record its operations.
        return [torch.device("cpu")] if self in dist.distributed_c10d._world.pg_map else []

    @property
    def supports_splitting(self) -> bool:
        """Return False: torch must create groups with `new_group`."""
        return False

    @property
    def supports_coalescing(self) -> bool:
        """Return False: torch must issue messages one by one."""
        return False

    def _get_backend(self, device: torch.device) -> ProcessGroup:
        if torch.device(device).type != "cpu":
            raise RuntimeError(
                f"horo_lite is a backend for CPU tensors, not for {device}: use the backend nccl "
                "for those"
            )
        return self

    def _set_sequence_number_for_group(self) -> None:
        """Do nothing: collectives are always numbered."""

    def _has_hooks(self) -> bool:
        return False

    def _wait_for_pending_works(self) -> None:
        """Do nothing: there are no hooks to wait for."""

    def __repr__(self) -> str:
        return f"<horo_lite process group: rank {self.rank()} of {self.size()}>"

    # Shutdown and timeouts.

    def shutdown(self) -> None:
        """Complete what all ranks have issued, and leave. Each rank calls it at least once."""
        if not self._is_open:
            return
        self._is_open = False
        try:
            if self._owns_world:
                session.shutdown()
            elif not self._is_whole:
                groups.free_group(self.group)
        finally:
            self._waiter.close()
            self._message_waiter.close()

    def abort(self) -> None:
        """Leave at once: ranks that wait for this one, now or later, raise PeerLostError."""
        self.group.abandon("it called abort()")
        with contextlib.suppress(Exception):  # operations in flight have failed
            self.shutdown()

    def set_timeout(self, timeout: timedelta) -> None:
        """Set how long a rank may wait for another, from now on."""
        self._timeout_s = timeout.total_seconds()
        detector = stall.detector_of(context.world())
        if self._owns_world and detector is not None:
            detector.set_limits(detector.warn_s, self._timeout_s)

    _set_default_timeout = set_timeout

    # Reductions.

    def allreduce(self, tensors: Any, *options: Any, **named: Any) -> Work:
        """Reduce a tensor in place; several of one size and dtype to their common reduction."""
        what, given, o = "all_reduce", listed(tensors), Options.of(options, named)
        first, *others = some(what, given)
        if not others:
            return self._reduced(what, given, o)
        check_alike(what, "list", given, [first] * len(given))
        if first.is_sparse:
            _check_sparse(o.op, first)
        with torch.no_grad():
            total = functools.reduce(_LOCALLY[o.op], others, first.clone())
        return self._reduced(
            what, [total], o, results=given, after=lambda _: _copy_to_all(total, given)
        )

    def allreduce_coalesced(self, tensors: Any, *options: Any, **named: Any) -> Work:
        """Reduce tensors in place, each for itself, in one operation."""
        what = "all_reduce_coalesced"
        given = some(what, tensors)
        for i, x in enumerate(given):
            if x.layout is not given[0].layout:
                raise ArgumentError(f"{what}: invalid tensor layout at index {i}: {x.layout}")
            if x.layout is not torch.strided:
                raise ArgumentError(f"{what}: unsupported layout {x.layout}: use all_reduce")
        return self._reduced("all_reduce", given, Options.of(options, named))

    def average(
        self,
        tensor: Tensor,
        compression: Compressor = Compression.none,
        shared: SharedMemory | None = None,
    ) -> Work:
        """Average a tensor in place over the ranks, with compression in transfer.

        Args:
            tensor: The tensor, of any floating-point dtype.
            compression: The wire format for wider numbers; see horo_lite.Compression for its effect
                on them.
            shared: The memory that contains the tensor, if the ranks share it.
        """
        return self._reduced(
            "all_reduce", [tensor], Options("AVG"), compression=compression, shared=shared
        )

    def reduce(self, tensors: Any, *options: Any, **named: Any) -> Work:
        """Reduce a tensor in place on one rank; those of the others are not changed."""
        o = Options.of(options, named)
        root, given = self._root("reduce", o), only("reduce", "", tensors)
        work = given if self.rank() == root else given.detach().clone()
        return self._reduced("reduce", [work], o, root=root)

    def reduce_scatter(self, outputs: Any, inputs: Any, *options: Any, **named: Any) -> Work:
        """Reduce the ranks' inputs for this rank into the output."""
        o, output = Options.of(options, named), only("reduce_scatter", "output", outputs)
        parts = [[x] for x in only_list("reduce_scatter", "input", inputs)]
        return self._reduce_scattered([output], parts, o, Staged(o.is_async))

    def reduce_scatter_single(
        self, output: Tensor, input: Tensor, *options: Any, **named: Any
    ) -> Work:
        """Write this rank's part of the reduction of the ranks' inputs to the output."""
        return self.reduce_scatter_single_coalesced([output], [input], *options, **named)

    def reduce_scatter_single_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], *options: Any, **named: Any
    ) -> Work:
        """Do `reduce_scatter_single` with each pair, in one operation."""
        o = Options.of(options, named)
        staged = Staged(o.is_async)
        self._check_wholes("reduce_scatter", "input", inputs, "output", outputs)
        parts: list[list[Tensor]] = [[] for _ in range(self.size())]
        for output, each in zip(outputs, inputs, strict=True):
            sizes = [output.numel()] * self.size()
            for r, row in enumerate(staged.rows(each, sizes, is_written=False)):
                parts[r].append(row)
        return self._reduce_scattered(list(outputs), parts, o, staged)

    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def _reduce_scattered(
        self, outputs: list[Tensor], parts: list[list[Tensor]], o: Options, staged: Staged
    ) -> Work:
        """Reduce the ranks' parts for this rank into the outputs; parts[r] is for rank r."""
        what = "reduce_scatter"
        ReduceScatter.access.check(what, parts, [outputs], self.rank(), self.size(), 0)
        is_bool = all(x.dtype == torch.bool for x in outputs)
        ops = _BOOL_OPS if is_bool else _OPS
        # The decision must be the same on all ranks.
        if o.op not in ops or any(x.is_complex() and o.op not in _LINEAR for x in outputs):
            return self._reduce_scattered_by_all_reduce(outputs, parts, o)
        send, (receive,) = staged.transfer(parts, [outputs], self.rank())
        terms = f"{o.op}, factor {o.factor}, of {_of_ranks(send)}"
        if is_bool:
            receive = [x.view(torch.uint8) for x in receive]
            send = [[x.view(torch.uint8) for x in each] for each in send]
        reduction = Reduction.of(ops[o.op].value, "none", o.factor, 1.0, [1.0] * self.size())
        part = Buffers(
            send=[_native.Tensors(each, writable=False) for each in send],
            receive=[result := _native.Tensors(receive)],
        )
        arithmetic.check(result, reduction.op, reduction.prescale)
        call = ReduceScatter(terms=terms, reduction=reduction)
        return self._issue(what, call, part, outputs, o, staged)

    def _reduce_scattered_by_all_reduce(
        self, outputs: list[Tensor], parts: list[list[Tensor]], o: Options
    ) -> Work:
        """Do it with an all-reduce of copies of the parts, which sends everything to all ranks."""
        sizes = [x.numel() for each in parts for x in each]
        flat = [x.detach().reshape(-1) for each in parts for x in each]
        wholes = [torch.cat(flat[i :: len(outputs)]) for i in range(len(outputs))]
        begins = [sum(sizes[i :: len(outputs)][: self.rank()]) for i in range(len(outputs))]

        def finish(_: Any) -> None:
            for output, whole, begin in zip(outputs, wholes, begins, strict=True):
                mine = whole[begin : begin + output.numel()]
                output.detach().copy_(mine.view(output.shape))

        return self._reduced("reduce_scatter", wholes, o, results=outputs, after=finish)

    def _reduced(
        self,
        what: str,
        tensors: Sequence[Tensor],
        o: Options,
        *,
        root: int | None = None,
        compression: Compressor = Compression.none,
        results: Sequence[Tensor] | None = None,
        after: Callable[[Any], None] | None = None,
        shared: SharedMemory | None = None,
    ) -> Work:
        staged = Staged(o.is_async)
        if after is not None:
            staged.do_after(after)
        results = tensors if results is None else results
        if what == "all_reduce" and tensors[0].layout is torch.sparse_coo:
            return self._reduced_sparse(tensors[0], o, results, staged)
        memory = staged.in_place(tensors)
        if root is not None:
            what = f"reduce to rank {self._world_ranks[root]}"
        names = () if what == "all_reduce" else (what,) * len(memory)
        is_bool = all(x.dtype == torch.bool for x in memory)
        ops = _BOOL_OPS if is_bool else _OPS
        if o.op in _BITWISE and o.op not in ops:
            return self._reduced_bitwise(what, o, memory, staged, results)
        if o.op not in ops or (o.op not in _LINEAR and staged.is_complex):
            raise ArgumentError(_meaningless(what, o.op, tensors[0]))
        if is_bool:
            memory = [x.view(torch.uint8) for x in memory]
        part = Part(Memory(memory, fresh=True), shared=shared)
        call = _all_reduce(ops[o.op], compression, o.factor, names)
        call.check(part)
        return self._issue(what, call, part, results, o, staged)

    def _reduced_bitwise(
        self,
        what: str,
        o: Options,
        memory: list[Tensor],
        staged: Staged,
        results: Sequence[Tensor],
    ) -> Work:
        if any(x.dtype.is_floating_point for x in memory):
            raise ArgumentError(_meaningless(what, o.op, memory[0]))
        everyone = [[torch.empty_like(x) for x in memory] for _ in range(self.size())]

        def finish(_: Any) -> None:
            for i, x in enumerate(memory):
                x.copy_(everyone[0][i])
                for other in everyone[1:]:
                    _BITWISE[o.op](x, other[i], out=x)

        staged.do_before(finish)
        return self._gathered_all(f"{what} {o.op}", memory, everyone, results, o, staged)

    def _reduced_sparse(
        self, tensor: Tensor, o: Options, results: Sequence[Tensor], staged: Staged
    ) -> Work:
        _check_sparse(o.op, tensor)
        # Of a complex tensor, torch passes a view as real numbers, which if sparse has memory of
        # its own.
        if tensor._base is not None and tensor._base.is_complex():
            tensor = tensor._base
            results = [tensor]
        local = tensor.detach().coalesce()
        indices, values = local.indices().contiguous(), local.values().contiguous()
        shape, size = values.shape[1:], self.size()

        def finish(everyone: Any) -> None:
            whole = torch.sparse_coo_tensor(
                torch.cat([torch.from_numpy(i) for i, _ in everyone], 1),
                torch.cat(
                    [
                        values[:0],  # the only one if no rank has any values
                        *(
                            torch.from_numpy(v).view(values.dtype).view(-1, *shape)
                            for _, v in everyone
                            if v.size
                        ),
                    ]
                ),
                tensor.shape,
                check_invariants=False,
            ).coalesce()
            if o.op == "AVG":
                whole = whole / size
            _copy_to_all(whole, [tensor])

        staged.do_before(finish)
        terms = f"{o.op} of sparse {tensor.dtype}{list(tensor.shape)}"
        as_bytes = values.view(-1).view(torch.uint8) if values.numel() else torch.empty(0).byte()
        part = Buffers(send=[_native.Tensors([indices, as_bytes], writable=False)])
        call = GatherSparse(terms=terms, n_axes=len(indices))
        return self._issue("all_reduce", call, part, results, o, staged)

    # Moving tensors.

    def broadcast(self, tensors: Any, *options: Any, **named: Any) -> Work:
        """Copy the root's tensor, or one of several that it has, to every rank's, in place."""
        o, given = Options.of(options, named), listed(tensors)
        root = self._root("broadcast", o)
        if not 0 <= o.root_tensor < len(given):
            raise ArgumentError(
                f"broadcast: invalid root tensor: {o.root_tensor} of {len(given)} tensors"
            )
        check_alike("broadcast", "list", given, given[:1] * len(given))
        staged, chosen = Staged(is_async=True), given[o.root_tensor]
        if len(given) > 1:
            copy = chosen = chosen.detach().clone()
            staged.do_after(lambda _: _copy_to_all(copy, given))
        memory = staged.in_place([chosen])
        terms = f"from rank {self._world_ranks[root]}: {described(memory)}"
        part = Part(Memory([as_bytes(x) for x in memory], fresh=True))
        call = Broadcast(terms=terms, root=root)
        return self._issue("broadcast", call, part, given, o, staged)

    def allgather(self, outputs: Any, inputs: Any, *options: Any, **named: Any) -> Work:
        """Copy each rank's tensor into the output for it; they may differ in size.

        With k inputs there are k lists of outputs, each for all inputs of all ranks.
        """
        what, o = "all_gather", Options.of(options, named)
        lists, given = nested(outputs), listed(inputs)
        if not given:
            raise ArgumentError(f"{what}: requires non-empty input tensor list")
        if len(lists) != len(given):
            raise ArgumentError(
                f"{what}: requires input/output tensor lists to have the same length, and not "
                f"{len(given)} and {len(lists)}"
            )
        k, n = len(given), len(given) * self.size()
        for i, each in enumerate(lists):
            if len(each) != n:
                raise ArgumentError(
                    f"{what}: invalid output tensor list at index {i}: its length must be {n}, "
                    f"one tensor for each rank's inputs, and not {len(each)}"
                )
        staged = Staged(o.is_async)
        if k == 1:
            everyone = [[x] for x in lists[0]]
            return self._gathered_all(what, given, everyone, lists[0], o, staged)
        for each in lists:
            check_alike(what, "output", each, given * self.size())
        everyone = [[torch.empty_like(x) for x in given] for _ in range(self.size())]

        def copy(_: Any) -> None:
            for each in lists:
                for x, received in zip(each, itertools.chain.from_iterable(everyone), strict=True):
                    x.detach().copy_(received)

        staged.do_after(copy)
        return self._gathered_all(what, given, everyone, lists, o, staged)

    def all_gather_single(self, output: Tensor, input: Tensor, *options: Any, **named: Any) -> Work:
        """Concatenate all ranks' tensors in the output."""
        return self.all_gather_single_coalesced([output], [input], *options, **named)

    def all_gather_single_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], *options: Any, **named: Any
    ) -> Work:
        """Do `all_gather_single` with each pair, in one operation."""
        o = Options.of(options, named)
        staged = Staged(o.is_async)
        self._check_wholes("all_gather", "output", outputs, "input", inputs)
        everyone: list[list[Tensor]] = [[] for _ in range(self.size())]
        for output, each in zip(outputs, inputs, strict=True):
            sizes = [each.numel()] * self.size()
            for r, row in enumerate(staged.rows(output, sizes, is_written=True)):
                everyone[r].append(row)
        return self._gathered_all("all_gather", list(inputs), everyone, outputs, o, staged)

    def allgather_coalesced(
        self,
        outputs: Sequence[Sequence[Tensor]],
        inputs: Sequence[Tensor],
        *options: Any,
        **named: Any,
    ) -> Work:
        """Copy each rank's tensors into the list of outputs for it."""
        o, everyone = Options.of(options, named), [list(each) for each in outputs]
        # The future's value, as gloo's: only the list of a single rank is not in a list of lists.
        results: Sequence[Any] = everyone[0] if len(everyone) == 1 else everyone
        staged = Staged(o.is_async)
        return self._gathered_all("all_gather", list(inputs), everyone, results, o, staged)

    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def _gathered_all(
        self,
        what: str,
        mine: list[Tensor],
        everyone: list[list[Tensor]],
        results: Sequence[Any],
        o: Options,
        staged: Staged,
    ) -> Work:
        send, receive = self._transfer(what, AllGather, [mine], everyone, o, staged)
        call = AllGather(terms=f"{what} of {_of_ranks(receive)}")
        part = _buffers(send, receive)
        return self._issue(what, call, part, results, o, staged)

    def gather(self, outputs: Any, inputs: Any, *options: Any, **named: Any) -> Work:
        """Copy each rank's tensor into the output for it on one rank."""
        o = Options.of(options, named)
        staged, root = Staged(o.is_async), self._root("gather", o)
        mine = only("gather", "input", inputs)
        lists = only_list("gather", "output", outputs, is_used=self.rank() == root)
        everyone = [[x] for x in lists]
        (sent,), receive = self._transfer("gather", Gather, [[mine]], everyone, o, staged)
        send = [sent if r == root else [] for r in range(self.size())]
        (n,) = (x.nbytes for x in sent)
        call = Gather(
            terms=f"to rank {self._world_ranks[root]}: {described(sent)}",
            n_bytes=[[n * (d == root) for d in range(self.size())] for _ in range(self.size())],
        )
        part = _buffers(send, receive or [[]] * self.size())
        return self._issue("gather", call, part, lists, o, staged)

    def scatter(self, outputs: Any, inputs: Any, *options: Any, **named: Any) -> Work:
        """Copy one rank's input for this rank into the output."""
        o = Options.of(options, named)
        staged, root = Staged(o.is_async), self._root("scatter", o)
        output = only("scatter", "output", outputs)
        lists = only_list("scatter", "input", inputs, is_used=self.rank() == root)
        everyone = [[x] for x in lists]
        send, (received,) = self._transfer("scatter", Scatter, everyone, [[output]], o, staged)
        receive = [received if r == root else [] for r in range(self.size())]
        (n,) = (x.nbytes for x in received)
        call = Scatter(
            terms=f"from rank {self._world_ranks[root]}: {described(received)}",
            n_bytes=[[n * (s == root)] * self.size() for s in range(self.size())],
        )
        part = _buffers(send or [[]] * self.size(), receive)
        return self._issue("scatter", call, part, [output], o, staged)

    def alltoall(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], *options: Any, **named: Any
    ) -> Work:
        """Send a tensor to each rank, and receive one from each; they may differ in size."""
        o = Options.of(options, named)
        return self._all_to_all(
            [[x] for x in inputs], [[x] for x in outputs], list(outputs), o, Staged(o.is_async)
        )

    def all_to_all_single(
        self,
        output: Tensor,
        input: Tensor,
        output_split_sizes: Sequence[int] | None = None,
        input_split_sizes: Sequence[int] | None = None,
        *options: Any,
        **named: Any,
    ) -> Work:
        """Send rows to each rank, and receive rows from each."""
        what, n, o = "all_to_all", self.size(), Options.of(options, named)
        staged = Staged(o.is_async)
        sizes = row_sizes(input, input_split_sizes, n, what, "input")
        send = staged.rows(input, sizes, is_written=False)
        sizes = row_sizes(output, output_split_sizes, n, what, "output")
        receive = staged.rows(output, sizes, is_written=True)
        is_even = not (input_split_sizes or output_split_sizes)
        return self._all_to_all(
            [[x] for x in send], [[x] for x in receive], [output], o, staged, is_even=is_even
        )

    alltoall_base = all_to_all_single

    def _all_to_all(
        self,
        send: list[list[Tensor]],
        receive: list[list[Tensor]],
        results: list[Tensor],
        o: Options,
        staged: Staged,
        *,
        is_even: bool = False,
    ) -> Work:
        what, n = "all_to_all", self.size()
        send, receive = self._transfer(what, AllToAll, send, receive, o, staged)
        (mine,) = own_part(send, self.rank())
        if is_even:  # all ranks know what the others send
            terms, n_bytes = f"of {described([mine])} for each rank", [[mine.nbytes] * n] * n
        else:
            terms, n_bytes = f"of {mine.dtype}, sizes by rank", []
        call = AllToAll(terms=terms, n_bytes=n_bytes)
        return self._issue(what, call, _buffers(send, receive), results, o, staged)

    def _transfer(
        self,
        what: str,
        kind: type[Collective[Any]],
        send: list[list[Tensor]],
        receive: list[list[Tensor]],
        o: Options,
        staged: Staged,
    ) -> tuple[list[list[Tensor]], list[list[Tensor]]]:
        """Check a rank's input and output, and return the memory from and to which to transfer."""
        kind.access.check(what, send, receive, self.rank(), self.size(), o.root)
        return staged.transfer(send, receive, self.rank())

    def _check_wholes(
        self, what: str, large: str, wholes: Sequence[Tensor], small: str, parts: Sequence[Tensor]
    ) -> None:
        """Raise ArgumentError unless each tensor consists of a part for each rank."""
        if len(wholes) != len(parts) or not parts:
            raise ArgumentError(f"{what}: {len(parts)} {small}s, and {len(wholes)} {large}s")
        for whole, part in zip(wholes, parts, strict=True):
            if whole.numel() != part.numel() * self.size():
                raise ArgumentError(
                    f"{what}: the {large} has {whole.numel()} elements, and not the {small}'s "
                    f"{part.numel()} for each of {self.size()} ranks"
                )

    def _root(self, what: str, o: Options) -> int:
        return check_root(what, o.root, self.size())

    # Barriers.

    def barrier(self, *options: Any, **named: Any) -> Work:
        """Wait until all ranks have called this."""
        o = Options.of(options, named)
        return self._issue("barrier", Barrier(), Part(), [], o, Staged(True))

    def monitored_barrier(
        self, timeout: timedelta | None = None, wait_all_ranks: bool = False
    ) -> None:
        """Wait until all ranks have called this; after a timeout, raise StallError.

        Args:
            timeout: The timeout; by default that of the process group.
            wait_all_ranks: Has no effect: StallError always names all ranks that are late.
        """
        self.barrier().wait(timedelta(0) if timeout is None else timeout)

    # Messages.

    def send(self, tensors: Sequence[Tensor], dst: int, tag: int = 0) -> Work:
        """Send a tensor to a rank."""
        tensor = only("send", "", tensors)
        peer = self._world_ranks[check_root("send", dst, self.size(), "destination")]
        ((memory,),), _ = Staged(True).transfer([[tensor]], [], 0)
        message = self._messages.isend(as_bytes(memory), peer, tag, self._channel)
        return self._noted(Work(message, [tensor], self._message_waiter, self._timeout_s))

    def recv(self, tensors: Sequence[Tensor], src: int, tag: int = 0) -> Work:
        """Receive a tensor from a rank."""
        source = self._world_ranks[check_root("recv", src, self.size(), "source")]
        return self._received(tensors, source, tag)

    def recv_anysource(self, tensors: Sequence[Tensor], tag: int = 0) -> Work:
        """Receive a tensor from any rank; see `source_rank` of the operation."""
        return self._received(tensors, None, tag)

    def _received(self, tensors: Sequence[Tensor], peer: int | None, tag: int) -> Work:
        tensor = only("recv", "", tensors)
        staged = Staged(True)
        _, ((memory,),) = staged.transfer([], [[tensor]], 0)
        message = self._messages.irecv(as_bytes(memory), peer, tag, self._channel)
        numbers = {number: place for place, number in enumerate(self._world_ranks)}
        handle = _FromRank(message, numbers)
        return self._noted(
            Receive(handle, [tensor], self._message_waiter, self._timeout_s, staged.finish())
        )

    # Coalescing.

    def _start_coalescing(self, device: torch.device) -> None:
        self._coalescing = []

    def _end_coalescing(self, device: torch.device) -> Work:
        works, self._coalescing = self._coalescing or [], None
        handle = AllOf("coalesced operations", works)
        tensors = [x for work in works for x in work.result()]
        return Work(handle, tensors, self._waiter, self._timeout_s)

    # Issuing of operations.

    def _issue(
        self,
        what: str,
        call: Call[Any],
        part: Part,
        results: Sequence[Any],
        o: Options,
        staged: Staged,
    ) -> Work:
        with _named(f"horo_lite:{what}"), self._order:
            part.label = f"torch.distributed collective {next(self._numbers)}{self._of_group}"
            handle = self.group.submit(call, part)
        finish = staged.finish()
        issued = Work(handle, results, self._waiter, o.timeout_s or self._timeout_s, finish)
        if finish is not None and staged.is_async:
            self._waiter.put(issued)  # the caller may never wait for it
        return self._noted(issued)

    def _noted(self, work: Work) -> Work:
        if self._coalescing is not None:
            self._coalescing.append(work)
        return work


def _buffers(send: Sequence[Sequence[Tensor]], receive: Sequence[Sequence[Tensor]]) -> Buffers:
    return Buffers(
        send=[memory_of(each, writable=False) for each in send],
        receive=[memory_of(each) for each in receive],
    )


def _of_ranks(parts: Sequence[Sequence[Tensor]]) -> str:
    """Return dtypes and sizes of the parts for all ranks; only once if they are the same."""
    shown = [described(each) for each in parts]
    return "; ".join(shown[:1] if len(set(shown)) == 1 else shown)


def _copy_to_all(source: Tensor, tensors: Sequence[Tensor]) -> None:
    with torch.no_grad():  # detach() of a sparse tensor does not share its memory
        for x in tensors:
            x.copy_(source)


def _check_sparse(op_name: str, tensor: Tensor) -> None:
    if op_name not in ("SUM", "AVG"):
        raise ArgumentError(_meaningless("all_reduce", op_name, tensor))


def _meaningless(what: str, op_name: str, tensor: Tensor) -> str:
    return (
        f"{what}: unsupported reduction operation: {op_name} of {tensor.dtype} ({tensor.layout}) "
        "has no meaning"
    )


@lru_cache(maxsize=64)
def _all_reduce(
    op: Op, compression: Compressor, factor: float, names: tuple[str, ...]
) -> AllReduce:
    return AllReduce(None, op, compression, factor, 1.0, names)


class _FromRank(Handle):
    """A receive whose value is the sender's rank in the process group."""

    def __init__(self, message: Handle, numbers: dict[int, int]) -> None:
        super().__init__(message.name, None, lambda: None)
        self._message = message
        self._numbers = numbers

    def done(self) -> bool:
        return self._message.done()

    def wait(self, beside: bool = False) -> int:
        return self._numbers[self._message.wait(beside)]
