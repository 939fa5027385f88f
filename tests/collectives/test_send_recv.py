"""Messages between two ranks: their contents, their order, and errors."""

from __future__ import annotations

import contextlib
import os
import resource
import time
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from launch import run_ranks, start_ranks
from worlds import on_ranks, script_on_ranks

import horo_lite as hvd

MESSAGES = Path(__file__).with_name("send_recv_ranks.py")
POLLS = Path(__file__).with_name("poll_ranks.py")


@pytest.mark.served
@pytest.mark.parametrize(
    "hosts", ["", *[pytest.param(hosts, marks=pytest.mark.mpi) for hosts in ("1,1,1", "2,1")]]
)
def test_messages(hosts: str) -> None:
    result = script_on_ranks(MESSAGES, 3, env={"HORO_LITE_TEST_HOSTS": hosts}, timeout_s=60)
    assert result.stdout.count("done") == 4


@pytest.mark.served
def test_alone_there_is_nobody_to_write_to() -> None:
    script_on_ranks(
        """
        import numpy as np
        import horo_lite as hvd
        hvd.init()
        for call in (hvd.recv, hvd.irecv):
            try:
                call(np.ones(1))
            except ValueError as error:
                assert "this world has only one rank" in str(error)
            else:
                raise AssertionError(call)
        for call in (hvd.send, hvd.recv, hvd.isend, hvd.irecv):
            for peer in (0, 1):
                try:
                    call(np.ones(1), peer)
                except ValueError as error:
                    assert ("itself" if peer == 0 else "ranks are 0 to 0") in str(error)
                else:
                    raise AssertionError("there is nobody")
        """,
        1,
    )


TUTORIAL = """
import torch
import horo_lite.torch as hvd

world = hvd.init()
rank, size = world.rank, world.size


def ring_allreduce(tensor):
    # Each rank passes on what it has received, and adds it.
    total, sent, got = tensor.clone(), tensor.clone(), torch.empty_like(tensor)
    for _ in range(size - 1):
        request = hvd.isend(sent, (rank + 1) % size)
        hvd.recv(got, (rank - 1) % size)
        request.wait()
        total += got
        sent, got = got, sent
    tensor.copy_(total)


for n in (5, 100_000):
    x = torch.arange(n, dtype=torch.float64) * (rank + 1)
    ring_allreduce(x)
    assert torch.equal(x, torch.arange(n, dtype=torch.float64) * sum(range(1, size + 1)))

# The trainer that sums each gradient and divides it, next to one process with the whole batch.
torch.manual_seed(0)
model, alone = (torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
                for _ in range(2))
if rank == 0:
    tensor = torch.zeros(1)
    for p in model.parameters():
        for r in range(1, size):
            hvd.send(p, r)
else:
    for p in model.parameters():
        with torch.no_grad():
            p.zero_()
        hvd.recv(p, src=0)
alone.load_state_dict(model.state_dict())
x, y = torch.randn(6 * size, 4), torch.randn(6 * size, 1)
for net, rows in ((model, slice(6 * rank, 6 * rank + 6)), (alone, slice(None))):
    for step in range(5):
        net.zero_grad()
        torch.nn.functional.mse_loss(net(x[rows]), y[rows]).backward()
        if net is model:
            for p in net.parameters():
                hvd.allreduce_(p.grad, op=hvd.Sum)
                p.grad /= size
        with torch.no_grad():
            for p in net.parameters():
                p -= 0.1 * p.grad
for p, q in zip(model.parameters(), alone.parameters()):
    torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)
half = torch.full((3,), float(rank), dtype=torch.bfloat16)
request = hvd.isend(half, (rank + 1) % size)
hvd.recv(half := torch.empty(3, dtype=torch.bfloat16), (rank - 1) % size)
request.wait()
assert half.tolist() == [(rank - 1) % size] * 3
"""


def send_without_a_descriptor() -> None:
    world = hvd.init(device="cpu", stall_abort_s=20)
    x = np.arange(3.0)
    if world.rank == 1:
        hvd.recv(received := np.zeros(3), 0)
        assert received.tolist() == [0.0, 1.0, 2.0]  # not the message that was not sent
        return
    send = hvd.send  # imported now, since that also needs a descriptor
    highest = max(map(int, os.listdir("/proc/self/fd")))
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    held: list[int] = []
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 1, limits[1]))
        with contextlib.suppress(OSError):
            while True:
                held.append(os.dup(0))
        with pytest.raises(OSError, match="no free file descriptor"):
            send(np.zeros(3), 1)
    finally:
        for descriptor in held:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    hvd.send(x, 1)


@pytest.mark.served
def test_a_first_message_without_a_free_descriptor_is_an_error_of_its_sender() -> None:
    on_ranks(send_without_a_descriptor, 2)


def have_many_messages_under_way() -> list[int]:
    """Return by how many descriptors rank 0 has more while they are, in each turn."""
    rank = hvd.init(device="cpu").rank
    sizes, tags, more = [1000, 5000, 200_000, 3_000_000], range(120), []

    def value(turn: int, tag: int) -> npt.NDArray[np.float32]:
        return np.arange(sizes[tag % 4], dtype=np.float32) + 1000 * turn + tag

    for turn in range(2):
        if rank == 0:
            before = len(os.listdir("/proc/self/fd"))
            handles = [hvd.isend(value(turn, tag), 1, tag=tag) for tag in tags]
            more.append(len(os.listdir("/proc/self/fd")) - before)
            hvd.barrier()
            for handle in handles:
                handle.wait()
        else:
            hvd.barrier()
            for tag in reversed(tags):
                received = np.zeros(sizes[tag % 4], np.float32)
                hvd.recv(received, 0, tag=tag)
                assert np.array_equal(received, value(turn, tag)), tag
    return more


@pytest.mark.served
def test_messages_under_way_share_descriptors_and_keep_what_they_hold() -> None:
    """Several sizes, received in another order than sent, twice, so that files are reused."""
    more, _ = on_ranks(have_many_messages_under_way, 2)
    assert len(more) == 2
    assert max(more) < 20, "one descriptor per message"


def send_what_finds_no_room() -> None:
    rank = hvd.init(device="cpu", stall_abort_s=10).rank
    small, large = np.zeros(300), np.zeros(50_000)
    if rank == 0:
        handles = [hvd.isend(small + tag, 1, tag=tag) for tag in range(100)]
        hvd.recv(large, 1)
        hvd.barrier()
        for handle in handles:
            handle.wait()
    else:
        handle = hvd.isend(large, 0)
        time.sleep(0.3)
        handle.wait()  # its acknowledgement comes after the small ones
        for tag in range(100):
            hvd.recv(small, 0, tag=tag)
            assert (small == tag).all(), tag
        hvd.barrier()


@pytest.mark.served
def test_what_finds_no_room_is_sent_while_its_sender_is_elsewhere() -> None:
    """Small messages, and the acknowledgement of a large one: a pipe holds 64 KiB."""
    on_ranks(send_what_finds_no_room, 2)


@pytest.mark.served
def test_the_tutorial_of_torch_distributed() -> None:
    """Its ring and its trainer, rewritten."""
    pytest.importorskip("torch")
    script_on_ranks(TUTORIAL, 3, timeout_s=60)


@pytest.mark.mpi
def test_what_was_sent_before_its_sender_left_is_received_however_late_it_comes() -> None:
    """MPI may report a rank's end before a message that it has sent earlier."""
    run_ranks(
        """
        import time
        import numpy as np
        import horo_lite as hvd
        from horo_lite.transports.hosts.mailbox import HostsMailbox

        rank = hvd.init().rank
        if rank == 1:
            hvd.send(np.full(3, 7.0), 0)
            hvd.send(np.full(3, 8.0), 0)
        else:
            collect, until = HostsMailbox.receive, None

            def collect_late(mailbox):
                global until
                if until is None and mailbox._transport.members.has_left(1, 2):
                    until = time.monotonic() + 1.5
                return [] if until is None or time.monotonic() < until else collect(mailbox)

            HostsMailbox.receive = collect_late
            x = np.zeros(3)
            for expected in (7.0, 8.0):
                assert hvd.recv(x, 1) == 1 and x.tolist() == [expected] * 3, x
            try:
                hvd.recv(x, 1)
            except hvd.PeerLostError as error:
                assert "rank 1" in str(error) and "has left" in str(error), error
            else:
                raise AssertionError("received what nobody has sent")
        """,
        2,
        env={"HORO_LITE_TEST_HOSTS": "1,1"},
    ).check()


@pytest.mark.launches
@pytest.mark.parametrize("hosts", ["", pytest.param("1,1,1", marks=pytest.mark.mpi)])
def test_whoever_asks_learns_that_a_rank_has_left(hosts: str) -> None:
    """Instead of polling forever. Under gloo, and when a rank dies: tests/start/test_gloo.py."""
    result = run_ranks(POLLS, 3, args=["ends"], env={"HORO_LITE_TEST_HOSTS": hosts}, timeout_s=60)
    assert "all are lost" in result.check().stdout


@pytest.mark.launches
@pytest.mark.parametrize("hosts", ["", "1,1"])
def test_who_waits_for_a_message_says_so(hosts: str) -> None:
    script = """
    import os, time
    import numpy as np
    import horo_lite as hvd
    rank = hvd.init().rank
    x = np.ones(3)
    if rank == 0:
        hvd.recv(x, 1, tag=4)
    else:
        while not os.access("it was reported", os.F_OK):
            time.sleep(0.01)
        hvd.send(x, 0, tag=4)
    """
    env = {"HORO_LITE_TEST_HOSTS": hosts, "HORO_LITE_STALL_WARN_S": "0.4"}
    with start_ranks(script, 2, env=env) as job:
        job.wait_for(" in recv from rank 1 (tag 4) for rank 1", on_stderr=True)
        if not hosts:  # the stacks of rank 1
            job.wait_for(", line ", on_stderr=True)
        job.folder.joinpath("it was reported").touch()
        assert "rank 0 has waited " in job.wait().check().stderr


@pytest.mark.launches
def test_mistakes_of_two_ranks_are_an_end() -> None:
    """Both send large messages, and neither receives: the cyclic wait is detected."""
    result = run_ranks(
        """
        import numpy as np
        import horo_lite as hvd
        from stall_limits import limit_waits
        rank = hvd.init().rank
        limit_waits(3)
        hvd.send(np.ones(5000), 1 - rank)
        """,
        2,
    )
    assert result.returncode != 0
    assert "the ranks wait for each other" in result.stderr
    assert " in send to rank 1 (tag 0) for rank 1" in result.stderr, str(result)
    assert hvd.StallError.__name__ in result.stderr
