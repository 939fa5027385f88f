"""Jobs on several hosts started by torchrun: namespaces of this machine, with gloo between them."""

from __future__ import annotations

import contextlib
import re
import sys
import tempfile
from pathlib import Path

import pytest
from launch import Job, environment
from network import Network, unavailable
from without_mpi import ended

pytest.importorskip("torch")
pytestmark = [
    pytest.mark.launches,
    pytest.mark.skipif(bool(unavailable()), reason=unavailable()),
]

BITS = Path(__file__).with_name("bits_ranks.py")
LINE = re.compile(r"rank (\d) at (\S+ \S+) on (\S+): ([0-9a-f]{64})")


def test_bits_are_those_of_simulated_hosts(tmp_path: Path) -> None:
    """No interface is named, and hostnames do not resolve to addresses, as on many new machines."""
    shape = [2, 1]
    with Network(len(shape), rate_mbit=1000) as network, contextlib.ExitStack() as stack:
        jobs = []
        for node, (host, n) in enumerate(zip(network.hosts, shape, strict=True)):
            command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2"]
            command += ["--node-rank", str(node), "--nproc-per-node", str(n)]
            command += ["--master-addr", network.hosts[0].address, "--master-port", "29400"]
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            job = Job(host.command([*command, str(BITS)]), environment(), folder)
            stack.callback(job.close)
            jobs.append(job)
        real = sorted(line for job in jobs for line in LINE.findall(job.wait(60).check().stdout))
    places = [(place, host) for _, place, host, _ in real]
    assert places == [("0/2 0/2", "host0"), ("1/2 0/1", "host0"), ("0/1 1/2", "host1")]
    env = {"HORO_LITE_TEST_HOSTS": "2,1"}
    simulated = LINE.findall(ended(BITS, 3, tmp_path, env=env).check().stdout)
    assert len(simulated) == 3
    assert len({digest for *_, digest in real + simulated}) == 1, (real, simulated)
