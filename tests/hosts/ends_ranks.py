"""The ranks of test_hosts.py that leave every kind of short message to peers, and end.

ends_ranks.py together|late

`together`: rank 0 ends a little later, within the time that ending ranks wait for the last messages
of others. `late`: rank 0 continues for longer than that.
"""

import sys
import time

import numpy as np

import horo_lite as hvd
from horo_lite.start import mpi

(how,) = sys.argv[1:]
mpi._LAST_MESSAGES_S = {"together": 1e6, "late": 0.5}[how]
hvd.init(device="cpu")
rank, size = hvd.rank(), hvd.size()
everyone = size * (size + 1) / 2
evens = hvd.new_group([r for r in range(size) if r % 2 == 0])
for step in range(20):  # engines wake each other for every round
    x = np.full(1000, rank + 1.0, np.float32)
    assert hvd.allreduce_async(x, op=hvd.Sum, name=f"{step}").wait()[0] == everyone
if rank == 0:
    time.sleep(0.5)  # ranks that wait report that they have arrived
assert hvd.allreduce(np.array([rank + 1.0]), op=hvd.Sum)[0] == everyone
if how == "late":
    if rank == 0:
        time.sleep(mpi._LAST_MESSAGES_S + 1)
    hvd.shutdown()
elif rank == 0:
    time.sleep(0.3)
print("the end", flush=True)
