"""torch.distributed's process group, implemented with a group of horo_lite."""

# Torch's stubs list several signatures for each method. Its own functions use only that with opts.
# mypy: disable-error-code="override,assignment"

from __future__ import annotations

import contextlib
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
from horo_lite.collectives.arrays import HostArrays
from horo_lite.collectives.calls import Call, Part
from horo_lite.collectives.compression import Compression, Compressor
from horo_lite.collectives.group import Group
from horo_lite.collectives.handle import Handle
from horo_lite.collectives.reductions import AllReduce, Op
from horo_lite.start import groups, session, stall
from horo_lite.torch.distributed.memory import (
    Staged,
    as_bytes,
    check_alike,
    check_number,
    cut,
    described,
    is_apart,
    is_async,
    joined,
    listed,
    memory_of,
    nested,
    op_of,
    root_of,
    timeout_of,
)
from horo_lite.torch.distributed.operations import (
    AllGather,
    AllToAll,
    Barrier,
    Broadcast,
    Buffers,
    Gather,
    GatherSparse,
    ReduceScatter,
    Scatter,
)
from horo_lite.torch.distributed.work import AllOf, Waiter, Work
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
_COUNTER = "torch.distributed's collectives"  # in Group.kept

_named = torch._C._profiler._RecordFunctionFast


@all_uncompiled
class ProcessGroup(dist.ProcessGroup):
    """A process group whose collectives are executed by horo_lite's engine.

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
        self._order = threading.Lock()
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
        return [torch.device("cpu")]

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
        for transport in self.group.transports():
            transport.abandon("it called abort()")
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

    def allreduce(self, tensors: Any, opts: Any = None) -> Work:
        """Reduce tensors in place."""
        return self._reduced("all_reduce", listed(tensors), op_of(opts), timeout_of(opts))

    def allreduce_coalesced(self, tensors: Sequence[Tensor], opts: Any = None) -> Work:
        """Reduce tensors in place, together."""
        return self.allreduce(list(tensors), opts)

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
            "all_reduce", [tensor], ("AVG", 1.0), 0.0, compression=compression, shared=shared
        )

    def reduce(self, tensors: Any, opts: Any = None) -> Work:
        """Reduce tensors in place on one rank; those of the others are not changed."""
        root = root_of(opts)
        given = listed(tensors)
        work = given if self.rank() == root else [x.detach().clone() for x in given]
        return self._reduced("reduce", work, op_of(opts), timeout_of(opts), root=root)

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> Work:
        """Reduce the ranks' inputs for this rank into the output."""
        (output,), (parts,) = listed(outputs), nested(inputs)
        check_number(parts, self.size(), "reduce_scatter: input tensors")
        return self._reduce_scattered([output], [parts], opts)

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Work:
        """Write this rank's part of the reduction of the ranks' inputs to the output."""
        return self.reduce_scatter_single_coalesced([output], [input], opts)

    def reduce_scatter_single_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None
    ) -> Work:
        """Do `reduce_scatter_single` with each pair, in one operation."""
        parts = []
        for output, each in zip(outputs, inputs, strict=True):
            if each.numel() != output.numel() * self.size():
                raise ValueError(
                    f"reduce_scatter: the input has {each.numel()} elements, not the output's "
                    f"{output.numel()} for each of {self.size()} ranks"
                )
            whole, n = each.detach().contiguous().view(-1), output.numel()
            parts.append([whole.narrow(0, r * n, n) for r in range(self.size())])
        return self._reduce_scattered(list(outputs), parts, opts)

    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def _reduce_scattered(
        self, outputs: Sequence[Tensor], parts: Sequence[Sequence[Tensor]], opts: Any
    ) -> Work:
        """Reduce the ranks' parts for this rank into each output.

        parts[i] contains this rank's parts of the i-th output for all ranks.
        """
        for output, each in zip(outputs, parts, strict=True):
            if output.numel() != each[self.rank()].numel():
                raise ValueError(
                    f"reduce_scatter: the output is {described([output])}, but this rank's input "
                    f"for itself is {described([each[self.rank()]])}"
                )
        op_name, factor = op_of(opts)
        mine = [each[self.rank()] for each in parts]
        ops = _BOOL_OPS if all(x.dtype == torch.bool for x in mine) else _OPS
        # The decision must be the same on all ranks.
        if (
            self.group.transport.host.reduce_scatter is None
            or op_name not in ops
            or any(x.is_complex() and op_name not in _LINEAR for x in mine)
        ):
            return self._reduce_scattered_by_all_reduce(outputs, parts, opts)
        staged = Staged(is_async(opts))
        send = [[staged.input(each[r]) for each in parts] for r in range(self.size())]
        receive = []
        for i, output in enumerate(outputs):
            own = send[self.rank()][i]
            if output.dtype == mine[i].dtype and is_apart(output, parts, mine[i]):
                receive.append(staged.output(output))
            else:  # it may overlap memory that others still have to read
                receive.append(staged.output_of(output, torch.empty_like(own)))
        each_of = [described(each) for each in send]
        shown = each_of[:1] if len(set(each_of)) == 1 else each_of
        if ops is _BOOL_OPS:
            receive = [x.view(torch.uint8) for x in receive]
            send = [[x.view(torch.uint8) for x in each] for each in send]
        reduction = Reduction.of(ops[op_name].value, "none", factor, 1.0, [1.0] * self.size())
        call = ReduceScatter(
            contract=f"{op_name}, factor {factor}, of {'; '.join(shown)}",
            reduction=reduction,
        )
        part = Buffers(
            send=[_native.Tensors(each, writable=False) for each in send],
            receive=[result := _native.Tensors(receive)],
        )
        _native.check_reducible(result, reduction.op)
        return self._issue("reduce_scatter", call, part, outputs, timeout_of(opts), staged)

    def _reduce_scattered_by_all_reduce(
        self, outputs: Sequence[Tensor], parts: Sequence[Sequence[Tensor]], opts: Any
    ) -> Work:
        """Do it with an all-reduce of copies of the parts, which sends everything to all ranks."""
        wholes = [joined(each) for each in parts]

        def finish(_: Any) -> None:
            for output, (_, views) in zip(outputs, wholes, strict=True):
                output.detach().copy_(views[self.rank()].view_as(output))

        return self._reduced(
            "reduce_scatter",
            [whole for whole, _ in wholes],
            op_of(opts),
            timeout_of(opts),
            results=outputs,
            after=finish,
            is_async=is_async(opts),
        )

    def _reduced(
        self,
        what: str,
        tensors: Sequence[Tensor],
        op: tuple[str, float],
        timeout_s: float,
        *,
        root: int | None = None,
        compression: Compressor = Compression.none,
        results: Sequence[Tensor] | None = None,
        after: Callable[[Any], None] | None = None,
        is_async: bool = True,
        shared: SharedMemory | None = None,
    ) -> Work:
        op_name, factor = op
        if tensors[0].layout is torch.sparse_coo:
            return self._reduced_sparse(tensors, op_name, timeout_s)
        staged = Staged(is_async)
        memory = [staged.in_place(x) for x in tensors]
        names = () if what == "all_reduce" else (what,) * len(memory)
        if root is not None:
            names = (f"reduce to rank {self._world_ranks[root]}",) * len(memory)
        if after is not None:
            staged.do_after(after)
        results = tensors if results is None else results
        is_bool = all(x.dtype == torch.bool for x in memory)
        ops = _BOOL_OPS if is_bool else _OPS
        if op_name in _BITWISE and op_name not in ops:
            return self._reduced_bitwise(op_name, memory, staged, results, timeout_s)
        if op_name not in ops or (op_name not in _LINEAR and staged.is_complex):
            raise ValueError(f"{what}: {op_name} of {tensors[0].dtype} has no meaning")
        if is_bool:
            memory = [x.view(torch.uint8) for x in memory]
        part = Part(HostArrays(memory, fresh=True), shared=shared)
        call = _all_reduce(ops[op_name], compression, factor, names)
        call.check(part)
        return self._issue(what, call, part, results, timeout_s, staged)

    def _reduced_bitwise(
        self,
        op_name: str,
        memory: Sequence[Tensor],
        staged: Staged,
        results: Sequence[Tensor],
        timeout_s: float,
    ) -> Work:
        if any(x.dtype.is_floating_point for x in memory):
            raise ValueError(f"all_reduce: {op_name} of floating-point numbers has no meaning")
        everyone = [[torch.empty_like(x) for x in memory] for _ in range(self.size())]

        def finish(_: Any) -> None:
            for i, x in enumerate(memory):
                x.copy_(everyone[0][i])
                for other in everyone[1:]:
                    _BITWISE[op_name](x, other[i], out=x)

        staged.do_before(finish)
        return self._gathered_all(
            f"all_reduce {op_name}", memory, everyone, results, timeout_s, staged
        )

    def _reduced_sparse(self, tensors: Sequence[Tensor], op_name: str, timeout_s: float) -> Work:
        (tensor,) = tensors
        if op_name not in ("SUM", "AVG"):
            raise ValueError(f"all_reduce: sparse tensors support only SUM and AVG, not {op_name}")
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
            if op_name == "AVG":
                whole = whole / size
            with torch.no_grad():  # detach() of a sparse tensor does not share its memory
                tensor.copy_(whole)

        staged = Staged(True)
        staged.do_after(finish)
        contract = f"{op_name} of sparse {tensor.dtype}{list(tensor.shape)}"
        as_bytes = values.view(-1).view(torch.uint8) if values.numel() else torch.empty(0).byte()
        part = Buffers(send=[_native.Tensors([indices, as_bytes], writable=False)])
        call = GatherSparse(contract=contract, n_axes=len(indices))
        return self._issue("all_reduce", call, part, [tensor], timeout_s, staged)

    # Moving tensors.

    def broadcast(self, tensors: Any, opts: Any = None) -> Work:
        """Copy the root's tensors to every rank, in place."""
        root = root_of(opts)
        staged, given = Staged(True), listed(tensors)
        memory = [staged.in_place(x) for x in given]
        contract = f"from rank {self._world_ranks[root]}: {described(memory)}"
        part = Part(HostArrays([as_bytes(x) for x in memory], fresh=True))
        call = Broadcast(contract=contract, root=root)
        return self._issue("broadcast", call, part, given, timeout_of(opts), staged)

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> Work:
        """Copy each rank's tensor into the output for it; they may differ in size."""
        (lists,), (given,) = nested(outputs), listed(inputs)
        check_number(lists, self.size(), "all_gather: output tensors")
        staged = Staged(is_async(opts))
        everyone = [[staged.output(x)] for x in lists]
        return self._gathered_all(
            "all_gather", [staged.input(given)], everyone, lists, timeout_of(opts), staged
        )

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Work:
        """Concatenate all ranks' tensors in the output."""
        return self.all_gather_single_coalesced([output], [input], opts)

    def all_gather_single_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None
    ) -> Work:
        """Do `all_gather_single` with each pair, in one operation."""
        staged = Staged(is_async(opts))
        everyone: list[list[Tensor]] = [[] for _ in range(self.size())]
        for output, each in zip(outputs, inputs, strict=True):
            if output.numel() != each.numel() * self.size():
                raise ValueError(
                    f"all_gather: the output has {output.numel()} elements, not the input's "
                    f"{each.numel()} for each of {self.size()} ranks"
                )
            whole = staged.output(output).view(self.size(), -1)
            for r in range(self.size()):
                everyone[r].append(whole[r])
        mine = [staged.input(each) for each in inputs]
        return self._gathered_all("all_gather", mine, everyone, outputs, timeout_of(opts), staged)

    def allgather_coalesced(
        self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any = None
    ) -> Work:
        """Copy each rank's tensors into the list of outputs for it."""
        check_number(outputs, self.size(), "all_gather: lists of output tensors")
        staged = Staged(is_async(opts))
        everyone = [[staged.output(x) for x in each] for each in outputs]
        mine = [staged.input(x) for x in inputs]
        flat = [x for each in outputs for x in each]
        return self._gathered_all("all_gather", mine, everyone, flat, timeout_of(opts), staged)

    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def _gathered_all(
        self,
        what: str,
        mine: Sequence[Tensor],
        everyone: Sequence[Sequence[Tensor]],
        results: Sequence[Tensor],
        timeout_s: float,
        staged: Staged,
    ) -> Work:
        expected = everyone[self.rank()]
        for given, room in zip(mine, expected, strict=True):
            if (given.dtype, given.numel()) != (room.dtype, room.numel()):
                raise ValueError(
                    f"{what}: this rank's tensor is {described([given])}, but the output for it is "
                    f"{described([room])}"
                )
        same = len({tuple(x.numel() for x in each) for each in everyone}) == 1
        shown = everyone[:1] if same else everyone
        contract = f"{what} of {'; '.join(map(described, shown))}"
        part = Buffers(
            send=[memory_of(mine, writable=False)],
            receive=[memory_of(each) for each in everyone],
        )
        call = AllGather(contract=contract)
        return self._issue(what, call, part, results, timeout_s, staged)

    def gather(self, outputs: Any, inputs: Any, opts: Any = None) -> Work:
        """Copy each rank's tensor into the output for it on one rank."""
        root = root_of(opts)
        (given,) = listed(inputs)
        staged, size, is_root = Staged(is_async(opts)), self.size(), self.rank() == root
        mine = staged.input(given)
        lists = nested(outputs)[0] if is_root else []
        if is_root:
            check_number(lists, size, "gather: output tensors")
            check_alike(lists, mine, "gather: the output")
        nothing = memory_of([])
        send = [memory_of([mine], writable=False) if r == root else nothing for r in range(size)]
        receive = [memory_of([staged.output(x)]) for x in lists] or [nothing] * size
        n_bytes = [[mine.nbytes * (d == root) for d in range(size)] for _ in range(size)]
        contract = f"to rank {self._world_ranks[root]}: {described([mine])}"
        call = Gather(contract=contract, n_bytes=n_bytes)
        part = Buffers(send=send, receive=receive)
        return self._issue("gather", call, part, lists, timeout_of(opts), staged)

    def scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> Work:
        """Copy one rank's input for this rank into the output."""
        root = root_of(opts)
        (output,) = listed(outputs)
        staged, size, is_root = Staged(is_async(opts)), self.size(), self.rank() == root
        mine = staged.output(output)
        lists = staged.inputs(nested(inputs)[0], [output]) if is_root else []
        if is_root:
            check_number(lists, size, "scatter: input tensors")
            check_alike(lists, mine, "scatter: the input")
        nothing = memory_of([])
        send = [memory_of([x], writable=False) for x in lists] or [nothing] * size
        receive = [memory_of([mine]) if r == root else nothing for r in range(size)]
        n_bytes = [[mine.nbytes * (s == root)] * size for s in range(size)]
        contract = f"from rank {self._world_ranks[root]}: {described([mine])}"
        call = Scatter(contract=contract, n_bytes=n_bytes)
        part = Buffers(send=send, receive=receive)
        return self._issue("scatter", call, part, [output], timeout_of(opts), staged)

    def alltoall(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None
    ) -> Work:
        """Send a tensor to each rank, and receive one from each; they may differ in size."""
        check_number(outputs, self.size(), "all_to_all: output tensors")
        check_number(inputs, self.size(), "all_to_all: input tensors")
        staged = Staged(is_async(opts))
        send = [memory_of([x], writable=False) for x in staged.inputs(inputs, outputs)]
        receive = [memory_of([staged.output(x)]) for x in outputs]
        call = AllToAll(contract=f"of {inputs[0].dtype}, sizes by rank")
        part = Buffers(send=send, receive=receive)
        return self._issue("all_to_all", call, part, outputs, timeout_of(opts), staged)

    def all_to_all_single(
        self,
        output: Tensor,
        input: Tensor,
        output_split_sizes: Sequence[int] | None = None,
        input_split_sizes: Sequence[int] | None = None,
        opts: Any = None,
    ) -> Work:
        """Send rows to each rank, and receive rows from each."""
        staged, size = Staged(is_async(opts)), self.size()
        (source,), target = staged.inputs([input], [output]), staged.output(output)
        send = cut(source, input_split_sizes, size, "input")
        receive = cut(target, output_split_sizes, size, "output")
        if input_split_sizes or output_split_sizes:
            call = AllToAll(contract=f"of {input.dtype}, sizes by rank")
        else:
            if source.nbytes != target.nbytes:
                raise ValueError(
                    f"all_to_all: the output is {described([target])} and the input "
                    f"{described([source])}: make them the same size, or pass split sizes"
                )
            n_bytes = [[source.nbytes // size] * size] * size
            call = AllToAll(contract=f"of {described([source])}", n_bytes=n_bytes)
        part = Buffers(
            send=[memory_of([x], writable=False) for x in send],
            receive=[memory_of([x]) for x in receive],
        )
        return self._issue("all_to_all", call, part, [output], timeout_of(opts), staged)

    alltoall_base = all_to_all_single

    # Barriers.

    def barrier(self, opts: Any = None) -> Work:
        """Wait until all ranks have called this."""
        return self._issue("barrier", Barrier(), Part(), [], timeout_of(opts), Staged(True))

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
        (tensor,) = tensors
        peer = self._world_ranks[dst]
        message = self._messages.isend(
            as_bytes(Staged(True).input(tensor)), peer, tag, self._channel
        )
        return self._noted(Work(message, [tensor], self._message_waiter, self._timeout_s))

    def recv(self, tensors: Sequence[Tensor], src: int, tag: int = 0) -> Work:
        """Receive a tensor from a rank."""
        return self._received(tensors, self._world_ranks[src], tag)

    def recv_anysource(self, tensors: Sequence[Tensor], tag: int = 0) -> Work:
        """Receive a tensor from any rank; see `source_rank` of the operation."""
        return self._received(tensors, None, tag)

    def _received(self, tensors: Sequence[Tensor], peer: int | None, tag: int) -> Work:
        (tensor,) = tensors
        staged = Staged(True)
        memory = staged.output(tensor)
        message = self._messages.irecv(as_bytes(memory), peer, tag, self._channel)
        numbers = {number: place for place, number in enumerate(self._world_ranks)}
        handle = _FromRank(message, numbers)
        return self._noted(
            Work(handle, [tensor], self._message_waiter, self._timeout_s, staged.finish())
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
        results: Sequence[Tensor],
        timeout_s: float,
        staged: Staged,
    ) -> Work:
        with _named(f"horo_lite:{what}"), self._order:
            part.label = f"torch.distributed collective {next(self._numbers)}{self._of_group}"
            handle = self.group.submit(call, part)
        finish = staged.finish()
        issued = Work(handle, results, self._waiter, timeout_s or self._timeout_s, finish)
        if finish is not None and staged.is_async:
            self._waiter.put(issued)  # the caller may never wait for it
        return self._noted(issued)

    def _noted(self, work: Work) -> Work:
        if self._coalescing is not None:
            self._coalescing.append(work)
        return work


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
