"""What keeps others out: the memory that ranks share, and the ports that nobody opens."""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path

import pytest
from launch import run_ranks

from horo_lite._native import Segment

N_BYTES = 4096


def test_shared_memory_has_no_name_and_is_its_owners_only() -> None:
    segment = Segment.create(N_BYTES)
    assert stat.S_IMODE(os.fstat(segment.fd).st_mode) == 0o600
    assert Path(f"/proc/self/fd/{segment.fd}").readlink() == Path("/memfd:horo_lite (deleted)")
    assert not os.get_inheritable(segment.fd)
    segment.close_descriptor()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(segment.fd)


def test_shared_memory_is_opened_with_a_token_that_nobody_can_guess() -> None:
    segments = [Segment.create(N_BYTES) for _ in range(64)]
    tokens = [segment.token for segment in segments]
    for bit in range(62):
        assert {token >> bit & 1 for token in tokens} == {0, 1}
    first = segments[0]
    assert Segment.open(os.getpid(), first.fd, N_BYTES, first.token).token == first.token
    for wrong in (0, tokens[1], first.token ^ 1):
        with pytest.raises(RuntimeError, match="not this job's segment"):
            Segment.open(os.getpid(), first.fd, N_BYTES, wrong)


def test_what_another_user_made_is_not_mapped() -> None:
    segment = Segment.create(N_BYTES)
    if os.geteuid() == 0:
        os.fchown(segment.fd, 12345, -1)
        foreign = os.dup(segment.fd)
    else:
        foreign = os.open("/dev/null", os.O_RDWR)  # root's, and everybody may write it
    try:
        with pytest.raises(RuntimeError, match="belongs to another user"):
            Segment.open(os.getpid(), foreign, N_BYTES, segment.token)
    finally:
        os.close(foreign)


@pytest.mark.parametrize("n_bytes", [0, N_BYTES - 1, N_BYTES + 1, 1 << 30])
def test_what_has_another_size_is_not_mapped(n_bytes: int) -> None:
    segment = Segment.create(N_BYTES)
    with pytest.raises(RuntimeError, match="another size"):
        Segment.open(os.getpid(), segment.fd, n_bytes, segment.token)


@pytest.mark.mpi
@pytest.mark.parametrize("hosts", ["", "1,1"])
def test_no_port_is_opened_that_mpi_has_not_opened(hosts: str) -> None:
    """Not by init(), direct calls, the engine or objects, on one host or between two."""
    result = run_ranks(
        """
        import os
        import socket
        from pathlib import Path

        import numpy as np
        from mpi4py import MPI

        import horo_lite as hvd


        def listening():
            mine = {os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")
                    if os.path.lexists(f"/proc/self/fd/{fd}")}
            found = set()
            for kind in ("tcp", "tcp6", "udp", "udp6"):
                for line in Path("/proc/self/net", kind).read_text().splitlines()[1:]:
                    _, local, _, state, *rest = line.split()
                    if f"socket:[{rest[5]}]" in mine and (state == "0A" or kind[0] == "u"):
                        found.add(f"{kind} {local}")
            return found


        comm = MPI.COMM_WORLD.Dup()
        comm.allreduce(1)
        before = listening()
        hvd.init()
        x = np.ones(1000)
        hvd.allreduce(x)
        hvd.synchronize(hvd.allreduce_async(x, name="x"))
        hvd.allgather_object({"rank": hvd.rank()})
        hvd.check_in_sync({"x": x})
        print("more:", sorted(listening() - before), flush=True)
        with socket.create_server(("127.0.0.1", 0)):
            assert len(listening() - before) == 1, "this test sees ports"
        """,
        env={"HORO_LITE_TEST_HOSTS": hosts},
    ).check()
    assert re.findall("more: (.*)", result.stdout) == ["[]", "[]"], str(result)
