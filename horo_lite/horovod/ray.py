"""`horovod.ray.RayExecutor`: Ray actors as ranks, which keep their state between calls.

Each rank is an actor, and so a process of its own. When a function that they execute calls
`init()`, the ranks find each other without MPI, at an address on rank 0's host.
"""

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import ray
from ray.util import get_node_ip_address, remove_placement_group
from ray.util.placement_group import get_current_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from horo_lite import context
from horo_lite.errors import PeerLostError, in_one_line
from horo_lite.horovod.runner import UnderTheName
from horo_lite.launch.on_ray import reserve
from horo_lite.launch.tasks import address_of, free_port, ranks_by_host
from horo_lite.settings import Settings
from horo_lite.start import rendezvous, session
from horo_lite.start.launcher import JOB_TOKEN
from horo_lite.start.rendezvous_spec import RendezvousSpec, rendezvous_spec

__all__ = ["RayExecutor"]

CAUSE_S = 10.0  # how long to wait for the error that caused the others


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
        self._per_host = num_workers_per_host
        self.num_workers = num_workers or (num_hosts or 0) * num_workers_per_host
        self._inherits = use_current_placement_group
        self._reserved: Any = None  # the placement group, if it is this executor's own
        self.workers: list[Any] = []
        """The actors, in rank order."""
        self._n_calls = 0
        self._went_well = True  # the previous call, as far as is known

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
        if self.workers:
            raise RuntimeError(
                "the workers have already been started: call shutdown() before another start()"
            )
        if not ray.is_initialized():
            ray.init()
        try:
            workers = [worker.remote() for worker in self._placed()]
            where = ray.get([worker.where.remote() for worker in workers])
            hosts = [host for host, _ in where]
            ranks = ranks_by_host(hosts)
            order = sorted(range(len(workers)), key=ranks.__getitem__)
            self.workers = [workers[i] for i in order]
            own_names = ("HORO_LITE_", "HOROVOD_")
            env = {k: v for k, v in os.environ.items() if k.startswith(own_names)}
            env |= {
                "HORO_LITE_SIZE": str(self.num_workers),
                "HORO_LITE_ADDRESS": address_of(*where[order[0]]),
                "HORO_LITE_START_TIMEOUT_S": str(self.settings.timeout_s),
                JOB_TOKEN: secrets.token_hex(16),
            }
            env |= extra_env_vars or {}
            gpus = self._gpus_by_host([hosts[i] for i in order])
            path = [os.path.abspath(entry) for entry in sys.path]
            started = []
            for rank, i in enumerate(order):
                own = env | gpus.get(hosts[i], {}) | {"HORO_LITE_RANK": str(rank)}
                started.append(self.workers[rank].become.remote(own, path))
            ray.get(started)
            if executable_cls is not None:
                made = UnderTheName(executable_cls)
                args, kwargs = list(executable_args or ()), dict(executable_kwargs or {})
                ray.get([w.start_executable.remote(made, args, kwargs) for w in self.workers])
        except BaseException:
            self.shutdown()
            raise

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
        return self._results(self.run_remote(fn, args, kwargs))

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
        return self._called(lambda _: fn(*given, **named))

    def execute(self, fn: Callable[[Any], Any], callbacks: Any = None) -> list[Any]:
        """Call a function on every rank, with the object that the worker created in `start`.

        Args:
            fn: The function.
            callbacks: Not supported, as in `run`.

        Returns:
            Its results, in rank order.
        """
        _refuse_callbacks(callbacks)
        return self._results(self._called(fn))

    def execute_single(self, fn: Callable[[Any], Any]) -> Any:
        """Call a function on rank 0 only, with the object that the worker created in `start`.

        Returns:
            Its result.
        """
        return self._results(self._called(fn, only_first=True))[0]

    def shutdown(self) -> None:
        """Kill the workers, whatever they are doing."""
        workers, self.workers = self.workers, []
        for worker in workers:
            ray.kill(worker)
        reserved, self._reserved = self._reserved, None
        if reserved is not None:
            remove_placement_group(reserved)  # which also ends everything that runs in it

    def _placed(self) -> list[Any]:
        """Return the actor class once for each worker, with its placement."""
        group = get_current_placement_group() if self._inherits else None
        bundles = [-1] * self.num_workers  # any bundle of it that has room
        if group is None:
            shares, strategy, per_bundle = self.num_workers, "PACK", 1
            if self._n_hosts is not None:
                shares, strategy, per_bundle = self._n_hosts, "STRICT_SPREAD", self._per_host
            share = {kind: n * per_bundle for kind, n in self._needs.items()}
            each = ", ".join(f"{kind} {n:g}" for kind, n in self._needs.items())
            on = "" if self._n_hosts is None else f" on {self._n_hosts} nodes"
            group = self._reserved = reserve(
                [share] * shares,
                strategy,
                self.settings.placement_group_timeout_s,
                f"{self.num_workers} workers on Ray{on} need {each} each",
                "create_settings(placement_group_timeout_s=…)",
            )
            bundles = [rank // per_bundle for rank in range(self.num_workers)]
        return [
            ray.remote(_Worker).options(
                num_cpus=self._needs["CPU"],
                num_gpus=self._needs.get("GPU", 0),
                max_restarts=0,
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    group, placement_group_bundle_index=bundle
                ),
            )
            for bundle in bundles
        ]

    def _gpus_by_host(self, hosts: Sequence[str]) -> dict[str, dict[str, str]]:
        """Return, for each host, the variable that makes all its ranks' GPUs visible to each.

        Ray makes only a worker's own GPUs visible, so `torch.cuda.set_device(hvd.local_rank())`,
        which scripts use, would fail.
        """
        if "GPU" not in self._needs:
            return {}
        all_of: dict[str, list[str]] = {host: [] for host in hosts}
        each = ray.get([worker.gpus.remote() for worker in self.workers])
        for host, gpus in zip(hosts, each, strict=True):
            all_of[host] += [gpu for gpu in gpus if gpu not in all_of[host]]
        return {host: {"CUDA_VISIBLE_DEVICES": ",".join(gpus)} for host, gpus in all_of.items()}

    def _called(self, fn: Callable[[Any], Any], only_first: bool = False) -> list[Any]:
        if not self.workers:
            raise RuntimeError("there are no workers: call start() first")
        if not self._went_well:
            # A rank may have returned from the function before another one raised.
            ray.get([worker.be_idle.remote() for worker in self.workers])
            ray.get([worker.leave_lost_world.remote() for worker in self.workers])
        self._went_well = False
        self._n_calls += 1
        sent = ray.put(UnderTheName(fn))
        workers = self.workers[:1] if only_first else self.workers
        return [worker.execute.remote(sent, self._n_calls) for worker in workers]

    def _results(self, references: Sequence[Any]) -> list[Any]:
        """Return the ranks' results; if ranks failed, raise the error that caused the others."""
        try:
            results: list[Any] = ray.get(list(references))
        except PeerLostError:
            for reference in references:  # the error of the rank that the others waited for
                try:
                    ray.get(reference, timeout=CAUSE_S)
                except (PeerLostError, ray.exceptions.GetTimeoutError):
                    continue
            raise
        self._went_well = True
        return results


def _refuse_callbacks(callbacks: Any) -> None:
    if callbacks:
        raise ValueError(
            "callbacks are not supported, since horo_lite has no horovod.ray.ray_logger: return "
            "the values from the function"
        )


class _Worker:
    """A rank: an actor."""

    def __init__(self) -> None:
        self._executable: Any = None

    def where(self) -> tuple[str, int]:
        """Return this host's address, and a free port."""
        return get_node_ip_address(), free_port()

    def gpus(self) -> list[str]:
        """Return the GPUs that Ray has assigned to this actor."""
        return [str(gpu) for gpu in ray.get_gpu_ids()]

    def become(self, env: dict[str, str], path: list[str]) -> None:
        """Make this process a rank, as the variables say, with access to the caller's modules."""
        os.environ.update(env)
        sys.path += [entry for entry in path if entry not in sys.path]
        spec = _rendezvous()
        if spec.rank == 0 and spec.size > 1:
            # Before any function runs, so that ranks that fail before init() can report it.
            with suppress(ImportError, RuntimeError):  # init() will raise it, if it is called
                rendezvous.keep_store(spec)

    def start_executable(
        self, make: Callable[..., Any], args: list[Any], kwargs: dict[str, Any]
    ) -> None:
        """Create the object that is passed to functions."""
        self._executable = make(*args, **kwargs)

    def be_idle(self) -> None:
        """Return once all previous functions have ended."""

    def leave_lost_world(self) -> None:
        """Leave the world if another rank has left it: the next `init()` then makes a new one."""
        if context.is_initialized():
            try:
                context.world().group.transport.check_peer(-1, "the next function")
            except PeerLostError:
                _leave_world("another rank failed")

    def execute(self, fn: Callable[[Any], Any], number: int) -> Any:
        """Call the function with that number, as all ranks do."""
        # So that the rendezvous does not find ranks of an earlier, failed call. Torch's variable.
        os.environ["TORCHELASTIC_RESTART_COUNT"] = str(number)
        try:
            return fn(self._executable)
        except BaseException as error:
            reason = f"it raised {in_one_line(error)}"
            _leave_world(reason)
            with suppress(Exception):  # the function may have changed the environment
                rendezvous.report_failure(_rendezvous(), reason)
            raise


def _rendezvous() -> RendezvousSpec:
    """Return where this rank finds the others, from the environment that `become` has set."""
    spec = rendezvous_spec(Settings.read({}, os.environ), os.environ)
    assert spec is not None
    return spec


def _leave_world(reason: str) -> None:
    """Make ranks that wait for this one raise PeerLostError; `init()` then makes a new world."""
    if context.is_initialized():
        for transport in context.world().group.transports():
            transport.abandon(reason)
        with suppress(Exception):  # operations in flight have failed
            session.shutdown()
