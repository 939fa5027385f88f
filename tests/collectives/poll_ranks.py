"""Ranks that poll operations in which a rank takes part that has ended.

    poll_ranks.py ends|dies

Rank 1 ends, normally or not. Rank 2, if there is one, continues.
"""

import os
import signal
import sys
import time

import numpy as np

import horo_lite as hvd

(how,) = sys.argv[1:]
world = hvd.init(device="cpu")
hvd.barrier()
small, large = np.ones(3), np.ones(5000)


def poll(handle):
    until = time.monotonic() + 60
    while not handle.done():
        assert time.monotonic() < until, f"{handle.name} is not done"
        time.sleep(0.001)


def fails(handle):
    try:
        handle.wait()
    except hvd.PeerLostError as error:
        assert "rank 1" in str(error), error
    else:
        raise AssertionError(f"{handle.name} has not failed")


if world.rank == 1 and how == "dies":
    os.kill(os.getpid(), signal.SIGKILL)
if world.rank == 0:
    lost = [hvd.irecv(large.copy(), 1), hvd.isend(large, 1)]
    for handle in lost:
        poll(handle)
        assert handle.done()
    if how == "ends":  # a rank that only polls messages can continue with the others
        answer = hvd.irecv(small)
        assert not answer.done()
        hvd.send(small, 2)
        poll(answer)
        assert answer.wait() == 2
    lost.append(hvd.allreduce_async(small, name="w"))
    poll(lost[-1])
    for handle in lost:
        fails(handle)
    print("all are lost", flush=True)
if world.rank == 2:
    hvd.recv(small, 0)
    hvd.send(small, 0)
