"""Optimizers of torch with gradients on a GPU, run by every rank: see `make gpu-check`.

    torch_steps.py nccl|alone

Every rank also trains on all ranks' samples by itself, and compares.
"""

from __future__ import annotations

import faulthandler
import hashlib
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from collectives import judged
from ranks import join, use_nccl_alone

import horo_lite.torch as hvd
from horo_lite import ops
from horo_lite.collectives.group import Group

WHERE = "cuda" if torch.cuda.is_available() else "cpu"  # a dry run has no GPU
N_STEPS, N_SAMPLES = 8, 16  # of each rank
CLOSE = {"rtol": 2e-3, "atol": 2e-4}  # convolutions may add up in another order
HALF = {"rtol": 2e-2, "atol": 2e-3}


def network() -> torch.nn.Module:
    torch.manual_seed(5)
    layers = [torch.nn.Conv2d(1, 8, 3), torch.nn.ReLU(), torch.nn.Flatten()]
    layers += [torch.nn.Linear(8 * 36, 600), torch.nn.ReLU(), torch.nn.Linear(600, 10)]
    return torch.nn.Sequential(*layers).to(WHERE)


def optimizer_of(net: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)


def samples(rank: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a rank's batch."""
    random = torch.Generator().manual_seed(1000 * rank + step)
    images = torch.randn(N_SAMPLES, 1, 8, 8, generator=random)
    return images.to(WHERE), torch.randint(10, (N_SAMPLES,), generator=random).to(WHERE)


def loss_of(net: torch.nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(net(batch[0]), batch[1])


def wrapped(net: torch.nn.Module, **options: Any) -> Any:
    optimizer = optimizer_of(net)
    return hvd.DistributedOptimizer(optimizer, named_parameters=net.named_parameters(), **options)


def assert_alike(net: torch.nn.Module, group: Group) -> None:
    """Assert that all ranks have the same bits."""
    digest = hashlib.sha256()
    for tensor in net.state_dict().values():
        digest.update(tensor.detach().float().cpu().numpy().tobytes())
    assert len(set(ops.allgather_object(digest.hexdigest(), group=group))) == 1


def assert_as_alone(net: torch.nn.Module, group: Group, n_passes: int = 1, **close: float) -> None:
    """Assert that training on all ranks' batches by oneself gives the same parameters."""
    alone = network()
    optimizer = optimizer_of(alone)
    for step in range(N_STEPS):
        optimizer.zero_grad()
        for i in range(n_passes):
            for rank in range(group.size):
                batch = samples(rank, step * n_passes + i)
                (loss_of(alone, batch) / (group.size * n_passes)).backward()
        optimizer.step()
    for (name, got), expected in zip(net.named_parameters(), alone.parameters(), strict=True):
        assert torch.allclose(got, expected, **(close or CLOSE)), name


def train(net: torch.nn.Module, optimizer: Any, group: Group, late_s: float = 0.0) -> None:
    for step in range(N_STEPS):
        optimizer.zero_grad()
        loss_of(net, samples(group.rank, step)).backward()
        if step == N_STEPS // 2 and group.rank == group.size - 1:
            time.sleep(late_s)
        optimizer.step()


def check_training(group: Group) -> None:
    net = network()
    train(net, wrapped(net), group)
    assert_alike(net, group)
    assert_as_alone(net, group)


def check_a_late_rank(group: Group) -> None:
    net = network()
    train(net, wrapped(net), group, late_s=3.0)
    assert_as_alone(net, group)


def check_half_precision_on_the_wire(group: Group) -> None:
    net = network()
    train(net, wrapped(net, compression=hvd.Compression.fp16), group)
    assert_alike(net, group)
    assert_as_alone(net, group, **HALF)


def check_divided_state_and_gradients(group: Group) -> None:
    """Each rank receives the averages of its share, and updates it."""
    for compression, close in ((hvd.Compression.none, CLOSE), (hvd.Compression.fp16, HALF)):
        net = network()
        optimizer = wrapped(net, compression=compression, shard_state=True, shard_gradients=True)
        train(net, optimizer, group)
        assert_alike(net, group)
        assert_as_alone(net, group, **close)


def check_accumulation(group: Group) -> None:
    net = network()
    optimizer = wrapped(net, backward_passes_per_step=2)
    for step in range(N_STEPS):
        optimizer.zero_grad()
        for i in range(2):
            (loss_of(net, samples(group.rank, 2 * step + i)) / 2).backward()
        optimizer.step()
    assert_alike(net, group)
    assert_as_alone(net, group, n_passes=2)


def check_a_scaler_with_an_overflow_on_one_rank(group: Group) -> None:
    """Every rank skips that step."""
    net = network()
    optimizer = wrapped(net)
    scaler = torch.amp.GradScaler(WHERE, init_scale=256.0)
    before = [p.detach().clone() for p in net.parameters()]
    factor = torch.inf if group.rank == group.size - 1 else 1.0
    scaler.scale(factor * loss_of(net, samples(group.rank, 0))).backward()
    optimizer.synchronize()
    with optimizer.skip_synchronize():
        scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 128.0
    assert all(torch.equal(p, b) for p, b in zip(net.parameters(), before, strict=True))


def check_a_parameter_that_some_ranks_do_not_use(group: Group) -> None:
    net = network()
    more = torch.nn.Parameter(torch.ones(1000, device=WHERE))
    named = [*net.named_parameters(), ("more", more)]
    optimizer = torch.optim.SGD([p for _, p in named], lr=1.0)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=named)
    for step in range(3):
        optimizer.zero_grad()
        loss = loss_of(net, samples(group.rank, step))
        (loss + more.sum() if group.rank == 0 else loss).backward()
        optimizer.step()
    assert torch.allclose(more, torch.full_like(more, 1 - 3 / group.size)), more[0]


def check_memory_does_not_grow(group: Group) -> None:
    if WHERE == "cpu":
        return
    net = network()
    optimizer = wrapped(net)
    free = []
    for _ in range(4):
        train(net, optimizer, group)
        torch.cuda.synchronize()
        ops.barrier(group=group)
        free.append(torch.cuda.mem_get_info()[0])
        ops.barrier(group=group)
    assert free[-1] >= free[1] - 2**21, free


def check_time_of_a_step(group: Group) -> None:
    """Say how much of the exchange is hidden behind backward()."""
    width, n = (2048, 12) if WHERE == "cuda" else (64, 2)
    layers = [torch.nn.Linear(width, width) for _ in range(n)]
    net = torch.nn.Sequential(*layers).to(WHERE)
    x = torch.randn(4096 if WHERE == "cuda" else 4, width, device=WHERE)

    def seconds(call: Callable[[], object]) -> float:
        times = []
        for _ in range(12):
            ops.barrier(group=group)
            if WHERE == "cuda":
                torch.cuda.synchronize()
            began = time.perf_counter()
            call()
            if WHERE == "cuda":
                torch.cuda.synchronize()
            times.append(time.perf_counter() - began)
        return sorted(times)[len(times) // 2]

    def backward() -> None:
        net.zero_grad(set_to_none=False)
        net(x).sum().backward()

    alone = seconds(backward)
    gradients = [p.grad for p in net.parameters()]
    exchange = seconds(lambda: ops.grouped_allreduce_(gradients, group=group))
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(net.parameters(), lr=0.0), named_parameters=net.named_parameters()
    )

    def step() -> None:
        backward()
        optimizer.step()

    together = seconds(step)
    hidden = (alone + exchange - together) / min(alone, exchange)
    if group.rank == 0:
        print(
            f"| backward {1e3 * alone:.2f} ms, exchange {1e3 * exchange:.2f} ms, a step "
            f"{1e3 * together:.2f} ms: {100 * hidden:.0f} % of the shorter one is hidden",
            flush=True,
        )


def main() -> int:
    faulthandler.enable()
    faulthandler.dump_traceback_later(float(os.environ.get("HORO_LITE_TEST_GPU_S", "60")) * 0.9)
    world, referee = join()
    if sys.argv[1] == "alone" and WHERE == "cuda":
        use_nccl_alone(world)
    failed = False
    for name, check in list(globals().items()):
        if name.startswith("check_"):
            what = name.removeprefix("check_").replace("_", " ")
            failed |= judged(what, lambda: check(world.group), referee)  # noqa: B023
    hvd.shutdown()
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
