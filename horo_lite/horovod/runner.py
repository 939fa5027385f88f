"""`horovod.run` and `horovod.runner.run`: a function on every rank of a job of its own."""

from __future__ import annotations

import pickle
import shlex
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from horo_lite.horovod.aliases import install
from horo_lite.launch import calls
from horo_lite.launch import run as launch

__all__ = ["run"]

T = TypeVar("T")


def run(
    func: Callable[..., T],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    np: int = 1,
    *,
    hosts: str | None = None,
    mpi_args: str | None = None,
    env: Mapping[str, str] | None = None,
    verbose: Any = None,
    use_gloo: bool | None = None,
    use_mpi: bool | None = None,
) -> list[T]:
    """Call a function on every rank of a job of its own, and return what it returned on each.

    `horo_lite.run` with Horovod's arguments.

    Args:
        func: The function, called on every rank; it calls `init()` itself.
        args: Its positional arguments.
        kwargs: Its named arguments.
        np: The number of ranks.
        hosts: Hosts, each with its number of ranks, such as "a:4,b:4".
        mpi_args: More arguments for mpiexec, in one string.
        env: More environment variables for the ranks.
        verbose: Horovod's argument, which has no meaning here.
        use_gloo: Must not be True: jobs are started by mpiexec.
        use_mpi: Horovod's argument, which has no meaning here.
    """
    if use_gloo:
        raise ValueError("use_gloo=True: horo_lite starts jobs with mpiexec, so leave it out")
    more = shlex.split(mpi_args or "")
    return launch.run(
        UnderTheName(func), args, kwargs, np=np, hosts=hosts, mpiexec_args=more, env=env
    )


class UnderTheName:
    """A function for processes in which `horovod` is this package, before the function is read.

    It may use modules of `horovod`, which are imported when it is unpickled.
    """

    def __init__(self, fn: Any) -> None:
        if not callable(fn):
            raise TypeError(f"a function is called on every rank, not {fn!r}")
        self._fn = fn

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._fn(*args, **kwargs)

    def __repr__(self) -> str:
        return repr(self._fn)

    def __reduce__(self) -> tuple[Any, ...]:
        return _read, (calls.dumps(self._fn),)


def _read(fn: bytes) -> UnderTheName:
    install(replace=True)  # the calling process has refused, unless told otherwise
    return UnderTheName(pickle.loads(fn))
