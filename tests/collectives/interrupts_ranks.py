"""The ranks of test_interrupts.py."""

import gc
import os
import signal
import sys
import threading
import time

import numpy as np

import horo_lite as hvd

operation, phase, how = sys.argv[1:]
world = hvd.init(device="cpu")
rank, size = world.rank, world.size
transport = world.group.transport
n = 1 << 19  # 2 MiB of float32: several windows

x = np.full(n, rank + 1.0, np.float32)
operations = {
    "allreduce": lambda: hvd.allreduce_(x),
    "allgather": lambda: hvd.allgather(x),
    "broadcast": lambda: hvd.broadcast_(x, size - 1),
    "alltoall": lambda: hvd.alltoall(x[: n // size * size]),
    "allgather_object": lambda: hvd.allgather_object(x),
    "recv": lambda: hvd.recv(x, size - 1) if rank == 0 else hvd.send(x, 0),
}
hvd.barrier()


def exists(what):
    return os.access(what, os.F_OK)


def note(what):
    open(what, "w").close()


def wait_until_ended():
    note("rank 1 is late")
    while not exists("rank 0 has ended its call"):
        time.sleep(0.001)


# The last rank is late: in `agree`, or when all have agreed and the data is to be sent.
threads = []
if rank == size - 1:
    name = {"allgather_object": "allgather"}.get(operation, operation)
    if phase == "handshake":
        real_agree = transport.agree

        def late(*args, **options):
            wait_until_ended()
            return real_agree(*args, **options)

        transport.agree = late
    elif operation == "recv":
        from horo_lite import context  # the envelope is sent at once, its data late

        channel = context.messages()._mailbox.channel
        real_exchange = channel.exchange

        def late(*messages):
            sent = []

            def start():
                wait_until_ended()
                sent.append(real_exchange(*messages))

            threads.append(threading.Thread(target=start))
            threads[0].start()
            return lambda: bool(sent) and sent[0]()

        channel.exchange = late
    else:
        real = getattr(transport, name)

        def late(*args, **options):
            wait_until_ended()
            return real(*args, **options)

        setattr(transport, name, late)


def end_early():
    while not exists("rank 1 is late"):
        time.sleep(0.001)
    time.sleep(0.2)  # until this rank waits for it
    if how == "interrupt":
        os.kill(os.getpid(), signal.SIGINT)
    else:
        transport.leave("the test says so")


def move_until(what, at_most_s):
    from mpi4py import MPI

    until = time.monotonic() + at_most_s
    while not exists(what) and time.monotonic() < until:
        MPI.COMM_WORLD.Iprobe()
        time.sleep(0.001)


try:
    if rank == 0:
        threading.Thread(target=end_early, daemon=True).start()
    operations[operation]()
except (KeyboardInterrupt, hvd.PeerLostError) as error:
    ended = type(error).__name__
else:
    ended = "nothing"
if rank == 0:
    assert ended == ("KeyboardInterrupt" if how == "interrupt" else "PeerLostError"), ended
    x[:] = 7.0
    gc.collect()
    # Other arrays, of the sizes of memory that may have been returned.
    given = [np.zeros(k * n, np.float32) for k in (1, size) for _ in range(40)]
    for k in (32, 64, 96, 4096, 1 << 16, 1 << 20):
        given += [np.zeros(k, np.uint8) for _ in range(50)]
    note("rank 0 has ended its call")
    move_until("rank 1 is through", at_most_s=3.0)
    move_until("nothing", at_most_s=0.2)
    assert (x == 7.0).all(), "the array was written to"
    assert not any(array.any() for array in given), "other arrays were written to"
    print("untouched", flush=True)
    note("rank 0 has looked")
else:
    for thread in threads:
        thread.join()
    note("rank 1 is through")
    move_until("rank 0 has looked", at_most_s=30.0)
sys.stdout.flush()
os._exit(0)
