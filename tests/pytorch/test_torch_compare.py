"""PyTorch's optimizers on several ranks take the steps of one process, as `compare` sees it."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from steps import compared, recorded

torch = pytest.importorskip("torch")

import horo_lite as hvd  # noqa: E402
from horo_lite.collectives.group import Group  # noqa: E402
from horo_lite.launch.compare import read  # noqa: E402
from horo_lite.torch.optimizer import DistributedOptimizer  # noqa: E402
from horo_lite.training import step_record  # noqa: E402

N_STEPS = 5
TITLE = "gradients of optimizer 1"


def train(
    group: Group, lr: float = 0.01, passes: int = 1, clip: bool = True, **options: Any
) -> None:
    rng = torch.Generator().manual_seed(3)
    net = torch.nn.Sequential(torch.nn.Linear(12, 16), torch.nn.Tanh(), torch.nn.Linear(16, 3))
    for parameter in net.parameters():
        parameter.data.normal_(0, 0.3, generator=rng)
    inner = torch.optim.Adam(net.parameters(), lr)
    optimizer = DistributedOptimizer(
        inner, net.named_parameters(), process_set=group, backward_passes_per_step=passes, **options
    )
    for _ in range(N_STEPS):
        optimizer.zero_grad()
        for _ in range(passes):
            x, y = torch.randn(12, 12, generator=rng), torch.randn(12, 3, generator=rng)
            mine = slice(group.rank, None, group.size)
            ((net(x[mine]) - y[mine]).square().mean() / passes).backward()
        if clip:
            torch.nn.utils.clip_grad_norm_(net.parameters(), 0.5)
        optimizer.step()


@pytest.mark.parametrize(
    ("options", "n_ranks"),
    [
        ({}, 3),
        ({"passes": 2, "gradient_as_bucket_view": True}, 2),
        ({"shard_state": True}, 2),
        ({"shard_state": True, "shared_parameters": True}, 2),
    ],
    ids=str,
)
def test_ranks_take_the_steps_of_one_process(
    options: dict[str, Any], n_ranks: int, tmp_path: Path
) -> None:
    passes = options.get("passes", 1)
    one = recorded(tmp_path / "one", 1, partial(train, passes=passes))
    several = recorded(tmp_path / "several", n_ranks, partial(train, **options))
    assert compared(one, several) == (0, f"The same in all {N_STEPS} steps.")
    other = recorded(tmp_path / "other", n_ranks, partial(train, lr=0.02, **options))
    code, text = compared(one, other)
    assert code == 1
    assert text.startswith("Step 1 is the first to differ, in its updates: B's are 2 times A's: 4 ")


def test_averages_of_a_share_are_left_out(tmp_path: Path) -> None:
    """The parameters show the steps, too."""
    train_one = partial(train, clip=False)
    train_two = partial(train_one, shard_state=True, shard_gradients=True)
    one = recorded(tmp_path / "one", 1, train_one)
    code, text = compared(one, recorded(tmp_path / "two", 2, train_two))
    assert text == (
        "Not compared: gradients that only one run has, 0.bias, 0.weight, 2.bias and 1 more.\n"
        f"The same in all {N_STEPS} steps."
    )
    assert code == 0
    faster = recorded(tmp_path / "faster", 2, partial(train_two, lr=0.02))
    code, text = compared(one, faster)
    assert code == 1
    assert "Step 1 is the first to differ, in its updates: B's are 2 times A's" in text


def test_what_adam_makes_of_rounding_errors_is_no_difference(tmp_path: Path) -> None:
    """Such as the gradient of a bias that a softmax or a normalization removes again."""

    def shifted(group: Group) -> None:
        rng = torch.Generator().manual_seed(3)
        net = torch.nn.Linear(12, 5)
        net.shift = torch.nn.Parameter(torch.zeros(300))
        for parameter in net.parameters():
            parameter.data.normal_(0, 0.3, generator=rng)
        inner = torch.optim.Adam(net.parameters(), 0.01, eps=1e-20)
        optimizer = DistributedOptimizer(inner, net.named_parameters(), process_set=group)
        for _ in range(N_STEPS):
            optimizer.zero_grad()
            x, y = torch.randn(12, 12, generator=rng), torch.randint(0, 5, (12,), generator=rng)
            mine = slice(group.rank, None, group.size)
            out = net(x[mine])[:, :, None] + net.shift
            torch.nn.functional.cross_entropy(out, y[mine, None].expand(-1, 300)).backward()
            optimizer.step()

    one, two = (recorded(tmp_path / str(n), n, shifted) for n in (1, 2))
    a, b = ([step.parameters for step in read(Path(path)).steps[TITLE]] for path in (one, two))
    assert not np.allclose(a[-1].chosen(["shift"]).sketches, b[-1].chosen(["shift"]).sketches)
    assert compared(one, two) == (0, f"The same in all {N_STEPS} steps.")


def test_parameters_that_round_their_updates_are_no_difference(tmp_path: Path) -> None:
    """An update of bfloat16 is a few times the distance between neighbouring numbers, or none."""

    def small(group: Group, lr: float = 0.01) -> None:
        rng = torch.Generator().manual_seed(3)
        net = torch.nn.Linear(200, 50).to(torch.bfloat16)
        for parameter in net.parameters():
            parameter.data.normal_(0, 0.3, generator=rng)
        inner = torch.optim.SGD(net.parameters(), lr)
        optimizer = DistributedOptimizer(inner, net.named_parameters(), process_set=group)
        for _ in range(2):
            optimizer.zero_grad()
            x = torch.randn(12, 200, generator=rng).to(torch.bfloat16)
            net(x[group.rank :: group.size]).square().mean().backward()
            optimizer.step()

    one = recorded(tmp_path / "one", 1, small)
    assert compared(one, recorded(tmp_path / "two", 2, small)) == (0, "The same in all 2 steps.")
    assert compared(one, recorded(tmp_path / "more", 2, partial(small, lr=0.5)))[0] == 1


def test_a_script_without_horo_lite_records_its_steps(tmp_path: Path) -> None:
    """Names, such as those with a prefix from DDP, may be others."""

    def plain(_: Group) -> None:
        rng = torch.Generator().manual_seed(3)
        net = torch.nn.Sequential(torch.nn.Linear(12, 16), torch.nn.Tanh(), torch.nn.Linear(16, 3))
        for parameter in net.parameters():
            parameter.data.normal_(0, 0.3, generator=rng)
        optimizer = torch.optim.Adam(net.parameters(), 0.01)
        for _ in range(N_STEPS):
            optimizer.zero_grad()
            x, y = torch.randn(12, 12, generator=rng), torch.randn(12, 3, generator=rng)
            (net(x) - y).square().mean().backward()
            hvd.record_step(optimizer, torch.nn.ModuleDict({"module": net}).named_parameters())
            torch.nn.utils.clip_grad_norm_(net.parameters(), 0.5)
            optimizer.step()

    one = recorded(tmp_path / "one", 1, plain)
    code, text = compared(one, recorded(tmp_path / "two", 2, train))
    assert text == (
        f"The names differ: arrays are compared in their order.\nThe same in all {N_STEPS} steps."
    )
    assert code == 0
    assert compared(one, recorded(tmp_path / "more", 2, partial(train, lr=0.02)))[0] == 1


def test_record_step_takes_what_has_parameters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    net = torch.nn.Linear(2, 1)
    net(torch.ones(1, 2)).sum().backward()
    hvd.record_step(net)
    monkeypatch.setenv("HORO_LITE_RECORD_STEPS", str(tmp_path / "file"))
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "1")
    hvd.record_step(net)
    monkeypatch.delenv("OMPI_COMM_WORLD_SIZE")
    master = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "9"}
    for variables in (
        {"HOROVOD_RANK": "1", "HOROVOD_SIZE": "2"},
        {"RANK": "1", "WORLD_SIZE": "2", **master},
    ):
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        hvd.record_step(net)
    assert not (tmp_path / "file").exists()
    monkeypatch.setenv("RANK", "0")
    for of in (net, torch.optim.SGD(net.parameters(), 0.1)):
        hvd.record_step(of)
    first, *steps = map(json.loads, (tmp_path / "file").read_text().splitlines())
    assert first["size"] == 2
    assert [list(step["gradients"]) for step in steps] == [
        ["weight", "bias"],
        ["param_groups[0][0]", "param_groups[0][1]"],
    ]
    assert [step["gradients"] == step["parameters"] for step in steps] == [False, False]
    table = torch.nn.Embedding(4, 2, sparse=True)
    table(torch.tensor([1])).sum().backward()
    hvd.record_step(torch.nn.ModuleList([table, net]))
    last = json.loads((tmp_path / "file").read_text().splitlines()[-1])
    assert list(last["parameters"]) == ["0.weight", "1.weight", "1.bias"]
    assert list(last["gradients"]) == ["1.weight", "1.bias"]
    with pytest.raises(TypeError, match="sparse"):
        hvd.record_step(table)
    with pytest.raises(ValueError, match="Tanh shows no parameters: pass named_parameters="):
        hvd.record_step(torch.nn.Tanh())
    step_record._writer.close()
