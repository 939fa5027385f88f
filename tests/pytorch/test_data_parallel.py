"""horo_lite.torch.DistributedDataParallel: PyTorch's own, on the ranks of init()."""

from __future__ import annotations

import io

import pytest
from worlds import on_ranks

torch = pytest.importorskip("torch")

from torch import distributed as dist  # noqa: E402

import horo_lite.torch as hvd  # noqa: E402
from horo_lite.errors import NotInitializedError  # noqa: E402
from horo_lite.torch import ddp_hooks  # noqa: E402


def train(n_lives: int) -> list[float]:
    """Train on a third of each batch, and compare with one process; in one world after another."""
    for _ in range(n_lives):
        world = hvd.init()
        torch.manual_seed(world.rank)
        net = torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.Tanh(), torch.nn.Linear(5, 2))
        net.register_buffer("turns", torch.polar(torch.ones(3), torch.full((3,), 1.0 + world.rank)))
        model = hvd.DistributedDataParallel(net.double())
        model.register_comm_hook(None, ddp_hooks.average_in_place)
        torch.manual_seed(0)
        expected = torch.nn.Sequential(
            torch.nn.Linear(4, 5), torch.nn.Tanh(), torch.nn.Linear(5, 2)
        ).double()
        assert torch.equal(net.turns, torch.polar(torch.ones(3), torch.ones(3)))  # rank 0's
        optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (model, expected)]
        for step in range(4):
            x = torch.randn(
                6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(step)
            )
            for optimizer, one, rows in zip(
                optimizers, (model, expected), (x[world.rank :: 3], x), strict=True
            ):
                optimizer.zero_grad()
                one(rows).square().mean().backward()
                optimizer.step()
        for p, q in zip(net.parameters(), expected.parameters(), strict=True):
            torch.testing.assert_close(p, q, rtol=1e-12, atol=1e-14)
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        again = torch.load(file, weights_only=False)
        assert torch.equal(again.module[0].weight, net[0].weight)
        dist.destroy_process_group()
        hvd.shutdown()
    return [p.sum().item() for p in net.parameters()]


@pytest.mark.served
@pytest.mark.mpi
@pytest.mark.parametrize("hosts", ["", "2,1"])
def test_training_is_that_of_one_process(hosts: str) -> None:
    first, *others = on_ranks(train, 3, 2, hosts=hosts, timeout_s=60)
    assert others == [first] * 2


def test_mistakes_are_told() -> None:
    with pytest.raises(NotInitializedError):
        hvd.DistributedDataParallel(torch.nn.Linear(1, 1))
