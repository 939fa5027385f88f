"""`horo-lite compare` names the first step in which two runs differ, and what differs in it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from launch import run_and_hear
from steps import compared, recorded

import horo_lite as hvd
from horo_lite.__main__ import main
from horo_lite.collectives.group import Group
from horo_lite.training import step_record
from horo_lite.training.step_record import N_SUMS, sketch

N_SAMPLES = 24
N_STEPS = 6
X = np.random.default_rng(5).standard_normal((N_STEPS, N_SAMPLES, 40)).astype(np.float32)
Y = np.random.default_rng(6).standard_normal((N_STEPS, N_SAMPLES, 3)).astype(np.float32)


class Parameter:
    def __init__(self, data: np.ndarray) -> None:
        self.data = data
        self.grad: Any = None


class Momentum:
    def __init__(self, params: dict[str, Parameter], lr: float, momentum: float) -> None:
        self.params, self.lr, self.momentum = params, lr, momentum
        self.velocity = {name: np.zeros_like(p.data) for name, p in params.items()}

    def step(self) -> None:
        for name, p in self.params.items():
            self.velocity[name] = self.momentum * self.velocity[name] + p.grad
            p.data -= np.float32(self.lr) * self.velocity[name]


def train(
    group: Group,
    *,
    seed: int = 1,
    lr: float = 0.05,
    momentum: float = 0.9,
    n_steps: int = N_STEPS,
    change: Callable[[int, dict[str, np.ndarray]], None] = lambda step, gradients: None,
    names: tuple[str, str] = ("w", "b"),
    **options: Any,
) -> None:
    """Fit a tanh layer; each rank has its part of every step's samples."""
    rng = np.random.default_rng(seed)
    w, b = names
    params = {
        w: Parameter(0.1 * rng.standard_normal((40, 3)).astype(np.float32)),
        b: Parameter(np.zeros(3, np.float32)),
    }
    opt = hvd.DistributedOptimizer(Momentum(params, lr, momentum), group=group, **options)
    for step in range(n_steps):
        x, y = X[step][group.rank :: group.size], Y[step][group.rank :: group.size]
        out = np.tanh(x @ params[w].data + params[b].data)
        error = (out - y) * (1 - out**2) / np.float32(len(x))
        gradients = {w: x.T @ error, b: error.sum(0)}
        change(step, gradients)
        for name, gradient in gradients.items():
            params[name].grad = gradient
        opt.step()


Record = Callable[..., str]


@pytest.fixture
def record(tmp_path: Path) -> Record:
    """Return a function that records a run, and returns the path of its file."""

    def run(name: str, n_ranks: int, **options: Any) -> str:
        return recorded(tmp_path / name, n_ranks, partial(train, **options))

    return run


def test_ranks_take_the_steps_of_one_process(record: Record) -> None:
    one, three = record("one", 1), record("three", 3)
    assert compared(one, three) == (0, f"The same in all {N_STEPS} steps.")


def test_ranks_that_do_not_average_are_found(
    record: Record, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = record("one", 1)
    monkeypatch.setattr(Group, "exchange", lambda *args, **kwargs: None)
    alone = record("alone", 3)
    code, text = compared(one, alone)
    assert code == 1
    assert text.startswith("Step 1 is the first to differ, in its gradients: 2 of 2 arrays, '")
    assert "other samples in this step" in text


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (
            {"op": hvd.Sum},
            "Step 1 is the first to differ, in its gradients: B's are 2 times A's: 2 of 2 arrays, "
            "'w' by 5.0e-01, 'b' by 5.0e-01. This is the proportion of the numbers of ranks.\n"
            "Look for a loss that is a sum",
        ),
        (
            {"lr": 0.15},
            "Step 1 is the first to differ, in its updates: B's are 3 times A's: 2 of 2 arrays, "
            "'w' by 6.7e-01, 'b' by 6.6e-01.\nLook for the learning rate",
        ),
        (
            {"momentum": 0.8},
            "Step 2 is the first to differ, after 1 that is the same, in its updates: 2 of 2 ",
        ),
        (
            {"seed": 2},
            "The runs start from different parameters: 1 of 2 arrays, 'w' by 1.",
        ),
        (
            {"change": lambda step, gradients: gradients["b"].__imul__(1 - (step == 3) / 4)},
            "Step 4 is the first to differ, after 3 that are the same, in its gradients: B's "
            "are 0.75 times A's: 1 of 2 arrays, 'b' by 2.5e-01.\nLook for a loss",
        ),
        (
            {"change": lambda step, gradients: gradients["w"].__setitem__(7, np.nan * (step or 1))},
            "Step 1 is the first to differ, in its gradients: only one run's are finite: 1 of 2 "
            "arrays, 'w' by inf.",
        ),
    ],
    ids=["sum", "learning rate", "momentum", "seed", "one gradient of one step", "NaN"],
)
def test_what_differs_is_named(options: dict[str, Any], expected: str, record: Record) -> None:
    code, text = compared(record("one", 1), record("two", 2, **options))
    assert text.startswith(expected)
    assert code == 1


@pytest.mark.parametrize("compression", ["fp16", "bf16"])
def test_rounding_of_a_compression_is_no_difference(compression: str, record: Record) -> None:
    one = record("one", 1)
    two = record("two", 2, compression=getattr(hvd.Compression, compression))
    code, text = compared(one, two)
    assert (code, "The same in all" in text) == (0, True), text
    twice = record("twice", 2, compression=getattr(hvd.Compression, compression), op=hvd.Sum)
    text = compared(one, twice)[1]
    assert re.search(r"in its gradients: B's are (2|2.0\d|1.9\d) times A's", text), text


def test_the_tolerance_follows_the_compression_and_the_dtype(record: Record) -> None:
    """As recorded; so what int8 leaves over, between hosts, is no difference."""

    def rounded(step: int, gradients: dict[str, np.ndarray]) -> None:
        gradients["w"] *= np.float32(1.02)

    one, two = record("one", 1, n_steps=1), record("two", 2, n_steps=1, change=rounded)
    assert compared(one, two)[0] == 1
    text = Path(two).read_text()
    for old, new in (('"compression":"none"', '"compression":"int8"'), ("float32", "bfloat16")):
        assert old in text
        Path(two).write_text(text.replace(old, new))
        assert compared(one, two)[0] == 0


def test_rounding_errors_that_training_enlarges_are_no_difference(record: Record) -> None:
    def enlarged(first: float) -> dict[str, Any]:
        def change(step: int, gradients: dict[str, np.ndarray]) -> None:
            for gradient in gradients.values():
                gradient *= np.float32(1 + first * 8**step)

        return {"change": change, "lr": 1e-12}

    one = record("one", 1, lr=1e-12)
    code, text = compared(one, record("two", 2, **enlarged(1e-6)))
    assert code == 0
    assert text.startswith("No step stands out: the difference has grown from 9")
    assert "Training enlarges rounding errors" in text
    code, text = compared(one, record("more", 2, **enlarged(1e-4)))
    assert code == 1
    assert "Rounding does not explain that of step 1: look with --tolerance 2e-05." in text
    code, text = compared(one, str(Path(one).with_name("more")), "--tolerance", "2e-5")
    assert text.startswith("Step 1 is the first to differ, in its gradients: 2 of 2 arrays")


def test_parameters_with_other_names_are_compared_in_their_order(record: Record) -> None:
    one, two = record("one", 1), record("two", 2, names=("module.w", "module.b"), n_steps=4)
    assert compared(one, two) == (
        0,
        "The names differ: arrays are compared in their order.\n"
        "A has 6 steps and B 4: the first 4 are compared.\nThe same in all 4 steps.",
    )
    other = record("other", 2, names=("w", "bias"))
    code, text = compared(one, other)
    assert text == (
        "Not compared: parameters that only one run has, b, bias.\n"
        "Not compared: gradients that only one run has, b, bias.\n"
        f"The same in all {N_STEPS} steps."
    )
    assert code == 0


def test_runs_without_a_common_array_are_not_the_same(record: Record) -> None:
    one, two = record("one", 1), record("two", 2, names=("x", "y"))
    lines = Path(two).read_text().splitlines()
    for i, line in enumerate(map(json.loads, lines[1:]), 1):
        for kind in ("gradients", "parameters"):
            del line[kind]["y"]
        lines[i] = json.dumps(line)
    Path(two).write_text("\n".join(lines) + "\n")
    code, text = compared(one, two)
    assert code == 1
    assert text.endswith(
        "Nothing could be compared: the runs have no array in common. Is it the same model?"
    )


def test_what_a_killed_job_has_written_counts(record: Record) -> None:
    one, two = Path(record("one", 1)), Path(record("two", 2))
    two.write_bytes(two.read_bytes()[:-10])
    code, text = compared(str(one), str(two))
    assert (code, text.splitlines()[-1]) == (0, f"The same in all {N_STEPS - 1} steps.")


def test_files_that_are_no_records(tmp_path: Path, record: Record) -> None:
    one = record("one", 1)
    other = tmp_path / "other"
    text = Path(one).read_text()
    first, second = text.splitlines()[:2]
    for content, expected in (
        ("", "no step was recorded"),
        (f"{first}\n", "no step was recorded"),
        ("import horo_lite\n", "line 1: not what HORO_LITE_RECORD_STEPS writes"),
        (first.replace('"horo_lite_steps":1', '"horo_lite_steps":9') + "\n", "another version"),
        (f"{first}\n{second.replace('float32', '0', 1)[:200]}\n", "line 2: not what"),
        (f"{first}\n{json.dumps({**json.loads(second), 'gradients': {'w': [1, 2]}})}\n", "line 2"),
    ):
        other.write_text(content)
        code, error = compared(one, str(other))
        assert code == 2
        assert expected in error
    assert compared(one, str(tmp_path / "none"))[0] == 2


def test_a_file_that_cannot_be_written_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HORO_LITE_RECORD_STEPS", str(tmp_path / "no folder" / "file"))
    _, warned = run_and_hear(2, train)
    (text,) = warned
    assert "the steps are no longer recorded, since their file cannot be written" in text
    step_record._writer.close()


def test_only_the_rank_that_writes_does_anything(
    record: Record, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that an error in recording cannot be one in the exchange: it is not collective."""
    writers = []
    plain = step_record._sketches

    def seen(named: Any, readable: Any) -> Any:
        writers.append(readable._group.rank)
        return plain(named, readable)

    monkeypatch.setattr(step_record, "_sketches", seen)
    record("three", 3)
    assert set(writers) == {0}


def test_a_sketch_tells_how_far_arrays_are_apart() -> None:
    """Its squared norm is that of the array, on average; its sums are the same for any length."""
    rng = np.random.default_rng(1)
    ratios = []
    for n in (1, 5, 8192, 8193, 600_000):
        for kind in ("normal", "constant", "one element"):
            x = {
                "normal": rng.standard_normal(n),
                "constant": np.full(n, 0.1),
                "one element": np.eye(1, n, n // 2)[0],
            }[kind]
            sums = sketch(x.astype(np.float32))
            assert len(sums) == N_SUMS
            ratios.append(np.linalg.norm(sums) / np.linalg.norm(x))
    assert min(ratios) > 0.3
    assert max(ratios) < 2.5
    assert 0.8 < np.sqrt(np.mean(np.square(ratios))) < 1.2
    signs = [sketch(np.eye(1, at + 1, at)[0])[0] for at in range(0, 128 << 13, 1 << 13)]
    assert set(signs) == {-1, 1}
    assert signs[:64] != signs[64:]  # nor do those of the elements repeat
    x, y = rng.standard_normal((2, 100_000))
    both = np.array(sketch(x)) * 2 + np.array(sketch(y))
    assert np.allclose(both, sketch(2 * x + y))


def test_the_variable_is_set_for_the_ranks(tmp_path: Path) -> None:
    from horo_lite.__main__ import _parser, _read

    parser = _parser()
    args = parser.parse_args(["-n", "2", "--record-steps", "x", "python"])
    assert _read(parser, args)[1]["HORO_LITE_RECORD_STEPS"] == str(Path("x").absolute())
    with pytest.raises(SystemExit):
        main(["compare", "a", "b", "--tolerance", "0"])


def test_parameters_are_recorded_where_only_gradients_are_exchanged(tmp_path: Path) -> None:
    """As in frameworks whose optimizers receive gradients: the step between two is seen, too."""

    def program(rate: float) -> Callable[[Group], None]:
        def run(group: Group) -> None:
            w = np.ones(40, np.float32)
            for step in range(4):
                gradient = X[step][group.rank :: group.size].mean(0)
                average = hvd.average_gradients({"w": gradient}, group=group, parameters={"w": w})
                w = w - np.float32(rate * (10 if step == 2 else 1)) * average["w"]

        return run

    a = recorded(tmp_path / "a", 1, program(0.1))
    b = recorded(tmp_path / "b", 2, program(0.1))
    code, told = compared(a, b)
    assert code == 0, told
    wrong = recorded(tmp_path / "wrong", 2, program(0.2))
    code, told = compared(a, wrong)
    assert code == 1
    assert "update" in told, told
