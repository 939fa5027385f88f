"""The examples with horo_lite.torch, as a user starts them: training results and output."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest
from launch import Result, run_ranks
from worlds import script_on_ranks

torch = pytest.importorskip("torch")

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "torch"
# An example takes ten seconds; the limits are for machines with other load.
LIMIT_S = 150
pytestmark = pytest.mark.timeout(6 * LIMIT_S)


def run(example: str, np: int, *args: object) -> Result:
    """Return what the example printed."""
    arguments = [str(arg) for arg in args]
    return script_on_ranks(EXAMPLES / example, np, args=arguments, timeout_s=LIMIT_S)


def start(example: str, np: int, *args: object) -> Result:
    """Return how the example ended; one rank runs without a launcher, as for most users."""
    arguments = [str(arg) for arg in args]
    return run_ranks(EXAMPLES / example, np, args=arguments, launcher=np > 1, timeout_s=LIMIT_S)


def numbers(pattern: str, result: Result) -> list[float]:
    found = re.findall(pattern, result.stdout)
    assert found, result
    return [float(number.replace(",", "")) for number in found]


@pytest.mark.served
@pytest.mark.mpi
@pytest.mark.parametrize(
    ("size", "flags"),
    [
        (2, ""),
        (2, "--fp16-allreduce --gradient-predivide-factor 2 --momentum 0.8 --seed 1 --no-cuda"),
        (2, "--use-adasum --test-batch-size 100"),
        (2, "--batches-per-allreduce 2 --batch-size 16 --lr 0.015 --log-interval 5"),
    ],
)
def test_digits_are_learned(size: int, flags: str) -> None:
    as_users_do = start if not flags else run
    result = as_users_do("mnist.py", size, "--epochs", 6, *flags.split())
    accuracies = numbers(r"accuracy ([\d.]+)", result)
    assert len(accuracies) == 6
    assert accuracies[-1] > 0.93, result
    assert result.stdout.count(f"parameters identical on {size} rank(s)") == 1


@pytest.mark.served
def test_mnist_takes_idx_files(tmp_path: Path) -> None:
    from test_examples import write_mnist

    write_mnist(tmp_path)
    result = run("mnist.py", 1, "--epochs", 1, "--data", tmp_path)
    assert "step 5 of 5" in result.stdout  # 130 images of noise
    assert numbers(r"accuracy ([\d.]+)", result)[0] * 20 % 1 == pytest.approx(0)


@pytest.mark.served
@pytest.mark.mpi
@pytest.mark.parametrize("size", [1, 2])
def test_the_synthetic_benchmark_counts_images(size: int) -> None:
    flags = "--batch-size 2 --image-size 32 --num-warmup-batches 1 --num-iters 3"
    result = run("synthetic_benchmark.py", size, *flags.split(), "--fp16-allreduce")
    turns = numbers(r"with exchange, turn \d: ([\d.]+)", result)
    assert len(turns) == 3
    (of_one,) = numbers(r"images/s per rank: ([\d.]+)", result)
    assert of_one == pytest.approx(sum(turns) / 3, abs=0.11)  # printed values are rounded
    (of_all,) = numbers(rf"images/s on {size} rank\(s\): ([\d.]+)", result)
    assert of_all == pytest.approx(size * of_one, abs=0.05 + 0.05 * size)
    assert re.search(r"scaling: [\d.]+%", result.stdout)
    assert "parameters identical on all ranks" in result.stdout


def test_its_resnet50_is_one() -> None:
    net = load("synthetic_benchmark").resnet50()
    shapes = [tuple(p.shape) for p in net.parameters()]
    assert len(shapes) == 161
    assert sum(p.numel() for p in net.parameters()) == 25_557_032
    for size in (32, 224):
        assert net.eval()(torch.zeros(1, 3, size, size)).shape == (1, 1000)


@pytest.mark.launches
@pytest.mark.skipif(importlib.util.find_spec("torchvision") is not None, reason="it is there")
def test_other_models_need_torchvision() -> None:
    result = start("synthetic_benchmark.py", 1, "--model", "resnet18")
    assert result.returncode != 0
    assert "--model resnet18 needs torchvision: pip install torchvision" in result.stderr


@pytest.mark.served
@pytest.mark.mpi
@pytest.mark.parametrize(
    ("size", "flags"),
    [
        (2, ""),
        (2, "--no-autocast --fp16-allreduce --clip 0.5"),
    ],
)
def test_the_language_model_knows_more_than_how_often_bytes_occur(size: int, flags: str) -> None:
    small = "--steps 80 --context 32 --width 32 --heads 2 --warmup 10 --lr 0.01"
    result = run("language_model.py", size, *small.split(), *flags.split())
    (validation,) = numbers(r"validation loss ([\d.]+)", result)
    (without,) = numbers(r"unigram ([\d.]+)", result)
    assert 2.5 < without < 4.5, "nats per byte of Python's sources"
    assert validation < without - 0.3, result
    assert all(speed > 0 for speed in numbers(r"([\d,]+) tokens/s", result))
    assert result.stdout.count("parameters identical on all ranks") == 1


def test_the_language_model_looks_at_nothing_that_comes_later() -> None:
    example = load("language_model")
    model = example.Transformer(layers=2, width=32, heads=2, context=16).eval()
    text = torch.arange(16).reshape(1, 16)
    other = text.clone()
    other[0, 9:] += 100
    with torch.no_grad():
        scores, changed = model(text), model(other)
    torch.testing.assert_close(scores[0, :9], changed[0, :9])
    assert (scores[0, 9:] - changed[0, 9:]).abs().amax(1).min() > 1e-4


def test_the_comparison_of_the_language_model_is_the_entropy() -> None:
    train = torch.tensor([1] * 3000 + [2] * 1000, dtype=torch.uint8)
    found = load("language_model").unigram_loss(train, train)
    assert found == pytest.approx(0.5623, abs=0.1)  # -(3/4 ln 3/4 + 1/4 ln 1/4)


def load(name: str) -> Any:
    """Return the example as a module; its main() is not called."""
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
