"""PyTorch's optimizers do what every framework's do."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from contract import Contract

torch = pytest.importorskip("torch")

import horo_lite.torch  # noqa: E402

nn = torch.nn


@pytest.mark.shows("fp16")
class TestTorch(Contract):
    face = horo_lite.torch
    threads = True
    optimizers = ("momentum", "adam")
    dtypes = ("float64", "float16")

    def network(self, seed: int) -> Any:
        net = nn.Sequential(nn.Conv2d(1, 3, 3), nn.ReLU(), nn.Flatten(), nn.Linear(48, 5))
        generator = torch.Generator().manual_seed(seed)  # the threads share torch's
        for p in net.parameters():
            nn.init.normal_(p, std=0.3, generator=generator)
        return net

    def parameters(self, values: Any) -> Any:
        return nn.ParameterDict({name: torch.from_numpy(x.copy()) for name, x in values.items()})

    def arrays(self, net: Any) -> Any:
        return dict(net.named_parameters())

    def optimizer(self, kind: str, net: Any) -> Any:
        if kind == "adam":
            return torch.optim.Adam(net.parameters(), lr=0.01, eps=1e-3)
        momentum = {"sgd": 0.0, "momentum": 0.9}[kind]
        return torch.optim.SGD(net.parameters(), 1.0 if kind == "sgd" else 0.1, momentum)

    def gradients(self, net: Any, optimizer: Any, x: Any, y: Any) -> Any:
        optimizer.zero_grad()
        if hasattr(optimizer, "set_weight"):  # backward() sends
            optimizer.set_weight(len(x))
        nn.functional.cross_entropy(net(torch.from_numpy(x)), torch.from_numpy(y)).backward()

    def given(self, net: Any, gradients: Any) -> Any:
        for name, p in net.items():
            p.grad = None if gradients[name] is None else torch.from_numpy(gradients[name].copy())

    def step(self, net: Any, optimizer: Any, gradients: Any, **weight: float) -> None:
        optimizer.step()

    def array(self, x: Any) -> Any:
        return torch.from_numpy(np.array(x))

    def numpy(self, x: Any) -> Any:
        return x.detach().numpy()

    def wrap(self, net: Any, optimizer: Any, group: Any, **options: Any) -> Any:
        named = net.named_parameters()
        return self.face.DistributedOptimizer(optimizer, named, process_set=group, **options)

    def broadcast(self, net: Any, root: int, group: Any) -> None:
        self.face.broadcast_parameters(net.state_dict(), root, process_set=group)

    def broadcast_state(self, optimizer: Any, root: int, group: Any) -> None:
        self.face.broadcast_optimizer_state(optimizer, root, process_set=group)
