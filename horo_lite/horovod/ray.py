"""`horovod.ray.RayExecutor`: Ray actors as ranks, which keep their state between calls.

Each rank is an actor, and so a process of its own. When a function that they execute calls
`init()`, the ranks find each other without MPI, at an address on rank 0's host.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from horo_lite.horovod.runner import UnderTheName
from horo_lite.launch.on_ray import Workers
from horo_lite.start.launcher import JOB_TOKEN

__all__ = ["RayExecutor"]


@dataclass
class RaySettings:
    """Settings that `RayExecutor.create_settings` returns.

    Attributes:
        timeout_s: Seconds within which all ranks must call `init()`.
        placement_group_timeout_s: Seconds within which Ray must have reserved all workers.
    """

    timeout_s: float = 30
    placement_group_timeout_s: float = 100


class RayExecutor:
    """Workers of a Ray cluster, each of them a rank, that call functions together.

        executor = RayExecutor(RayExecutor.create_settings(timeout_s=30), num_workers=4)
        executor.start()
        results = executor.run(train, args=[0.1])     # in rank order
        executor.shutdown()

    The workers, and the state that functions leave in them, persist between calls; so does the
    world, unless a function called `shutdown()` or raised. Ranks of a node are consecutive.

    Args:
        settings: From `create_settings`; None for the defaults.
        num_workers: The number of ranks, which Ray places on as few nodes as it can.
        num_hosts: The number of nodes, instead of `num_workers`.
        num_workers_per_host: With `num_hosts`, the number of ranks on each node.
        cpus_per_worker: CPUs that each rank reserves.
        use_gpu: Whether each rank reserves GPUs. A rank then sees those of all ranks of its node,
            and `init()` selects one by `local_rank()`.
        gpus_per_worker: How many GPUs; by default one.
        use_current_placement_group: Whether the workers run in the placement group of the task or
            actor that creates the executor, if it has one.
        min_workers: Not supported, nor are the following: the number of workers is fixed.
        max_workers: See `min_workers`.
        reset_limit: See `min_workers`.
        cooldown_range: See `min_workers`.
        elastic_timeout: Has no effect here.
        override_discovery: Has no effect here.
    """

    def __init__(
        self,
        settings: Any,
        num_workers: int | None = None,
        num_hosts: int | None = None,
        num_workers_per_host: int = 1,
        cpus_per_worker: int = 1,
        use_gpu: bool = False,
        gpus_per_worker: int | None = None,
        use_current_placement_group: bool = True,
        min_workers: int | None = None,
        max_workers: int | None = None,
        reset_limit: int | None = None,
        cooldown_range: Sequence[int] | None = None,
        elastic_timeout: float = 600,
        override_discovery: bool = True,
    ) -> None:
        if any(x is not None for x in (min_workers, max_workers, reset_limit, cooldown_range)):
            raise ValueError(
                "min_workers, max_workers, reset_limit and cooldown_range are not supported: the "
                "number of workers on Ray is fixed; pass num_workers, and see docs/elastic.md for "
                "elastic training without Ray"
            )
        if (num_workers is None) == (num_hosts is None):
            raise ValueError("pass num_workers, or num_hosts and num_workers_per_host")
        counts: dict[str, Any] = {"num_workers": num_workers, "num_hosts": num_hosts}
        counts |= {"num_workers_per_host": num_workers_per_host, "gpus_per_worker": gpus_per_worker}
        for name, count in counts.items():
            if count is not None and (not isinstance(count, int) or count < 1):
                raise ValueError(f"{name} must be an integer, 1 or more, not {count!r}")
        if gpus_per_worker and not use_gpu:
            raise ValueError("gpus_per_worker needs use_gpu=True")
        self.settings = RaySettings() if settings is None else settings
        self._needs: dict[str, float] = {"CPU": cpus_per_worker}
        if use_gpu:
            self._needs["GPU"] = gpus_per_worker or 1
        self._n_hosts = num_hosts
        self.num_workers = num_workers or (num_hosts or 0) * num_workers_per_host
        self._inherits = use_current_placement_group
        self._workers: Workers | None = None

    @classmethod
    def create_settings(
        cls,
        timeout_s: float = 30,
        ssh_identity_file: str | None = None,
        ssh_str: str | None = None,
        placement_group_timeout_s: float = 100,
        nics: Any = None,
    ) -> RaySettings:
        """Return settings for the constructor.

        Args:
            timeout_s: Seconds within which all ranks must call `init()`.
            ssh_identity_file: Has no effect here: nothing uses SSH.
            ssh_str: Has no effect here, either; it is not written to a file.
            placement_group_timeout_s: Seconds within which Ray must have reserved all workers.
            nics: Has no effect here: set GLOO_SOCKET_IFNAME to choose an interface.
        """
        return RaySettings(timeout_s, placement_group_timeout_s)

    def start(
        self,
        executable_cls: Callable[..., Any] | None = None,
        executable_args: Sequence[Any] | None = None,
        executable_kwargs: Mapping[str, Any] | None = None,
        extra_env_vars: Mapping[str, str] | None = None,
    ) -> None:
        """Start the workers.

        Args:
            executable_cls: A class of which every worker creates an object; `execute` passes it to
                its function.
            executable_args: Positional arguments of the class.
            executable_kwargs: Keyword arguments of the class.
            extra_env_vars: Environment variables for the workers.

        Raises:
            LauncherError: The cluster does not have the resources that the workers need.
            RuntimeError: The workers have already been started.
        """
        if self._workers is not None:
            raise RuntimeError(
                "the workers have already been started: call shutdown() before another start()"
            )
        self._workers = Workers(
            self.num_workers,
            self._needs,
            timeout_s=self.settings.placement_group_timeout_s,
            limit="create_settings(placement_group_timeout_s=…)",
            n_hosts=self._n_hosts,
            inherits=self._inherits,
        )
        own_names = ("HORO_LITE_", "HOROVOD_")
        env = {k: v for k, v in os.environ.items() if k.startswith(own_names)}
        env |= {
            "HORO_LITE_SIZE": str(self.num_workers),
            "HORO_LITE_ADDRESS": self._workers.address,
            "HORO_LITE_START_TIMEOUT_S": str(self.settings.timeout_s),
            JOB_TOKEN: secrets.token_hex(16),
        }
        try:
            self._workers.become_ranks(env | dict(extra_env_vars or {}))
            if executable_cls is not None:
                made = UnderTheName(executable_cls)
                self._workers.make(made, list(executable_args or ()), dict(executable_kwargs or {}))
        except BaseException:
            self.shutdown()
            raise

    @property
    def workers(self) -> list[Any]:
        """The actors, in rank order."""
        return [] if self._workers is None else self._workers.actors

    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        callbacks: Any = None,
    ) -> list[Any]:
        """Call a function on every rank, and return what it returned on each, in rank order.

        Args:
            fn: The function, which calls `init()` itself.
            args: Its positional arguments.
            kwargs: Its keyword arguments.
            callbacks: Not supported: there is no `ray_logger`.

        Raises:
            ray.exceptions.RayTaskError: `fn` raised on a rank; the error is also an instance of
                what it raised. Other ranks that wait for that one, also in `init()`, raise
                PeerLostError.
        """
        _refuse_callbacks(callbacks)
        return self._started().results(self.run_remote(fn, args, kwargs))

    def run_remote(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[Any]:
        """Begin `run`, and return Ray's references to the results, in rank order.

        The next call waits until this one has ended.
        """
        given, named = list(args or ()), dict(kwargs or {})
        return self._started().submit(UnderTheName(lambda _: fn(*given, **named)))

    def execute(self, fn: Callable[[Any], Any], callbacks: Any = None) -> list[Any]:
        """Call a function on every rank, with the object that the worker created in `start`.

        Args:
            fn: The function.
            callbacks: Not supported, as in `run`.

        Returns:
            Its results, in rank order.
        """
        _refuse_callbacks(callbacks)
        workers = self._started()
        return workers.results(workers.submit(UnderTheName(fn)))

    def execute_single(self, fn: Callable[[Any], Any]) -> Any:
        """Call a function on rank 0 only, with the object that the worker created in `start`.

        Returns:
            Its result.
        """
        workers = self._started()
        return workers.results(workers.submit(UnderTheName(fn), only_first=True))[0]

    def shutdown(self) -> None:
        """Kill the workers, whatever they are doing."""
        workers, self._workers = self._workers, None
        if workers is not None:
            workers.kill()

    def _started(self) -> Workers:
        if self._workers is None:
            raise RuntimeError("there are no workers: call start() first")
        return self._workers


def _refuse_callbacks(callbacks: Any) -> None:
    if callbacks:
        raise ValueError(
            "callbacks are not supported, since horo_lite has no horovod.ray.ray_logger: return "
            "the values from the function"
        )
