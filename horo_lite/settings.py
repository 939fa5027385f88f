"""The settings: the arguments of `init()`, and every variable HORO_LITE_….

`VARIABLES` is the only table of the variables; a test compares docs/environment.md with it.
`Settings` holds those from which a world is made; the functions below it read the others.
"""

from __future__ import annotations

import difflib
import math
import operator
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple


@dataclass(frozen=True)
class Settings:
    """The settings of a world, read once by `init()` from its arguments and the environment.

    See `init()` for those that are its arguments.

    Attributes:
        timeline: The file for a trace of the ranks' operations.
        problem: Why a value is invalid; "" if all are valid. It is raised on every rank, after
            these have found each other.
    """

    rank: int | None = None
    size: int | None = None
    address: str | None = None
    start_timeout_s: float = 120.0
    device: str | None = None
    threads: int | None = None
    binding: str = "auto"
    slot_stores: str = "auto"
    overlap: str = "auto"
    test_hosts: tuple[int, ...] | None = None
    stall_warn_s: float = 30.0
    stall_abort_s: float = 0.0
    timeline: str | None = None
    problem: str = ""

    @staticmethod
    def read(arguments: Mapping[str, object], environ: Mapping[str, str]) -> Settings:
        """Return the settings from arguments and variables.

        Args:
            arguments: Those of `init()` by name. One that is not None takes precedence over its
                variable.
            environ: The environment.

        Raises:
            ValueError: `rank` or `size` is invalid; without these a rank cannot report a problem
                to the others. For other values, the result's `problem` says so.
        """
        values: dict[str, Any] = {}
        problems = []
        for setting in fields(Settings):
            name = setting.name
            given: object = arguments.get(name)
            where = ""
            if given is None:
                variable = _PREFIX + name.upper()
                given = environ.get(variable) or None
                where = f"{variable}={given}: "
            if given is None or name == "problem":
                continue
            try:
                values[name] = _read(name, given)
            except ValueError as error:
                if name in ("rank", "size"):
                    raise ValueError(f"{where}{error}") from None
                problems.append(f"{where}{error}")
        return Settings(**values, problem=problems[0] if problems else "")

    def difference(self, other: Settings) -> str:
        """Return the name of the first argument of `init()` in which two settings differ, or ""."""
        own, theirs = asdict(self), asdict(other)
        return next((name for name in _ARGUMENTS if own[name] != theirs[name]), "")


_PREFIX = "HORO_LITE_"
# Variables of the repository's own tests.
_OF_TESTS = ("HORO_LITE_TEST_", "HORO_LITE_FAKE_")
_ARGUMENTS = [each.name for each in fields(Settings) if each.name not in ("timeline", "problem")]

SLOT_STORES = ("auto", "cached", "streaming")

# The form of settings that another rank has written, for `fits`.
FORM = {
    "rank": [None, int],
    "size": [None, int],
    "address": [None, str],
    "start_timeout_s": float,
    "device": [None, str],
    "threads": [None, int],
    "binding": str,
    "slot_stores": str,
    "overlap": str,
    "test_hosts": [None, (range(1 << 20), ...)],
    "stall_warn_s": float,
    "stall_abort_s": float,
    "timeline": [None, str],
    "problem": str,
}


def _read(name: str, given: object) -> object:
    """Return a setting's value, given as an argument or as text."""
    if name in ("rank", "size"):
        return whole_number(name, given, {"rank": 0, "size": 1}[name])
    if name.endswith("_s"):
        return seconds(name, given)
    if name == "threads" and not (str(given).isdigit() and int(str(given)) > 0):
        raise ValueError(f"threads must be a positive number, not {given!r}")
    if name == "threads":
        return int(str(given))
    if name == "binding" and given not in ("auto", "keep"):
        raise ValueError(f"binding must be 'auto' or 'keep', not {given!r}")
    if name == "slot_stores" and given not in SLOT_STORES:
        raise ValueError(f"slot_stores must be 'auto', 'cached' or 'streaming', not {given!r}")
    if name == "overlap" and given not in ("auto", "always", "never"):
        raise ValueError(f"overlap must be 'auto', 'always' or 'never', not {given!r}")
    if name == "test_hosts":
        return _test_hosts(given)
    if name == "device":
        kind, colon, index = str(given).partition(":")
        if kind not in ("cpu", "cuda") or (colon and not (kind == "cuda" and index.isdigit())):
            raise ValueError(f"device must be 'cpu', 'cuda' or like 'cuda:1', not {given!r}")
    return str(given)


def _test_hosts(given: Any) -> tuple[int, ...]:
    sizes = [str(n).strip() for n in (given.split(",") if isinstance(given, str) else given)]
    if not all(n.isdigit() and int(n) > 0 for n in sizes):
        raise ValueError(f"test_hosts must be positive sizes as in '2,1', not {given!r}")
    return tuple(map(int, sizes))


def whole_number(name: str, value: object, least: int) -> int | None:
    """Return a whole number that may be given as text; None for None.

    Raises:
        ValueError: It is not a number, or below the least.
    """
    if value is None:
        return None
    if not (str(value).isdigit() and int(str(value)) >= least):
        raise ValueError(f"{name} must be a number, and at least {least}, not {value!r}")
    return int(str(value))


def seconds(name: str, given: object) -> float:
    """Return a number of seconds, 0 for never, that may be given as text.

    Raises:
        ValueError: It is not a number, or negative, or infinite.
    """
    try:
        value = float(str(given))
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise ValueError(f"{name} must be a number of seconds, or 0 for never, not {given!r}")
    return value


def bucket_bytes(given: int | None = None) -> int | None:
    """Return the bytes of gradients per bucket: the argument's, or HORO_LITE_BUCKET_BYTES.

    None if neither is given: optimizers and NCCL have different defaults.

    Raises:
        ValueError: It is not a whole number of at least 1.
    """
    return _whole("bucket_bytes", given, 1, "a bucket has a whole number of bytes, at least 1")


def check_every(given: int | None = None) -> int | None:
    """Return the steps between comparisons of parameters: the argument's, or the variable's.

    0 means never, and None rarely, with a warning.

    Raises:
        ValueError: It is not a whole number of at least 0.
    """
    return _whole("check_every", given, 0, "a whole number of steps, or 0 for never")


def noise_every() -> int:
    """Return the steps between measurements of the gradients' noise; 0 means never.

    Raises:
        ValueError: It is not a whole number of at least 0.
    """
    return _whole("noise_every", None, 0, "a whole number of steps, or 0 for never") or 0


def nccl_timeout_s() -> float:
    """Return the seconds within which NCCL must have connected the GPUs."""
    name = "HORO_LITE_NCCL_TIMEOUT_S"
    return seconds(name, os.environ.get(name) or "120")


REPLACEMENT = "HORO_LITE_REPLACEMENT"


def is_replacement() -> bool:
    """Return whether this process was started to replace a lost rank, and has not yet joined.

    Until then it is rank 0 of its own world, which must not write to the files of the job's rank 0.
    """
    return REPLACEMENT in os.environ


def flight_record_folder() -> Path | None:
    """Return the folder for the ranks' last operations, if a failed job is to leave a record."""
    return _path("HORO_LITE_FLIGHT_RECORD")


def steps_file() -> Path | None:
    """Return the file in which rank 0 records what the steps begin with, if it is to do so."""
    return _path("HORO_LITE_RECORD_STEPS")


def _path(variable: str) -> Path | None:
    path = os.environ.get(variable)
    return Path(path).absolute() if path and not is_replacement() else None


def registers_with_nccl() -> bool:
    """Return whether the fusion buffer is registered with NCCL."""
    return os.environ.get("HORO_LITE_NCCL_REGISTER", "1") != "0"


def shares_gpus_with_nccl() -> bool:
    """Return whether NCCL is used even if ranks share a GPU, for tests."""
    return os.environ.get("HORO_LITE_NCCL_SHARED_GPU") == "1"


def _whole(argument: str, given: int | None, least: int, form: str) -> int | None:
    """Return a whole number, given as an argument or by its variable; None if by neither."""
    name = _PREFIX + argument.upper()
    text = os.environ.get(name, "")
    if given is None and not text:
        return None
    try:
        value = int(text) if given is None else operator.index(given)
    except (TypeError, ValueError):
        value = least - 1
    if value < least:
        where = f"{argument}={given!r}" if given is not None else f"{name}={text}"
        raise ValueError(f"{where}: {form}")
    return value


class Variable(NamedTuple):
    """Environment variables that belong together: one row of docs/environment.md."""

    names: tuple[str, ...]
    argument: str
    """The arguments that take precedence, if there are any."""
    meaning: str
    default: str


VARIABLES = (
    Variable(
        ("HORO_LITE_RANK", "HORO_LITE_SIZE", "HORO_LITE_ADDRESS"),
        "`init(rank=, size=, address=)`",
        "rank, number of ranks and rendezvous address of a job that MPI did not start",
        "`RANK`, `WORLD_SIZE`, `MASTER_ADDR:MASTER_PORT`",
    ),
    Variable(
        ("HORO_LITE_START_TIMEOUT_S",),
        "`init(start_timeout_s=)`",
        "how long the rendezvous of such a job may take",
        "120",
    ),
    Variable(
        ("HORO_LITE_JOB_TOKEN",),
        "–",
        "a secret, the same for all ranks, used to sign the rendezvous entries of ranks "
        "that MPI did not start; needed if they are on several hosts "
        "([jobs.md](jobs.md#without-mpiexec))",
        "on one host, a secret of rank 0",
    ),
    Variable(
        ("HORO_LITE_DEVICE",),
        "`init(device=)`",
        "`cpu`, `cuda` or `cuda:1`; the same kind on all ranks",
        "GPU `local_rank % count` if there is one, else `cpu`",
    ),
    Variable(
        ("HORO_LITE_THREADS",),
        "`init(threads=)`",
        "BLAS and OpenMP threads of this rank",
        "its share of the host's cores; unchanged if `OMP_NUM_THREADS` or the like is "
        "set, or with one rank",
    ),
    Variable(
        ("HORO_LITE_BINDING",),
        "`init(binding=)`",
        "`auto` undoes Open MPI's own core binding if that is narrower than a fair share;"
        " `keep` never does",
        "`auto`",
    ),
    Variable(
        ("HORO_LITE_SLOT_STORES",),
        "`init(slot_stores=)`",
        "on one host, how ranks write the memory through which they exchange: `cached`, "
        "`streaming` (past the caches), or `auto`, by a measured core-to-core round trip "
        "([performance.md](performance.md#ranks-that-share-no-cache))",
        "`auto`",
    ),
    Variable(
        ("HORO_LITE_OVERLAP",),
        "`init(overlap=)`",
        "whether gradients leave while `backward()` computes the others: `always`, `never`, or "
        "`auto`: on one host only where it leaves cores free "
        "([performance.md](performance.md#beside-backward))",
        "`auto`",
    ),
    Variable(
        ("HORO_LITE_BUCKET_BYTES",),
        "`DistributedOptimizer(bucket_bytes=)`",
        "bytes of gradients, as sent, per bucket",
        "25 MiB; NCCL's fusion buffer 128 MiB",
    ),
    Variable(
        ("HORO_LITE_CHECK_EVERY",),
        "`DistributedOptimizer(check_every=)`",
        "number of steps between comparisons of the ranks' parameters; `on_drift=` "
        "selects the reaction; `0`: never",
        "before the first exchange, after steps 10 and 100 and every 1,000, with a warning",
    ),
    Variable(
        ("HORO_LITE_CHECKPOINT",),
        "`State(checkpoint=)`, `run(checkpoint=)`, `--checkpoint`",
        "the file for commits, from which a restarted job continues",
        "with restarts a temporary file, else none",
    ),
    Variable(
        ("HORO_LITE_RESTART", "HORO_LITE_JOB", "HORO_LITE_END"),
        "",
        "set for the ranks: how often this job has been restarted; a marker of its "
        "processes; a file that the ranks create when they finish",
        "",
    ),
    Variable(
        ("HORO_LITE_RANK_PROCESS",),
        "",
        "set by `init()` under MPI for what a rank starts: which process is that rank",
        "",
    ),
    Variable(
        (REPLACEMENT,),
        "",
        "set for a process that elastic.run started to replace a lost rank: who started it",
        "",
    ),
    Variable(
        ("HORO_LITE_NCCL_LIB",),
        "",
        "the only libnccl to try",
        "torch's or CuPy's, a wheel's, the system's",
    ),
    Variable(
        ("HORO_LITE_NCCL_TIMEOUT_S",),
        "",
        "how long connecting the GPUs may take",
        "120",
    ),
    Variable(
        ("HORO_LITE_NCCL_REGISTER",),
        "",
        "`0`: do not register the fusion buffer with NCCL",
        "`1`",
    ),
    Variable(
        ("HORO_LITE_NCCL_SHARED_GPU",),
        "",
        "`1`: use NCCL even if ranks share a GPU, for tests",
        "`0`",
    ),
    Variable(
        ("HORO_LITE_CUDA", "HORO_LITE_CUDA_ARCHITECTURES"),
        "",
        "at build time: `0` builds without GPU support; architectures: `all`, `native` or such as "
        "`90`",
        "all that the toolkit supports",
    ),
    Variable(
        ("HORO_LITE_QUICK_BUILD",),
        "",
        "at build time: `1` builds for this machine's CPU only, and without what the tests "
        "need, as `make demo` does",
        "`0`",
    ),
    Variable(
        ("HORO_LITE_DEBUG",),
        "",
        "at build time: `1` builds with assertions, little optimization and symbols for a debugger",
        "`0`",
    ),
    Variable(
        ("HORO_LITE_STALL_WARN_S",),
        "`init(stall_warn_s=)`",
        "how long a rank waits before it reports who is late, and where; `0`: never report",
        "30",
    ),
    Variable(
        ("HORO_LITE_STALL_ABORT_S",),
        "`init(stall_abort_s=)`",
        "how long a rank waits before every rank raises `StallError`; `0`: never",
        "0",
    ),
    Variable(
        ("HORO_LITE_TIMELINE",),
        "`hvd.start_timeline(path)`",
        "where the ranks write a trace of their operations "
        "([when-it-hangs.md](when-it-hangs.md#timeline)); with `{rank}` in the path,"
        " each its own",
        "none",
    ),
    Variable(
        ("HORO_LITE_FLIGHT_RECORD",),
        "",
        "the folder where a job that fails leaves the last operations of every rank "
        "([when-it-hangs.md](when-it-hangs.md#flight-record))",
        "none",
    ),
    Variable(
        ("HORO_LITE_RECORD_STEPS",),
        "`horo-lite --record-steps`",
        "the file in which rank 0 records the gradients and parameters of every step, for "
        "`horo-lite compare` ([same-steps.md](how-to/same-steps.md))",
        "none",
    ),
    Variable(
        ("HORO_LITE_NOISE_EVERY",),
        "`horo-lite --noise-every`",
        "number of steps between measurements of the gradients' noise, from which the end of a run "
        "tells whether more ranks would pay ([more-ranks.md](how-to/more-ranks.md)); `0`: never",
        "never",
    ),
    Variable(
        ("HORO_LITE_INSIDE_JIT",),
        "",
        "in JAX's compiled functions on CPUs: `callback` uses callbacks instead of XLA "
        "custom calls ([jax.md](jax.md))",
        "`xla`",
    ),
    Variable(
        ("HORO_LITE_TEST_HOSTS",),
        "`init(test_hosts=)`",
        "for tests: treat the ranks of one machine as simulated hosts of these sizes, "
        "such as `2,1`",
        "none",
    ),
)


def unknown_variables(environ: Mapping[str, str]) -> list[str]:
    """Return a sentence for each variable HORO_LITE_… that is set but not known."""
    known = {name.removeprefix(_PREFIX) for variable in VARIABLES for name in variable.names}
    sentences = []
    for variable in sorted(environ):
        name = variable.removeprefix(_PREFIX)
        if name in (variable, *known) or variable.startswith(_OF_TESTS):
            continue
        alike = difflib.get_close_matches(name, known, n=1, cutoff=0.75)
        hint = f"; did you mean {_PREFIX}{alike[0]}?" if alike else ""
        sentences.append(f"{variable} is set, but there is no such variable{hint}")
    return sentences
