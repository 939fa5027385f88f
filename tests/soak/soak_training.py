"""A job of `make soak`: training that loses ranks, and must end with the result of one process.

A small model is trained under Open MPI's fault tolerance, while ranks are killed: before, in, or
after an exchange, two at once, one more during the recovery. The survivors must end with equal
parameters, and these must be what one process computes from the batches that the job kept in its
state; every sample must occur in them as often as it should.
"""

from __future__ import annotations

import json
import os
import random
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np

N_SAMPLES, N_EPOCHS, BATCH, N_WEIGHTS = 240, 2, 4, 2000


class Adam:
    """Any optimizer with state would do; this one's steps depend on their number."""

    def __init__(self, weights: np.ndarray) -> None:
        self.params = [self]
        self.data, self.grad = weights, np.zeros_like(weights)
        self.mean, self.square, self.t = np.zeros_like(weights), np.zeros_like(weights), 0

    def step(self) -> None:
        self.t += 1
        self.mean[:] = 0.9 * self.mean + 0.1 * self.grad
        self.square[:] = 0.99 * self.square + 0.01 * self.grad**2
        rate = 0.01 / (1 - 0.9**self.t)
        self.data -= rate * self.mean / (np.sqrt(self.square / (1 - 0.99**self.t)) + 1e-8)


def samples() -> np.ndarray:
    return np.random.default_rng(7).normal(size=(N_SAMPLES, N_WEIGHTS))


def gradient(weights: np.ndarray, batch: np.ndarray) -> np.ndarray:
    return (np.tanh(weights) - batch).mean(axis=0)


def main() -> None:
    """Run one rank: it dies by the plan in the environment, `{"rank": [place, step, signal], …}`.

    If the place is "renewal", the step is the time in milliseconds after which it dies in the
    first.
    """
    import horo_lite as hvd
    from horo_lite.elastic import recovery

    hvd.init()
    print("STARTS", flush=True)
    me = hvd.rank()
    place, at, how = json.loads(os.environ["SOAK_PLAN"]).get(str(me), ["nowhere", 0, 0])
    sleepy = random.Random(me)

    def here(where: str, step: int) -> None:
        if where == place and step == at:
            print(f"DIES {time.time()}", flush=True)
            os.kill(os.getpid(), how)

    def renew(comm: object, renew: Callable[[object], object] = recovery.renew) -> None:
        if place == "renewal":
            threading.Timer(at / 1000, os.kill, [os.getpid(), how]).start()
        renew(comm)

    recovery.renew = renew
    inner = Adam(np.full(N_WEIGHTS, float(me)))
    opt = hvd.DistributedOptimizer(inner)
    data = samples()
    sampler = hvd.elastic.Sampler(N_SAMPLES, seed=5)
    # Which rank trained on which samples is kept in the state, and is rolled back with it.
    state = hvd.elastic.State(
        weights=inner.data, opt=opt, sampler=sampler, epoch=0, step=0, history=[],
        begin=inner.data.copy(),
    )  # fmt: skip
    state.register_reset_callbacks([lambda: here("reset", 0)])
    first_after = False

    @hvd.elastic.run
    def train(state: hvd.elastic.State) -> None:
        nonlocal first_after
        again = first_after
        first_after = True
        for state.epoch in range(state.epoch, N_EPOCHS):  # noqa: B020
            sampler.set_epoch(state.epoch)
            mine = list(sampler)
            for i in range(0, len(mine), BATCH):
                here("before", state.step)
                time.sleep(0.05 if sleepy.random() < 0.02 else 0.005)
                batch = mine[i : i + BATCH]
                together = hvd.allgather_object(batch)
                inner.grad[:] = gradient(inner.data, data[batch])
                here("exchange", state.step)
                handle = hvd.allreduce_async(np.ones(100_000), name="beside")
                here("beside", state.step)
                opt.step()
                here("after", state.step)
                state.history = [*state.history, [state.epoch, together]]
                sampler.record_batch(i // BATCH, BATCH)
                state.step += 1
                hvd.synchronize(handle)
                if again:
                    again = False
                    print(f"GOES ON {time.time()} {state.step}", flush=True)
                if state.step % 10 == 0:
                    here("commit", state.step)
                    state.commit()
        here("end", 0)

    train(state)
    print("TRAINED", flush=True)
    seen = [(epoch, i) for epoch, parts in state.history for part in parts for i in part]
    every = {(epoch, i) for epoch in range(N_EPOCHS) for i in range(N_SAMPLES)}
    # Each epoch's end may be padded with size - 1 samples, and once more after a loss.
    assert set(seen) == every, f"{len(every - set(seen))} samples were never seen"
    assert len(seen) <= len(every) + 3 * N_EPOCHS + 3, f"{len(seen) - len(every)} were seen twice"
    assert state.step == len(state.history) == inner.t

    reference = Adam(state.begin)
    for _, parts in state.history:
        gradients = [gradient(reference.data, data[part]) for part in parts]
        reference.grad[:] = np.mean(gradients, axis=0)
        reference.step()
    error = np.abs(reference.data - inner.data).max()
    assert error < 1e-9, f"the weights are off by {error}"
    assert len(set(hvd.allgather_object(inner.data.tobytes()))) == 1, "the survivors differ"
    print(f"ENDS {hvd.size()} {state.step}", flush=True)


def plan_of(rng: random.Random, n: int) -> dict[str, list[Any]]:
    """Draw which ranks die, and where: one rank, two at once, or one after the other."""
    places = ["before", "exchange", "beside", "after", "commit", "end", "reset"]
    how = [signal.SIGKILL, signal.SIGKILL, signal.SIGTERM, signal.SIGSEGV]
    n_dying = rng.randint(1, n - 1)
    together = rng.random() < 0.4
    step = rng.randint(0, 28)
    plan: dict[str, list[Any]] = {}
    for rank in rng.sample(range(n), n_dying):
        place = rng.choice(places)
        at = step if together else rng.randint(0, 28)
        if place == "commit":
            at = max(10, at // 10 * 10)
        plan[str(rank)] = [place, 0 if place in ("end", "reset") else at, int(rng.choice(how))]
    if n > 2 and rng.random() < 0.3:  # one more in the recovery from the first
        first = rng.choice(sorted(plan))
        if plan[first][0] == "reset":
            plan[first][:2] = ["exchange", step]
        others = [str(r) for r in range(n) if str(r) != first]
        other = rng.choice(others)
        if len(plan) < n - 1 or other in plan:
            where = rng.choice([["reset", 0], ["renewal", rng.randint(0, 20)]])
            plan[other] = [*where, int(signal.SIGKILL)]
    return plan


if __name__ == "__main__":
    main()
