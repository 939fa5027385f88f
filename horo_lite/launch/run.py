"""`run`: call a function on every rank of a new job, from a script or a notebook."""

from __future__ import annotations

import os
import pickle
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from horo_lite.errors import HoroLiteError, JobError
from horo_lite.launch import calls, clusters, jobs, tasks
from horo_lite.start import launcher

T = TypeVar("T")


def run(
    fn: Callable[..., T],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    np: int = 0,
    restarts: int = 0,
    checkpoint: str | os.PathLike[str] | None = None,
    on: str | None = None,
    hosts: str | None = None,
    mpiexec_args: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
) -> list[T]:
    """Call a function on every rank of a new job, and return the ranks' results.

    A process that is not itself a rank calls it, a script or a notebook. It starts new processes
    under mpiexec, which must be installed, shows their output and waits for them. `fn` calls
    `init()` itself. The function, its arguments and results are pickled. With the package
    cloudpickle, they can be defined in a notebook or script, including lambdas; without it, `fn`
    must be importable, and a script must call `run` under `if __name__ == "__main__":`, since every
    rank imports it. Ctrl-C and SIGTERM end the job. No process or file of the job is left behind.

    With `on`, tasks of a Ray, Dask or Spark cluster start the ranks, each in its own process on one
    of the cluster's workers; the ranks find each other through PyTorch instead of MPI.

    Args:
        fn: The function, called on every rank.
        args: Its positional arguments, as a list or tuple.
        kwargs: Its keyword arguments.
        np: The number of ranks.
        restarts: How often a job that fails is started again; states of `elastic` continue from
            their last commit.
        checkpoint: The file with the commits of `elastic` states; by default a temporary
            one.
        on: "ray", "dask" or "spark", to use the cluster that this process is connected to; by
            default mpiexec starts the ranks.
        hosts: Hosts for the ranks, as "a:4,b:4", which need a shared $TMPDIR; by default this one.
        mpiexec_args: More arguments for mpiexec.
        env: Variables added to the environment.

    Returns:
        The results of `fn`, one per rank, in rank order.

    Raises:
        Exception: What `fn` raised on a rank, with that rank's traceback as its cause.
        JobError: The job failed in another way; the message says how, and names the rank that
            caused it.
        TypeError: The function, an argument or a result cannot be pickled.
        LauncherError: There is no mpiexec, or the cluster is too small.
        HoroLiteError: This process is itself a rank.
    """
    _check(fn, args, np, restarts, on, hosts, mpiexec_args, env)
    cluster = clusters.cluster(on) if on is not None else None
    call = calls.pickled_call(fn, tuple(args), dict(kwargs or {}))
    with (
        jobs.ended_by_signals(),
        tempfile.TemporaryDirectory(prefix="horo_lite-") as folder,  # mode 0700
        jobs.checkpoint_of(os.fspath(checkpoint) if checkpoint else None, restarts) as commits,
    ):
        call |= {"argv": sys.argv, "is_last": not restarts}
        more = {jobs.CHECKPOINT: commits, jobs.RESTART: "0"}
        environ = jobs.environment({k: v for k, v in more.items() if v} | dict(env or {}))
        path = [os.path.abspath(entry) for entry in sys.path]
        if cluster is None:
            calls.write(Path(folder, "call"), pickle.dumps(call))
            if not hosts:
                jobs.set_session_folder(environ, folder)
            command = calls.command(path, folder, np)
            if np > 1 or hosts or mpiexec_args:
                mpiexec = jobs.find_mpiexec()
                command = mpiexec.command(command, np, hosts=hosts, more=mpiexec_args, env=environ)
        errors: list[calls.RankError] = []

        def start_ranks(number: int) -> tuple[int, str]:
            restart = {jobs.RESTART: str(number)}
            if cluster is None:
                return _under_mpiexec(command, environ | restart, folder)
            own = {k: v for k, v in environ.items() if k.startswith(("HORO_LITE_", "HOROVOD_"))}
            shared = dict(env or {}) | own | restart
            task = tasks.RankTask(pickle.dumps(call), np, shared, path)
            return _on_cluster(cluster, task, folder)

        def attempt(number: int) -> jobs.Failure | None:
            for left in Path(folder).glob("[er]*.[0-9]*"):
                left.unlink()
            code, cause = start_ranks(number)
            errors[:] = calls.errors_in(Path(folder))
            if errors:
                raised = f"rank {errors[0].rank} raised {errors[0].summary}"
                return jobs.Failure(code, jobs.lost_rank(raised) or raised)
            missing = [rank for rank in range(np) if not Path(folder, f"result.{rank}").exists()]
            if code == 0 and not missing:
                return None
            why = f"no result from rank {', '.join(map(str, missing))}" if not code else ""
            return jobs.failure_of(code, why, cause)

        failure = jobs.until_done(attempt, restarts=restarts, checkpoint=commits)
        if errors:
            raise errors[0].as_exception()
        if failure is not None:
            raise JobError(f"the job of {np} ranks failed: {failure.why}", failure.returncode or 1)
        results = [Path(folder, f"result.{rank}").read_bytes() for rank in range(np)]
    calls.alias_main()
    return [calls.unpickled(result, rank) for rank, result in enumerate(results)]


def _check(
    fn: object,
    args: object,
    np: object,
    restarts: int,
    on: str | None,
    hosts: str | None,
    mpiexec_args: Sequence[str],
    env: Mapping[str, str] | None,
) -> None:
    """Raise an error if arguments of `run` are invalid."""
    launch = launcher.detect(os.environ)
    if launch is not None and launch.size != 1:
        raise HoroLiteError(
            f"run() was called on rank {launch.rank} of a job, but starts a job itself: start this "
            'script without mpiexec, and keep run() under if __name__ == "__main__":'
        )
    if not callable(fn):
        raise TypeError(f"run() needs a function to call on every rank, not {fn!r}")
    if not isinstance(args, (list, tuple)):
        raise TypeError(
            f"run()'s second argument must be the list of fn's arguments, not {args!r}; the number "
            "of ranks is np=: hvd.run(train, np=2), hvd.run(train, (lr,), np=2)"
        )
    if not isinstance(np, int) or np < 1:
        raise ValueError(
            f"np must be the number of ranks (1 or more), as in hvd.run(fn, np=2), not {np!r}"
        )
    if restarts < 0:
        raise ValueError(f"restarts must be 0 or more, not {restarts}")
    if isinstance(mpiexec_args, str):
        raise TypeError(
            f"mpiexec_args must be a list, not a string: mpiexec_args={mpiexec_args.split()!r}"
        )
    for name, value in (env or {}).items():
        if not isinstance(value, str):
            raise TypeError(
                f"values of env must be strings, but {name} is {value!r}: pass {str(value)!r}"
            )
    if on is not None and (hosts or mpiexec_args):
        raise ValueError(f"hosts and mpiexec_args are for mpiexec, which on={on!r} does not use")


def _under_mpiexec(command: Sequence[str], env: Mapping[str, str], folder: str) -> tuple[int, str]:
    """Run a job to its end; return its exit code, and the cause as far as the output says it."""
    job = jobs.Job(command, env)
    code = job.wait(has_failed=lambda: any(Path(folder).glob("error.*")))
    return code, jobs.cause(job.tail)


def _on_cluster(cluster: clusters.Cluster, task: tasks.RankTask, folder: str) -> tuple[int, str]:
    """Run a job by tasks of a cluster, whose files go to `folder`; return the same."""
    ends = cluster(task)
    ends.sort(key=lambda end: end.when)
    for end in ends:  # in this order: the first error is the likeliest cause of the others
        for name, data in end.files.items():
            calls.write(Path(folder, name), data)
    failed = next((end for end in ends if end.code), None)
    if failed is None:
        return 0, ""
    cause = jobs.cause("".join(end.said for end in ends))
    return failed.code, cause or f"rank {failed.rank} was the first to end"
