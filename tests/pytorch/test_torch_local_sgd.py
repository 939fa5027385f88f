"""LocalSGD with modules of PyTorch: parameters take outer steps, moving statistics are averaged."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from launch import run_threads

import horo_lite as hvd
from horo_lite.collectives.group import Group

torch = pytest.importorskip("torch")
nn = torch.nn


def test_a_module_with_batch_norm() -> None:
    def train(group: Group) -> tuple[dict[str, Any], dict[str, Any]]:
        net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
        with torch.no_grad():
            for i, p in enumerate(net.parameters()):
                p.copy_(torch.linspace(-1, 1 + i, p.numel()).view_as(p))
        start = {name: x.clone() for name, x in net.state_dict().items()}
        optimizer = torch.optim.Adam(net.parameters(), 0.1)
        local = hvd.LocalSGD(net, every=2, outer_lr=0.5, outer_momentum=0.5, group=group)
        x = torch.linspace(-1, 1, 18).view(6, 3) ** (1 + group.rank)
        for step in (1, 2):
            optimizer.zero_grad()
            net(x).pow(2).mean().backward()
            optimizer.step()
            mine = {name: value.clone() for name, value in net.state_dict().items()}
            assert local.step() is net
            same = all(map(torch.equal, mine.values(), net.state_dict().values()))
            assert same == (step == 1)
        changes = {name: value - start[name] for name, value in mine.items()}
        return changes, {name: value - start[name] for name, value in net.state_dict().items()}

    everyone = run_threads(3, train)
    for name in everyone[0][0]:
        mean = np.mean([mine[name].numpy() for mine, _ in everyone], axis=0)
        for _, after in everyone:
            if name.endswith("tracked"):
                assert after[name] == 2
            elif "running" in name:
                np.testing.assert_allclose(after[name], mean, rtol=1e-5, atol=1e-6)
            else:  # the first step of Nesterov's momentum
                np.testing.assert_allclose(after[name], 0.5 * 1.5 * mean, rtol=1e-5, atol=1e-6)
