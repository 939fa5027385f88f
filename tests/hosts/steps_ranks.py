"""The ranks of test_hosts.py that take steps, with correct results, until a file exists.

steps_ranks.py FOLDER [elastic] [abort_after=SECONDS]

The file is FOLDER/enough. After the first steps, longer waits end the job. A rank's stderr is in
FOLDER/rank-N: for a host that has been cut off, the launcher shows nothing.
"""

import os
import sys
import time
from pathlib import Path

folder = Path(sys.argv[1])
number = os.environ.get("OMPI_COMM_WORLD_RANK") or os.environ["PMI_RANK"]
os.dup2(os.open(folder / f"rank-{number}", os.O_WRONLY | os.O_CREAT), 2)

import numpy as np  # noqa: E402
from stall_limits import limit_waits  # noqa: E402

import horo_lite as hvd  # noqa: E402

hvd.init(device="cpu")
x = np.arange(500_000, dtype=np.float32) % 100
n_steps, longest_s, last = 0, 0.0, time.monotonic()
sizes = []


def steps() -> None:
    global n_steps, longest_s, last
    is_enough = False
    while not is_enough:
        y = hvd.allreduce(x + np.float32(hvd.rank() + n_steps % 10), op=hvd.Sum)
        # The last gradient shows whether rank 0 has seen the file.
        seen = float(hvd.rank() == 0 and (folder / "enough").exists())
        is_enough = hvd.allreduce(np.array([seen]), op=hvd.Sum)[0] > 0
        sizes.append(hvd.size())
        of_ranks = hvd.size() * (hvd.size() - 1) / 2
        if sizes[-2:] in ([hvd.size()], 2 * [hvd.size()]):
            assert np.array_equal(y, hvd.size() * (x + n_steps % 10) + of_ranks), (n_steps, y)
        n_steps += 1
        longest_s, last = max(longest_s, time.monotonic() - last), time.monotonic()
        if n_steps == 3:
            for limit in (arg for arg in sys.argv if arg.startswith("abort_after=")):
                limit_waits(float(limit.partition("=")[2]))
            print("begun", flush=True)


if "elastic" in sys.argv:
    state = hvd.elastic.State(x=x)
    hvd.elastic.run(lambda state: steps())(state)
else:
    steps()
print(f"rank {hvd.rank()} of {hvd.size()}: longest step {longest_s:.2f} s", flush=True)
hvd.shutdown()
