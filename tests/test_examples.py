"""The examples as a user starts them, and what they print, save and draw."""

from __future__ import annotations

import gzip
import importlib.util
import json
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import cpus
import numpy as np
import pytest
from launch import Result, mpi_name, run_ranks
from notebook import code_of
from worlds import script_on_ranks

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
HALVES = {"float32": [], "float16": ["--fp16-allreduce"], "bfloat16": ["--bf16-allreduce"]}
# An example takes a few seconds; the limits are for machines with other load.
LIMIT_S = 150
pytestmark = pytest.mark.timeout(6 * LIMIT_S)

needs_torch = pytest.mark.skipif(
    importlib.util.find_spec("torch") is None,
    reason="PyTorch is not installed: digits_torch.py goes untested; pip install torch",
)
NUMPY = pytest.param("digits_numpy.py", id="numpy")
TORCH = pytest.param("digits_torch.py", id="torch", marks=needs_torch)


def run(example: str, np: int, *args: object, options: Sequence[str] = ()) -> Result:
    """Return how the example ended; one rank runs without a launcher, as for most users."""
    arguments = [str(arg) for arg in args]
    return run_ranks(
        EXAMPLES / example,
        np,
        args=arguments,
        options=options,
        launcher=np > 1,
        # Each thread of OpenBLAS spins while another job has the core of the others: 18 s of CPU.
        env={"OPENBLAS_NUM_THREADS": "1"} if np == 1 else None,
        timeout_s=LIMIT_S,
    )


def printed_by(example: str, np: int, *args: object) -> Result:
    """Return what the example printed on ranks that already run."""
    arguments = [str(arg) for arg in args]
    return script_on_ranks(EXAMPLES / example, np, args=arguments, timeout_s=LIMIT_S)


def accuracy(result: Result) -> float:
    (found,) = re.findall(r"^test accuracy (\d\.\d+)$", result.stdout, re.MULTILINE)
    return float(found)


def furthest(path: Path, other: Path) -> float:
    """Return the largest relative distance between parameters of the two files."""
    with np.load(path) as a, np.load(other) as b:
        assert a.files == b.files
        return max(float(np.linalg.norm(a[k] - b[k]) / np.linalg.norm(a[k])) for k in a.files)


@pytest.mark.launches
@pytest.mark.parametrize(
    ("example", "size", "wire"),
    [
        pytest.param(*example.values, size, wire, id=f"{example.id}-{size}-{wire}", marks=marks)
        for example, marks, cases in [
            # Each size and each format: combinations are tested in tests/collectives. One under
            # every MPI: on one host MPI starts the ranks, but does not take part in the exchange.
            (NUMPY, [pytest.mark.mpi, pytest.mark.quick], [(2, "float32")]),
            (NUMPY, (), [(1, "float32")]),
            (NUMPY, pytest.mark.served, [(2, "bfloat16"), (4, "float16")]),
            (TORCH, [pytest.mark.served, needs_torch], [(2, "float16")]),
        ]
        for size, wire in cases
    ],
)
def test_digits_are_learned_alike_on_all_ranks(
    example: str, size: int, wire: str, request: pytest.FixtureRequest
) -> None:
    served = request.node.get_closest_marker("served")
    result = (printed_by if served else run)(example, size, *HALVES[wire]).check()
    assert accuracy(result) > 0.97
    table = re.findall(r"^ +\d+ +\d+\.\d+ +\d\.\d+ +[\d,]+ +(?:[\d.]+%|-)$", result.stdout, re.M)
    assert len(table) == 12
    assert "\r" not in result.stdout + result.stderr, "a progress bar, and no terminal"
    if size == 1:
        assert "nothing to exchange" in result.stdout
    else:
        assert f"parameters bit-identical on all {size} ranks" in result.stdout
        # PyTorch's gradients are exchanged inside backward().
        cost = "not timed separately" if "torch" in example else r"took [\d.]+ ms per step, [\d.]+%"
        assert re.search(rf"{cost}[^)]* as {wire} through", result.stdout)


@pytest.mark.served
@pytest.mark.parametrize("example", [NUMPY, TORCH])
def test_ranks_on_shares_end_where_one_ends_on_whole_batches(example: str, tmp_path: Path) -> None:
    def trained(size: int, *args: object) -> Path:
        path = tmp_path / f"{size}{''.join(map(str, args))}.npz"
        printed_by(example, size, "--save", path, *args)
        return path

    # 65 is divisible by neither 2 nor 3; and small steps, since training amplifies rounding.
    options = ["--epochs", 1, "--lr", 0.01, "--batch-size", 65]
    one = trained(1, *options)
    # Rounding gives 5e-7; ignoring that the shards are uneven, 2e-2.
    assert furthest(one, trained(2, *options)) < 1e-4
    assert furthest(one, trained(3, *options)) < 1e-4

    # Rounded to 11 bits, it needs few steps, too, to stay close: one per epoch.
    options = ["--epochs", 4, "--batch-size", 720]
    one = trained(1, *options)
    assert furthest(one, trained(2, *options, "--fp16-allreduce")) < 3e-3


@pytest.mark.launches
@pytest.mark.parametrize("kernels", cpus.OPENBLAS)
def test_shares_add_up_to_the_whole_batch_whatever_the_cpu(kernels: dict[str, str]) -> None:
    code = """
        import numpy as np
        from threadpoolctl import threadpool_info

        from digits import load_digits
        from digits_numpy import SGD, Network

        images, labels, *_ = load_digits(None)

        def trained(n_shares):
            net = Network(images.shape[1:], n_classes=10, seed=0)
            opt = SGD(net.params, lr=0.01)
            for batch in np.array_split(np.arange(len(images)), 22):
                sums = [0.0] * len(net.params)
                for share in np.array_split(batch, n_shares):
                    net.gradients(images[share], labels[share])
                    weight = len(share) / len(batch)
                    sums = [s + weight * p.grad for s, p in zip(sums, net.params, strict=True)]
                for p, s in zip(net.params, sums, strict=True):
                    p.grad = s
                opt.step()
            return [p.data for p in net.params]

        whole = trained(1)
        for n_shares in (2, 3):
            pairs = zip(whole, trained(n_shares), strict=True)
            print(max(np.linalg.norm(a - b) / np.linalg.norm(a) for a, b in pairs))
        print(*(pool.get("architecture") for pool in threadpool_info()))
    """
    env = {"PYTHONPATH": os.pathsep.join([str(EXAMPLES), os.environ.get("PYTHONPATH", "")])}
    result = run_ranks(code, 1, env={**env, **kernels}, launcher=False, timeout_s=LIMIT_S).check()
    *distances, used = result.stdout.splitlines()
    # Rounding gives 1e-6; relu in the network up to 7e-5, max pooling 3e-2.
    assert max(map(float, distances)) < 1e-5
    if "OpenBLAS" in np.show_config(mode="dicts")["Build Dependencies"]["blas"]["name"]:
        assert set(kernels.values()) <= set(used.split())


@pytest.mark.launches
def test_a_forgotten_broadcast_is_noticed() -> None:
    code = (EXAMPLES / "digits_numpy.py").read_text()
    line = "    hvd.broadcast_parameters(net.params)\n"
    assert line in code
    env = {"PYTHONPATH": os.pathsep.join([str(EXAMPLES), os.environ.get("PYTHONPATH", "")])}
    result = run_ranks(
        code.replace(line, ""), 3, args=["--epochs", "1"], env=env, timeout_s=LIMIT_S
    )
    assert result.returncode != 0
    assert "the parameters of rank 1, 2 differ from rank 0's" in result.stdout
    assert "bit-identical" not in result.stdout


@pytest.mark.launches
def test_training_that_is_killed_ends_with_the_same_bits() -> None:
    result = run("restart.py", 1, "--epochs", 2, "--kill-in-epoch", 2).check()
    assert "the weights are bit-identical" in result.stdout
    assert result.stdout.count("epoch 1: test accuracy") == 2
    assert re.search(r"job failed.*: restart 1 of 1 in 1 s, from the commit", result.stderr)


@pytest.mark.launches
@pytest.mark.skipif(mpi_name() != "openmpi", reason="Open MPI's fault tolerance")
def test_ranks_that_are_killed_leave_the_same_bits() -> None:
    kills = "--kill", "1:5", "--kill", "2:9"
    jobs = [
        run("digits_same_bits.py", 1, "--steps", 15),
        run("digits_same_bits.py", 4, "--steps", 15, *kills, options=["--with-ft", "ulfm"]),
    ]
    assert "4 rank(s) began, 2 ended, 15 steps" in jobs[1].check().stdout
    assert jobs[1].stderr.count("was killed by signal 9") == 2
    one, other = (re.findall(r"SHA-256 of the model (\w{64})", job.stdout) for job in jobs)
    assert one == other != []


@pytest.mark.launches
def test_local_steps_with_averages_learn_what_no_rank_sees() -> None:
    result = run("digits_local_sgd.py", 2, "--every", 20, "--steps", 300).check()
    (found,) = re.findall(r"ranks' models: (\S+) (\S+)", result.stdout)
    assert found[0] == found[1]
    assert float(found[0]) > 0.8, result.stdout  # each rank has half of the digits


def cupy_and_a_gpu() -> bool:
    try:
        import cupy

        return bool(cupy.cuda.runtime.getDeviceCount())
    except Exception:
        return False


@pytest.mark.launches
@pytest.mark.skipif(cupy_and_a_gpu(), reason="CuPy and a GPU are here: make gpu-check runs it")
def test_without_cupy_or_a_gpu_the_example_says_so() -> None:
    result = run("digits_cupy.py", 1)
    assert result.returncode == 1
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert line.startswith("this example needs CuPy and an NVIDIA GPU: ")


# The part of NumPy that the example uses, compared with CuPy 14.2, which is too large to install.
IN_CUPY = {"arange", "asarray", "exp", "float32", "log", "pad", "tanh", "zeros", "zeros_like"}
IN_CUPY |= {"lib.stride_tricks.sliding_window_view"}


def test_the_network_asks_nothing_of_its_array_module_that_cupy_lacks() -> None:
    code = (EXAMPLES / "digits_numpy.py").read_text()
    assert set(re.findall(r"\bxp\.([\w.]*\w)", code)) == IN_CUPY


@pytest.mark.launches
def test_a_framework_of_ones_own_in_a_notebook() -> None:
    path = EXAMPLES / "any_framework.ipynb"
    shown = "print(*(one.accuracy for one in (alone, *ranks)), sep='\\n')"
    result = run_ranks(f"{code_of(path)}\n{shown}", 1, launcher=False, timeout_s=LIMIT_S).check()
    what_differs, *accuracies = result.stdout.splitlines()
    assert "rank 1 has 'layer 1, matrix' float32[64, 81]" in what_differs
    assert len(accuracies) == 3
    assert all(float(one) > 0.97 for one in accuracies)
    # The notebook shows its actual output.
    assert json.dumps(what_differs) in path.read_text().replace("\\n", "")
    assert re.search(r"Trained\(accuracy=0.9[78]\d*, ", path.read_text())


@pytest.mark.launches
def test_mnist_files_and_the_plot(tmp_path: Path) -> None:
    write_mnist(tmp_path)
    plot = tmp_path / "curve.png"
    result = run("digits_numpy.py", 1, "--epochs", 2, "--data", tmp_path, "--plot", plot).check()
    assert "130 images to train on, 20 to test" in result.stdout
    assert "learning curve saved to" in result.stdout
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_mnist_files_are_read_as_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_mnist(tmp_path)
    images, labels, test_images, test_labels = digits(monkeypatch).load_digits(tmp_path)
    assert images.shape == (130, 28, 28, 1)
    assert test_images.shape == (20, 28, 28, 1)
    assert images.dtype == test_images.dtype == np.float32
    assert labels.tolist() == [i % 10 for i in range(130)]
    assert test_labels.tolist() == [i % 10 for i in range(20)]
    pixels, test_pixels = mnist_pixels(130), mnist_pixels(20)
    np.testing.assert_allclose(images[..., 0], (pixels - pixels.mean()) / 255, atol=1e-6)
    np.testing.assert_allclose(test_images[..., 0], (test_pixels - pixels.mean()) / 255, atol=1e-6)


def test_bad_mnist_files_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load = digits(monkeypatch).load_digits
    with pytest.raises(SystemExit, match=r"neither train-images-\S+ nor \S+gz exists"):
        load(tmp_path)
    write_mnist(tmp_path)
    path = tmp_path / "t10k-images-idx3-ubyte"
    whole = path.read_bytes()
    for wrong in (whole[:-1], whole[:5], whole[:3] + b"\x01" + whole[4:]):
        path.write_bytes(wrong)
        with pytest.raises(
            SystemExit, match="t10k-images-idx3-ubyte is truncated, or not an IDX file"
        ):
            load(tmp_path)
    write_idx(path, mnist_pixels(19))
    with pytest.raises(SystemExit, match="19 t10k images, but 20 labels"):
        load(tmp_path)


def digits(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.delitem(sys.modules, "digits", raising=False)
    return importlib.import_module("digits")


def mnist_pixels(n: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return np.random.default_rng(n).integers(0, 256, (n, 28, 28), np.uint8)


def write_mnist(folder: Path) -> None:
    """Write 130 and 20 images of noise, half of the files compressed."""
    for part, n, suffix in (("train", 130, ".gz"), ("t10k", 20, "")):
        write_idx(folder / f"{part}-images-idx3-ubyte{suffix}", mnist_pixels(n))
        write_idx(folder / f"{part}-labels-idx1-ubyte", np.arange(n, dtype=np.uint8) % 10)


def write_idx(path: Path, array: np.ndarray[Any, np.dtype[np.uint8]]) -> None:
    header = np.array([0x0800 + array.ndim, *array.shape], ">u4").tobytes()
    data = header + array.tobytes()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
