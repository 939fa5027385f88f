"""The flags, the printed table and the final check of the digits examples."""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import os
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

import horo_lite as hvd

try:
    from tqdm import tqdm
except ImportError as error:
    sys.exit(f"{error}. To install the examples' dependencies: pip install 'horo_lite[examples]'")

T = TypeVar("T")
WIRE_DTYPES = {"fp16": "float16", "bf16": "bfloat16"}
BYTES = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}
TRANSPORTS = {
    "shm": "shared memory",
    "mpi": "MPI",
    "nccl": "NCCL",
    "staged": "the host's memory",
}


def arguments(description: str | None, *, lr: float) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--epochs", type=int, default=12, help="default %(default)s")
    parser.add_argument(
        "--batch-size",
        type=int,
        default=64,
        help="images per step, all ranks together (default %(default)s)",
    )
    parser.add_argument("--lr", type=float, default=lr, help="learning rate (default %(default)s)")
    halves = parser.add_mutually_exclusive_group()
    halves.add_argument("--fp16-allreduce", action="store_true", help="send gradients as float16")
    halves.add_argument("--bf16-allreduce", action="store_true", help="send gradients as bfloat16")
    parser.add_argument("--data", type=Path, metavar="DIR", help="folder with the MNIST IDX files")
    parser.add_argument("--seed", type=int, default=0, help="default %(default)s")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw the learning curve")
    parser.add_argument("--save", type=Path, metavar="FILE.npz", help="save the parameters")
    args = parser.parse_args()
    if min(args.epochs, args.batch_size) < 1 or args.seed < 0:
        parser.error("--epochs and --batch-size must be at least 1, --seed at least 0")
    args.compression = (
        hvd.Compression.fp16
        if args.fp16_allreduce
        else hvd.Compression.bf16
        if args.bf16_allreduce
        else hvd.Compression.none
    )
    return args


class Report:
    """Measures the training and reports it on rank 0. Every rank makes the same calls."""

    def __init__(
        self,
        args: argparse.Namespace,
        world: hvd.World,
        *,
        n_train: int,
        n_test: int,
        parameter_sizes: Iterable[int],
        dtype: str = "float32",
    ) -> None:
        self._args = args
        self._world = world
        self._n_elements = sum(parameter_sizes)
        self._wire = WIRE_DTYPES.get(args.compression.wire, dtype)
        self._rows: list[tuple[float, float]] = []
        self._train_s = 0.0
        self._exchange_s = 0.0
        self._steps = 0
        share = args.batch_size / world.size
        self.say(
            f"{n_train:,} images to train on, {n_test:,} to test; "
            f"{self._n_elements:,} parameters\n"
            + (
                f"1 rank ({world.device}) processes the whole batch of {args.batch_size} images"
                if world.size == 1
                else f"{world.size} ranks ({world.device}) share each batch of "
                f"{args.batch_size} images, {share:.3g} per rank; "
                f"gradients are sent as {self._wire}"
            )
            + "\n\nepoch  train loss  test accuracy  images/s  exchange"
        )

    def say(self, text: str) -> None:
        if self._world.rank == 0:
            print(text, flush=True)

    def batches(self, loader: Iterable[T], epoch: int) -> Iterator[T]:
        """Yield the loader's batches, timed, with a progress bar if rank 0 has a terminal."""
        self._epoch_train_s = -time.perf_counter()
        self._epoch_exchange_s = 0.0
        self._epoch_steps = 0
        with tqdm(
            loader,
            desc=f"epoch {epoch + 1}/{self._args.epochs}",
            unit="step",
            ncols=72,  # Set explicitly, because a launcher's pseudo-terminal has no size.
            nrows=20,
            leave=False,
            file=sys.stdout,  # The same stream as for the table: launchers reorder streams.
            disable=self._world.rank != 0 or not _on_terminal(),
        ) as bar:
            for batch in bar:
                yield batch
                self._epoch_steps += 1
        self._epoch_train_s += time.perf_counter()

    @contextlib.contextmanager
    def exchange(self) -> Iterator[None]:
        """Count the time inside as gradient exchange, including the wait for other ranks."""
        start = time.perf_counter()
        yield
        self._epoch_exchange_s += time.perf_counter() - start

    def epoch(self, train_loss_sum: float, n_seen: int, n_correct: int, n_tested: int) -> None:
        """Print a line of the table. Arguments are this rank's, so that the totals are exact."""
        sums = np.array([train_loss_sum, n_seen, n_correct, n_tested], np.float64)
        loss_sum, seen, correct, tested = hvd.allreduce(sums, op=hvd.Sum)
        times = np.array([self._epoch_train_s, self._epoch_exchange_s], np.float64)
        train_s, exchange_s = hvd.allreduce(times)
        loss, accuracy = loss_sum / seen, correct / tested
        self._rows.append((loss, accuracy))
        self._train_s += train_s
        self._exchange_s += exchange_s
        self._steps += self._epoch_steps
        share = f"{exchange_s / train_s:.1%}" if exchange_s > 0 and self._world.size > 1 else "-"
        self.say(
            f"{len(self._rows):5}  {loss:10.4f}  {accuracy:13.4f}  {seen / train_s:8,.0f}"
            f"  {share:>8}"
        )

    def finish(self, parameters: Mapping[str, Any]) -> None:
        """Print the result, and end the program with an error if the ranks' weights differ."""
        world, args = self._world, self._args
        # CuPy arrays are copied to the host with get().
        arrays = {name: a.get() if hasattr(a, "get") else a for name, a in parameters.items()}
        digest = hashlib.sha256()
        for array in arrays.values():
            digest.update(array.tobytes())
        digests = hvd.allgather_object(digest.hexdigest())
        others = [rank for rank, theirs in enumerate(digests) if theirs != digests[0]]

        self.say(f"\ntest accuracy {self._rows[-1][1]:.4f}")
        if others:
            self.say(
                f"the parameters of rank {', '.join(map(str, others))} differ from rank 0's: "
                "was broadcast_parameters() omitted, or a step taken without the exchange?"
            )
            raise SystemExit(1)
        if world.size > 1:
            self.say(
                f"parameters bit-identical on all {world.size} ranks "
                f"(checked: SHA-256 {digests[0][:12]}… on each)"
            )
        self.say(self._cost())
        if world.rank == 0 and args.save:
            np.savez(args.save, **arrays)
        if world.rank == 0 and args.plot:
            self._plot(args.plot)
            self.say(f"learning curve saved to {args.plot}")

    def _cost(self) -> str:
        if self._world.size == 1:
            return "nothing to exchange: a single rank has the whole gradient"
        step_ms = 1e3 * self._exchange_s / self._steps
        took = (
            f"averaging the gradients over the ranks took {step_ms:.2f} ms per step, "
            f"{self._exchange_s / self._train_s:.1%} of the training time,\n"
            "including the wait for the slowest rank"
            if self._exchange_s > 0
            else "averaging the gradients is part of the compiled step or the backward pass, "
            "and not timed separately"
        )
        step_bytes = self._n_elements * BYTES[self._wire]
        transport = TRANSPORTS.get(self._world.transport, self._world.transport)
        return (
            f"{took}\n({self._steps:,} steps, each with {step_bytes / 1e3:,.1f} kB of gradients "
            f"as {self._wire} through {transport}: "
            f"{self._steps * step_bytes / 1e6:,.1f} MB in total)"
        )

    def _plot(self, path: Path) -> None:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot as plt

        losses, accuracies = zip(*self._rows, strict=True)
        epochs = range(1, len(losses) + 1)
        figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.5), layout="constrained")
        left.plot(epochs, losses, "o-")
        left.set(title="train loss", xlabel="epoch", yscale="log")
        right.plot(epochs, accuracies, "o-", color="tab:green")
        right.set(title=f"test accuracy (at the end {accuracies[-1]:.4f})", xlabel="epoch")
        for axes in (left, right):
            axes.grid(alpha=0.3)
            axes.xaxis.get_major_locator().set_params(integer=True)
        ranks = "1 rank" if self._world.size == 1 else f"{self._world.size} ranks"
        figure.suptitle(f"{ranks}, batches of {self._args.batch_size}")
        figure.savefig(path, dpi=120)


def _on_terminal() -> bool:
    """Return whether rank 0's output goes to a terminal.

    Checks the launcher's stdout instead of rank 0's, for which launchers insert a pipe or a
    pseudo-terminal.
    """
    launchers = ("mpi", "prte", "orte", "hydra")
    try:
        pid = os.getpid()
        parent = os.getppid()
        while Path(f"/proc/{parent}/comm").read_text().startswith(launchers):
            pid = parent
            parent = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        return os.readlink(f"/proc/{pid}/fd/1").startswith(("/dev/pts/", "/dev/tty"))
    except OSError:
        return False
