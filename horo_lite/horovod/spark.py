"""`horovod.spark.run`: call a function on ranks that Spark's tasks start."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from horo_lite.errors import LauncherError
from horo_lite.horovod.runner import UnderTheName
from horo_lite.launch import run as launch

__all__ = ["run"]

T = TypeVar("T")


def run(
    fn: Callable[..., T],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    num_proc: int | None = None,
    start_timeout: float | None = None,
    use_mpi: bool | None = None,
    use_gloo: bool | None = None,
    extra_mpi_args: str | None = None,
    env: Mapping[str, str] | None = None,
    stdout: Any = None,
    stderr: Any = None,
    verbose: Any = 1,
    nics: Any = None,
    prefix_output_with_timestamp: bool = False,
) -> list[T]:
    """Call a function on every rank of a job on Spark, and return the ranks' results.

    This is `horo_lite.run(on="spark")` with Horovod's arguments. Each rank is a process of its own,
    which a task of a barrier stage starts; `fn` calls `init()` itself. The ranks' output is in the
    logs of the executors.

    Args:
        fn: The function, called on every rank.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
        num_proc: The number of ranks; by default `spark.default.parallelism`.
        start_timeout: Seconds within which the ranks must have found each other.
        use_mpi: True is not supported: the ranks find each other through PyTorch, without MPI.
        use_gloo: Horovod's argument, which has no effect here.
        extra_mpi_args: Not supported, like `use_mpi`.
        env: More environment variables for the ranks.
        stdout: Not supported: the ranks' output is not collected.
        stderr: Not supported.
        verbose: Horovod's argument, which has no effect here.
        nics: The same.
        prefix_output_with_timestamp: The same.

    Returns:
        One result per rank, in rank order.

    Raises:
        LauncherError: There is no SparkContext.
        Exception: What `fn` raised on a rank; see `horo_lite.run`.
    """
    if use_mpi or extra_mpi_args:
        raise ValueError(
            "use_mpi=True and extra_mpi_args are not supported: on Spark the ranks find each other "
            "without MPI, so leave them out"
        )
    if stdout is not None or stderr is not None:
        raise ValueError(
            "stdout= and stderr= are not supported: the ranks' output on Spark is in the logs of "
            "the executors; return what you need from the function"
        )
    from pyspark import SparkContext

    context = SparkContext._active_spark_context
    if context is None:
        raise LauncherError(
            "there is no SparkContext in this process: create one first, for example with "
            "SparkSession.builder.getOrCreate()"
        )
    more = dict(env or {})
    if start_timeout is not None:
        more.setdefault("HORO_LITE_START_TIMEOUT_S", str(start_timeout))
    n = context.defaultParallelism if num_proc is None else num_proc
    return launch.run(UnderTheName(fn), args, kwargs, np=n, on="spark", env=more)
