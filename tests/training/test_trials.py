"""Compression.auto: which format is tried when, and which is kept, on all ranks."""

from __future__ import annotations

import contextlib
import io
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
from home_made import SGD, Parameter
from worlds import on_ranks

import horo_lite as hvd
from horo_lite.training import trials

pytestmark = [pytest.mark.served, pytest.mark.timeout(60)]

N = 64 * 1024
SENT = {"none": 4 * N, "fp16": 2064 * N // 1024, "int8": 260 * N // 256, "int4": 132 * N // 256}


def train(
    costs: dict[str, float], epochs: list[tuple[int, int]]
) -> tuple[list[int], np.ndarray, str]:
    """Return the bytes sent in each step, the parameters, and what was printed.

    A step with a format takes the time that `costs` says; an epoch has a number of batches for each
    rank.
    """
    clock = [0.0]
    end_step = trials.Trials.end_step

    def timed(self: trials.Trials, what: str, *, counts: bool) -> None:
        # On average what the costs say; rank 1 by itself would choose the first.
        clock[0] += 3 if hvd.rank() else 2 * costs[self.candidate.name] - 3
        end_step(self, what, counts=counts)

    rank = hvd.init().rank
    p, sent = Parameter(np.zeros(N, np.float64), np.zeros(N, np.float32)), []
    with (
        contextlib.redirect_stderr(io.StringIO()) as said,
        mock.patch.object(trials.Trials, "end_step", timed),
        mock.patch.object(trials, "time", SimpleNamespace(perf_counter=lambda: clock[0])),
    ):
        opt = hvd.DistributedOptimizer(SGD([p]), compression=hvd.Compression.auto(*costs))
        for epoch, n_batches in enumerate(epochs):
            for step in range(n_batches[rank]):
                p.grad[:] = np.random.default_rng([epoch, step, rank]).standard_normal(N)
                before = hvd.stats().bytes_sent
                opt.step()
                sent.append(hvd.stats().bytes_sent - before)
            hvd.join()
    return sent, p.data, said.getvalue()


@pytest.mark.parametrize(
    ("costs", "chosen"),
    [
        ({"none": 10, "fp16": 6, "int8": 5.8}, "fp16"),
        ({"none": 10, "fp16": 9.6, "int8": 9.7}, "none"),
        ({"none": 10, "int8": 4, "int4": 3}, "int4"),
    ],
)
def test_the_first_that_is_nearly_as_fast_as_the_fastest_is_kept(
    costs: dict[str, float], chosen: str
) -> None:
    found = on_ranks(train, 2, costs, [(25, 25)], hosts="1,1")
    for sent, data, said in found:
        for i, wire in enumerate(costs):
            assert sent[7 * i + 1 : 7 * i + 6] == [SENT[wire]] * 5
        assert sent[22:] == [SENT[chosen]] * 3
        assert data.tobytes() == found[0][1].tobytes()
        assert (f"compression {chosen} from now on" in said) == (data is found[0][1])
    for wire, cost in costs.items():
        assert f"{wire} {1e3 * cost:.3g}" in found[0][2]


def test_steps_without_all_ranks_are_not_counted() -> None:
    costs = {"none": 10, "int8": 4}
    epochs = [(9, 5), (2, 9), (14, 8), (4, 4)]
    (_, _, said), (sent, _, nothing) = on_ranks(train, 2, costs, epochs, hosts="1,1")
    assert "compression int8 from now on" in said
    assert nothing == ""
    assert sent[-3:] == [SENT["int8"]] * 3


def test_what_has_no_effect_is_not_tried() -> None:
    for _, _, said in on_ranks(train, 2, {"none": 10, "int8": 4}, [(18, 18)]):
        assert said == ""
    ((_, _, said),) = on_ranks(train, 1, {"none": 10, "fp16": 4}, [(18,)])
    assert said == ""


def asked_in_each_step() -> str:
    hvd.init()
    with contextlib.redirect_stderr(io.StringIO()) as said:
        for _ in range(15):
            auto = hvd.Compression.auto("none", "int8")
            hvd.average_gradients(np.ones(3000, np.float32), compression=auto, name="x")
    return said.getvalue()


def test_a_function_may_ask_in_each_step() -> None:
    said, nothing = on_ranks(asked_in_each_step, 2, hosts="1,1")
    assert "from now on, for average_gradients 'x'" in said
    assert nothing == ""


def misuse() -> None:
    hvd.init()
    auto = hvd.Compression.auto()
    assert repr(auto) == "Compression.auto(none, fp16)"
    with pytest.raises(ValueError, match="is for the gradients of an optimizer's steps"):
        hvd.allreduce(np.ones(3), compression=auto)
    with pytest.raises(ValueError, match=r"auto\(\) takes 'none', .* not 'fp8'"):
        hvd.Compression.auto("fp8")


def test_misuse_is_an_error() -> None:
    on_ranks(misuse, 1)
