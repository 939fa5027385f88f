"""A script for DDP with a fault of rank 1 in the third step, chosen by the argument."""

from __future__ import annotations

import os
import signal
import sys
import time
from datetime import timedelta

import torch
from torch import distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import horo_lite.torch  # noqa: F401 (registers the backend)

fault = sys.argv[1]
limit_s = 8 if fault == "stop" else 60
dist.init_process_group("horo_lite", timeout=timedelta(seconds=60))
rank, group = dist.get_rank(), dist.new_group(timeout=timedelta(seconds=limit_s))
model = DistributedDataParallel(
    nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1)), process_group=group, bucket_cap_mb=1e-4
)


def train_step() -> None:
    model(torch.full((2, 8), float(rank))).sum().backward()


for step in range(5):
    if step == 2 and rank == 1:
        print("now", flush=True)
        if fault == "mismatch":
            dist.all_reduce(torch.ones(3), group=group, async_op=True)
        elif fault == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif fault == "stop":
            time.sleep(1)  # so that it is not waiting itself when it stops
            os.kill(os.getpid(), signal.SIGSTOP)
        elif fault == "raise":
            raise ValueError("a bug of the program's")
    train_step()
dist.destroy_process_group()
print("the end", flush=True)
