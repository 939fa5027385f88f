"""Between hosts, gathered data is sent to each host once: which rank receives what from which."""

from __future__ import annotations

from collections import Counter

import pytest
from launch import run_ranks

from horo_lite.transports.hosts.transport import Places


@pytest.mark.parametrize(
    "hosts",
    [
        [[0], [1]],
        [[0, 1], [2, 3]],
        [[0, 2], [1]],
        [[0], [1, 3, 4], [2, 5]],
        [[0, 3, 5, 7], [1, 4, 6], [2]],
    ],
)
def test_every_host_gets_every_rank_once(hosts: list[list[int]]) -> None:
    host_of = {rank: h for h, ranks in enumerate(hosts) for rank in ranks}
    places = {rank: Places.of(hosts, h, hosts[h].index(rank)) for rank, h in host_of.items()}
    for h, ranks in enumerate(hosts):
        (brought,) = {tuple(map(tuple, places[rank].brought)) for rank in ranks}  # all agree
        assert Counter(r for each in brought for r in each) == Counter(list(places))
        for rank, has in zip(ranks, brought, strict=True):
            own, *fetched = has
            assert own == rank
            assert len(fetched) <= places[rank].most_peers
            # The peers from which it expects data send it there, and no others do.
            senders = [peer for peer, where in places.items() if rank in where.counterparts]
            assert sorted(senders) == sorted(fetched)
            # Starting with the next host: not all send to the same host at once.
            after = [(host_of[peer] - h) % len(hosts) for peer in places[rank].counterparts]
            assert after == list(range(1, len(hosts)))
    assert len({each.most_peers for each in places.values()}) == 1


@pytest.mark.mpi
def test_operations_of_one_transport_may_have_windows_of_different_sizes() -> None:
    """As in a world of many ranks, where an all-to-all has more peers than an all-gather."""
    script = """
    import numpy as np
    import horo_lite as hvd
    from horo_lite.transports.hosts import transport
    transport.WINDOWS_BYTES = 5_000_011
    world = hvd.init()
    n, rank = 300_000, world.rank
    for _ in range(2):
        received = hvd.alltoall(np.repeat(10.0 * rank + np.arange(4), n))
        assert (received.reshape(4, n) == 10.0 * np.arange(4)[:, None] + rank).all()
        gathered = hvd.allgather(np.full(n + rank, 1.0 + rank))
        assert (gathered == np.repeat(1.0 + np.arange(4), n + np.arange(4))).all()
    """
    run_ranks(script, 4, env={"HORO_LITE_TEST_HOSTS": "2,2"}, timeout_s=60).check()


@pytest.mark.mpi
def test_an_all_to_all_sends_through_mpi_what_goes_to_other_hosts() -> None:
    script = """
    import numpy as np
    import horo_lite as hvd
    from horo_lite.transports.mpi.carrier import MpiCarrier
    real, sent = MpiCarrier.start, [0] * 5
    def counting(carrier, receive, send):
        for peer, _, memory in send:
            sent[peer] += memory.nbytes
        return real(carrier, receive, send)
    MpiCarrier.start = counting  # ranks also exchange the numbers of rows
    world = hvd.init()
    rank, size = world.rank, world.size
    rows = lambda source, to: (5 * source + to) % 7 * 70_001
    to_each = [rows(rank, to) for to in range(size)]
    received, _ = hvd.alltoall(np.repeat(10 * rank + np.arange(size), to_each), to_each)
    from_each = [rows(source, rank) for source in range(size)]
    assert (received == np.repeat(10 * np.arange(size) + rank, from_each)).all()
    is_here = [(peer < 2) == (rank < 2) for peer in range(size)]
    expected = [0 if is_here[to] else 8 * n for to, n in enumerate(to_each)]
    assert all(0 <= n - all_of_it < 100 for n, all_of_it in zip(sent, expected)), (sent, expected)
    """
    run_ranks(script, 5, env={"HORO_LITE_TEST_HOSTS": "2,3"}, timeout_s=60).check()
