"""Test equipment: GPUs in host memory, and the GPU kernels one call at a time. In no wheel."""

from collections.abc import Callable, Sequence

from horo_lite._native import DeviceQueue

def run_kernel(
    queue: DeviceQueue | None,
    step: str,
    grad_dtype: str,
    wire_dtype: str,
    pieces: Sequence[tuple[int, int, int, int]],
    wire: int = 0,
    prescale: float = 1.0,
    scale: float = 1.0,
    divisor: float = 1.0,
    divisor_at: int = 0,
    exponents: int = 0,
    headroom: int = 0,
    stats: int = 0,
) -> None:
    """Queue it on a GPU, whose memory all addresses are of; None: run it on the CPU.

    A piece is (address, n_elements, wire offset in units of 64 bytes, tensor).
    """

def fake_gpus() -> object:
    """Hand GPUs in host memory to `_native`; HORO_LITE_TEST_GPUS has their names."""

class FakeStream:
    """A stream of the fake GPUs."""

    def __init__(self) -> None: ...
    @property
    def handle(self) -> int: ...
    def call(self, function: Callable[[], object]) -> None:
        """Queue a call."""

    def lead(self, consumer: int) -> None:
        """Its later work comes after what is queued here."""
