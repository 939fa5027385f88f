"""CuPy's arrays in a home-made framework: stand-ins for CuPy and NCCL, without a GPU."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import contract
import fake_nccl
import numpy as np
import pytest
from contract import Contract
from launch import SUPPORT, run_ranks

STAND_IN = str(Path(__file__).resolve().with_name("cupy_stand_in"))
sys.path.insert(0, STAND_IN)
rank = os.environ.get("OMPI_COMM_WORLD_RANK") or os.environ.get("PMI_RANK")
if rank is not None:  # its own GPUs
    os.environ["HORO_LITE_TEST_GPUS"] = ",".join(f"{rank}{name}" for name in "abcd")

import cupy as cp  # noqa: E402

import horo_lite as hvd  # noqa: E402
from horo_lite.adapters import adapter_of  # noqa: E402
from horo_lite.collectives.group import Group  # noqa: E402


class Net:
    def __init__(self, values: Any) -> None:
        self.params = {name: cp.asarray(x) for name, x in values.items()}
        self.grads: dict[str, Any] = {}


class Momentum:
    def __init__(self, net: Net, lr: float, momentum: float) -> None:
        self.params, self.grads, self.lr, self.momentum = net.params, net.grads, lr, momentum
        self.velocity = [cp.asarray(np.zeros(p.shape, p.dtype)) for p in net.params.values()]

    def step(self) -> None:
        for (name, p), v in zip(self.params.items(), self.velocity, strict=True):
            if self.grads.get(name) is not None:
                v.subtract(v, 1 - self.momentum)
                v.subtract(self.grads[name], -1.0)
                p.subtract(v, self.lr)


@pytest.mark.shows("eager", "in place", "fp16")
class TestCupy(Contract):
    optimizers = ("momentum",)
    dtypes = ("float64", "float16")

    def run(self, check: Callable[[Group], None], size: int) -> None:
        places = [STAND_IN, str(SUPPORT), os.environ.get("PYTHONPATH", "")]
        env = {"PYTHONPATH": os.pathsep.join(places), "HORO_LITE_NCCL_LIB": fake_nccl.compiled()}
        args = [__file__, type(self).__name__, check.__name__]
        run_ranks(Path(contract.__file__), size, args=args, env=env, timeout_s=120).check()

    def network(self, seed: int) -> Any:
        rng = np.random.default_rng(seed)
        shapes = {"w": (36, 5), "b": (5,)}
        return Net({k: rng.standard_normal(s).astype("f") / 6 for k, s in shapes.items()})

    def parameters(self, values: Any) -> Any:
        return Net(values)

    def arrays(self, net: Any) -> Any:
        return net.params

    def optimizer(self, kind: str, net: Any) -> Any:
        return Momentum(net, *((1.0, 0.0) if kind == "sgd" else (0.5, 0.5)))

    def wrap(self, net: Any, optimizer: Any, **options: Any) -> Any:
        assert hvd.world().device.kind == "cuda"
        adapter = adapter_of(next(iter(net.params.values())))
        assert type(adapter).__name__ == "CupyAdapter"
        if not isinstance(optimizer, hvd.DistributedOptimizer):
            assert adapter_of(optimizer) is adapter
        return hvd.DistributedOptimizer(optimizer, **options)

    def gradients(self, net: Any, optimizer: Any, x: Any, y: Any) -> Any:
        x, n = x.reshape(len(x), -1).astype(np.float64), len(x)
        w, b = (p.get().astype(np.float64) for p in net.params.values())
        error = (np.tanh(x @ w + b) - np.eye(5)[y]) / n
        self.given(net, {"w": np.float32(x.T @ error), "b": np.float32(error.sum(0))})

    def given(self, net: Any, gradients: Any) -> Any:
        present = {name: g for name, g in gradients.items() if g is not None}
        net.grads.clear()
        net.grads.update({name: cp.asarray(g) for name, g in present.items()})

    def array(self, x: Any) -> Any:
        return cp.asarray(x)

    def numpy(self, x: Any) -> Any:
        return x.get()

    def held(self, net: Any) -> Any:
        return list(net.grads.values())

    def place(self, gradient: Any) -> Any:
        return id(gradient), gradient._memory.__array_interface__["data"][0]

    def test_parameter_objects_that_hold_arrays(self) -> None:
        self.run(self.objects, 2)

    def objects(self, group: Group) -> None:
        """A gradient that only one rank has counts as zeros, on the GPU, on the other."""
        parameters = [
            SimpleNamespace(data=cp.asarray(np.ones(n, np.float32)), grad=None) for n in (2, 3)
        ]

        def step() -> None:
            for parameter in parameters:
                parameter.data.subtract(parameter.grad, 1.0)

        optimizer = hvd.DistributedOptimizer(SimpleNamespace(params=parameters, step=step))
        for k in range(2):
            for i, parameter in enumerate(parameters):
                is_here = i == group.rank or k == 1
                values = np.full(parameter.data.shape, 2.0 + i + k, np.float32)
                parameter.grad = cp.asarray(values) if is_here else None
            optimizer.step()
        # Minus 2 / 2 and 3 / 2, then minus 3 and 4.
        assert [set(p.data.get().tolist()) for p in parameters] == [{-3.0}, {-4.5}]

    def test_a_thread_that_has_not_chosen_a_gpu(self) -> None:
        self.run(self.elsewhere, 2)

    def elsewhere(self, group: Group) -> None:
        """Results are on the GPU of the inputs."""
        x = cp.asarray([[1.0, 2.0], [3.0, 4.0]], np.float32)
        x.get()  # this thread's stream has written it: the other thread has a stream of its own
        found: list[Any] = []
        sums: list[Any] = []

        def call() -> None:
            found.append(hvd.allreduce(x, op=hvd.Sum))
            found.append(hvd.allgather(x))
            found.append(hvd.broadcast(x, 1))
            found.append(hvd.synchronize(hvd.allreduce_async(x, op=hvd.Sum)))
            sums.extend(found[3].get().tolist())  # in the order of this thread's stream
            found.append(adapter_of(x).zeros_like(x))
            found.append(adapter_of(x).from_numpy(np.ones(2), x))
            found.append(hvd.average_gradients([x, x if group.rank else None])[1])
            found[-1].get()  # this stream has read x, which the other one frees

        thread = threading.Thread(target=call)
        thread.start()
        thread.join()
        assert len(found) == 7
        here = hvd.world().device.index
        assert all(got.device == here for got in found), [got.device for got in found]
        assert sums == [[2, 4], [6, 8]]
