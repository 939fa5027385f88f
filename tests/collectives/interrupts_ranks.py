"""The ranks of test_interrupts.py."""

import contextlib
import gc
import os
import signal
import threading
import time
from pathlib import Path

import numpy as np
import pytest

import horo_lite as hvd

N = 1 << 19  # 2 MiB of float32: several windows


class Notes:
    """Files that tell the other rank how far this one is, without a message."""

    def __init__(self, folder):
        self._folder = Path(folder)

    def write(self, what):
        (self._folder / what).touch()

    def has(self, what):
        return (self._folder / what).exists()

    def wait_for(self, what):
        while not self.has(what):
            time.sleep(0.001)

    def move_until(self, what, at_most_s):
        from mpi4py import MPI

        until = time.monotonic() + at_most_s
        while not self.has(what) and time.monotonic() < until:
            MPI.COMM_WORLD.Iprobe()
            time.sleep(0.001)


def end_early(operation, phase, how, folder):
    world = hvd.init(device="cpu")
    transport, notes = world.group.transport, Notes(folder)
    x = np.full(N, world.rank + 1.0, np.float32)
    operate = {
        "allreduce": lambda: hvd.allreduce_(x),
        "allgather": lambda: hvd.allgather(x),
        "broadcast": lambda: hvd.broadcast_(x, 1),
        "alltoall": lambda: hvd.alltoall(x),
        "allgather_object": lambda: hvd.allgather_object(x),
        "recv": lambda: hvd.recv(x, 1) if world.rank == 0 else hvd.send(x, 0),
    }[operation]
    hvd.barrier()
    if world.rank == 1:
        be_late(operation, phase, how, operate, world.group, notes)
        return
    threading.Thread(target=end_soon, args=(how, transport, notes), daemon=True).start()
    with pytest.raises(KeyboardInterrupt if how == "interrupt" else hvd.PeerLostError):
        operate()
    x[:] = 7.0
    gc.collect()
    # Other arrays, of the sizes of memory that may have been returned.
    given = [np.zeros(k * N, np.float32) for k in (1, 2) for _ in range(40)]
    for k in (32, 64, 96, 4096, 1 << 16, 1 << 20):
        given += [np.zeros(k, np.uint8) for _ in range(50)]
    notes.write("rank 0 has ended its call")
    notes.move_until("rank 1 is through", at_most_s=3.0)
    notes.move_until("nothing", at_most_s=0.2)
    assert (x == 7.0).all(), "the array was written to"
    assert not any(array.any() for array in given), "other arrays were written to"
    notes.write("rank 0 has looked")


def end_soon(how, transport, notes):
    notes.wait_for("rank 1 is late")
    time.sleep(0.2)  # until this rank waits for it
    if how == "interrupt":
        os.kill(os.getpid(), signal.SIGINT)
    else:
        transport.members.leave("the test says so")


def be_late(operation, phase, how, operate, group, notes):
    """Before the call is matched, or when all have agreed and the data is to be sent."""
    threads = []

    def wait_until_ended():
        notes.write("rank 1 is late")
        notes.wait_for("rank 0 has ended its call")

    def later(real):
        def late(*args, **options):
            wait_until_ended()
            return real(*args, **options)

        return late

    if phase == "handshake":
        group._together = later(group._together)
    elif operation == "recv":
        from horo_lite import context  # the envelope is sent at once, its data late

        channel = context.messages()._mailbox.channel
        real_start = channel.start

        def late(*messages):
            sent = []

            def start_late():
                wait_until_ended()
                sent.append(real_start(*messages))

            threads.append(threading.Thread(target=start_late))
            threads[0].start()
            return lambda: bool(sent) and sent[0]()

        channel.start = late
    else:
        name = {"allgather_object": "allgather"}.get(operation, operation)
        transport = group.transport
        setattr(transport, name, later(getattr(transport, name)))
    with contextlib.suppress(hvd.PeerLostError):
        operate()
    for thread in threads:
        thread.join()
    notes.write("rank 1 is through")
    notes.move_until("rank 0 has looked", at_most_s=30.0)


def shutdown_early(folder):
    from horo_lite.transports.mpi.carrier import MpiCarrier

    earlier, notes = list(MpiCarrier.in_use), Notes(folder)
    world = hvd.init(device="cpu")
    hvd.barrier()
    if world.rank == 0:
        hvd.allreduce_async(np.ones(3), name="only here")
        threading.Thread(target=end_soon, args=("interrupt", None, notes), daemon=True).start()
        notes.write("rank 1 is late")
        with pytest.raises(KeyboardInterrupt):
            hvd.shutdown()
        carriers = [one for one in MpiCarrier.in_use if one not in earlier]
        assert not any(one._is_closed for one in carriers), "MPI may still write to its memory"
        notes.write("rank 0 has ended its call")
    else:
        notes.wait_for("rank 0 has ended its call")
        with pytest.raises(hvd.PeerLostError, match="KeyboardInterrupt"):
            hvd.barrier()
        hvd.shutdown()
    hvd.init(device="cpu")
    assert hvd.allreduce(1.0, hvd.Sum) == 2
