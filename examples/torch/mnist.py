"""Handwritten digits with a small convolutional network, as a Horovod script would train it.

    python mnist.py                       one process
    mpiexec -n 2 python mnist.py          two ranks, each with its own batches

The only change is `import horo_lite.torch as hvd` in place of `import horovod.torch as hvd`.
Without `--data` (a folder of MNIST's IDX files) it trains on scikit-learn's 8 x 8 digits.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import horo_lite.torch as hvd

sys.path.append(str(Path(__file__).resolve().parent.parent))
from digits import load_digits


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--batch-size", type=int, default=32, help="images per rank and pass (default %(default)s)")
    add(
        "--test-batch-size",
        type=int,
        default=1000,
        help="the same, for testing (default %(default)s)",
    )
    add("--epochs", type=int, default=10, help="default %(default)s")
    add("--lr", type=float, default=0.01, help="learning rate for one rank (default %(default)s)")
    add("--momentum", type=float, default=0.9, help="default %(default)s")
    add("--no-cuda", action="store_true", help="train on the CPU")
    add("--seed", type=int, default=42, help="default %(default)s")
    add("--log-interval", type=int, default=10, help="steps between lines (default %(default)s)")
    add("--fp16-allreduce", action="store_true", help="send gradients as float16")
    add(
        "--use-adasum",
        action="store_true",
        help="combine the ranks' steps with Adasum instead of averaging gradients",
    )
    add(
        "--gradient-predivide-factor",
        type=float,
        default=1.0,
        help="divide gradients by this before the sum, and by the remainder after it",
    )
    add(
        "--batches-per-allreduce",
        type=int,
        default=1,
        help="backward passes per exchange of gradients",
    )
    add("--data", type=Path, metavar="DIR", help="folder with the MNIST IDX files")
    args = parser.parse_args()
    if min(args.batch_size, args.test_batch_size, args.epochs, args.batches_per_allreduce) < 1:
        parser.error("sizes, --epochs and --batches-per-allreduce must be at least 1")
    return args


class Net(nn.Module):
    """Two convolutions and two linear layers, for images `[n, 1, height, width]` of any size."""

    def __init__(self, height: int, width: int) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(16, 32, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Dropout2d(0.1),
        )
        self.classes = nn.Sequential(
            nn.Linear(32 * (height // 4) * (width // 4), 64), nn.ReLU(), nn.Linear(64, 10)
        )
        # PyTorch's default initial weights are so small that the loss stays flat at first.
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.kaiming_normal_(parameter, nonlinearity="relu")

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.classes(self.features(images).flatten(1))


def main() -> None:
    args = arguments()
    hvd.init()
    torch.manual_seed(args.seed)
    device = torch.device("cpu")
    if torch.cuda.is_available() and not args.no_cuda:
        device = torch.device("cuda", hvd.local_rank() % torch.cuda.device_count())
        torch.cuda.set_device(device)

    train_images, train_labels, test_images, test_labels = map(
        torch.from_numpy, load_digits(args.data)
    )
    train = TensorDataset(train_images.movedim(3, 1).contiguous(), train_labels)
    # A rank's share of the test set: every size-th image, so that each is tested once.
    mine = slice(hvd.rank(), None, hvd.size())
    test = TensorDataset(test_images.movedim(3, 1)[mine], test_labels[mine])
    sampler = DistributedSampler(train, hvd.size(), hvd.rank(), seed=args.seed)
    # All passes of one exchange are loaded together, and split below.
    train_loader = DataLoader(train, args.batch_size * args.batches_per_allreduce, sampler=sampler)
    test_loader = DataLoader(test, args.test_batch_size)

    model = Net(*train_images.shape[1:3]).to(device)
    # The number of batches per step; Adasum needs no scaling by the number of ranks.
    lr_factor = args.batches_per_allreduce * (1 if args.use_adasum else hvd.size())
    optimizer = torch.optim.SGD(model.parameters(), args.lr * lr_factor, args.momentum)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    optimizer = hvd.DistributedOptimizer(
        optimizer,
        named_parameters=model.named_parameters(),
        compression=hvd.Compression.fp16 if args.fp16_allreduce else hvd.Compression.none,
        backward_passes_per_step=args.batches_per_allreduce,
        op=hvd.Adasum if args.use_adasum else hvd.Average,
        gradient_predivide_factor=args.gradient_predivide_factor,
    )

    for epoch in range(1, args.epochs + 1):
        model.train()
        sampler.set_epoch(epoch)
        for step, (images, labels) in enumerate(train_loader, 1):
            images, labels = images.to(device), labels.to(device)
            optimizer.zero_grad()
            total = 0.0
            for some, theirs in zip(
                images.split(args.batch_size), labels.split(args.batch_size), strict=True
            ):
                loss = functional.cross_entropy(model(some), theirs, reduction="sum") / len(images)
                loss.backward()
                total += loss.item()
            optimizer.step()
            if hvd.rank() == 0 and (step % args.log_interval == 0 or step == len(train_loader)):
                print(f"epoch {epoch}, step {step} of {len(train_loader)}: loss {total:.4f}")
        tested(model, test_loader, len(test_images), device)
    check_parameters(model)


@torch.no_grad()
def tested(model: nn.Module, loader: DataLoader, n_images: int, device: torch.device) -> None:
    """Print on rank 0 the loss and accuracy over all ranks' test images."""
    model.eval()
    sums = torch.zeros(2, dtype=torch.float64)
    for images, labels in loader:
        scores = model(images.to(device)).cpu()
        sums[0] += functional.cross_entropy(scores, labels, reduction="sum")
        sums[1] += (scores.argmax(1) == labels).sum()
    loss, accuracy = hvd.allreduce(sums, op=hvd.Sum, name="test") / n_images
    if hvd.rank() == 0:
        print(f"test: loss {loss:.4f}, accuracy {accuracy:.4f}")


def check_parameters(model: nn.Module) -> None:
    """Raise an error unless all ranks ended with bit-identical parameters."""
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(parameter.detach().cpu().numpy().tobytes())
    if len(set(hvd.allgather_object(digest.hexdigest()))) > 1:
        raise SystemExit("the ranks' parameters differ")
    if hvd.rank() == 0:
        print(f"parameters identical on {hvd.size()} rank(s): {digest.hexdigest()[:12]}")


if __name__ == "__main__":
    main()
