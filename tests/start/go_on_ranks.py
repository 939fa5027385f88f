"""The ranks of test_go_on.py."""

import os
import signal
import threading
import time

import numpy as np
import pytest
from home_made import SGD, Parameter

import horo_lite as hvd


def init():
    world = hvd.init(device="cpu", stall_warn_s=20, stall_abort_s=25)
    return world.rank, world.size


class NumpyModel:
    def __init__(self):
        self.params = {"w": Parameter(np.arange(6.0)), "b": Parameter(np.array([1.0, -1.0]))}
        self.optimizer = SGD(self.params, 0.25)

    def distribute(self):
        self.optimizer = hvd.DistributedOptimizer(self.optimizer)

    def step(self, c):  # gradients that depend on the parameters and on c
        self.optimizer.zero_grad()
        for p in self.params.values():
            p.grad = p.data * c
        self.optimizer.step()

    def broadcast(self):
        hvd.broadcast_parameters(self.params, root_rank=0)

    def values(self):
        return np.concatenate([p.data for p in self.params.values()])


class TorchModel:
    def __init__(self):
        import torch

        self.layer = torch.nn.Linear(2, 2).double()
        with torch.no_grad():
            for p in self.layer.parameters():
                p.copy_(torch.arange(p.numel(), dtype=torch.float64).reshape(p.shape))
        self.optimizer = torch.optim.SGD(self.layer.parameters(), lr=0.25)

    def distribute(self):
        from horo_lite.torch import DistributedOptimizer

        self.optimizer = DistributedOptimizer(self.optimizer, self.layer.named_parameters())

    def step(self, c):
        self.optimizer.zero_grad()
        sum(0.5 * c * (p * p).sum() for p in self.layer.parameters()).backward()
        self.optimizer.step()

    def broadcast(self):
        import horo_lite.torch

        horo_lite.torch.broadcast_parameters(self.layer.state_dict(), root_rank=0)

    def values(self):
        return np.concatenate([p.detach().numpy().ravel() for p in self.layer.parameters()])


def interrupt_inside():
    # Once the main thread waits for the others in an operation, which it cannot finish.
    group, has_begun = hvd.world().group, threading.Event()
    real = group._together

    def together(*args):
        has_begun.set()
        return real(*args)

    def interrupt():
        has_begun.wait()
        time.sleep(0.1)
        os.kill(os.getpid(), signal.SIGINT)

    group._together = together
    threading.Thread(target=interrupt, daemon=True).start()


def train(which):
    rank, size = init()
    make = {"numpy": NumpyModel, "torch": TorchModel}[which]
    model, alone = make(), make()
    model.distribute()
    mean = (size + 1) / 2

    def steps():
        for k in (1, 2):
            model.step((rank + 1) / k / 8)
            alone.step(mean / k / 8)
        np.testing.assert_allclose(model.values(), alone.values(), rtol=1e-12)

    operations = {"broadcast_parameters": model.broadcast, "step": lambda: model.step(1.0)}
    if which == "numpy":
        operations |= {"barrier": hvd.barrier, "allreduce": lambda: hvd.allreduce(np.ones(4))}
    steps()
    for operation in operations.values():
        before = model.values().copy()
        if rank == 0:
            # The last rank never comes: it waits for this one's message.
            interrupt_inside()
            with pytest.raises(KeyboardInterrupt):
                operation()
            unusable = (
                r"(?s)can no longer be used.*call shutdown\(\) and then init\(\) on every rank"
            )
            with pytest.raises(hvd.PeerLostError, match=unusable):
                operation()
        else:
            with pytest.raises(hvd.PeerLostError, match=r"(?s)rank 0.*interrupted"):
                operation() if rank < size - 1 else hvd.recv(np.zeros(1), 0)
        np.testing.assert_array_equal(model.values(), before)
        hvd.shutdown()
        assert not hvd.is_initialized()
        assert init() == (rank, size)
        steps()
