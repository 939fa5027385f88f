"""Classes that SINGA's extension has only if it was built with CUDA and NCCL."""

# ruff: noqa: N802 (the names are SINGA's)
from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

from numpy.typing import NDArray

from horo_lite.adapters.singa import array_of, write
from horo_lite.collectives.compression import Compression, Compressor
from horo_lite.collectives.group import Group
from horo_lite.collectives.reductions import Sum
from horo_lite.context import World, is_initialized, local_rank, world
from horo_lite.launch.tasks import free_port
from horo_lite.ops import ranks_of
from horo_lite.singa.sparse import sparse_sum
from horo_lite.start import launcher
from horo_lite.start.session import init

Raw = Any  # the `.data` of SINGA's tensors
Arrays = list[NDArray[Any]]


class NcclIdHolder:
    """The address, a port on this host, for ranks that a program starts with `multiprocessing`."""

    def __init__(self) -> None:
        self.address = f"127.0.0.1:{free_port()}"


class Communicator:
    """Sums raw tensors over all ranks, in place; replaces singa_wrap.Communicator.

    `Communicator(buffSize)` calls `horo_lite.init()`, unless it has been called. So does
    `Communicator(local_rank, world_size, nccl_id, buffSize)`, for processes of one host that were
    not started by a launcher; this needs PyTorch, and raises ValueError if the world has another
    rank or size. The size of the buffer has no effect. Every rank creates the same communicators in
    the same order.

    When a call returns, the tensors hold their sums: in SINGA, later work is queued behind the sum
    on the same GPU, but on the host there is no such queue. If the ranks' calls differ, every rank
    raises MismatchError. Sums are float32, in rank order, with the same bits on every rank.
    """

    def __init__(self, *arguments: Any, group: Group | None = None) -> None:
        if len(arguments) not in (0, 1, 4):
            raise TypeError(
                "Communicator takes (buffSize) or (local_rank, world_size, nccl_id, buffSize), "
                f"not {len(arguments)} arguments"
            )
        self.group = _world(*arguments[:-1]).group if group is None else ranks_of(group)
        self.world_size = self.totalMPIRanksInGlobal = self.group.size
        self.global_rank = self.MPIRankInGlobal = self.group.rank
        self.local_rank = self.MPIRankInLocal = (
            local_rank() if is_initialized() else self.global_rank
        )
        expected = arguments[:2]
        if len(arguments) == 4 and expected != (self.global_rank, self.world_size):
            raise ValueError(
                f"this is rank {self.global_rank} of {self.world_size}, not {expected[0]} of "
                f"{expected[1]}: leave nccl_id out if a launcher has started the ranks"
            )
        self._number = self.group.new_number("Communicator")
        self._n_calls = 0
        self._buffers: dict[str, Arrays] = {}

    def synch(self, t: Raw) -> None:
        """Replace `t` by its sum over all ranks."""
        self._sum("synch", [t], [array_of(t)], Compression.none)

    def synchHalf(self, t: Raw) -> None:
        """Like `synch`, with scaled float16 on the wire, which causes no overflow or underflow."""
        self._sum("synchHalf", [t], [array_of(t)], Compression.fp16)

    def fusedSynch(self, ts: Iterable[Raw], send: bool = True) -> None:
        """Replace the tensors by their sums over all ranks; they travel together.

        With `send=False`, their current values are stored. The next call with `send=True` sends
        the stored values, in that order, and writes the sums into its own tensors.
        """
        self._fused("fusedSynch", list(ts), send, Compression.none)

    def fusedSynchHalf(self, ts: Iterable[Raw], send: bool = True) -> None:
        """Like `fusedSynch`, with float16 on the wire."""
        self._fused("fusedSynchHalf", list(ts), send, Compression.fp16)

    def sparsification(self, t: Raw, *rest: Any) -> None:
        """Replace `t` by the sum of each rank's large elements.

        The arguments are (t, accumulation, spars, topK) or (t, spars, topK); see `sparse_sum` for
        their meaning. The raw tensor `accumulation` holds what has not been sent so far.
        """
        self._sparse("sparsification", [t], *rest)

    def fusedSparsification(self, ts: Iterable[Raw], *rest: Any) -> None:
        """Like `sparsification`, for several tensors as if they were one."""
        self._sparse("fusedSparsification", list(ts), *rest)

    def wait(self) -> None:
        """Do nothing, since every call above waits; programs call it because GPUs need it."""

    def _fused(self, call: str, ts: list[Raw], send: bool, compression: Compressor) -> None:
        aside = self._buffers.setdefault(call, [])
        if not send:
            aside += map(array_of, ts)
            return
        arrays = aside or [array_of(t) for t in ts]
        shapes, here = [array.shape for array in arrays], [tuple(t.shape()) for t in ts]
        if shapes != here:
            raise ValueError(
                f"{call}: rank {self.global_rank} has stored tensors of shapes {shapes} with "
                f"send=False, but the sums are to go to tensors of shapes {here}"
            )
        del self._buffers[call]
        self._sum(call, ts, arrays, compression)

    def _sum(self, call: str, ts: list[Raw], arrays: Arrays, compression: Compressor) -> None:
        self.group.exchange(
            arrays,
            names=[f"tensor {i}" for i in range(len(ts))],
            label=self.label(call),
            op=Sum,
            compression=compression,
        )
        for t, array in zip(ts, arrays, strict=True):
            write(t, array)

    def _sparse(self, call: str, ts: list[Raw], *rest: Any) -> None:
        *accumulation, spars, top_k = rest
        arrays, left_over = [array_of(t) for t in ts], [array_of(t) for t in accumulation]
        sparse_sum(
            self.group,
            arrays,
            left_over,
            names=[f"tensor {i}:" for i in range(len(ts))],
            spars=spars,
            top_k=top_k,
            label=self.label(call),
        )
        for t, array in zip([*ts, *accumulation], [*arrays, *left_over], strict=True):
            write(t, array)

    def label(self, call: str) -> str:
        """Return a label for this call, numbered in the same way on every rank."""
        self._n_calls += 1
        return f"call {self._n_calls} of SINGA's Communicator {self._number}, {call}"


def _world(rank: int = 0, size: int = 1, holder: Any = None) -> World:
    if is_initialized():
        return world()
    if holder is None or launcher.detect(os.environ) is not None:
        return init()
    return init(rank=rank, size=size, address=holder.address)


def install() -> None:
    """Make SINGA's own `opt.DistOpt` work in this process, on CPUs, without changes to a program.

    Call it before the first DistOpt is created. It puts `Communicator` and `NcclIdHolder` into
    `singa.singa_wrap`, in place of those of a build with NCCL.
    """
    from singa import singa_wrap

    singa_wrap.Communicator = Communicator
    singa_wrap.NcclIdHolder = NcclIdHolder
    if not hasattr(singa_wrap, "VecTensor"):  # missing in the known builds without NCCL
        singa_wrap.VecTensor = list
