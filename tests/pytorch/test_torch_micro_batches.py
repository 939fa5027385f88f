"""MicroBatches with PyTorch: dropout, BatchNorm and Adam, on 1 to 4 ranks and two hosts."""

from __future__ import annotations

import hashlib
from typing import Any

import pytest
from worlds import on_ranks

torch = pytest.importorskip("torch")

import horo_lite.torch as hvd  # noqa: E402
from horo_lite.errors import MismatchError  # noqa: E402

nn = torch.nn


def network(momentum: float | None = 0.1) -> Any:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 3, 3),
        nn.BatchNorm2d(3, momentum=momentum),
        nn.ReLU(),
        nn.Flatten(),
        nn.Dropout(0.4),
        nn.Linear(12, 5),
        nn.BatchNorm1d(5),
        nn.Linear(5, 2),
    )


def backward(net: Any, x: Any) -> None:
    out = net(x)
    nn.functional.cross_entropy(out, (x.sum((1, 2, 3)) > 0).long()).backward()


def images(n: int = 40) -> Any:
    return torch.randn((n, 1, 4, 4), generator=torch.Generator().manual_seed(1))


def train() -> tuple[str, list[list[float]]]:
    """Return a hash of the model after training, and its running statistics."""
    hvd.init(threads=1)
    x, net, unused = images(), network(), nn.Linear(2, 2)
    optimizer = torch.optim.Adam([*net.parameters(), *unused.parameters()], lr=0.01)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 4, 0.5)
    micro_batches = hvd.MicroBatches(8, optimizer, model=net, seed=3)
    for step in range(12):
        if step == 6:
            net[1].eval()  # frozen
        for batch in micro_batches(step):
            backward(net, x[batch.samples(x, 24)])
        assert net[1].momentum == 0.1
        nn.utils.clip_grad_norm_(net.parameters(), 0.5)
        optimizer.step()
        schedule.step()
    assert unused.weight.grad is None
    assert hvd.check_in_sync(net, buffers=True)
    assert hvd.check_in_sync(optimizer, state=True)
    assert (int(net[1].num_batches_tracked), int(net[6].num_batches_tracked)) == (48, 96)
    state = net.state_dict()
    content = b"".join(x.numpy().tobytes() for x in state.values()) + repr(torch.rand(2)).encode()
    statistics = [state[name].tolist() for name in ("1.running_mean", "1.running_var")]
    return hashlib.sha256(content).hexdigest(), statistics


@pytest.mark.served
def test_the_bits_do_not_depend_on_the_number_of_ranks() -> None:
    (alone,) = on_ranks(train, 1)
    for size, hosts in ((2, ""), (3, ""), (4, ""), (3, "2,1")):
        assert on_ranks(train, size, hosts=hosts) == [alone] * size


def statistics_of(momentum: float | None) -> tuple[list[Any], list[Any]]:
    """Return the running statistics that MicroBatches computes, and those of one process."""
    hvd.init(threads=1)
    x, both = images(), []
    for n in (4, 0):
        net = network(momentum)
        net[4].p = 0.0
        if n:
            optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
            micro_batches = hvd.MicroBatches(n, optimizer, model=net)
            for step in range(3):
                for batch in micro_batches(step):
                    backward(net, x[batch.rows(x)] + step)
                optimizer.step()
        else:
            for step in range(3):
                for part in x.chunk(4):
                    net(part + step)
        both.append([net[i].state_dict() for i in (1, 6)])
    return both[0], both[1]


@pytest.mark.served
@pytest.mark.parametrize("momentum", [0.1, None])
def test_running_statistics_are_those_of_one_process(momentum: float | None) -> None:
    for mine, theirs in on_ranks(statistics_of, 3, momentum):
        for a, b in zip(mine, theirs, strict=True):
            for name in ("num_batches_tracked", "running_mean", "running_var"):
                torch.testing.assert_close(a[name], b[name])


def interrupted() -> None:
    """A loop that is left has not changed the running statistics."""
    world = hvd.init(threads=1)
    x, net = images(), network()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    micro_batches = hvd.MicroBatches(4, optimizer, model=net)
    before = {name: t.clone() for name, t in net.state_dict().items()}
    with pytest.raises(KeyError):  # noqa: PT012
        for batch in micro_batches(0):
            backward(net, x[batch.rows(x)])
            raise KeyError
    for name, t in net.state_dict().items():
        assert torch.equal(t, before[name])
    assert net[1].momentum == 0.1

    for layer in (hvd.SyncBatchNorm(3), nn.InstanceNorm1d(3, track_running_stats=True)):
        with pytest.raises(ValueError, match=f"a layer {type(layer).__name__}, whose running"):
            hvd.MicroBatches(4, optimizer, model=nn.Sequential(layer))

    # The statistics of a step belong to one loop, and to one run of each layer.
    other = hvd.MicroBatches(4, torch.optim.SGD(net.parameters(), lr=0.1), model=net)
    with pytest.raises(RuntimeError, match=r"pass model= to one MicroBatches only"):
        list(zip(micro_batches(0), other(0), strict=True))
    with pytest.raises(ValueError, match=r"[02] of 4.*: the BatchNorm2d '1' has run 2 times"):  # noqa: PT012
        for batch in micro_batches(0):
            net(x)
            backward(net, x[batch.rows(x)])
    assert net[1].momentum == 0.1

    for batch in micro_batches(0):  # each rank's last one is a number, seen as a whole gradient
        for p in net.parameters():
            first = torch.arange(float(p.numel())).reshape(p.shape)
            p.grad = torch.tensor(2.0).expand(p.shape) if batch.number % 2 else first
    assert all(
        (p.grad.flatten() == torch.arange(p.numel()) / 2 + 1).all() for p in net.parameters()
    )
    with pytest.raises(TypeError, match="a second time"):
        hvd.MicroBatches(4, hvd.DistributedOptimizer(optimizer))

    # A frozen layer uses its statistics, which no loop may hide.
    net.eval()
    before["output"] = net(x)
    for _ in micro_batches(0):
        assert torch.equal(net(x), before["output"])
    for name, t in net.state_dict().items():
        assert torch.equal(t, before[name])
    net.train()

    if world.rank == 1:
        net[7].weight.requires_grad_(False)
        net[7].weight.data = net[7].weight.data.double()
        net[7].bias.data = net[7].bias.data.double()
    with pytest.raises(MismatchError, match=r"param_groups\[0\]\[\d+\]: float32.*float64"):
        for _ in micro_batches(0):
            pass


@pytest.mark.served
def test_a_step_that_was_left_can_be_repeated() -> None:
    on_ranks(interrupted, 2)


def halves(dtype: torch.dtype) -> list[list[float]]:
    """Return averages of gradients whose sums, weighted or not, are no numbers of float16."""
    hvd.init(threads=1)
    found = []
    w = nn.Parameter(torch.zeros(2, 3, dtype=dtype).t())
    optimizer, bare = torch.optim.SGD([w], lr=1.0), nn.Identity()  # without statistics
    micro_batches = hvd.MicroBatches(8, optimizer, model=bare)
    for weight, factor in ((1, 8192), (100_000, 1), (1 / 3, 1)):
        for batch in micro_batches(0):
            batch.weight = weight
            if batch.number % 2:  # the others have none
                w.grad = torch.full_like(w, factor * (batch.number // 2))
        found.append((w.grad / factor).unique().tolist())
    return found


@pytest.mark.served
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_added_up_in_single(dtype: torch.dtype) -> None:
    for size in (1, 2, 3):
        assert on_ranks(halves, size, dtype) == [[[0.75]] * 3] * size
