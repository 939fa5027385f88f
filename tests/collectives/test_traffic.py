"""hvd.stats(): the bytes of every operation between hosts, by the formulas of the algorithms."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from without_mpi import by_address
from worlds import on_ranks

import horo_lite as hvd

BLOCK, FP16_BLOCK_BYTES = 1024, 2 * 1024 + 16  # elements; bytes with their scale
N = 12 * 200 * BLOCK  # 9.4 MiB: several windows, and each share has whole blocks
LARGE = 500_000  # bytes of a message that does not fit into its envelope


def sent_by_each_operation() -> dict[str, int]:
    """Return how many bytes this rank sends in each operation."""
    world = hvd.init(device="cpu")
    rank, last = world.rank, world.size - 1
    x = np.full(N, float(rank + 1), np.float32)
    total = world.size * (world.size + 1) / 2
    sent: dict[str, int] = {}

    def count(name: str, operate: Callable[[], object]) -> None:
        hvd.barrier()
        before = hvd.stats().bytes_sent
        operate()
        sent[name] = hvd.stats().bytes_sent - before

    def reduce(**options: object) -> None:
        assert (hvd.allreduce(x, hvd.Sum, **options) == total).all()  # type: ignore[arg-type]

    def reduce_later() -> None:
        assert (hvd.synchronize(hvd.allreduce_async(x, hvd.Sum, name="x")) == total).all()

    def pass_on(n_bytes: int) -> None:
        if rank == 0:
            hvd.send(np.full(n_bytes, 7, np.uint8), last)
        elif rank == last:
            hvd.recv(received := np.zeros(n_bytes, np.uint8), 0)
            assert (received == 7).all()

    group = hvd.new_group([0, last])
    count("barrier", hvd.barrier)
    count("float32", reduce)
    count("fp16", lambda: reduce(compression=hvd.Compression.fp16))
    count("later", reduce_later)
    if rank in (0, last):
        count("group", lambda: hvd.allreduce(x, hvd.Sum, group=group))
    else:
        hvd.barrier()
    count("broadcast", lambda: hvd.broadcast(x, last))
    count("allgather", lambda: hvd.allgather(x))
    count("reducescatter", lambda: hvd.reducescatter(x, op=hvd.Sum))
    count("small", lambda: pass_on(10))
    count("large", lambda: pass_on(LARGE))
    return sent


@pytest.mark.served
@pytest.mark.parametrize("over", ["mpi", "gloo"])
def test_two_hosts_send_what_the_algorithms_say(over: str) -> None:
    if over == "gloo":
        pytest.importorskip("torch")
    env = by_address() if over == "gloo" else {}
    first, second = on_ranks(sent_by_each_operation, 2, hosts="1,1", env=env, timeout_s=60)
    n_bytes = 4 * N
    # Half of the numbers to their owner, and the sums of the other half back.
    both = {
        "barrier": 0,
        "float32": n_bytes,
        "fp16": N // BLOCK * FP16_BLOCK_BYTES,
        "later": n_bytes,
        "group": n_bytes,
        "allgather": n_bytes,
        "reducescatter": n_bytes // 2,
    }
    assert first == {**both, "broadcast": 0, "small": 10, "large": LARGE}
    assert second == {**both, "broadcast": n_bytes, "small": 0, "large": 0}


@pytest.mark.served
def test_ranks_of_a_host_share_what_it_sends() -> None:
    sent = on_ranks(sent_by_each_operation, 3, hosts="2,1", timeout_s=60)
    for name in ("float32", "later"):
        assert sent[0][name] + sent[1][name] == sent[2][name] == 4 * N
        assert min(sent[0][name], sent[1][name]) == 2 * N
    assert sent[2]["broadcast"] == 4 * N
    assert "group" not in sent[1]


@pytest.mark.served
def test_three_hosts_send_four_times_the_tensors() -> None:
    """Each owner of a share receives it from two hosts, and sends its sums to both."""
    sent = on_ranks(sent_by_each_operation, 3, hosts="1,1,1", timeout_s=60)
    for name, n_bytes in (("float32", 4 * N), ("fp16", N // BLOCK * FP16_BLOCK_BYTES)):
        each = [of_rank[name] for of_rank in sent]
        assert sum(each) == 2 * 2 * n_bytes
        # Not exactly: a window's blocks cannot always be divided by three.
        assert max(each) - min(each) < 0.02 * n_bytes


@pytest.mark.served
def test_one_host_sends_nothing() -> None:
    for sent in on_ranks(sent_by_each_operation, 2, timeout_s=60):
        assert set(sent.values()) == {0}
