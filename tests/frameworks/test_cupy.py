"""CuPy's arrays in a home-made framework: stand-ins for CuPy and NCCL, without a GPU."""

from __future__ import annotations

import os
from pathlib import Path
from textwrap import indent

import fake_nccl
import pytest
from launch import SUPPORT, Result, run_ranks

HERE = Path(__file__).resolve().parent

START = """
import os

rank = int(os.environ.get("OMPI_COMM_WORLD_RANK") or os.environ["PMI_RANK"])
os.environ["HORO_LITE_TEST_GPUS"] = ",".join(f"{rank}{name}" for name in "abcd")  # its own

import numpy as np
import horo_lite as hvd

world = hvd.init()
assert world.device.kind == "cuda", world
size = world.size

import cupy as cp
from horo_lite.collectives import arrays
from horo_lite.adapters import adapter_of

class Momentum:
    def __init__(self, params):
        self.params = params
        self.grads = []
        self.velocity = [cp.asarray(np.zeros(p.shape, p.dtype)) for p in params]

    def step(self):
        for p, g, v in zip(self.params, self.grads, self.velocity):
            v.subtract(v, 0.5)
            v.subtract(g, -1.0)
            p.subtract(v, 0.5)

def parameters(seed):
    rng = np.random.default_rng(seed)
    return [cp.asarray(rng.standard_normal(shape), np.float32) for shape in [(3, 2), (2,)]]

def gradients(params, n, seed, mine=slice(None)):
    rng = np.random.default_rng(seed)
    x, y = rng.standard_normal((n, 3))[mine], rng.standard_normal((n, 2))[mine]
    w, b = (p.get().astype(np.float64) for p in params)
    error = 2 * (x @ w + b - y) / len(x)
    return [cp.asarray(g, np.float32) for g in (x.T @ error, error.sum(0))]

def place(x):
    return x._memory.__array_interface__["data"][0]

assert type(adapter_of(parameters(0)[0])).__name__ == "CupyAdapter"
assert adapter_of(Momentum(parameters(0))) is adapter_of(parameters(0)[0])
"""


def ranks(code: str, np: int) -> Result:
    places = [str(HERE / "cupy_stand_in"), str(SUPPORT), os.environ.get("PYTHONPATH", "")]
    env = {"PYTHONPATH": os.pathsep.join(places), "HORO_LITE_NCCL_LIB": fake_nccl.compiled()}
    # In a function, so that no array and its stream are left when Python ends.
    code = f"def main():\n{indent(code, '    ')}\n\nmain()\nprint('done', rank)\n"
    return run_ranks(START + code, np, env=env, timeout_s=120).check()


@pytest.mark.shows("eager", "in place", "fp16")
@pytest.mark.parametrize("np", [2, 3])
def test_training_is_that_of_one_process_on_the_whole_batch(np: int) -> None:
    ranks(
        """
for compression, rtol in ((hvd.Compression.none, 1e-5), (hvd.Compression.fp16, 2e-3)):
    params = parameters(seed=rank)
    kept = [place(p) for p in params]
    hvd.broadcast_parameters(params, root_rank=size - 1)
    assert [place(p) for p in params] == kept
    alone = Momentum(parameters(seed=size - 1))
    assert all((p.get() == q.get()).all() for p, q in zip(params, alone.params))

    opt = hvd.DistributedOptimizer(Momentum(params), compression=compression)
    copied = arrays.bytes_copied
    for step in range(5):
        n = 4 * size + 1
        cuts = [0, 5, *range(9, n + 1, 4)]  # the first rank has one sample more
        opt.grads = gradients(params, n, step, slice(cuts[rank], cuts[rank + 1]))
        places, objects = [place(g) for g in opt.grads], list(opt.grads)
        opt.step(weight=cuts[rank + 1] - cuts[rank])
        assert [place(g) for g in opt.grads] == places
        assert all(g is was for g, was in zip(opt.grads, objects))
        alone.grads = gradients(alone.params, n, step)
        alone.step()
    assert arrays.bytes_copied == copied
    off = 0.0
    for p, q in zip(params, alone.params):
        # Sums in another order, and rounded on the wire.
        np.testing.assert_allclose(p.get(), q.get(), rtol=rtol, atol=rtol)
        off = max(off, np.abs(p.get() - q.get()).max())
    assert (off > 1e-5) == (compression is hvd.Compression.fp16), off
    assert len(set(hvd.allgather_object(b"".join(p.get().tobytes() for p in params)))) == 1
""",
        np,
    )


def test_what_travels_and_what_does_not() -> None:
    ranks(
        """
x = cp.asarray([[1.0, 2.0], [3.0, 4.0]], np.float32)
later = hvd.allreduce_async(x, op=hvd.Sum)
for got in (hvd.allreduce(x.copy(), op=hvd.Sum), hvd.synchronize(later)):
    assert type(got) is cp.ndarray and got.get().tolist() == [[2, 4], [6, 8]]
rows = hvd.allgather(cp.asarray(np.full((rank + 1, 2), rank)))
assert type(rows) is cp.ndarray and rows.get().tolist() == [[0, 0], [1, 1], [1, 1]]
assert hvd.broadcast(cp.asarray([rank, 7.0]), 1).get().tolist() == [1, 7]

# In a thread that has not chosen a GPU, results are on the GPU of the inputs.
import threading
found = []
def elsewhere():
    found.append(hvd.allreduce(x, op=hvd.Sum))
    found.append(hvd.allgather(x))
    found.append(hvd.broadcast(x, 1))
    found.append(hvd.synchronize(hvd.allreduce_async(x, op=hvd.Sum)))
    found.append(adapter_of(x).zeros_like(x))
    found.append(adapter_of(x).from_numpy(np.ones(2), x))
    found.append(hvd.average_gradients([x, x if rank else None])[1])
thread = threading.Thread(target=elsewhere)
thread.start(), thread.join()
assert len(found) == 7
assert all(got.device == world.device.index for got in found), [got.device for got in found]

# A gradient that only one rank has counts as zeros on the other.
opt = hvd.DistributedOptimizer(Momentum([cp.asarray(np.ones(2)), cp.asarray(np.ones(3))]))
opt.grads = [cp.asarray([2.0, 4.0]), None if rank else cp.asarray([2.0, 4.0, 6.0])]
opt.step()
assert type(opt.grads[1]) is cp.ndarray and opt.grads[1].get().tolist() == [1, 2, 3]
assert opt.params[1].get().tolist() == [0.5, 0, -0.5]

opt = hvd.DistributedOptimizer(Momentum([cp.asarray(np.ones(2)), cp.asarray(np.ones(3 + rank))]))
opt.grads = [cp.asarray(np.ones(p.shape)) for p in opt.params]
try:
    opt.step()
    raise SystemExit("stepped")
except hvd.MismatchError as error:
    assert "params[1]" in str(error) and "float64[3]" in str(error), error
""",
        2,
    )
