"""The kernels on a GPU against their host versions, bit for bit: see `make gpu-check`.

As a plug-in of pytest it makes tests/csrc/test_gpu_kernels.py run everything on the GPU as well:
every call is made on both, and every byte compared, including those around the tensors. As a
program, `kernels.py`, it makes a few small calls with memory that ends where the tensors end, to
run under compute-sanitizer.
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

FAKE = bool(os.environ.get("HORO_LITE_TEST_GPUS"))
ALIGNMENT = 256  # of the driver's allocations
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


class Mirror:
    """Zeros on the host, and as many bytes on the GPU, none of them beyond their end."""

    def __init__(self, n_bytes: int) -> None:
        memory = np.zeros(n_bytes + ALIGNMENT, np.uint8)
        skip = -memory.ctypes.data % ALIGNMENT
        self.host = memory[skip : skip + n_bytes]
        self.address = self.host.ctypes.data
        self.shift = 0  # from an address on the host to that on the GPU
        if not FAKE:
            there = ctypes.c_uint64()
            size = ctypes.c_size_t(max(n_bytes, 1))
            must(driver().cuMemAlloc_v2(ctypes.byref(there), size), "cuMemAlloc")
            self.shift = there.value - self.address
            weakref.finalize(self, driver().cuMemFree_v2, there)

    @property
    def there(self) -> int:
        """The address on the GPU."""
        return self.address + self.shift

    def upload(self) -> None:
        there, size = ctypes.c_uint64(self.there), ctypes.c_size_t(self.host.size)
        if self.shift and self.host.size:
            here = ctypes.c_void_p(self.address)
            must(driver().cuMemcpyHtoD_v2(there, here, size), "cuMemcpyHtoD")

    def download(self) -> None:
        there, size = ctypes.c_uint64(self.there), ctypes.c_size_t(self.host.size)
        if self.shift and self.host.size:
            here = ctypes.c_void_p(self.address)
            must(driver().cuMemcpyDtoH_v2(here, there, size), "cuMemcpyDtoH")


class Buffer(cases.Buffer):
    def __init__(self, n_bytes: int) -> None:
        self.mirror = Mirror(n_bytes + cases.WIRE_UNIT)
        self._memory = self.mirror.host
        self._memory[:] = cases.GUARD
        self.bytes = self._memory[:n_bytes]
        self.address = self.mirror.address


def run(step: str, tensors: Any, **options: Any) -> None:
    """Run the kernel on the CPU and then, from the same state, on the GPU: compare all bytes."""
    arrays = {name: x for name, x in options.items() if isinstance(x, np.ndarray)}
    numbers = {name: x for name, x in options.items() if name not in arrays}
    mirrors = {"tensors": tensors.memory.mirror, "wire": tensors.wire.mirror}
    for name, x in arrays.items():
        mirrors[name] = Mirror(x.nbytes)
        mirrors[name].host[:] = x.view(np.uint8).ravel()
    before = [mirror.host.copy() for mirror in mirrors.values()]
    call = (step, cases.name_of(tensors.dtype), cases.name_of(tensors.wires[0].dtype))
    here = {name: mirrors[name].address for name in ("wire", *arrays)}
    _testing.run_kernel(None, *call, tensors.pieces, **numbers, **here)
    after = [mirror.host.copy() for mirror in mirrors.values()]
    for mirror, image in zip(mirrors.values(), before, strict=True):
        mirror.host[:] = image
        mirror.upload()
    shift = mirrors["tensors"].shift
    pieces = [(address + shift, *rest) for address, *rest in tensors.pieces]
    there = {name: mirrors[name].there for name in ("wire", *arrays)}
    _testing.run_kernel(queue(), *call, pieces, **numbers, **there)
    queue().synchronize()
    for (what, mirror), image in zip(mirrors.items(), after, strict=True):
        mirror.download()
        wrong = np.flatnonzero(mirror.host != image)
        assert not wrong.size, (
            f"{step}: {wrong.size} bytes of the {what} differ from the host's; the first is number "
            f"{wrong[0]}: {mirror.host[wrong[0]]:#x} instead of {image[wrong[0]]:#x}"
        )
    for name, x in arrays.items():
        x.view(np.uint8).ravel()[:] = mirrors[name].host


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
        memory = [Mirror((size + 1) * item) for size in SANITIZED]
        wires = Mirror(int(offsets[-1]) * cases.WIRE_UNIT)
        exponents, stats = Mirror(4 * n), Mirror(8 * n)
        exponents.host[:] = 0x80
        pieces = []
        for i, size in enumerate(SANITIZED):
            memory[i].host[item:] = cases.hard(size, kind).view(np.uint8)
            pieces.append((memory[i].there + item, size, int(offsets[i]), i))
        for mirror in (*memory, wires, exponents, stats):
            mirror.upload()
        scales = {"exponents": exponents.there, "headroom": 1}
        more = scales if grad in cases.FLOATS else {}
        factors = {"scale": 0.5, "divisor": 3.0} if grad in cases.FLOATS else {}
        calls: list[tuple[str, dict[str, Any]]] = [
            ("measure", scales),
            ("pack", {**more, "stats": stats.there}),
            ("unpack", {**more, **factors}),
            ("scale", factors),
        ]
        for step, options in calls:
            if step == "measure" and grad not in cases.FLOATS:
                continue
            where = {"wire": wires.there, **options}
            _testing.run_kernel(queue(), step, grad, wire, pieces, **where)
            queue().synchronize()
            n_calls += 1
        # A thousand small pieces, in the table for many.
        many = Mirror(1000 * 4 * item)
        wires = Mirror(1000 * cases.WIRE_UNIT)
        many.upload()
        wires.upload()
        pieces = [(many.there + 4 * item * i, 3, i, 0) for i in range(1000)]
        for step in ("pack", "unpack"):
            _testing.run_kernel(queue(), step, grad, wire, pieces, wire=wires.there)
            queue().synchronize()
            n_calls += 1
    return n_calls


if __name__ == "__main__":
    print(f"{small_calls()} calls")
    sys.stdout.flush()
