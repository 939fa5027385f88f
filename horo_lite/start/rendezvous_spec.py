"""The address of the rendezvous of a world that MPI did not start, and this process's rank."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from ipaddress import ip_address
from typing import NamedTuple
from urllib.parse import urlsplit

from horo_lite.errors import LauncherError
from horo_lite.settings import Settings, whole_number
from horo_lite.start.launcher import TORCHRUN, connects_by_mpi, detect


class RendezvousSpec(NamedTuple):
    """The address of the rendezvous of a world that MPI did not start, and this process's rank."""

    rank: int
    size: int
    host: str
    port: int
    served: bool
    """Whether another process, such as torchrun, keeps the store; otherwise rank 0 does."""
    attempt: str
    """The number of the job's start, if several use it in succession."""
    one_host: bool = False
    """Whether the environment shows that all ranks are on one host: see `is_one_host`."""

    @property
    def where(self) -> str:
        """The address of the store, for messages."""
        return f"{self.host}:{self.port}" if self.port else self.host


# The variables that replace an argument of init() that is not given.
_STANDARD = {"rank": "RANK", "size": "WORLD_SIZE", "address": "MASTER_ADDR and MASTER_PORT"}


def rendezvous_spec(settings: Settings, environ: Mapping[str, str]) -> RendezvousSpec | None:
    """Return the rendezvous in init()'s `rank`, `size` and `address`, or in torchrun's variables.

    None if there is neither. In a job of MPI's launcher, the variables are ignored. With `address`,
    or under srun without MPI, rank and size are the launcher's if they are not given.

    Raises:
        ValueError: A value is invalid.
        LauncherError: Some of the values are missing, or variables number nodes instead of ranks.
    """
    given: dict[str, int | str | None] = {
        "rank": settings.rank,
        "size": settings.size,
        "address": settings.address,
    }
    explicit = any(value is not None for value in given.values())
    launch = detect(environ)
    is_started = launch is not None and launch.name != TORCHRUN and launch.size != 1
    host, port = environ.get("MASTER_ADDR"), environ.get("MASTER_PORT")
    standard = {
        "rank": environ.get("RANK"),
        "size": environ.get("WORLD_SIZE"),
        "address": f"{host}:{port}" if host and port else None,
    }
    if launch is not None and is_started:
        by_mpi = connects_by_mpi(launch, environ)
        if not explicit and (by_mpi or not standard["address"]):
            return None
        if by_mpi or not (standard["rank"] and standard["size"]):
            numbers = {"rank": launch.rank, "size": launch.size}
            standard |= {name: None if n is None else str(n) for name, n in numbers.items()}
    found = {name: standard[name] if given[name] is None else given[name] for name in _STANDARD}
    if not explicit and standard["size"] is None and not (standard["rank"] and host):
        if launch is None:
            _refuse_a_node_alone(environ)
        return None  # a single variable may have another meaning
    rank, size = whole_number("rank", found["rank"], 0), whole_number("size", found["size"], 1)
    if launch is None and given["rank"] is None and size != 1:
        _refuse_numbers_of_nodes(environ)
    if size == 1:
        if rank:
            raise ValueError(f"rank is {rank}, but size is 1")
        return RendezvousSpec(0, 1, "", 0, False, "")
    missing = [_STANDARD[name] for name, value in found.items() if value is None]
    if missing or rank is None or size is None:
        has = ", ".join(f"{name} {value}" for name, value in found.items() if value is not None)
        lacks = " and ".join(missing)
        raise LauncherError(
            f"this process should be a rank of a world that MPI does not start ({has}), but lacks "
            f"{lacks}: set what is missing, or call init(rank=…, size=…, address='host:port'). To "
            "run it alone, unset HORO_LITE_RANK and _SIZE, RANK, WORLD_SIZE and MASTER_ADDR"
        )
    where = urlsplit("//" + str(found["address"]).removeprefix("tcp://"))
    try:
        name, number = where.hostname, where.port
    except ValueError:
        name = number = None
    if not name or not number:
        raise ValueError(f"address must be rank 0's host and a port, not {found['address']!r}")
    ours = environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" and given["address"] is None
    attempt = environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    one_host = is_one_host(name, size, environ)
    return RendezvousSpec(rank, size, name, number, ours, attempt, one_host)


def expected_place(environ: Mapping[str, str]) -> tuple[int, int]:
    """Return the rank and the size that this process has in a job, without `init()`.

    (0, 1) if the environment does not say so. HOROVOD_RANK is set by `horovodrun` without MPI.
    """
    with suppress(ValueError, LauncherError):
        spec = rendezvous_spec(Settings.read({}, environ), environ)
        if spec is not None:
            return spec.rank, spec.size
    launch = detect(environ)
    if launch is not None:
        return launch.rank or 0, launch.size or 1
    rank, size = environ.get("HOROVOD_RANK", ""), environ.get("HOROVOD_SIZE", "")
    return (int(rank), int(size)) if rank.isdigit() and size.isdigit() else (0, 1)


def is_one_host(address: str, size: int, environ: Mapping[str, str]) -> bool:
    """Return whether all ranks must be on this host, whatever the entries of the store claim.

    Args:
        address: The host of the store. A name is not resolved: on Debian, a host's own name leads
            to the loopback there, and to its network address elsewhere.
        size: The number of ranks.
        environ: The environment; torchrun sets LOCAL_WORLD_SIZE.
    """
    with suppress(ValueError):
        number = ip_address(address)
        if number.is_loopback or number.is_unspecified:
            return True
    return address == "localhost" or environ.get("LOCAL_WORLD_SIZE") == str(size)


# Variables with the number of ranks per node: Alibaba's PAI-DLC and Baidu's AIHC set the first,
# Kubeflow's PyTorchJob the second, which torchrun reads itself.
_RANKS_OF_A_NODE = ("NPROC_PER_NODE", "PET_NPROC_PER_NODE")
# The number of nodes of a job that starts one process on each: Kubeflow's Trainer, AWS Batch.
_NODES = ("PET_NNODES", "AWS_BATCH_JOB_NUM_NODES")
_PAGE = "docs/launching.md has the command for each platform"


def _refuse_numbers_of_nodes(environ: Mapping[str, str]) -> None:
    """Raise LauncherError if RANK is the number of a node that should have several ranks.

    LOCAL_RANK shows that these have been started, by a launcher that has numbered them.
    """
    for name in _RANKS_OF_A_NODE:
        value = environ.get(name, "1")
        if value not in ("", "1") and "LOCAL_RANK" not in environ:
            raise LauncherError(
                f"RANK={environ.get('RANK')} and WORLD_SIZE={environ.get('WORLD_SIZE')} number the "
                f"nodes of this job and not its ranks: {name} is {value}, but that many have not "
                "been started on this node. On each node run `torchrun --nnodes <number of nodes> "
                "--node-rank $RANK --nproc-per-node <ranks of a node> --master-addr $MASTER_ADDR "
                "--master-port $MASTER_PORT train.py` instead of `python train.py`; for one rank "
                f"per node, set {name}=1. {_PAGE}"
            )


def _refuse_a_node_alone(environ: Mapping[str, str]) -> None:
    """Raise LauncherError if each of several nodes would train alone."""
    for name in _NODES:
        value = environ.get(name, "1")
        if value not in ("", "1", "1:1"):
            raise LauncherError(
                f"{name} is {value}, but this process has not been started as a rank: it would "
                "train alone, as would those on the other nodes. Start it with torchrun on each "
                "node, or with mpiexec on one; to train alone, call init(rank=0, size=1). "
                f"{_PAGE}"
            )
