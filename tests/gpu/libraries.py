"""How the checks make, change and read arrays on a GPU: one small class per array library.

`FakeDevice` replaces them if there is no GPU: see tests/support/fake_device.py.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

Host = np.ndarray[Any, Any]
LATE_S = 0.2  # how long a GPU is kept busy before late values appear
FLOATS = ("float16", "float32", "float64")
INTEGERS = ("bool", "uint8", "int8", "int16", "int32", "int64")


class Descent:
    """A home-made optimizer over arrays that support `-=`."""

    def __init__(self, params: Sequence[Any]) -> None:
        self.params = list(params)
        self.grads: list[Any] = [None] * len(params)

    def step(self) -> None:
        for param, grad in zip(self.params, self.grads, strict=True):
            param -= 0.5 * grad


class Library:
    name: str
    dtypes: tuple[str, ...] = (*FLOATS, *INTEGERS)
    writable = True

    def make(self, values: Host) -> Any:
        """Return an array on the GPU, which may then be used on any stream."""
        raise NotImplementedError

    def read(self, x: Any) -> Host:
        """Return the values in stream order: waits only for the current stream."""
        raise NotImplementedError

    def late(self, values: Host) -> Any:
        """Return immediately an array that gets the values after LATE_S of work on the stream."""
        raise NotImplementedError

    def is_busy(self, late: Any) -> bool:
        """Return whether the current stream, which has work of late(), is still busy."""
        raise NotImplementedError

    def doubled(self, x: Any) -> Any:
        return x * 2

    def another_stream(self) -> contextlib.AbstractContextManager[Any]:
        """Queue work inside on a stream that is not ordered with the default one."""
        return contextlib.nullcontext()

    def optimizer(self, values: Sequence[Host]) -> tuple[Any, list[Any]]:
        """Return an optimizer that subtracts half the gradients, and its parameters."""
        params = [self.make(x) for x in values]
        return Descent(params), params

    def give(self, optimizer: Any, gradients: Sequence[Any]) -> None:
        optimizer.grads[:] = gradients


class OfOnesOwn:
    """An optimizer that is not one of torch's, and so is not wrapped by horo_lite.torch."""

    def __init__(self, inner: Any) -> None:
        self.param_groups, self.step = inner.param_groups, inner.step


class Torch(Library):
    name = "torch"
    dtypes = (*FLOATS, *INTEGERS, "bfloat16")

    def __init__(self) -> None:
        import torch

        self.torch = torch
        torch.zeros(1, device="cuda")  # an error here shows the cause

    def make(self, values: Host) -> Any:
        shape, values = values.shape, np.ascontiguousarray(values)
        if values.dtype.name == "bfloat16":
            host = self.torch.from_numpy(values.view(np.int16)).view(self.torch.bfloat16)
        else:
            host = self.torch.from_numpy(values)
        x = host.to("cuda").reshape(shape)
        self.torch.cuda.synchronize()
        return x

    def read(self, x: Any) -> Host:
        x = x.detach()
        if x.dtype is self.torch.bfloat16:
            import ml_dtypes

            return x.view(self.torch.int16).cpu().numpy().view(ml_dtypes.bfloat16)
        return x.cpu().numpy()

    def late(self, values: Host) -> Any:
        source = self.make(values)
        x = self.torch.zeros_like(source)
        self.torch.cuda._sleep(int(LATE_S * 1.8e9))
        return x.copy_(source)

    def is_busy(self, late: Any) -> bool:
        return not self.torch.cuda.current_stream().query()

    def another_stream(self) -> contextlib.AbstractContextManager[Any]:
        return self.torch.cuda.stream(self.torch.cuda.Stream())

    def optimizer(self, values: Sequence[Host]) -> tuple[Any, list[Any]]:
        params = [self.torch.nn.Parameter(self.make(x)) for x in values]
        return OfOnesOwn(self.torch.optim.SGD(params, lr=0.5)), params

    def give(self, optimizer: Any, gradients: Sequence[Any]) -> None:
        for param, grad in zip(optimizer.param_groups[0]["params"], gradients, strict=True):
            param.grad = grad


class Cupy(Library):
    name = "cupy"
    dtypes = (*FLOATS, *INTEGERS, "uint16", "uint32", "uint64")

    def __init__(self) -> None:
        import cupy

        self.cupy = cupy
        source = """extern "C" __global__ void spin(long long cycles) {
          long long begin = clock64();
          while (clock64() - begin < cycles) {}
        }"""
        self.spin = cupy.RawKernel(source, "spin")
        self.spin((1,), (1,), (np.int64(1),))
        cupy.cuda.Device().synchronize()

    def make(self, values: Host) -> Any:
        x = self.cupy.asarray(values)
        self.cupy.cuda.Device().synchronize()
        return x

    def read(self, x: Any) -> Host:
        return self.cupy.asnumpy(x)  # on the current stream

    def late(self, values: Host) -> Any:
        source = self.make(values)
        x = self.cupy.zeros_like(source)
        self.spin((1,), (1,), (np.int64(LATE_S * 1.8e9),))
        x[...] = source
        return x

    def is_busy(self, late: Any) -> bool:
        return not self.cupy.cuda.get_current_stream().done

    def another_stream(self) -> contextlib.AbstractContextManager[Any]:
        return self.cupy.cuda.Stream(non_blocking=True)


class Jax(Library):
    name = "jax"
    dtypes = (*FLOATS, *INTEGERS, "uint16", "uint32", "uint64", "bfloat16")
    writable = False

    def __init__(self) -> None:
        import jax

        jax.config.update("jax_enable_x64", True)
        self.jax = jax
        if jax.default_backend() != "gpu":
            raise RuntimeError(f"this JAX computes on the {jax.default_backend()}")
        n, turns = 2048, 2000
        self.eye = jax.numpy.eye(n, dtype=jax.numpy.float32)

        @jax.jit
        def slow(x: Any, eye: Any) -> Any:
            """Return x, after slow products that do not change it."""
            y = jax.numpy.full((n, n), 1.0, jax.numpy.float32)
            y = jax.lax.fori_loop(0, turns, lambda _, y: eye @ y, y)
            return x * y[0, 0].astype(x.dtype)

        self.slow = slow

    def make(self, values: Host) -> Any:
        return self.jax.block_until_ready(self.jax.numpy.asarray(values))

    def read(self, x: Any) -> Host:
        return np.asarray(x)

    def late(self, values: Host) -> Any:
        return self.slow(self.make(values), self.eye)

    def is_busy(self, late: Any) -> bool:
        return not late.is_ready()


class FakeDevice(Library):
    name = "fake device"
    dtypes = (*FLOATS, *INTEGERS, "uint16", "uint32", "uint64", "bfloat16")

    def __init__(self) -> None:
        import fake_device

        self.fake = fake_device

    def make(self, values: Host) -> Any:
        return self.fake.array(values)

    def read(self, x: Any) -> Host:
        return x.numpy()

    def late(self, values: Host) -> Any:
        return self.fake.array(values)

    def is_busy(self, late: Any) -> bool:
        return True  # unknown

    def doubled(self, x: Any) -> Any:
        return x.copy().queue(lambda memory: np.multiply(memory, 2, out=memory))

    @contextlib.contextmanager
    def another_stream(self) -> Iterator[None]:
        with self.fake.another_stream():
            yield

    def optimizer(self, values: Sequence[Host]) -> tuple[Any, list[Any]]:
        class FakeDescent(Descent):
            def step(self) -> None:
                for param, grad in zip(self.params, self.grads, strict=True):
                    param.subtract(grad, 0.5)

        params = [self.make(x) for x in values]
        return FakeDescent(params), params


LIBRARIES = {library.name: library for library in (Torch, Cupy, Jax, FakeDevice)}
