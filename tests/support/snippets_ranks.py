"""Train with every snippet of the docs, on shards or in one process; print the learned weights.

python snippets_ranks.py whole|half|shares folder name...
"""

from __future__ import annotations

import importlib
import json
import sys

import numpy as np

import horo_lite as hvd
from horo_lite.adapters import to_host

which, folder, *names = sys.argv[1:]
sys.path.insert(0, folder)
hvd.init()
rank, size = hvd.rank(), hvd.size()

# Rows whose targets differ so much that no rank can learn from its shard alone the result of all.
rng = np.random.default_rng(0)
inputs = rng.standard_normal((4, 6, 3)).astype("f4")
targets = (inputs @ [[1.0], [2.0], [3.0]] + 8 * np.arange(6)[:, None] % 13).astype("f4")


def batches_for(name: str) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return this process's rows of every batch; shard sizes differ by one where that is tested."""
    n = 5 if name in ("uneven", "any_framework") else 6
    rows = slice(rank, n, size) if which == "shares" else slice(0, n, 1 if which == "whole" else 2)
    return [(x[rows], y[rows]) for x, y in zip(inputs, targets, strict=True)]


learned = {}
for name in names:
    snippet = importlib.import_module(name)
    train = snippet.train
    if hasattr(snippet, "Weight"):
        weight = snippet.Weight("w", np.full((3, 1), 0.5 + rank, "f4"))
        train(weight if name == "any_framework" else [weight], batches_for(name))
        values = to_host(weight)
    else:
        import torch

        torch.manual_seed(rank)
        model = torch.nn.Linear(3, 1)
        train(model, [tuple(map(torch.from_numpy, batch)) for batch in batches_for(name)])
        values = torch.cat([p.detach().flatten() for p in model.parameters()]).numpy()
    everyone = hvd.allgather_object(values.tobytes())
    assert set(everyone) == {values.tobytes()}, f"{name}: the replicas differ"
    learned[name] = values.ravel().tolist()
if rank == 0:
    print(json.dumps(learned))
