"""The record that each rank sends to the others in `init()`, and their comparison."""

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
"""The form of a record, for `fits`; the record of a rank that has failed is shorter."""


class RankInfo(NamedTuple):
    """The information that one rank sends in `init()`."""

    host: tuple[str, ...]
    """The result of `host_key`."""
    token: str
    """Rank 0's token identifies the world, so that messages of other worlds are ignored."""
    settings: Settings
    test_host: int
    """The number of the simulated host on which this rank is."""
    device: DeviceChoice
    cores: Cores

    def record(self) -> dict[str, Any]:
        """Return the record to send: dicts, tuples and plain values."""
        record = self._asdict() | {"settings": asdict(self.settings)}
        return {"version": __version__, "error": None} | record


def failure(host: tuple[str, ...], error: Exception) -> dict[str, Any]:
    """Return the record of a rank whose `init()` fails."""
    return {"version": __version__, "host": host, "error": str(error)}


def compare(records: Sequence[Mapping[str, Any]]) -> list[RankInfo]:
    """Return the information of all ranks, if it is consistent.

    Raises:
        MismatchError: On every rank, if it is not, or if a rank has failed.
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

    check("horo_lite's version", [r["version"] for r in records], "install the same everywhere")
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
    check("test_hosts", [h and list(h) for h in hosts_given], "pass the same on every rank")
    kinds = [one.device.kind for one in everyone]
    check("the kind of device", kinds, "pass device='cpu', or check the missing GPUs")
    return everyone


def simulated_host(sizes: Sequence[int] | None, rank: int, size: int) -> int:
    """Return the number of the simulated host of a rank; 0 if there are none.

    Raises:
        ValueError: The sizes of the hosts do not add up to the number of ranks.
    """
    if sizes is None:
        return 0
    if sum(sizes) != size:
        raise ValueError(
            f"test_hosts {list(sizes)} have {sum(sizes)} ranks, but the world has {size}"
        )
    return next(i for i in range(len(sizes)) if rank < sum(sizes[: i + 1]))


def numbered(keys: Sequence[Hashable]) -> list[int]:
    """Return a number for each key, the same for equal ones, in order of first appearance."""
    numbers = {key: i for i, key in enumerate(dict.fromkeys(keys))}
    return [numbers[key] for key in keys]


class Position(NamedTuple):
    """The position of a rank among the hosts."""

    local_rank: int
    local_size: int
    cross_rank: int
    cross_size: int


def position_of(rank: int, host_of_rank: Sequence[int]) -> Position:
    """Return a rank's position, given that rank r is on host `host_of_rank[r]`.

    The cross rank counts only hosts that have a rank with this local rank: sizes may differ.
    """
    host = host_of_rank[rank]
    local_rank = host_of_rank[:rank].count(host)
    peers = [h for h in dict.fromkeys(host_of_rank) if host_of_rank.count(h) > local_rank]
    return Position(local_rank, host_of_rank.count(host), peers.index(host), len(peers))
