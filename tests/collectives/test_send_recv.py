"""Messages from one rank to another: their contents, their order, what is wrong with them."""

from __future__ import annotations

import re

import pytest
from launch import run_ranks

import horo_lite as hvd

pytestmark = pytest.mark.mpi

MESSAGES = """
import threading
import numpy as np
import horo_lite as hvd

world = hvd.init()
rank, size = world.rank, world.size
right, left = (rank + 1) % size, (rank - 1) % size


def of(source, count, dtype=np.float32):
    return (np.arange(count) % 97 + 1000 * source).astype(dtype)


# Round the ring: nothing, little, what just fits into a letter and what does not, 10 MB, twice.
for count in (0, 1, 768, 769, 2_500_000, 2_500_000):
    sent, got = of(rank, count), np.full(count, -1, np.float32)
    handle = hvd.isend(sent, right)
    assert hvd.recv(got, left) == left
    assert handle.wait() is None and handle.done()
    sent[:] = 0
    np.testing.assert_array_equal(got, of(left, count))

# Blocking, between two; the others do something else, together.
if rank < 2:
    x = np.full(2000, float(rank))
    if rank == 0:
        hvd.send(x, 1)
        hvd.recv(x, 1)
    else:
        y = np.empty_like(x)
        hvd.recv(y, src=0)
        hvd.send(x + y, dst=0)
    assert rank == 1 or x[0] == 1, x

# Any layout and dtype; elements count in C order.
for x, y in [
    (of(rank, 3000).reshape(60, 50).T, np.zeros((50, 60), np.float32, order="F")),
    (of(rank, 12, np.int16)[::3], np.zeros((2, 4), np.int16)[:, ::2]),
    (of(rank, 6000, np.float64)[::2], np.zeros(6000)[1::2]),
    (np.array(7 + rank), np.zeros((), np.int64)),
    (np.array([rank > 0, True]), np.zeros(2, bool)),
]:
    handle = hvd.isend(x, right)
    z = hvd.irecv(y, left)
    assert hvd.synchronize(z) == left and hvd.synchronize(handle) is None and hvd.poll(z)
    ranks_of = hvd.allgather_object((x.ravel().tolist(), y.ravel().tolist()))
    assert ranks_of[rank][1] == ranks_of[left][0], (x.dtype, x.shape)

# Of one tag in order, of several in the receiver's; thousands before anybody looks.
n_messages = 3000
handles = [hvd.isend(np.array([i, rank]), right, tag=i % 2) for i in range(n_messages)]
odd = [hvd.irecv(np.empty(2, np.int64), left, tag=1) for _ in range(3)]
for tag, begin in ((0, 0), (1, 6)):
    for request in odd if tag else ():
        assert request.wait() == left
    for i in range(begin + tag, n_messages, 2):
        got = np.empty(2, np.int64)
        hvd.recv(got, left, tag=tag)
        assert got.tolist() == [i, left], (got, i, tag)
for handle in handles:
    handle.wait()

# From anybody; and large ones in the opposite order.
if rank == 0:
    got = [np.empty(1, np.int64) for _ in range(size - 1)]
    sources = [hvd.recv(x) for x in got]
    assert sorted(sources) == list(range(1, size))
    assert [int(x[0]) for x in got] == [10 * source for source in sources]
    big = np.empty(5000)
    assert hvd.recv(big, 1, tag=2) == 1 and big[0] == 2
    assert hvd.recv(big, 1, tag=1) == 1 and big[0] == 1
else:
    hvd.send(np.array([10 * rank]), 0)
    if rank == 1:
        both = [hvd.isend(np.full(5000, float(tag)), 0, tag=tag) for tag in (1, 2)]
        for handle in both:
            handle.wait()

# What is sent without waiting arrives while its sender is in a collective.
x, y = np.full(50_000, float(rank)), np.empty(50_000)
if rank == 0:
    handle = hvd.isend(x, 1)
elif rank == 1:
    hvd.recv(y, 0)
    assert y[-1] == 0
hvd.allreduce(np.ones(4))
if rank == 0:
    handle.wait()

# Two threads, each with its own.
if world.thread_multiple:
    def exchange(tag):
        got = np.empty(4000)
        for i in range(20):
            handle = hvd.isend(np.full(4000, 100.0 * rank + i + tag), right, tag=tag)
            hvd.recv(got, left, tag=tag)
            handle.wait()
            assert (got == 100.0 * left + i + tag).all()
        good.append(tag)

    good = []
    threads = [threading.Thread(target=exchange, args=(tag,)) for tag in (50, 60)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(good) == [50, 60]


# What is wrong.
def fails(call, error, *words):
    try:
        call()
    except error as raised:
        assert all(word in str(raised) for word in words), raised
    else:
        raise AssertionError(f"no {error.__name__}")


x = np.ones(3)
fails(lambda: hvd.send(x, rank), ValueError, "this rank itself")
fails(lambda: hvd.recv(x, rank), ValueError, "this rank itself")
fails(lambda: hvd.send(x, size), ValueError, f"dst is {size}, but the ranks are 0 to {size - 1}")
fails(lambda: hvd.send(x, "1"), TypeError, "dst must be an integer")
fails(lambda: hvd.recv(0.0, left), TypeError, "received into an array")


class OnGpu:
    def __dlpack_device__(self):
        return 2, 0


fails(lambda: hvd.send(OnGpu(), left), ValueError, "the array lies on cuda:0", "x.cpu()")
fails(lambda: hvd.recv(OnGpu(), left), ValueError, "the array lies on cuda:0")
frozen = np.ones(3)
frozen.flags.writeable = False
fails(lambda: hvd.recv(frozen, left), ValueError, "read-only")
for count, dtype in ((4, np.float64), (3, np.float32), (5000, np.float64), (4000, np.int64)):
    receives = np.zeros(3 if count < 100 else 4000)
    into = f"which receives into float64[{len(receives)}]"
    if rank == 0:
        words = f"rank 0 has sent {np.dtype(dtype).name}[{count}] to rank 1 (tag 3), "
        handle = hvd.isend(np.ones(count, dtype), 1, tag=3)
        if count < 100:
            handle.wait()
        else:
            fails(handle.wait, hvd.MismatchError, words, into)
    elif rank == 1:
        fails(lambda: hvd.recv(receives, 0, tag=3), hvd.MismatchError, "rank 0 has sent ", into)
        assert not receives.any()
hvd.barrier()
if rank == 0:
    hvd.send(x, 1, tag=3)
elif rank == 1:
    assert hvd.recv(x * 0, 0, tag=3) == 0

# What nobody has received is forgotten with its world.
if rank == 0:
    hvd.send(np.full(1, 5.0), 1)
hvd.barrier()
never = hvd.irecv(np.empty(1), left, tag=99)
hvd.shutdown()
fails(never.wait, hvd.NotInitializedError, "was shut down")
fails(lambda: hvd.send(x, left), hvd.NotInitializedError, "init()")
hvd.init()
if rank == 0:
    hvd.send(np.full(1, 6.0), 1)
elif rank == 1:
    got = np.empty(1)
    hvd.recv(got, 0)
    assert got[0] == 6
print("done", flush=True)
if rank == 0:  # and ends, before anybody has looked
    hvd.send(np.full(1, 7.0), 1)
elif rank == 1:
    import time
    time.sleep(0.3)
    hvd.recv(got)
    assert got[0] == 7
    print("done after", flush=True)
"""


@pytest.mark.parametrize("hosts", ["", "1,1,1", "2,1"])
def test_messages(hosts: str) -> None:
    result = run_ranks(MESSAGES, 3, env={"HORO_LITE_TEST_HOSTS": hosts}, timeout_s=60).check()
    assert result.stdout.count("done") == 4


def test_alone_there_is_nobody_to_write_to() -> None:
    run_ranks(
        """
        import numpy as np
        import horo_lite as hvd
        hvd.init()
        for call in (hvd.recv, hvd.irecv):
            try:
                call(np.ones(1))
            except ValueError as error:
                assert "this world has one rank" in str(error)
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
        launcher=False,
    ).check()


TUTORIAL = """
import torch
import horo_lite.torch as hvd

world = hvd.init()
rank, size = world.rank, world.size


def ring_allreduce(tensor):
    # Everyone passes on what it has got, and adds it up.
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


def test_a_first_message_without_a_free_descriptor_is_an_error_of_its_sender() -> None:
    body = """
    import os, resource
    import numpy as np
    import horo_lite as hvd

    world = hvd.init(device="cpu", stall_abort_s=20)
    x = np.arange(3.0)
    if world.rank == 0:
        send = hvd.send  # imported now: that takes a descriptor, too
        highest = max(map(int, os.listdir("/proc/self/fd")))
        limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 1, limits[1]))
        held = []
        try:
            while True:
                held.append(os.dup(0))
        except OSError:
            pass
        try:
            send(np.zeros(3), 1)
        except OSError as error:
            assert "no free file descriptor" in str(error), error
        else:
            raise AssertionError("it was sent")
        for descriptor in held:
            os.close(descriptor)
        hvd.send(x, 1)
    else:
        received = np.zeros(3)
        hvd.recv(received, 0)
        assert received.tolist() == [0.0, 1.0, 2.0]  # not what was not sent
    print("end", flush=True)
    """
    result = run_ranks(body, 2).check()
    assert result.stdout.count("end") == 2, str(result)


def test_messages_under_way_share_descriptors_and_keep_what_they_hold() -> None:
    """Of several sizes, fetched in another order than sent, twice, so that files are used again."""
    body = """
    import os
    import numpy as np
    import horo_lite as hvd

    rank = hvd.init(device="cpu").rank
    sizes = [1000, 5000, 200_000, 3_000_000]
    for turn in range(2):
        tags = range(120)
        value = lambda tag: np.arange(sizes[tag % 4], dtype=np.float32) + 1000 * turn + tag
        if rank == 0:
            before = len(os.listdir("/proc/self/fd"))
            handles = [hvd.isend(value(tag), 1, tag=tag) for tag in tags]
            print("more descriptors:", len(os.listdir("/proc/self/fd")) - before, flush=True)
            hvd.barrier()
            for handle in handles:
                handle.wait()
        else:
            hvd.barrier()
            for tag in reversed(tags):
                received = np.zeros(sizes[tag % 4], np.float32)
                hvd.recv(received, 0, tag=tag)
                assert np.array_equal(received, value(tag)), tag
    print("end", flush=True)
    """
    result = run_ranks(body, 2).check()
    assert result.stdout.count("end") == 2, str(result)
    more = [int(n) for n in re.findall(r"more descriptors: (\d+)", result.stdout)]
    assert len(more) == 2, str(result)
    assert max(more) < 20, "a descriptor for each message"


def test_the_tutorial_of_torch_distributed() -> None:
    """Its ring and its trainer, in own words."""
    pytest.importorskip("torch")
    run_ranks(TUTORIAL, 3, timeout_s=60).check()


def test_what_was_sent_before_its_sender_left_is_received_however_late_it_comes() -> None:
    """MPI may bring the news of a rank's end before a message that it has sent earlier."""
    run_ranks(
        """
        import time
        import numpy as np
        import horo_lite as hvd
        from horo_lite.transports.mpi.mailbox import MpiMailbox

        rank = hvd.init().rank
        if rank == 1:
            hvd.send(np.full(3, 7.0), 0)
            hvd.send(np.full(3, 8.0), 0)
        else:
            collect, until = MpiMailbox._receive, None

            def collect_late(mailbox):
                global until
                if until is None and mailbox._transport.has_left(1, 2):
                    until = time.monotonic() + 1.5
                return [] if until is None or time.monotonic() < until else collect(mailbox)

            MpiMailbox._receive = collect_late
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


@pytest.mark.parametrize("hosts", ["", "1,1"])
def test_who_waits_for_a_message_says_so(hosts: str) -> None:
    result = run_ranks(
        """
        import time
        import numpy as np
        import horo_lite as hvd
        rank = hvd.init().rank
        x = np.ones(3)
        if rank == 0:
            hvd.recv(x, 1, tag=4)
        else:
            time.sleep(1.5)
            hvd.send(x, 0, tag=4)
        """,
        2,
        env={"HORO_LITE_TEST_HOSTS": hosts, "HORO_LITE_STALL_WARN_S": "0.4"},
    ).check()
    assert "rank 0 has waited " in result.stderr
    assert " in recv from rank 1 (tag 4) for rank 1" in result.stderr, str(result)
    assert "time.sleep" in result.stderr or ", line " in result.stderr or hosts, str(result)


def test_mistakes_of_two_ranks_are_an_end() -> None:
    """Both send what is large, and nobody receives: it is seen who waits for whom."""
    result = run_ranks(
        """
        import numpy as np
        import horo_lite as hvd
        rank = hvd.init().rank
        hvd.send(np.ones(5000), 1 - rank)
        """,
        2,
        env={"HORO_LITE_STALL_WARN_S": "0.3", "HORO_LITE_STALL_ABORT_S": "0.8"},
    )
    assert result.returncode != 0
    assert "the ranks wait for each other" in result.stderr
    assert " in send to rank 1 (tag 0) for rank 1" in result.stderr, str(result)
    assert hvd.StallError.__name__ in result.stderr
