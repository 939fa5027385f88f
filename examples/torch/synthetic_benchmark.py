"""Training throughput in images per second, with random images and without disk access.

    python synthetic_benchmark.py
    mpiexec -n 2 python synthetic_benchmark.py --fp16-allreduce

First every rank trains alone, then all of them together: the difference is the cost of the
exchange. Without a GPU the defaults are small, and ResNet-50 takes half a minute.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional

import horo_lite.torch as hvd


def arguments(on_gpu: bool) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--model", default="resnet50", help="resnet50, or a torchvision model if it is installed")
    add(
        "--batch-size", type=int, default=32 if on_gpu else 4, help="per rank (default %(default)s)"
    )
    add(
        "--image-size",
        type=int,
        default=224 if on_gpu else 96,
        help="images are square (default %(default)s)",
    )
    add(
        "--num-warmup-batches",
        type=int,
        default=10 if on_gpu else 2,
        help="not timed (default %(default)s)",
    )
    add(
        "--num-batches-per-iter",
        type=int,
        default=10 if on_gpu else 2,
        help="timed together (default %(default)s)",
    )
    add("--num-iters", type=int, default=10 if on_gpu else 5, help="default %(default)s")
    add("--fp16-allreduce", action="store_true", help="send gradients as float16")
    add(
        "--use-adasum",
        action="store_true",
        help="combine the ranks' steps with Adasum instead of averaging gradients",
    )
    add("--no-cuda", action="store_true", help="train on the CPU")
    return parser.parse_args()


class Bottleneck(nn.Module):
    """Three convolutions around a shortcut (He et al. 2015; the stride at the 3 x 3, as usual)."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = 4 * width
        self.path = nn.Sequential(
            *convolution(inputs, width, 1),
            nn.ReLU(inplace=True),
            *convolution(width, width, 3, stride),
            nn.ReLU(inplace=True),
            *convolution(width, outputs, 1),
        )
        self.shortcut = nn.Sequential()
        if stride > 1 or inputs != outputs:
            self.shortcut = nn.Sequential(*convolution(inputs, outputs, 1, stride))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.relu(self.path(x) + self.shortcut(x))


def convolution(inputs: int, outputs: int, side: int, stride: int = 1) -> list[nn.Module]:
    return [
        nn.Conv2d(inputs, outputs, side, stride, padding=side // 2, bias=False),
        nn.BatchNorm2d(outputs),
    ]


def resnet50(classes: int = 1000) -> nn.Module:
    """Return ResNet-50, with 25,557,032 parameters in 161 tensors."""
    layers: list[nn.Module] = [
        *convolution(3, 64, 7, 2),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(3, 2, padding=1),
    ]
    inputs = 64
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            layers.append(Bottleneck(inputs, width, 2 if block == 0 and width > 64 else 1))
            inputs = 4 * width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, classes))


def network(name: str) -> nn.Module:
    if name == "resnet50":
        return resnet50()
    try:
        from torchvision import models
    except ImportError:
        raise SystemExit(f"--model {name} needs torchvision: pip install torchvision") from None
    try:
        return models.get_model(name)
    except ValueError as error:
        raise SystemExit(f"--model {name}: {error}") from None


def main() -> None:
    hvd.init()
    on_gpu = torch.cuda.is_available()
    args = arguments(on_gpu)
    device = torch.device("cpu")
    if on_gpu and not args.no_cuda:
        device = torch.device("cuda", hvd.local_rank() % torch.cuda.device_count())
        torch.cuda.set_device(device)
        torch.backends.cudnn.benchmark = True

    torch.manual_seed(hvd.rank())
    model = network(args.model).to(device)
    images = torch.randn(args.batch_size, 3, args.image_size, args.image_size, device=device)
    labels = torch.randint(1000, (args.batch_size,), device=device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step() -> None:
        optimizer.zero_grad()
        functional.cross_entropy(model(images), labels).backward()
        optimizer.step()

    say(f"{args.model}, {args.batch_size} images of {args.image_size} x {args.image_size} per step")
    say(f"{hvd.size()} rank(s) on {device.type}")
    alone, _ = measure("without exchange", step, args, device)

    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    optimizer = hvd.DistributedOptimizer(
        optimizer,
        named_parameters=model.named_parameters(),
        compression=hvd.Compression.fp16 if args.fp16_allreduce else hvd.Compression.none,
        op=hvd.Adasum if args.use_adasum else hvd.Average,
    )
    together, margin = measure("with exchange", step, args, device)

    n = hvd.size()
    say(f"images/s per rank: {together:.1f} +- {margin:.1f}")
    say(f"images/s on {n} rank(s): {n * together:.1f} +- {n * margin:.1f}")
    say(f"scaling: {together / alone:.1%} of {n} rank(s) without exchange")
    # All ranks must have taken the same steps: differing numbers mean different models.
    sums = torch.stack([p.detach().double().sum().cpu() for p in model.parameters()])
    everyone = hvd.allgather(sums[None], name="parameters")
    if not (everyone == everyone[0]).all():
        raise SystemExit("the ranks' parameters differ")
    say("parameters identical on all ranks")


def measure(
    what: str, step: Callable[[], None], args: argparse.Namespace, device: torch.device
) -> tuple[float, float]:
    """Return images per second per rank, averaged over ranks and turns, and the 95 % interval."""
    for _ in range(args.num_warmup_batches):
        step()
    rates = []
    for turn in range(args.num_iters):
        hvd.barrier()
        began = time.perf_counter()
        for _ in range(args.num_batches_per_iter):
            step()
        if device.type == "cuda":
            torch.cuda.synchronize()
        elapsed = time.perf_counter() - began
        rate = torch.tensor(args.batch_size * args.num_batches_per_iter / elapsed)
        rates.append(hvd.allreduce(rate, name="rate").item())
        say(f"{what}, turn {turn + 1}: {rates[-1]:.1f} images/s per rank")
    spread = statistics.stdev(rates) if len(rates) > 1 else 0.0
    return statistics.mean(rates), 1.96 * spread


def say(text: str) -> None:
    if hvd.rank() == 0:
        print(text, flush=True)


if __name__ == "__main__":
    main()
