"""torch's own wrappers on the backend "horo_lite", against one process on the whole batch."""

from __future__ import annotations

import copy
import gc
import os
import tempfile
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch import multiprocessing as mp
from torch.distributed import checkpoint
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

import horo_lite as hvd
import horo_lite.torch
from horo_lite import context
from horo_lite.torch import ddp_hooks

warnings.simplefilter("ignore", FutureWarning)
STEPS, ROWS = 4, 6  # rows of each rank


class Model(nn.Module):
    """Several buckets; one layer is not used in every step."""

    def __init__(self, *, sparse: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8, sparse=sparse)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(6))
        self.sometimes = nn.Linear(8, 8)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor, step: int = 1) -> Tensor:
        x = self.embedding(x).mean(1)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        if step % 2:
            x = x + self.sometimes(x)
        return self.head(x)


def model(**options: Any) -> Model:
    torch.manual_seed(7)
    return Model(**options).double()


def batch(step: int, size: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    x = torch.randint(11, (size * ROWS, 4), generator=generator)
    return x, torch.randn(size * ROWS, 3, generator=generator, dtype=torch.float64)


def shard(tensors: tuple[Tensor, Tensor], rank: int) -> tuple[Tensor, Tensor]:
    x, y = (t[rank * ROWS : (rank + 1) * ROWS] for t in tensors)
    return x, y


def trained(net: nn.Module, optimizer: Any, data: Callable[[int], Any], **kw: Any) -> None:
    for step in range(STEPS):
        x, y = data(step)
        optimizer.zero_grad()
        ((net(x, step, **kw) - y) ** 2).mean().backward()
        optimizer.step()


def alone(size: int, **options: Any) -> Model:
    """Return the model of one process after training on the whole batches."""
    net = model(**options)
    trained(net, torch.optim.SGD(net.parameters(), 0.3), lambda step: batch(step, size))
    return net


def check(net: nn.Module, expected: nn.Module, what: str, tolerance: float = 1e-12) -> None:
    state, other = net.state_dict(), expected.state_dict()
    assert state.keys() == other.keys(), what
    for name in state:
        torch.testing.assert_close(
            state[name], other[name], rtol=tolerance, atol=tolerance, msg=lambda m: f"{what} {m}"
        )
    # The ranks have the same bits.
    hvd.check_in_sync(net)


def ddp(rank: int, size: int) -> None:
    expected = alone(size)
    untrained = model().state_dict()
    assert not torch.equal(untrained["head.weight"], expected.head.weight)
    for options in (
        {"find_unused_parameters": True},
        {"find_unused_parameters": True, "gradient_as_bucket_view": True, "bucket_cap_mb": 0.001},
    ):
        net = model()
        if rank:  # DDP broadcasts rank 0's
            nn.init.zeros_(net.head.weight)
        wrapped = DistributedDataParallel(net, **options)
        optimizer = torch.optim.SGD(net.parameters(), 0.3)
        trained(wrapped, optimizer, lambda step: shard(batch(step, size), rank))
        check(net, expected, f"DDP {options}")

    # Compressed gradients; sparse gradients; several passes without communication.
    for hook, tolerance in (ddp_hooks.fp16_compress, 2e-3), (ddp_hooks.bf16_compress, 2e-2):
        net = model()
        wrapped = DistributedDataParallel(net, find_unused_parameters=True)
        wrapped.register_comm_hook(None, hook)
        trained(
            wrapped,
            torch.optim.SGD(net.parameters(), 0.3),
            lambda step: shard(batch(step, size), rank),
        )
        check(net, expected, hook.__name__, tolerance)
        exact = all(map(torch.equal, net.state_dict().values(), expected.state_dict().values()))
        assert not exact, f"{hook.__name__} has compressed nothing"

    net = model(sparse=True)
    wrapped = DistributedDataParallel(net, find_unused_parameters=True)
    trained(
        wrapped,
        torch.optim.SGD(net.parameters(), 0.3),
        lambda step: shard(batch(step, size), rank),
    )
    check(net, expected, "sparse gradients")

    net = model()
    wrapped = DistributedDataParallel(net)
    halves = [t.chunk(2) for t in shard(batch(1, size), rank)]
    with wrapped.no_sync():
        ((wrapped(halves[0][0]) - halves[1][0]) ** 2).mean().backward()
    ((wrapped(halves[0][1]) - halves[1][1]) ** 2).mean().backward()
    whole = model()
    x, y = batch(1, size)
    (((whole(x) - y) ** 2).mean() * 2).backward()
    for a, b in zip(net.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-12, atol=1e-12)

    # Ranks with different numbers of batches: sums are divided by that of all, or of those left.
    for by_all in True, False:
        net, whole = model(), model()
        wrapped = DistributedDataParallel(net)
        with wrapped.join(divide_by_initial_world_size=by_all):
            for step in range(1, 3 + rank):
                net.zero_grad()
                x, y = shard(batch(step, size), rank)
                ((wrapped(x) - y) ** 2).mean().backward()
        hvd.check_in_sync(net)
        (((whole(x) - y) ** 2).mean() / (size if by_all else 1)).backward()
        for a, b in zip(net.parameters(), whole.parameters(), strict=True):
            if rank == size - 1:  # the last step is its own
                torch.testing.assert_close(a.grad, b.grad, rtol=1e-12, atol=1e-12)


def in_place(rank: int, size: int) -> None:
    """Buckets in shared memory: the same bits as an ordinary average, and as DDP's own buckets."""

    def averaged(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        work = dist.all_reduce(bucket.buffer(), dist.ReduceOp.AVG, async_op=True)
        return work.get_future().then(lambda future: future.value()[0])

    averaged.__annotations__.clear()

    def buckets() -> list[Any]:
        kept = context.world().group.kept[ddp_hooks._SHARED_BUCKETS]
        return [each for each in kept._buckets.values() if each.memory is not None]

    def train(as_views: bool, hook: Any, n_batches: int) -> tuple[Model, DistributedDataParallel]:
        net = model()
        wrapped = DistributedDataParallel(
            net, bucket_cap_mb=0.001, gradient_as_bucket_view=as_views, find_unused_parameters=True
        )
        wrapped.register_comm_hook(None, hook)
        optimizer = torch.optim.SGD(net.parameters(), 0.3)
        with wrapped.join():  # a rank that has joined sends zeros
            for step in range(n_batches):
                x, y = shard(batch(step, size), rank)
                optimizer.zero_grad()
                ((wrapped(x, step) - y) ** 2).mean().backward()
                optimizer.step()
            own = [(p, p.grad.clone()) for p in net.parameters() if p.grad is not None]
        assert all(torch.equal(p.grad, gradient) for p, gradient in own)
        return net, wrapped

    def same_as_average(n_batches: int, as_views: bool) -> int:
        """Train with and without shared memory, and return how many buckets were in it."""
        net, _wrapped = train(as_views, ddp_hooks.average_in_place, n_batches)
        expected, _ = train(as_views, averaged, n_batches)
        for (name, a), b in zip(net.named_parameters(), expected.parameters(), strict=True):
            assert torch.equal(a, b), (name, as_views, n_batches)
        hvd.check_in_sync(net)
        if as_views and n_batches == 2 * STEPS and buckets():
            where = {p.grad.untyped_storage().data_ptr() for p in net.parameters()}
            assert where == {each.storage.data_ptr() for each in buckets()}
        return len(buckets())

    for as_views in (True, False):
        for n_batches in (2 * STEPS, 2 * STEPS - 3 * rank):
            assert same_as_average(n_batches, as_views) > 2
            gc.collect()
            assert buckets() == [], "memory of deleted models was not freed"

    # When a module is wrapped again in another dtype, a bucket may be as large as before.
    net = model().half()
    for dtype, factor in (torch.float16, 1.0), (torch.bfloat16, 1e6):
        wrapped = DistributedDataParallel(net.to(dtype))
        wrapped.register_comm_hook(None, ddp_hooks.average_in_place)
        for _ in range(3):
            net.zero_grad()
            x, _y = shard(batch(1, size), rank)
            (wrapped(x) * factor).sum().backward()
        bias = float(net.head.bias.grad[0])
        assert abs(bias / (ROWS * factor) - 1) < 0.01, (dtype, bias)
    del net, wrapped
    gc.collect()

    # A sparse gradient is averaged as without the hook, and does not affect the others.
    net = model(sparse=True)
    wrapped = DistributedDataParallel(net, find_unused_parameters=True)
    wrapped.register_comm_hook(None, ddp_hooks.average_in_place)
    trained(
        wrapped,
        torch.optim.SGD(net.parameters(), 0.3),
        lambda step: shard(batch(step, size), rank),
    )
    check(net, alone(size), "sparse gradients beside buckets in shared memory")
    assert len(buckets()) == 1
    del net, wrapped
    gc.collect()

    # If one rank cannot allocate memory, all continue without.
    move = ddp_hooks._moved_to_shared_memory
    if rank != 0:
        ddp_hooks._moved_to_shared_memory = lambda _: None
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert same_as_average(2 * STEPS, True) == 0
    ddp_hooks._moved_to_shared_memory = move
    n_warnings = sum("/dev/shm may be too small" in str(each.message) for each in caught)
    assert n_warnings == (rank == 0)


def overlap(rank: int, size: int) -> None:
    """The first bucket is complete before the backward pass has reached the last layer."""
    done: list[bool] = []
    works: list[Any] = []

    class Watched(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            if works:
                works[0].get_future().wait()  # it does not need anything that comes later
                done.append(works[0].is_success())
            return grad

    def hook(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        bucket.buffer().div_(size)
        works.append(dist.all_reduce(bucket.buffer(), async_op=True))
        return works[-1].get_future().then(lambda future: future.value()[0])

    hook.__annotations__.clear()
    first, last = nn.Linear(64, 64), nn.Linear(64, 64)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = first, last

        def forward(self, x: Tensor) -> Tensor:
            return self.last(Watched.apply(self.first(x)))

    wrapped = DistributedDataParallel(Net(), bucket_cap_mb=0.01)
    wrapped.register_comm_hook(None, hook)
    for step in range(3):
        works.clear()
        wrapped.zero_grad()
        x = torch.full((4, 64), float(rank + step))
        wrapped(x).sum().backward()
    assert done[-1:] == [True], (done, len(works))
    assert len(works) > 1
    mean = 4.0 * sum(r + 2 for r in range(size)) / size
    expected = (mean * last.weight.sum(0)[:, None]).expand(64, 64)
    torch.testing.assert_close(first.weight.grad, expected, rtol=1e-5, atol=1e-5)


def compiled(rank: int, size: int) -> None:
    """Compiled functions call the exchange as it is, without compiling it."""

    def linear() -> nn.Linear:
        layer = nn.Linear(2, 1, bias=False)
        nn.init.ones_(layer.weight)
        return layer

    x = torch.full((1, 2), rank + 1.0)
    mean = sum(r + 1.0 for r in range(size)) / size
    net = linear()
    torch.compile(DistributedDataParallel(net), backend="eager")(x).sum().backward()
    assert net.weight.grad.tolist() == [[mean] * 2]

    net = linear()
    optimizer = horo_lite.torch.DistributedOptimizer(torch.optim.SGD(net.parameters(), 1.0))

    @torch.compile(backend="eager")
    def whole_step(x: Tensor) -> Tensor:
        loss = net(x).sum()
        loss.backward()
        optimizer.step()
        return horo_lite.torch.allreduce(loss.detach())

    assert whole_step(x).item() == 2 * mean
    assert net.weight.tolist() == [[1 - mean] * 2]
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager")):
        try:
            net(x).sum().backward()
        except RuntimeError as error:
            assert "does not report its end" in str(error), error
        else:
            raise AssertionError("gradients were not exchanged")


def zero(rank: int, size: int) -> None:
    net = model()
    wrapped = DistributedDataParallel(net, find_unused_parameters=True)
    optimizer = ZeroRedundancyOptimizer(net.parameters(), torch.optim.SGD, lr=0.3)
    trained(wrapped, optimizer, lambda step: shard(batch(step, size), rank))
    check(net, alone(size), "ZeroRedundancyOptimizer")


def fsdp(rank: int, size: int, folder: str) -> None:
    net = nn.Sequential(
        *(nn.Sequential(nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 8)) for _ in "ab")
    )
    net = net.double()
    for i, parameter in enumerate(net.parameters()):
        nn.init.uniform_(parameter, -0.5, 0.5, torch.Generator().manual_seed(i))
    expected = copy.deepcopy(net)
    mesh = init_device_mesh("cpu", (size,))
    for block in net:
        fully_shard(block, mesh=mesh)
    fully_shard(net, mesh=mesh)
    assert net[0][0].weight.to_local().numel() < 8 * 12

    x = torch.randn(size * 4, 8, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    for each, rows in (expected, x), (net, x[rank * 4 : rank * 4 + 4]):
        optimizer = torch.optim.Adam(each.parameters(), 0.05)
        for _ in range(STEPS):
            optimizer.zero_grad()
            (each(rows) ** 2).mean().backward()
            optimizer.step()
    for (name, a), b in zip(net.named_parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(
            a.full_tensor(), b, rtol=1e-9, atol=1e-9, msg=lambda m, name=name: f"FSDP2 {name} {m}"
        )

    # Every rank saves its shards, and loads them into a model with different ones.
    checkpoint.save(net.state_dict(), checkpoint_id=folder)
    saved = {name: p.full_tensor().clone() for name, p in net.named_parameters()}
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.zero_()
    state = net.state_dict()
    checkpoint.load(state, checkpoint_id=folder)
    net.load_state_dict(state)
    for name, parameter in net.named_parameters():
        assert torch.equal(parameter.full_tensor(), saved[name]), name


def main(rank: int, size: int, store: str, folder: str) -> None:
    # Not before the fork, which loses PyTorch's pool of threads: the threads of autograd, which its
    # build for CUDA starts also without a GPU, would replace it all at once, and abort.
    torch.set_num_threads(1)
    dist.init_process_group("horo_lite", init_method=f"file://{store}", rank=rank, world_size=size)
    ddp(rank, size)
    in_place(rank, size)
    overlap(rank, size)
    compiled(rank, size)
    zero(rank, size)
    fsdp(rank, size, folder)
    dist.destroy_process_group()
    print("right", flush=True)


if __name__ == "__main__":
    size = int(os.environ.get("SIZE", "2"))
    # Most of PyTorch, which all ranks need, is imported before they are forked.
    import torch._inductor.cudagraph_trees

    torch.compile(torch.sin, backend="eager")(torch.ones(1))
    with tempfile.TemporaryDirectory() as folder:
        args = (size, f"{folder}/store", f"{folder}/checkpoint")
        mp.start_processes(main, args, size, start_method="fork")
