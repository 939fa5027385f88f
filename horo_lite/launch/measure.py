"""Measure how long this machine's cores work for an exchange, in a second or two: `model.Costs`."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable

import numpy as np

from horo_lite import _native
from horo_lite.launch.model import Costs, Wire

# More than any cache holds, so that gradients are read from memory, as after backward().
_N_ELEMENTS = 8 << 20
_WINDOW_BYTES = 1 << 20
_REPEATS = 5
_BYTES_BY_TCP = 128 << 20
_PIECE_BYTES = 256 << 10
MESSAGE_US, CROWDING, POLLING = 12.0, 0.85, 0.2
"""For Open MPI over TCP, on an Intel Xeon (docs/scaling.md); measuring them needs two hosts."""


def costs(cores: float | None = None) -> Costs:
    """Measure the costs.

    Args:
        cores: A host's cores for its ranks; by default those of this process.
    """
    wires = {
        "fp32": wire("none", 4.0),
        # With a block's exponent, or without.
        "fp16": wire("fp16", 2 + 4 / 1024),
        "bf16": wire("bf16", 2.0),
    }
    n_cores = cores or len(os.sched_getaffinity(0))
    return Costs(n_cores, tcp_ns(), MESSAGE_US, CROWDING, POLLING, wires)


def wire(name: str, element_bytes: float) -> Wire:
    """Measure the kernels of a wire dtype, window by window, as an exchange runs them."""
    gradient = np.ones(_N_ELEMENTS, np.float32)
    layout = _native.WireLayout(_native.Tensors([gradient]), "sum", name, _WINDOW_BYTES, 1)
    images = np.zeros((3, layout.largest_chunk), np.uint8)
    mine, other, total = (image.ctypes.data for image in images)
    windows = range(layout.n_chunks)

    def encode() -> None:
        for window in windows:
            layout.encode(window, mine)

    def reduce() -> None:
        for window in windows:
            layout.reduce(window, 0, [mine, other], 1.0, [], 1.0, 1.0, total)

    def decode() -> None:
        for window in windows:
            layout.decode(window, total)

    layout.encode(0, other)
    return Wire(element_bytes, _ns(encode), _ns(reduce) / 2, _ns(decode))


def _ns(work: Callable[[], None]) -> float:
    """Return the nanoseconds per element."""
    work()
    times = []
    for _ in range(_REPEATS):
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return min(times) / _N_ELEMENTS * 1e9


def tcp_ns() -> float:
    """Measure the CPU time for sending and receiving a byte, over this host's loopback."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        sender = socket.create_connection(server.getsockname())
        receiver, _ = server.accept()
    piece, room = bytes(_PIECE_BYTES), bytearray(_PIECE_BYTES)

    def send() -> None:
        with sender:
            for _ in range(_BYTES_BY_TCP // _PIECE_BYTES):
                sender.sendall(piece)

    thread = threading.Thread(target=send)
    with receiver:
        began = time.process_time()
        thread.start()
        while receiver.recv_into(room):
            pass
        thread.join()
        return (time.process_time() - began) / _BYTES_BY_TCP * 1e9
