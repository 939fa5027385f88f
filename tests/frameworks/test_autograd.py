"""autograd: gradients of NumPy functions, averaged before its optimizers use them."""

from __future__ import annotations

import pytest
from digits_runs import accuracy_of
from launch import Result, run_ranks

START = """
import autograd.numpy as anp
import numpy as np
from autograd import grad, value_and_grad
from autograd.misc.optimizers import adam, sgd

import horo_lite as hvd

world = hvd.init()
rank, size = world.rank, world.size

def parameters(seed):
    rng = np.random.default_rng(seed)
    return {
        "hidden": [rng.standard_normal((3, 8)), rng.standard_normal(8)],
        "out": (rng.standard_normal((8, 2)),),
    }

def loss_of(params, x, y):
    w, b = params["hidden"]
    hidden = anp.tanh(anp.dot(x, w) + b)
    return anp.mean((anp.dot(hidden, params["out"][0]) - y) ** 2)

def samples(n, seed):
    rng = np.random.default_rng(seed)
    return rng.standard_normal((n, 3)), rng.standard_normal((n, 2))

def leaves(params):
    return [*params["hidden"], *params["out"]]

def refused(error, call, *words):
    try:
        call()
    except error as said:
        assert all(word in str(said) for word in words), said
    else:
        raise SystemExit(f"no {error.__name__}")
"""


def ranks(code: str, np: int) -> Result:
    return run_ranks(START + code + "\nprint('done', rank)\n", np, timeout_s=120).check()


@pytest.mark.shows("eager")
def test_training_is_that_of_one_process_on_the_whole_batch() -> None:
    ranks(
        """
start = hvd.broadcast_parameters(parameters(seed=rank), root_rank=size - 1)
assert all((a == b).all() for a, b in zip(leaves(start), leaves(parameters(seed=size - 1))))

n = 4 * size + 1
cuts = [0, 5, *range(9, n + 1, 4)]  # the first rank has one sample more
mine = slice(cuts[rank], cuts[rank + 1])
gradient = hvd.grad_and_average(grad(loss_of))

def of_this_rank(params, step):
    x, y = samples(n, step)
    return gradient(params, x[mine], y[mine], weight=cuts[rank + 1] - cuts[rank])

def of_all(params, step):
    return grad(loss_of)(params, *samples(n, step))

for optimizer in (adam, sgd):
    together = optimizer(of_this_rank, start, num_iters=10)
    alone = optimizer(of_all, start, num_iters=10)
    for a, b, before in zip(leaves(together), leaves(alone), leaves(start)):
        # Float64 sums in another order: a batch's mean of shards' means.
        np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-11)
        assert (a != before).any()
    assert len(set(hvd.allgather_object(b"".join(a.tobytes() for a in leaves(together))))) == 1

# With the loss, which is averaged as well; the given gradients do not change.
value, gradients = hvd.grad_and_average(value_and_grad(loss_of))(start, *samples(4, seed=rank))
each = [value_and_grad(loss_of)(start, *samples(4, seed=r)) for r in range(size)]
assert abs(value - sum(v for v, _ in each) / size) < 1e-12 and type(gradients["out"]) is tuple
own = each[rank][1]
kept = [a.copy() for a in leaves(own)]
averaged = hvd.average_gradients(own)
assert all((a == b).all() for a, b in zip(leaves(own), kept))
for i, a in enumerate(leaves(averaged)):
    np.testing.assert_allclose(a, sum(leaves(g)[i] for _, g in each) / size, rtol=1e-12)
""",
        3,
    )


@pytest.mark.shows("fp16")
def test_fp16_and_what_is_refused() -> None:
    ranks(
        """
params = parameters(seed=0)
each = [grad(loss_of)(params, *samples(4, seed=r)) for r in range(size)]
half = hvd.grad_and_average(grad(loss_of), compression=hvd.Compression.fp16)
for i, a in enumerate(leaves(half(params, *samples(4, seed=rank)))):
    exact = sum(leaves(g)[i] for g in each) / size
    error = np.abs(a - exact).max() / max(np.abs(leaves(g)[i]).max() for g in each)
    assert a.dtype == np.float64 and 1e-8 < error < 2**-10, error

other = dict(params, out=(np.ones((8, 2 + rank)),))
refused(hvd.MismatchError, lambda: hvd.average_gradients(other), "out[0]", "float64[8, 3]")
if rank:
    del other["hidden"]
refused(hvd.MismatchError, lambda: hvd.average_gradients(other), "hidden[0]")

# Inside a function that is being differentiated there are no values yet.
def averages_too_early(w):
    return anp.sum(hvd.average_gradients({"w": w})["w"])

refused(TypeError, lambda: grad(averages_too_early)(np.ones(2)), "'w'", "ArrayBox")
assert hvd.allreduce(float(rank)) == (size - 1) / 2
""",
        2,
    )


def test_digits() -> None:
    assert accuracy_of("autograd", epochs=4, timeout_s=120) > 0.9
