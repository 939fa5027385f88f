"""A small transformer learns to write Python, byte by byte, from the standard library's sources.

    python language_model.py
    mpiexec -n 2 python language_model.py

Mixed precision (bfloat16 under autocast), gradient clipping, warm-up and cosine decay. At the end,
its loss on unseen files is compared with that of a unigram model, which knows only byte
frequencies.
"""

from __future__ import annotations

import argparse
import hashlib
import math
import sysconfig
import time
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional

import horo_lite.torch as hvd

N_BYTES = 256  # the vocabulary


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--steps", type=int, default=300, help="default %(default)s")
    add("--batch-size", type=int, default=8, help="texts per rank and step (default %(default)s)")
    add("--context", type=int, default=128, help="bytes per text (default %(default)s)")
    add("--layers", type=int, default=2, help="default %(default)s")
    add("--width", type=int, default=128, help="default %(default)s")
    add("--heads", type=int, default=4, help="default %(default)s")
    add("--lr", type=float, default=3e-3, help="maximum learning rate (default %(default)s)")
    add("--warmup", type=int, default=30, help="steps of linear warm-up (default %(default)s)")
    add("--clip", type=float, default=1.0, help="maximum gradient norm (default %(default)s)")
    add("--no-autocast", action="store_true", help="compute in float32 throughout")
    add("--fp16-allreduce", action="store_true", help="send gradients as float16")
    add("--no-cuda", action="store_true", help="train on the CPU")
    add("--seed", type=int, default=0, help="default %(default)s")
    add("--log-interval", type=int, default=50, help="steps between lines (default %(default)s)")
    return parser.parse_args()


def read_sources(limit: int = 8 << 20) -> tuple[torch.Tensor, torch.Tensor]:
    """Return bytes for training and for testing: nine and one of every ten files."""
    folder = Path(sysconfig.get_path("stdlib"))
    parts: tuple[list[bytes], list[bytes]] = ([], [])
    size = 0
    # Sorted, so that all ranks read the same; installed packages are excluded.
    for i, path in enumerate(sorted([*folder.glob("*.py"), *folder.glob("[a-z]*/*.py")])):
        if size > limit:
            break
        text = path.read_bytes()
        size += len(text)
        parts[i % 10 == 9].append(text)
    train, test = (torch.frombuffer(bytearray(b"".join(p)), dtype=torch.uint8) for p in parts)
    return train, test


class Block(nn.Module):
    """Causal attention, then two linear layers, each pre-normalized and with a residual."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.queries_keys_values = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        n, length, width = x.shape
        q, k, v = (
            part.view(n, length, self.heads, width // self.heads).transpose(1, 2)
            for part in self.queries_keys_values(self.norms[0](x)).chunk(3, dim=2)
        )
        seen = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(n, length, width))
        return x + self.mlp(self.norms[1](x))


class Transformer(nn.Module):
    """Next-byte scores `[n, length, 256]` for bytes `[n, length]`."""

    def __init__(self, layers: int, width: int, heads: int, context: int) -> None:
        super().__init__()
        self.bytes = nn.Embedding(N_BYTES, width)
        self.places = nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.scores = nn.Linear(width, N_BYTES, bias=False)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)
        for block in self.blocks:  # keeps the residual sum at the scale of one layer
            for last in (block.out, block.mlp[2]):
                nn.init.normal_(last.weight, std=0.02 / math.sqrt(2 * layers))

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        x = self.bytes(text) + self.places.weight[: text.size(1)]
        return self.scores(self.norm(self.blocks(x)))


def main() -> None:
    args = arguments()
    hvd.init()
    device = torch.device("cpu")
    if torch.cuda.is_available() and not args.no_cuda:
        device = torch.device("cuda", hvd.local_rank() % torch.cuda.device_count())
        torch.cuda.set_device(device)
    train, test = read_sources()
    autocast = torch.autocast(device.type, torch.bfloat16, enabled=not args.no_autocast)

    torch.manual_seed(args.seed)
    model = Transformer(args.layers, args.width, args.heads, args.context).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), args.lr, (0.9, 0.95), weight_decay=0.01)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    optimizer = hvd.DistributedOptimizer(
        optimizer,
        named_parameters=model.named_parameters(),
        compression=hvd.Compression.fp16 if args.fp16_allreduce else hvd.Compression.none,
    )

    def rate(step: int) -> float:
        """Return the rate's factor: linear warm-up to 1, then cosine decay to 0.05."""
        if step < args.warmup:
            return (step + 1) / args.warmup
        done = (step - args.warmup) / max(1, args.steps - args.warmup)
        return 0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * min(done, 1.0)))

    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)

    def loss_of(starts: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
        windows = torch.stack([text[start : start + args.context + 1] for start in starts.tolist()])
        windows = windows.to(device).long()
        with autocast:
            scores = model(windows[:, :-1])
        return functional.cross_entropy(scores.float().flatten(0, 1), windows[:, 1:].flatten())

    # Every rank reads at different positions.
    places = torch.Generator().manual_seed(1000 * args.seed + hvd.rank())
    n_parameters = sum(p.numel() for p in model.parameters())
    say(f"{hvd.size()} rank(s), {n_parameters:,} parameters, {len(train):,} bytes of training data")
    n_tokens = hvd.size() * args.batch_size * args.context
    began, steps_done = time.perf_counter(), 0
    for step in range(args.steps):
        starts = torch.randint(len(train) - args.context, (args.batch_size,), generator=places)
        optimizer.zero_grad()
        loss = loss_of(starts, train)
        loss.backward()
        # Gradients are averaged when backward() returns, so every rank clips by the same norm.
        torch.nn.utils.clip_grad_norm_(model.parameters(), args.clip)
        optimizer.step()
        scheduler.step()
        steps_done += 1
        if (step + 1) % args.log_interval == 0 or step + 1 == args.steps:
            mean = hvd.allreduce(loss.detach(), name="loss").item()
            speed = n_tokens * steps_done / (time.perf_counter() - began)
            say(f"step {step + 1}: loss {mean:.3f} nats per byte, {speed:,.0f} tokens/s")
            began, steps_done = time.perf_counter(), 0

    with torch.no_grad():
        starts = torch.arange(hvd.rank(), 64, hvd.size()) * ((len(test) - args.context - 1) // 64)
        total = torch.stack([loss_of(start[None], test) for start in starts]).double().sum().cpu()
    validation = hvd.allreduce(total, op=hvd.Sum, name="validation").item() / 64
    say(f"validation loss {validation:.3f}, unigram {unigram_loss(train, test):.3f}")
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(parameter.detach().cpu().numpy().tobytes())
    if len(set(hvd.allgather_object(digest.hexdigest()))) > 1:
        raise SystemExit("the ranks' parameters differ")
    say(f"parameters identical on all ranks: {digest.hexdigest()[:12]}")


def unigram_loss(train: torch.Tensor, test: torch.Tensor) -> float:
    """Return the nats per byte of a model that knows only byte frequencies."""
    counts = torch.bincount(train.long(), minlength=N_BYTES).double() + 1  # unseen bytes count once
    log_probabilities = (counts / counts.sum()).log()
    return -log_probabilities[test.long()].mean().item()


def say(text: str) -> None:
    if hvd.rank() == 0:
        print(text, flush=True)


if __name__ == "__main__":
    main()
