"""What each rank sends the others in `init()`, and whether they fit together."""

from __future__ import annotations

import re
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, NamedTuple

from horo_lite import __version__, settings
from horo_lite.errors import MismatchError
from horo_lite.settings import Settings
from horo_lite.start import devices
from horo_lite.start.cores import Cores
from horo_lite.start.devices import DeviceChoice

_CORES = (range(1 << 20), ...)
_FAILED = {"version": str, "host": (str, str, str), "error": str}
FORM = [
    _FAILED,
    _FAILED
    | {
        "error": None,
        "token": re.compile("[0-9a-f]{16}"),
        "settings": settings.FORM,
        "test_host": range(1 << 20),
        "device": devices.FORM,
        "cores": (_CORES, _CORES, [None, bool], float),
    },
]
"""The form of a record, as `fits` takes it; of a rank that has failed it has less."""


class RankInfo(NamedTuple):
    """What one rank brings to `init()`."""

    host: tuple[str, ...]
    """What `host_key` says."""
    token: str
    """Rank 0's names the world: messages of other worlds are not for it."""
    settings: Settings
    test_host: int
    """The number of the simulated host on which this rank is."""
    device: DeviceChoice
    cores: Cores

    def record(self) -> dict[str, Any]:
        """Return what travels: dicts, tuples and plain values."""
        record = self._asdict() | {"settings": asdict(self.settings)}
        return {"version": __version__, "error": None} | record


def failure(host: tuple[str, ...], error: Exception) -> dict[str, Any]:
    """Return the record of a rank whose `init()` fails."""
    return {"version": __version__, "host": host, "error": str(error)}


def compare(records: Sequence[Mapping[str, Any]]) -> list[RankInfo]:
    """Return what all ranks have brought, if it fits together.

    Raises:
        MismatchError: It does not, or one of them has failed; on every rank alike.
    """
    hosts = [record["host"][0] for record in records]
    for rank, record in enumerate(records):
        if record["error"]:
            raise MismatchError(
                f"init() failed on rank {rank} of {len(records)}: {record['error']}"
            )

    def check(what: str, values: Sequence[object], remedy: str) -> None:
        for rank, value in enumerate(values):
            if value != values[0]:
                raise MismatchError(
                    f"{what} is {values[0]} on rank 0 (host {hosts[0]}), but {value} on rank "
                    f"{rank} (host {hosts[rank]}): {remedy}"
                )

    check("horo_lite's version", [r["version"] for r in records], "install one everywhere")
    everyone = [
        RankInfo(
            host=record["host"],
            token=record["token"],
            settings=Settings(**record["settings"]),
            test_host=record["test_host"],
            device=DeviceChoice(*record["device"]),
            cores=Cores(*record["cores"]),
        )
        for record in records
    ]
    hosts_given = [one.settings.test_hosts for one in everyone]
    check("test_hosts", [h and list(h) for h in hosts_given], "give every rank the same")
    kinds = [one.device.kind for one in everyone]
    check("the kind of device", kinds, "pass device='cpu', or look for the missing GPUs")
    return everyone


def simulated_host(sizes: Sequence[int] | None, rank: int, size: int) -> int:
    """Return the number of the simulated host on which a rank is; 0 without any.

    Raises:
        ValueError: The hosts have room for more or fewer ranks than there are.
    """
    if sizes is None:
        return 0
    if sum(sizes) != size:
        raise ValueError(
            f"test_hosts {list(sizes)} are {sum(sizes)} ranks, but the world has {size}"
        )
    return next(i for i in range(len(sizes)) if rank < sum(sizes[: i + 1]))


def numbered(keys: Sequence[Hashable]) -> list[int]:
    """Return a number for each key, the same for equal ones, in order of first appearance."""
    numbers = {key: i for i, key in enumerate(dict.fromkeys(keys))}
    return [numbers[key] for key in keys]


class Position(NamedTuple):
    """Where a rank is among the hosts."""

    local_rank: int
    local_size: int
    cross_rank: int
    cross_size: int


def position_of(rank: int, host_of_rank: Sequence[int]) -> Position:
    """Return a rank's position, where rank r is on host `host_of_rank[r]`.

    The cross rank counts the hosts that have a rank with this local rank: hosts may be unequal.
    """
    host = host_of_rank[rank]
    local_rank = host_of_rank[:rank].count(host)
    peers = [h for h in dict.fromkeys(host_of_rank) if host_of_rank.count(h) > local_rank]
    return Position(local_rank, host_of_rank.count(host), peers.index(host), len(peers))
