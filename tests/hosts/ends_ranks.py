"""What each rank does in test_hosts.py: leaves every kind of short message to peers, and ends.

    ends_ranks.py together|late

`late`: rank 0 goes on alone for longer than ranks that end wait for its last messages.
"""

import sys
import time

import numpy as np

import horo_lite as hvd

hvd.init(device="cpu")
rank, size = hvd.rank(), hvd.size()
everyone = size * (size + 1) / 2
evens = hvd.new_group([r for r in range(size) if r % 2 == 0])
for step in range(20):  # engines wake each other for every round
    x = np.full(1000, rank + 1.0, np.float32)
    assert hvd.allreduce_async(x, op=hvd.Sum, name=f"{step}").wait()[0] == everyone
if rank == 0:
    time.sleep(0.5)  # those that wait report that they have arrived
assert hvd.allreduce(np.array([rank + 1.0]), op=hvd.Sum)[0] == everyone
if rank == 0 and sys.argv[1] == "late":
    time.sleep(3)
if sys.argv[1] == "late":
    hvd.shutdown()
print("the end", flush=True)
