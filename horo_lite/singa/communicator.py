"""What SINGA's extension has only where it was built with CUDA and NCCL."""

# ruff: noqa: N802 (the names are SINGA's)
from __future__ import annotations

import os
import socket
from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from horo_lite.adapters.singa import array_of, write
from horo_lite.collectives.compression import Compression, Compressor
from horo_lite.collectives.group import Group
from horo_lite.collectives.reductions import Sum
from horo_lite.context import World, is_initialized, local_rank, world
from horo_lite.ops import ranks_of
from horo_lite.singa.sparse import sparse_sum
from horo_lite.start import launcher
from horo_lite.start.session import init

Raw = Any  # what SINGA's tensors have in `.data`
Arrays = list[NDArray[Any]]


class NcclIdHolder:
    """Where the ranks meet that a program starts with `multiprocessing`: a port of this host."""

    def __init__(self) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.address = f"127.0.0.1:{free.getsockname()[1]}"


class Communicator:
    """Sums of raw tensors over all ranks, in place; a stand-in for singa_wrap.Communicator.

    `Communicator(buffSize)` calls `horo_lite.init()` where nobody has. So does
    `Communicator(local_rank, world_size, nccl_id, buffSize)`, for processes of one host that no
    launcher has started, which needs PyTorch; ValueError where the world is another. The size of
    the buffer means nothing here. Made by every rank, as often and in the same order.

    When a call returns, the tensors hold their sums: SINGA queues what follows on the same GPU
    behind the sum, and on the host there is no such queue. MismatchError, on every rank, where the
    ranks call different things. Sums are float32, in rank order, the same bits on every rank.
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
                f"this is rank {self.global_rank} of {self.world_size}, and not {expected[0]} of "
                f"{expected[1]}: leave nccl_id out where a launcher has started the ranks"
            )
        self._number = self.group.new_number("Communicator")
        self._n_calls = 0
        self._buffers: dict[str, Arrays] = {}

    def synch(self, t: Raw) -> None:
        """`t` holds the sum over all ranks."""
        self._sum("synch", [t], [array_of(t)], Compression.none)

    def synchHalf(self, t: Raw) -> None:
        """The same, with float16 on the wire; scaled, so that nothing overflows or vanishes."""
        self._sum("synchHalf", [t], [array_of(t)], Compression.fp16)

    def fusedSynch(self, ts: Iterable[Raw], send: bool = True) -> None:
        """The tensors hold their sums; they travel together.

        With `send=False` what they hold now is set aside; the next call that sends takes what was
        set aside, in that order, and names the tensors that are to hold the sums.
        """
        self._fused("fusedSynch", list(ts), send, Compression.none)

    def fusedSynchHalf(self, ts: Iterable[Raw], send: bool = True) -> None:
        """The same, with float16 on the wire."""
        self._fused("fusedSynchHalf", list(ts), send, Compression.fp16)

    def sparsification(self, t: Raw, *rest: Any) -> None:
        """`t` holds the sum of what is large on each rank.

        The arguments are (t, accumulation, spars, topK) or (t, spars, topK); see `sparse_sum` for
        what they mean. The raw tensor `accumulation` holds what has not travelled so far.
        """
        self._sparse("sparsification", [t], *rest)

    def fusedSparsification(self, ts: Iterable[Raw], *rest: Any) -> None:
        """The same for several tensors, as if they were one."""
        self._sparse("fusedSparsification", list(ts), *rest)

    def wait(self) -> None:
        """Nothing: every call above has waited. Programs call it as they do on GPUs."""

    def _fused(self, call: str, ts: list[Raw], send: bool, compression: Compressor) -> None:
        aside = self._buffers.setdefault(call, [])
        if not send:
            aside += map(array_of, ts)
            return
        arrays = self._buffers.pop(call) or [array_of(t) for t in ts]
        shapes, here = [array.shape for array in arrays], [tuple(t.shape()) for t in ts]
        if shapes != here:
            raise ValueError(
                f"{call}: with send=False tensors of shapes {shapes} were set aside on rank "
                f"{self.global_rank}, and the sums are to go to tensors of shapes {here}"
            )
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
        arrays = [array_of(t) for t in ts]
        left_over = array_of(accumulation[0]).reshape(-1) if accumulation else None
        total = sparse_sum(
            self.group,
            np.concatenate([array.reshape(-1) for array in arrays]),
            left_over,
            spars=spars,
            top_k=top_k,
            label=self.label(call),
            what="\n".join(f"tensor {i}: {list(array.shape)}" for i, array in enumerate(arrays)),
        )
        ends = np.cumsum([array.size for array in arrays])
        for t, array, part in zip(ts, arrays, np.split(total, ends[:-1]), strict=True):
            write(t, part.reshape(array.shape))
        if accumulation and left_over is not None:
            write(accumulation[0], left_over)

    def label(self, call: str) -> str:
        """Which call this is, counted on every rank."""
        self._n_calls += 1
        return f"call {self._n_calls} of SINGA's Communicator {self._number}, {call}"


def _world(rank: int = 0, size: int = 1, holder: Any = None) -> World:
    if is_initialized():
        return world()
    if holder is None or launcher.detect(os.environ) is not None:
        return init()
    return init(rank=rank, size=size, address=holder.address)


def install() -> None:
    """SINGA's own `opt.DistOpt` works in this process, on CPUs: its program can stay as it is.

    Called before the first DistOpt is made. Puts `Communicator` and `NcclIdHolder` into
    `singa.singa_wrap`, in place of those that a build with NCCL has.
    """
    from singa import singa_wrap

    singa_wrap.Communicator = Communicator
    singa_wrap.NcclIdHolder = NcclIdHolder
    if not hasattr(singa_wrap, "VecTensor"):  # builds without NCCL that were seen had none
        singa_wrap.VecTensor = list
