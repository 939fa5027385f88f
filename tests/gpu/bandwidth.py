"""The kernels' speed compared with a copy, and the host time of a step: `make gpu-check`.

    bandwidth.py                          pack and unpack, in bytes read and written per second
    bandwidth.py --host-time alone|nccl   from the call to its return, while the GPU is busy

All variants of one size are timed in turns, many times, and the medians compared. Their results are
compared with PyTorch's. HORO_LITE_TEST_GPUS: a dry run, whose times have no meaning.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import numpy as np
import torch
from allreduce import resnet50_shapes
from libraries import FakeDevice, Torch
from ranks import join, use_nccl_alone
from torch._utils import _flatten_dense_tensors as flatten
from torch._utils import _unflatten_dense_tensors as unflatten

import horo_lite as hvd
from horo_lite import _native, _testing, ops

FAKE = bool(os.environ.get("HORO_LITE_TEST_GPUS"))
DEVICE = "cpu" if FAKE else "cuda"  # the fake device uses host memory
MIB = 2**10 if FAKE else 2**20
ROUNDS = 2 if FAKE else 15
WIRES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
UNIT = 64  # bytes; each tensor begins at a multiple of this on the wire
OF_A_COPY = 0.9
TIMES_FASTER = 3.0
HOST_S = 100e-6

Way = Callable[[], object]


class Clock:
    """Times work on one stream, which is kept busy until all of it is queued."""

    def __init__(self, queue: _native.DeviceQueue, head_start_s: float) -> None:
        self._queue = queue
        self._cycles = int(head_start_s * 1.8e9)
        if not FAKE:
            self._stream = torch.cuda.ExternalStream(queue.stream)
            self._events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]

    def seconds(self, way: Way) -> float:
        if FAKE:
            began = time.perf_counter()
            way()
            self._queue.synchronize()
            return time.perf_counter() - began
        begin, end = self._events
        with torch.cuda.stream(self._stream):
            torch.cuda._sleep(self._cycles)
            begin.record()
            way()
            end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1e3

    def medians(self, ways: dict[str, Way]) -> dict[str, float]:
        times: dict[str, list[float]] = {name: [] for name in ways}
        for turn in range(ROUNDS + 2):
            for name, way in ways.items():
                seconds = self.seconds(way)
                if turn >= 2:
                    times[name].append(seconds)
        return {name: median(each) for name, each in times.items()}


class Gradients:
    """float32 tensors, and their places on a wire of every dtype."""

    def __init__(self, queue: _native.DeviceQueue, n_tensors: int, n_bytes: int) -> None:
        self._queue = queue
        self.n_bytes = n_tensors * n_bytes
        n = n_bytes // 4
        generator = torch.Generator(DEVICE).manual_seed(1)
        self.tensors = [
            torch.randn(n, device=DEVICE, generator=generator) * 2.0 ** (i % 60 - 30)
            for i in range(n_tensors)
        ]
        self.originals = torch.cat(self.tensors)
        self.exponents = torch.zeros(n_tensors, dtype=torch.int32, device=DEVICE)
        self.wires, self.views, self.pieces = {}, {}, {}
        for name, dtype in WIRES.items():
            units = -(-n * dtype.itemsize // UNIT)
            wire = torch.zeros(n_tensors * units * UNIT, dtype=torch.uint8, device=DEVICE)
            self.wires[name] = wire
            self.views[name] = [
                wire[i * units * UNIT :][: n * dtype.itemsize].view(dtype) for i in range(n_tensors)
            ]
            self.pieces[name] = [
                (x.data_ptr(), n, i * units, i) for i, x in enumerate(self.tensors)
            ]
        if not FAKE:
            torch.cuda.synchronize()

    def run(self, step: str, wire: str, **options: Any) -> None:
        """Call a kernel once over all tensors; float16 with a scale for each."""
        if wire == "float16" or step == "measure":
            options |= {"exponents": self.exponents.data_ptr(), "headroom": 1}
        address = self.wires[wire].data_ptr()
        pieces = self.pieces[wire]
        other = "float32" if step == "measure" else wire
        _testing.run_kernel(self._queue, step, "float32", other, pieces, wire=address, **options)

    def measure(self) -> None:
        self.run("measure", "float16")

    def restore(self) -> None:
        torch._foreach_copy_(self.tensors, list(self.originals.split(self.tensors[0].numel())))
        self.exponents.fill_(-0x7F7F7F80)
        if not FAKE:
            torch.cuda.synchronize()

    def check(self, wire: str) -> None:
        """Assert that pack and unpack give the same results as PyTorch."""
        self.restore()
        self.measure()
        self.run("pack", wire)
        self._queue.synchronize()
        largest = torch.stack([x.abs().max() for x in self.tensors]).cpu()
        exponents = torch.frexp(largest).exponent
        assert torch.equal(self.exponents.cpu(), exponents.to(torch.int32)), "measure"
        scales = [2.0 ** (14 - int(e)) if wire == "float16" else 1.0 for e in exponents]
        for x, packed, scale in zip(self.tensors, self.views[wire], scales, strict=True):
            assert torch.equal(packed, (x * scale).to(packed.dtype)), f"pack {wire}"
        self.run("unpack", wire, divisor=2.0)
        self._queue.synchronize()
        for x, packed, scale in zip(self.tensors, self.views[wire], scales, strict=True):
            assert torch.equal(x, packed.float() / scale / 2), f"unpack {wire}"
        self.restore()


def say(good: bool, text: str) -> None:
    print(f"{'passed' if good else 'FAILED'} {text}", flush=True)


def of_a_copy(queue: _native.DeviceQueue, mib: int) -> None:
    """Compare every kernel over tensors of 8 MiB with one copy of the same number of bytes."""
    name = f"{mib} MiB"
    print(f"begin {name}", flush=True)
    gradients = Gradients(queue, mib // 8, 8 * MIB)
    for wire in WIRES:
        gradients.check(wire)
    n = gradients.n_bytes
    target = torch.empty_like(gradients.originals)
    ways: dict[str, Way] = {"copy": lambda: target.copy_(gradients.originals)}
    moved = {"copy": 2 * n, "measure": n}
    ways["measure"] = gradients.measure
    for wire, dtype in WIRES.items():
        for step in ("pack", "unpack"):
            ways[f"{step} {wire}"] = lambda step=step, wire=wire: gradients.run(step, wire)
            moved[f"{step} {wire}"] = n + n // 4 * dtype.itemsize
    ways["measure and pack float16"] = lambda: (
        gradients.measure(),
        gradients.run("pack", "float16"),
    )
    moved["measure and pack float16"] = 2 * n + n // 2
    times = Clock(queue, 3e-3).medians(ways)
    copied = moved["copy"] / times["copy"]
    print(f"| {name}: a copy moves {copied / 1e9:,.0f} GB/s in {times['copy'] * 1e3:.3f} ms")
    for way in list(ways)[1:]:
        rate = moved[way] / times[way]
        text = f"{name}, {way}: {rate / copied:.0%} of the copy ({rate / 1e9:,.0f} GB/s)"
        say(rate >= OF_A_COPY * copied or FAKE, text)


def beside_others(queue: _native.DeviceQueue, n_tensors: int, n_bytes: int, judge: bool) -> None:
    """Compare a round trip through float16 (and half of it) with PyTorch's and CuPy's means."""
    shape = f"{n_tensors:,} tensors of {n_bytes // 2**10:,} KiB"
    print(f"begin {shape}", flush=True)
    gradients = Gradients(queue, n_tensors, n_bytes)
    gradients.check("float16")
    gradients.restore()
    gradients.measure()
    xs, views = gradients.tensors, gradients.views["float16"]
    flat = torch.cat(views)
    there: dict[str, Way] = {
        "horo_lite": lambda: gradients.run("pack", "float16"),
        "horo_lite with measure": lambda: (gradients.measure(), gradients.run("pack", "float16")),
        "torch flatten, cast": lambda: flatten(xs).half(),
        "torch _foreach_copy_": lambda: torch._foreach_copy_(views, xs),
    }
    back: dict[str, Way] = {
        "horo_lite": lambda: gradients.run("unpack", "float16", divisor=2.0),
        "torch cast, unflatten, copy": lambda: torch._foreach_copy_(
            xs, unflatten(flat.float().mul_(0.5), xs)
        ),
        "torch _foreach_copy_, _foreach_mul_": lambda: (
            torch._foreach_copy_(xs, views),
            torch._foreach_mul_(xs, 0.5),
        ),
    }
    try:
        import cupy

        stream = cupy.cuda.ExternalStream(queue.stream)
        theirs, flat_theirs = [cupy.asarray(x) for x in xs], cupy.zeros(flat.numel(), "f2")

        def cupy_there() -> None:
            with stream:
                cupy.concatenate(theirs).astype(cupy.float16)

        def cupy_back() -> None:
            with stream:
                parts = cupy.split(flat_theirs.astype(cupy.float32) * 0.5, len(theirs))
                for x, part in zip(theirs, parts, strict=True):
                    x[...] = part

        there["cupy concatenate, astype"] = cupy_there
        back["cupy astype, split, copy"] = cupy_back
    except Exception as error:
        print(f"not checked: {shape} with CuPy ({type(error).__name__}: {error})".splitlines()[0])
    clock = Clock(queue, 20e-3)
    for direction, ways in (("pack", there), ("unpack", back)):
        times = clock.medians(ways)
        others = {way: s for way, s in times.items() if not way.startswith("horo_lite")}
        best = min(others, key=lambda way: others[way])
        for way, seconds in times.items():
            print(f"| {shape}, {direction}: {seconds * 1e6:9,.1f} µs {way}")
        faster = others[best] / times["horo_lite"]
        text = f"{shape}, {direction} float16: {faster:.1f} times as fast as {best}"
        if judge:
            say(faster >= TIMES_FASTER or FAKE, text)
        else:
            print(f"| {text}")
    if judge:
        one_launch(gradients, shape)


def one_launch(gradients: Gradients, shape: str) -> None:
    if FAKE:
        return
    from torch.profiler import ProfilerActivity, profile

    for step in ("measure", "pack", "unpack"):
        with profile(activities=[ProfilerActivity.CUDA]) as profiled:
            gradients.run(step, "float16")
            torch.cuda.synchronize()
        n = sum(event.count for event in profiled.key_averages() if "horo_" in event.key)
        if n == 0:
            print(f"not checked: {shape}, launches of {step} (the profiler has seen none)")
        else:
            say(n == 1, f"{shape}, {step} float16: {n} launch{'es' * (n > 1)}")


# --- host time ------------------------------------------------------------------------------------


def host_time(how: str) -> None:
    library: Any = FakeDevice() if FAKE else Torch()
    world, _ = join()
    if how == "alone":
        use_nccl_alone(world)
    # Two ranks take turns on the GPU, and NCCL's sockets wait for each turn.
    rounds = 20 if world.size == 1 else 8
    shapes = resnet50_shapes()
    if FAKE:
        shapes = [tuple(max(1, n // 8) for n in shape) for shape in shapes]
    for compression in (hvd.Compression.none, hvd.Compression.fp16):
        who = f"{world.size} rank{'s' * (world.size > 1)}"
        what = f"a step of ResNet-50's 161 gradients, {who}, {compression!r}"
        if world.rank == 0:
            print(f"begin {what}", flush=True)
        inner, _ = library.optimizer([np.zeros(s, np.float32) for s in shapes])
        optimizer = hvd.DistributedOptimizer(inner, compression=compression)
        gradients = [library.make(np.full(s, world.rank + 1, np.float32)) for s in shapes]
        library.give(inner, gradients)
        for _ in range(3):
            optimizer.synchronize()
        library.read(gradients[0])
        stream = world.group.stream(world.device.index)
        nccl = stream.transport().group
        tensors = _native.Tensors(gradients, stream=-1)
        steps, reads, queued, busy = [], [], [], []
        for _ in range(rounds):
            late = library.late(np.zeros(8, np.float32))
            began = time.perf_counter()
            optimizer.synchronize()
            steps.append(time.perf_counter() - began)
            busy.append(library.is_busy(late))
            library.read(late)
            ops.barrier(group=world.group)
        for _ in range(rounds):
            late = library.late(np.zeros(8, np.float32))
            began = time.perf_counter()
            _native.Tensors(gradients, stream=-1)
            reads.append(time.perf_counter() - began)
            stream.queue.follow(library_stream(library))
            began = time.perf_counter()
            nccl.reduce([tensors], "average", compression.wire, 1.0, 1.0, float(world.size), None)
            queued.append(time.perf_counter() - began)
            stream.queue.synchronize()
            ops.barrier(group=world.group)
        if world.rank == 0:
            say(
                all(busy) and (median(steps) < HOST_S or FAKE),
                f"{what}: {median(steps) * 1e6:.0f} µs of the host"
                + ("" if all(busy) else ", and the call waited for the GPU"),
            )
            print(
                f"| of these {median(reads) * 1e6:.0f} µs to read 161 tensors, "
                f"{median(queued) * 1e6:.0f} µs to queue the kernels and NCCL's",
                flush=True,
            )
    hvd.shutdown()


def library_stream(library: Any) -> int:
    if isinstance(library, FakeDevice):
        return int(library.fake.stream().handle)
    return int(torch.cuda.current_stream().cuda_stream)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--host-time", choices=["alone", "nccl"])
    args = parser.parse_args(arguments)
    if args.host_time:
        host_time(args.host_time)
        return
    queue = _native.DeviceQueue(0)
    for mib in (64, 256, 1024):
        of_a_copy(queue, mib)
        if not FAKE:
            torch.cuda.empty_cache()
    beside_others(queue, 32, 8 * MIB, judge=False)
    beside_others(queue, 1000, 4 * 2**10, judge=True)


if __name__ == "__main__":
    main()
    sys.stdout.flush()
