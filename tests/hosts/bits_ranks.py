"""The ranks of test_hosts.py that print a digest of the bits of many all-reduces."""

import hashlib
import socket

import numpy as np

import horo_lite as hvd

hvd.init(device="cpu")
rank, size = hvd.rank(), hvd.size()
rng = np.random.default_rng(rank)
digest = hashlib.sha256()
# One value, a part of a block, and more than one window of every transport.
SIZES = (1, 1500, 300_001)


def record(what: str, xs: list) -> None:
    digest.update(what.encode())
    for x in xs:
        digest.update(x.tobytes())


def drawn(dtype: type) -> list:
    """Return values whose sums depend on the order of additions."""
    return [(rng.standard_normal(n) * 2.0 ** rng.integers(-9, 9, n)).astype(dtype) for n in SIZES]


for dtype in (np.int32, np.int64, np.float32):
    xs = [np.arange(n, dtype=dtype) % 100 * (rank + 1) for n in SIZES]
    sums = hvd.grouped_allreduce(xs, op=hvd.Sum)
    for x, total in zip(xs, sums, strict=True):
        assert np.array_equal(total * 2, x // (rank + 1) * size * (size + 1)), (dtype, total)
    record("exact", sums)

# Equal digests do not show that the results are right.
ones = np.ones(1500, np.float32)
(weighted,) = hvd.grouped_allreduce([ones * (rank + 1)], weight=rank + 1)
assert np.allclose(weighted, ones * (2 * size + 1) / 3, rtol=1e-6), weighted
assert (hvd.broadcast(ones * rank, size - 1) == size - 1).all()
assert (hvd.allgather(ones * rank).reshape(size, -1) == np.arange(size)[:, None]).all()
rows = hvd.reducescatter(np.arange(10.0 * size) * (rank + 1), op=hvd.Sum)
assert np.array_equal(rows, (np.arange(10) + 10 * rank) * size * (size + 1) / 2), rows

for name in ("none", "fp16", "bf16"):
    compression = getattr(hvd.Compression, name)
    record(name, hvd.grouped_allreduce(drawn(np.float32), compression=compression))
    handle = hvd.grouped_allreduce_async(
        drawn(np.float32), op=hvd.Sum, name=name, compression=compression
    )
    record(f"asynchronous {name}", hvd.synchronize(handle))
    record(
        f"weighted {name}",
        hvd.grouped_allreduce(drawn(np.float32), compression=compression, weight=rank + 0.7),
    )
for dtype in (np.float16, np.float64):
    record(str(dtype), hvd.grouped_allreduce(drawn(dtype)))
record("min", hvd.grouped_allreduce(drawn(np.float32), op=hvd.Min))
record("broadcast", [hvd.broadcast(drawn(np.float32)[1], size - 1)])
record("allgather", [hvd.allgather(drawn(np.float32)[1])])

place = f"{hvd.local_rank()}/{hvd.local_size()} {hvd.cross_rank()}/{hvd.cross_size()}"
print(f"rank {rank} at {place} on {socket.gethostname()}: {digest.hexdigest()}", flush=True)
hvd.shutdown()
