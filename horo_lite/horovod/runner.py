"""`horovod.run` and `horovod.runner.run`: call a function on every rank of a new job."""

from __future__ import annotations

import pickle
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from horo_lite.errors import warn
from horo_lite.horovod.aliases import install
from horo_lite.launch import calls
from horo_lite.launch import run as launch
from horo_lite.launch.hostfile import read_hostfile

__all__ = ["run"]

T = TypeVar("T")


def run(
    func: Callable[..., T],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    num_proc: int = 1,
    min_num_proc: int | None = None,
    max_num_proc: int | None = None,
    slots: int | None = None,
    reset_limit: int | None = None,
    cooldown_range: Any = None,
    hosts: str | None = None,
    hostfile: str | None = None,
    start_timeout: float | None = None,
    ssh_port: int | None = None,
    ssh_identity_file: str | None = None,
    disable_cache: bool | None = None,
    output_filename: str | None = None,
    verbose: Any = None,
    use_gloo: bool | None = None,
    use_mpi: bool | None = None,
    mpi_args: str | None = None,
    network_interface: str | None = None,
    executable: str | None = None,
    np: int | None = None,
    min_np: int | None = None,
    max_np: int | None = None,
    *,
    env: Mapping[str, str] | None = None,
) -> list[T]:
    """Call a function on every rank of a new job, and return the ranks' results.

    This is `horo_lite.run` with Horovod's arguments. `disable_cache` and `verbose` have no effect
    here. Neither have `ssh_port`, `ssh_identity_file` and `network_interface`, which must be set
    for mpiexec; a warning says so.

    Args:
        func: The function, called on every rank; it calls `init()` itself.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
        num_proc: The number of ranks.
        min_num_proc: Not supported, nor are the following: no driver adds hosts here.
        max_num_proc: See `min_num_proc`.
        slots: See `min_num_proc`.
        reset_limit: See `min_num_proc`.
        cooldown_range: See `min_num_proc`.
        hosts: Hosts, each with its number of ranks, such as "a:4,b:4".
        hostfile: The same in a file, with lines such as `a slots=4`.
        start_timeout: Seconds within which ranks must have found each other, without MPI.
        ssh_port: Has no effect here.
        ssh_identity_file: Has no effect here.
        disable_cache: Has no effect here.
        output_filename: Not supported: return what you need from `func`.
        verbose: Has no effect here.
        use_gloo: True is not supported: jobs are started by mpiexec.
        use_mpi: Has no effect: jobs are started by mpiexec anyway.
        mpi_args: More arguments for mpiexec, in one string.
        network_interface: Has no effect here.
        executable: Must be this Python, if given.
        np: Horovod's older name for `num_proc`.
        min_np: See `min_num_proc`.
        max_np: See `min_num_proc`.
        env: More environment variables for the ranks.

    Returns:
        One result per rank, in rank order.

    Raises:
        ValueError: An argument is not supported.
        Exception: What `func` raised on a rank; see `horo_lite.run`.
    """
    elastic = (min_num_proc, max_num_proc, slots, reset_limit, cooldown_range, min_np, max_np)
    for given, words in (
        (use_gloo, "use_gloo=True: horo_lite starts jobs with mpiexec, so leave it out"),
        (
            any(each is not None for each in elastic),
            "min_num_proc, max_num_proc, slots, reset_limit and cooldown_range are not supported: "
            "no driver adds hosts here; see docs/elastic.md for elastic training",
        ),
        (hosts and hostfile, "pass hosts= or hostfile=, not both"),
        (
            output_filename,
            "output_filename= is not supported: return what you need from the function",
        ),
        (
            executable not in (None, sys.executable),
            "executable= is not supported: ranks run the same Python as this process",
        ),
    ):
        if given:
            raise ValueError(words)
    if np is not None:
        warn("np= is Horovod's old name: use num_proc=", DeprecationWarning)
        num_proc = np if num_proc == 1 else num_proc
    ignored = {
        "ssh_port": ssh_port,
        "ssh_identity_file": ssh_identity_file,
        "network_interface": network_interface,
    }
    named = [f"{name}=" for name, value in ignored.items() if value]
    if named:
        warn(
            f"{', '.join(named)} of horovod.run has no effect, because mpiexec connects to the "
            "hosts: use mpi_args= and ~/.ssh/config"
        )
    variables = dict(env or {})
    if start_timeout is not None:
        variables.setdefault("HORO_LITE_START_TIMEOUT_S", str(start_timeout))
    return launch.run(
        UnderTheName(func),
        args,
        kwargs,
        np=num_proc,
        hosts=read_hostfile(hostfile) if hostfile else hosts,
        mpiexec_args=shlex.split(mpi_args or ""),
        env=variables,
    )


class UnderTheName:
    """A function that other processes unpickle after making `horovod` a name of this package.

    It may use modules of `horovod`, which are imported when it is unpickled.
    """

    def __init__(self, fn: Any) -> None:
        if not callable(fn):
            raise TypeError(f"pass a function to be called on every rank, not {fn!r}")
        self._fn = fn

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._fn(*args, **kwargs)

    def __repr__(self) -> str:
        return repr(self._fn)

    def __reduce__(self) -> tuple[Any, ...]:
        return _read, (calls.dumps(self._fn),)


def _read(fn: bytes) -> UnderTheName:
    install(replace=True)  # the calling process has refused a real one, unless told otherwise
    return UnderTheName(pickle.loads(fn))
