"""The kernels on a GPU against their host versions, bit for bit: see `make gpu-check`.

As a plug-in of pytest it makes tests/csrc/test_gpu_kernels.py run everything on the GPU as well: in
memory that both can access, every call is made on both, and every byte compared, including those
around the tensors. As a program, `kernels.py`, it makes a few small calls with memory that ends
where the tensors end, to run under compute-sanitizer.
"""

from __future__ import annotations

import ctypes
import functools
import os
import sys
import weakref
from collections import Counter
from typing import Any

import numpy as np
import test_gpu_kernels as cases

from horo_lite import _native, _testing

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
SANITIZED = [1, 9, 257, 1025, 4097]


@functools.cache
def driver() -> ctypes.CDLL:
    """Return the CUDA driver, with the runtime's context made current."""
    cuda = ctypes.CDLL("libcuda.so.1")
    context = ctypes.c_void_p()
    must(cuda.cuInit(0), "cuInit")
    must(cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0), "cuDevicePrimaryCtxRetain")
    must(cuda.cuCtxSetCurrent(context), "cuCtxSetCurrent")
    return cuda


def must(result: int, what: str) -> None:
    if result:
        raise RuntimeError(f"{what} failed with {result}")


@functools.cache
def queue() -> _native.DeviceQueue:
    return _native.DeviceQueue(0)


def shared_bytes(n_bytes: int) -> Bytes:
    """Return zeros that CPU and GPU can read and write, without memory beyond their end."""
    if os.environ.get("HORO_LITE_TEST_GPUS"):
        return np.zeros(n_bytes, np.uint8)
    address, global_ = ctypes.c_uint64(), 1
    size = ctypes.c_size_t(max(n_bytes, 1))
    must(driver().cuMemAllocManaged(ctypes.byref(address), size, global_), "cuMemAllocManaged")
    memory = np.frombuffer((ctypes.c_uint8 * n_bytes).from_address(address.value), np.uint8)
    memory[:] = 0
    # NumPy keeps the object that it was created from; when this is freed, nothing refers to the
    # memory.
    weakref.finalize(memory.base, driver().cuMemFree_v2, address)
    return memory


class Buffer(cases.Buffer):
    def __init__(self, n_bytes: int) -> None:
        self._memory = shared_bytes(n_bytes + cases.WIRE_UNIT)
        self._memory[:] = cases.GUARD
        skip = -self._memory.ctypes.data % cases.WIRE_UNIT
        self.bytes = self._memory[skip : skip + n_bytes]
        self.address = self.bytes.ctypes.data


def run(step: str, tensors: Any, **options: Any) -> None:
    """Run the kernel on the CPU and then, from the same state, on the GPU: compare all bytes."""
    arrays = {name: x for name, x in options.items() if isinstance(x, np.ndarray)}
    numbers = {name: x for name, x in options.items() if name not in arrays}
    shared = {name: shared_bytes(x.nbytes) for name, x in arrays.items()}
    for name, x in arrays.items():
        shared[name][:] = x.view(np.uint8).ravel()
    places = [tensors.memory.bytes, tensors.wire.bytes, *shared.values()]
    addresses = {name: x.ctypes.data for name, x in shared.items()}
    before = [place.copy() for place in places]
    call = (step, cases.name_of(tensors.dtype), cases.name_of(tensors.wires[0].dtype))
    options = {"wire": tensors.wire.address, **numbers, **addresses}
    _testing.run_kernel(None, *call, tensors.pieces, **options)
    after = [place.copy() for place in places]
    for place, image in zip(places, before, strict=True):
        place[:] = image
    _testing.run_kernel(queue(), *call, tensors.pieces, **options)
    queue().synchronize()
    for what, place, image in zip(["tensors", "wire", *shared], places, after, strict=True):
        wrong = np.flatnonzero(place != image)
        assert not wrong.size, (
            f"{step}: {wrong.size} bytes of the {what} differ from the host's; the first is number "
            f"{wrong[0]}: {place[wrong[0]]:#x} instead of {image[wrong[0]]:#x}"
        )
    for name, x in arrays.items():
        x.view(np.uint8).ravel()[:] = shared[name]


# --- the plug-in ----------------------------------------------------------------------------------

passed: Counter[str] = Counter()
failed: Counter[str] = Counter()


def pytest_collection_modifyitems(items: list[Any]) -> None:
    for module in {item.module for item in items}:
        module.Buffer, module.run = Buffer, run


def pytest_runtest_logreport(report: Any) -> None:
    name = report.nodeid.partition("::")[2].partition("[")[0].removeprefix("test_")
    if report.failed:
        failed[name] += 1
        last = str(report.longrepr).strip().splitlines()[-1] if report.longrepr else ""
        print(f"\nFAILED kernels, {report.nodeid.partition('::')[2]}: {last}", flush=True)
    elif report.when == "call":
        passed[name] += 1


def pytest_sessionfinish() -> None:
    for name, n in passed.items():
        if name not in failed:
            print(f"\npassed {name.replace('_', ' ')} ({n} cases)", flush=True)


# --- the program ----------------------------------------------------------------------------------


def small_calls() -> int:
    """Call every kernel a few times; return the number of calls."""
    n_calls = 0
    integers = [(name, name) for name in cases.INTEGERS]
    for grad, wire in [*cases.PAIRS, *integers]:
        kind = cases.dtype_of(grad)
        item, wire_item = kind.itemsize, cases.dtype_of(wire).itemsize
        n = len(SANITIZED)
        units = [-(-size * wire_item // cases.WIRE_UNIT) for size in SANITIZED]
        offsets = np.concatenate([[0], np.cumsum(units)])
        memory = [shared_bytes((size + 1) * item) for size in SANITIZED]
        wires = shared_bytes(int(offsets[-1]) * cases.WIRE_UNIT)
        exponents, stats = shared_bytes(4 * n), shared_bytes(8 * n)
        exponents[:] = 0x80
        pieces = []
        for i, size in enumerate(SANITIZED):
            memory[i][item:] = cases.hard(size, kind).view(np.uint8)
            pieces.append((memory[i].ctypes.data + item, size, int(offsets[i]), i))
        scales = {"exponents": exponents.ctypes.data, "headroom": 1}
        more = scales if grad in cases.FLOATS else {}
        factors = {"scale": 0.5, "divisor": 3.0} if grad in cases.FLOATS else {}
        calls: list[tuple[str, dict[str, Any]]] = [
            ("measure", scales),
            ("pack", {**more, "stats": stats.ctypes.data}),
            ("unpack", {**more, **factors}),
            ("scale", factors),
        ]
        for step, options in calls:
            if step == "measure" and grad not in cases.FLOATS:
                continue
            where = {"wire": wires.ctypes.data, **options}
            _testing.run_kernel(queue(), step, grad, wire, pieces, **where)
            queue().synchronize()
            n_calls += 1
        # A thousand small pieces, in the table for many.
        many = shared_bytes(1000 * 4 * item)
        wires = shared_bytes(1000 * cases.WIRE_UNIT)
        pieces = [(many.ctypes.data + 4 * item * i, 3, i, 0) for i in range(1000)]
        for step in ("pack", "unpack"):
            _testing.run_kernel(queue(), step, grad, wire, pieces, wire=wires.ctypes.data)
            queue().synchronize()
            n_calls += 1
    return n_calls


if __name__ == "__main__":
    print(f"{small_calls()} calls")
    sys.stdout.flush()
