"""docs/launching.md: its commands start the ranks that the platforms' variables describe."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

pytestmark = pytest.mark.launches

PAGE = Path(__file__).resolve().parent.parent / "docs" / "launching.md"
AWS = {"AWS_BATCH_JOB_NUM_NODES": "2"}
PAI_DLC = {"WORLD_SIZE": "2", "NPROC_PER_NODE": "8", "MASTER_ADDR": "a", "MASTER_PORT": "23456"}
OPENPAI = {
    "PAI_TASK_ROLE_TASK_COUNT_worker": "2",
    "PAI_HOST_IP_worker_0": "10.0.0.7",
    "PAI_PORT_LIST_worker_0_meet": "20001",
}


@pytest.mark.parametrize(
    ("section", "variables", "expected"),
    [
        # The main node does not get its own address.
        ("AWS Batch", AWS | {"AWS_BATCH_JOB_NODE_INDEX": "0"}, (0, "4", "10.0.0.5", 29500)),
        (
            "AWS Batch",
            AWS
            | {
                "AWS_BATCH_JOB_NODE_INDEX": "1",
                "AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS": "10.0.0.6",
            },
            (1, "4", "10.0.0.6", 29500),
        ),
        ("Alibaba PAI-DLC and Baidu AIHC", PAI_DLC | {"RANK": "1"}, (1, "8", "a", 23456)),
        (
            "OpenPAI",
            OPENPAI | {"PAI_CURRENT_TASK_ROLE_CURRENT_TASK_INDEX": "1"},
            (1, "4", "10.0.0.7", 20001),
        ),
    ],
)
def test_what_torchrun_is_given(
    section: str, variables: dict[str, str], expected: tuple[int, str, str, int]
) -> None:
    """As torchrun reads it; the platform's hostname command has two addresses."""
    run = pytest.importorskip("torch.distributed.run")
    text = PAGE.read_text().partition(f"## {section}\n")[2].partition("\n## ")[0]
    (line,) = re.findall(r"^```sh\n(torchrun .*?)^```", text, re.MULTILINE | re.DOTALL)
    stubs = "torchrun() { printf '%s\\n' \"$@\"; }; hostname() { echo 10.0.0.5 172.17.0.1; }\n"
    said = subprocess.run(
        ["bash", "-uc", stubs + line],
        env=variables | {"PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    args = run.get_args_parser().parse_args(said.stdout.splitlines())
    found = (args.node_rank, args.nproc_per_node, args.master_addr, args.master_port)
    assert (args.nnodes, args.training_script) == ("2", "train.py")
    assert found == expected
