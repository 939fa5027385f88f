"""The ranks of test_send_recv.py."""

import threading
from functools import partial

import numpy as np

import horo_lite as hvd
from horo_lite import context

world = hvd.init()
rank, size = world.rank, world.size
right, left = (rank + 1) % size, (rank - 1) % size


def of(source, count, dtype=np.float32):
    return (np.arange(count) % 97 + 1000 * source).astype(dtype)


# Around the ring: nothing, little, what just fits into an envelope and what does not, 10 MB, twice.
for count in (0, 1, 768, 769, 2_500_000, 2_500_000):
    sent, got = of(rank, count), np.full(count, -1, np.float32)
    handle = hvd.isend(sent, right)
    assert hvd.recv(got, left) == left
    assert handle.wait() is None and handle.done()
    sent[:] = 0
    np.testing.assert_array_equal(got, of(left, count))

# Blocking, between two ranks; the others do something else, together.
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
for dtype in "c8", ">f4", "M8[s]":
    theirs = of(left, 40, np.uint8).view(dtype)
    handle = hvd.isend(of(rank, 40, np.uint8).view(dtype), right, tag=5)
    received = np.zeros_like(theirs)
    hvd.recv(received, left, tag=5)
    handle.wait()
    assert received.tobytes() == theirs.tobytes()
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

# Of one tag in order, of several in the receiver's order; thousands before any is received.
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

# From any source; and large ones in the opposite order.
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

# A message of isend() arrives while its sender is in a collective.
x, y = np.full(50_000, float(rank)), np.empty(50_000)
if rank == 0:
    handle = hvd.isend(x, 1)
elif rank == 1:
    hvd.recv(y, 0)
    assert y[-1] == 0
hvd.allreduce(np.ones(4))
if rank == 0:
    handle.wait()

# A receive that was begun completes while its rank waits for something else.
y = [np.zeros(300_000) for _ in range(3)]
if rank == 0:
    handles = [hvd.irecv(each, 1, tag=tag) for tag, each in enumerate(y)]
    hvd.barrier()
    assert hvd.allreduce_async(x, name="meanwhile").wait()[0] == sum(range(size)) / size
    hvd.recv(np.empty(3), 1, tag=9)
    for tag, handle in enumerate(handles):
        assert handle.wait() == 1 and (y[tag] == tag).all()
else:
    for tag, each in enumerate(y):
        if rank == 1:
            hvd.isend(each + tag, 0, tag=tag).wait()
        if tag == 0:
            hvd.barrier()
        elif tag == 1:
            hvd.allreduce_async(x, name="meanwhile").wait()
        elif rank == 1:
            hvd.send(np.ones(3), 0, tag=9)
hvd.barrier()

# Large messages in flight are not confused, however few tags there are between hosts.
channel = getattr(context.messages()._mailbox, "channel", None)
if rank == 0 and channel is not None:
    largest_tag, channel.largest_tag = channel.largest_tag, 6
    handles = []
    try:
        while True:
            handles.append(hvd.isend(x - len(handles), 1, tag=len(handles)))
    except hvd.HoroLiteError as error:
        assert f"{len(handles)} large messages of this rank are in flight" in str(error), error
    hvd.send(np.array(len(handles)), 1, tag=98)
    handles[-1].wait()
    for i in range(20):
        hvd.send(x + i, 1, tag=99)
    for handle in handles:
        handle.wait()
    channel.largest_tag = largest_tag
elif rank == 1 and channel is not None:
    hvd.recv(n := np.array(0), 0, tag=98)
    assert n > 1
    got = np.empty_like(x)
    late = [(tag, -tag) for tag in range(int(n))]
    for tag, expected in (late.pop(), *((99, i) for i in range(20)), *late):
        hvd.recv(got, 0, tag=tag)
        assert (got == expected).all(), (tag, got)
hvd.barrier()


# Two threads, each with its own messages.
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


# Errors.
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


fails(lambda: hvd.send(OnGpu(), left), ValueError, "the array is on cuda:0", "x.cpu()")
fails(lambda: hvd.recv(OnGpu(), left), ValueError, "the array is on cuda:0")
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
        fails(partial(hvd.recv, receives, 0, tag=3), hvd.MismatchError, "rank 0 has sent ", into)
        assert not receives.any()
hvd.barrier()
if rank == 0:
    hvd.send(x, 1, tag=3)
elif rank == 1:
    assert hvd.recv(x * 0, 0, tag=3) == 0

# Messages that were not received are dropped with their world.
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
if rank == 0:  # and ends before anything is received
    hvd.send(np.full(1, 7.0), 1)
elif rank == 1:
    import time

    time.sleep(0.3)
    hvd.recv(got)
    assert got[0] == 7
    print("done after", flush=True)
