"""Random jobs, each with random faults, observed from outside: `make soak`.

    python tests/soak/soak.py [--minutes 30] [--runs N] [--jobs 2] [--seed N] [--mpich PYTHON]

A job is determined by its seed, and the next job's seed is one more: `--seed N --runs 1` repeats
the job of a finding. There are three kinds: training that loses ranks and must end with the result
of one process (soak_training.py); and every kind of call, while ranks are killed, stopped,
interrupted or mistaken, in plain jobs and under elastic.run (soak_calls.py). Some jobs run on
simulated hosts, some under MPICH, some on one core or at low priority. For each, this must hold:

- it ends in time, and leaves no processes or files;
- the exit code is 0 exactly if every rank that should have ended well has, and all have said so;
- results of calls were right, to the last bit, and the same on every rank;
- a lost rank is named, and neither Python nor the core has crashed.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import itertools
import json
import linecache
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1] / "support"))

import soak_calls
import soak_training
from launch import Job, Result, mpi_name, start_ranks

HERE = Path(__file__).parent
LIMIT_S = 240.0  # with many ranks on one busy core
FT = ["--with-ft", "ulfm"]
CRASHES = re.compile(
    r"Fatal Python error|[Nn]anobind|terminate called|UnicodeDecodeError|UnpicklingError|"
    r"SystemError|Segmentation fault|double free|corrupted|stack smashing|"
    r"(?:^|AssertionError: )(?:WRONG|ACCEPTED) .*$|Exception ignored",
    re.M,
)


class FindingError(AssertionError):
    """A violated requirement."""


@dataclass(frozen=True)
class Environment:
    """A Python with an MPI installed."""

    python: str
    has_torch: bool

    @staticmethod
    def of(python: str) -> Environment:
        find = "import importlib.util, sys; sys.exit(importlib.util.find_spec('torch') is None)"
        return Environment(
            python, subprocess.run([python, "-c", find], check=False).returncode == 0
        )


def run(seed: int, environments: dict[str, Environment]) -> str:
    """Run the job of that seed; return a summary line. AssertionError for a violation."""
    rng = random.Random(f"job {seed}")
    kinds = ["calls", "calls", "calls, elastic", "training"]
    kind = rng.choice(kinds if "openmpi" in environments else kinds[:2])
    mpi = rng.choice(sorted(environments)) if kind == "calls" else "openmpi"
    prefix = rng.choice([[], [], [], ["nice", "-n", "15"], ["taskset", "-c", "0"]])
    here = environments[mpi]
    watch = _training(rng) if kind == "training" else _calls(seed, kind != "calls", mpi, here)
    told = f"seed {seed}: {kind}, {mpi}, {' '.join(prefix) or 'alone'}, {watch.told}"
    with (
        tempfile.TemporaryDirectory(prefix="hvd") as folder,
        start_ranks(
            watch.script,
            watch.n,
            env={
                "SOAK_PLAN": watch.plan,
                "HORO_LITE_TEST_HOSTS": watch.hosts,
                "TMPDIR": folder,
                **watch.env,
            },
            mpi=mpi,
            python=here.python,
            prefix=prefix,
            options=watch.options if kind == "calls" else FT,
        ) as job,
    ):
        watch.meddle(job)
        result = _end_of(job, told)
        if kind != "calls" and _open_mpi_crashed(result):
            return f"{told}: Open MPI crashed, making a communicator while a rank died"
        try:
            watch.check(result)
            _look_for_crashes(result, watch.crashes)
            _look_for_leftovers(job, Path(folder))
        except FindingError as finding:
            raise FindingError(f"{told}\n{finding}\n{result}") from None
    return f"{told}: exit code {result.returncode}, {result.elapsed_s:.1f} s"


@dataclass(frozen=True)
class Watch:
    """A job to run, and its expected result."""

    script: Path
    n: int
    hosts: str
    plan: str
    told: str
    check: Callable[[Result], None]
    meddle: Callable[[Job], None] = lambda job: None
    crashes: bool = False
    """Ranks crash on purpose."""
    env: Mapping[str, str] = field(default_factory=dict)
    options: Sequence[str] = ()


def _calls(seed: int, elastic: bool, mpi: str, here: Environment) -> Watch:
    plan = soak_calls.plan_of(seed, elastic=elastic, torch=here.has_torch)
    hows = {trouble.how for trouble in plan.troubles}
    troubles = ", ".join(
        f"rank {t.rank} {t.how} at {t.step} ({plan.calls[t.step]})"
        + (f" + {t.after_ms:.1f} ms" if t.after_ms is not None else "")
        for t in plan.troubles
    )

    def check(result: Result) -> None:
        expected, code = plan.expected(), result.returncode
        if expected != "any" and (code == 0) != (expected == "good"):
            raise FindingError(f"exit code {code}, and the end should be {expected}")
        ends = re.findall(r"^ENDS (\d+) (\d+)$", result.stdout, re.M)
        n = len(ends)
        good = n in plan.survivors() and sorted(ends) == [(str(i), str(n)) for i in range(n)]
        if code == 0 and not good:
            raise FindingError(f"{plan.survivors()} ranks should have ended, but {ends} did")
        # A rank that skips a call ends the job there.
        until = min((t.step for t in plan.troubles if t.how == "skip"), default=len(plan.calls))
        lost = [
            t.rank for t in plan.troubles if t.how not in ("SIGSTOP", "skip") and t.step < until
        ]
        # MPICH's launcher kills the others before they can report which rank a signal has ended.
        # The second pattern is that of Open MPI's launcher, if it is faster:
        # [prterun-host-pid@1,rank].
        named = [r for r in lost if re.search(rf"\brank {r}\b|@\d+,{r}\]", result.stderr)]
        if expected == "bad" and len(lost) == 1 and mpi == "openmpi" and not named:
            raise FindingError(f"rank {lost[0]} was lost, and nobody names it")

    # MPICH's launcher would kill the others at once, and may report success.
    exits = bool(hows & {"_exit 0", "_exit 3"})
    is_left_alone = mpi == "mpich" and exits
    # Messages and collectives are not compared: a skipped call may make all wait. And a rank that
    # ends silently is noticed on its own host only, unless the launcher ends the others.
    stalls = "skip" in hows or ((is_left_alone or elastic) and exits and bool(plan.hosts))
    return Watch(
        HERE / "soak_calls.py",
        plan.n,
        plan.hosts,
        plan.to_json(),
        f"{plan.n} ranks on hosts of {plan.hosts or plan.n}; {troubles or 'no trouble'}",
        check,
        env={"HORO_LITE_STALL_ABORT_S": "30"} if stalls else {},
        options=["-disable-auto-cleanup"] if is_left_alone else [],
    )


def _training(rng: random.Random) -> Watch:
    n = rng.randint(2, 4)
    plan = soak_training.plan_of(rng, n)
    hosts = f"{n // 2},{n - n // 2}" if rng.random() < 0.4 else ""
    outside = rng.random() < 0.3 and len(plan) < n - 1
    delay_s, which = rng.uniform(0, 0.5), rng.random()

    def meddle(job: Job) -> None:
        """Kill one more rank, at a moment independent of what it does."""
        if not outside:
            return
        # Not before: in MPI_Init, Open MPI makes the others wait for the dead.
        job.wait_for("STARTS", count=n, timeout_s=LIMIT_S)
        time.sleep(delay_s)
        spared = [pid for rank, pid in job.ranks().items() if str(rank) not in plan]
        # After training, elastic.run is done.
        if len(spared) > 1 and "TRAINED" not in job.stdout():
            with contextlib.suppress(ProcessLookupError):
                os.kill(spared[int(which * len(spared))], signal.SIGKILL)

    def check(result: Result) -> None:
        if outside and "TRAINED" in result.stdout and result.returncode:
            return  # it was killed after the others had finished
        ends = re.findall(r"ENDS (\d+) (\d+)", result.stdout)
        good = result.returncode == 0 and ends and len(set(ends)) == 1
        if not good or int(ends[0][0]) != len(ends):
            raise FindingError(f"exit code {result.returncode}, and the ends are {ends}")

    return Watch(
        HERE / "soak_training.py",
        n,
        hosts,
        json.dumps(plan),
        f"{n} ranks on hosts of {hosts or n}; {plan}{', one from outside' * outside}",
        check,
        meddle,
        crashes=any(how == signal.SIGSEGV for _, _, how in plan.values()),
    )


def _end_of(job: Job, told: str) -> Result:
    try:
        job.wait_for_launcher(LIMIT_S)
    except subprocess.TimeoutExpired:
        job.show_stacks()
        left = [f"{pid}: {_look_of(pid)}" for pid in job.processes()]
        raise FindingError(f"{told}\nhangs: {left}\n{job.result()}") from None
    return job.result()


def _open_mpi_crashed(result: Result) -> bool:
    """Return whether every crash was in a call of Open MPI's that makes a communicator.

    Version 5.0.11 does that with --with-ft ulfm, and also in a program of mpi4py alone, when a rank
    dies at this very moment: docs/elastic.md.
    """
    places = re.findall(
        r"Segmentation fault\n\n(?:Current thread|Thread) .*\n  File \"(.*)\", line (\d+) in",
        result.stderr,
    )
    calls = [linecache.getline(path, int(line)) for path, line in places]
    return bool(calls) and all(re.search(r"\.(Dup|Split|Shrink)\(", call) for call in calls)


def _look_for_crashes(result: Result, meant: bool) -> None:
    for found in CRASHES.finditer(result.stdout + result.stderr):
        if not (meant and found[0] in ("Fatal Python error", "Segmentation fault")):
            raise FindingError(f"{found[0]!r} was printed")


def _look_for_leftovers(job: Job, folder: Path) -> None:
    until = time.monotonic() + 20
    while (left := job.processes()) and time.monotonic() < until:
        time.sleep(0.05)
    if left:
        raise FindingError(f"processes are left: {[f'{pid}: {_look_of(pid)}' for pid in left]}")
    ours = re.compile("horo|hvd")
    files = [str(path) for path in folder.rglob("*") if ours.search(path.name)]
    segments = [name for name in os.listdir("/dev/shm") if ours.search(name)]
    if files or segments:
        raise FindingError(f"left behind: {files} {segments}")


def _look_of(pid: int) -> str:
    with contextlib.suppress(OSError):
        words = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
        return f"{words}, {Path(f'/proc/{pid}/wchan').read_text()}"
    return "gone"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--minutes", type=float, default=30, help="no job begins later")
    add("--runs", type=int, help="how many jobs; by default as many as there is time for")
    add("--jobs", type=int, default=1, help="how many at once")
    add("--seed", type=int, default=time.time_ns() % 10**6 * 1000, help="of the first job")
    add("--mpich", metavar="PYTHON", help="of an environment with MPICH, which some jobs then use")
    args = parser.parse_args()
    environments = {mpi_name(): Environment.of(sys.executable)}
    if args.mpich:
        mpich = os.path.abspath(args.mpich)  # jobs run in their own directories
        environments[mpi_name("mpich", mpich)] = Environment.of(mpich)
    until = time.monotonic() + 60 * args.minutes
    seeds = (
        itertools.count(args.seed) if args.runs is None else range(args.seed, args.seed + args.runs)
    )
    findings: list[int] = []
    n_runs = 0

    def attempt(seed: int) -> None:
        nonlocal n_runs
        if time.monotonic() > until:
            return
        try:
            print(run(seed, environments), flush=True)
        except (AssertionError, subprocess.TimeoutExpired) as error:
            findings.append(seed)
            print(f"\n======== FINDING, seed {seed}\n{error}\n========\n", flush=True)
        n_runs += 1

    with concurrent.futures.ThreadPoolExecutor(args.jobs) as pool:
        running: set[concurrent.futures.Future[None]] = set()
        for seed in seeds:
            if time.monotonic() > until:
                break
            running.add(pool.submit(attempt, seed))
            if len(running) >= args.jobs:
                done, running = concurrent.futures.wait(running, return_when="FIRST_COMPLETED")
                for each in done:
                    each.result()
        for each in running:
            each.result()
    print(
        f"{n_runs} jobs, {len(findings)} findings{': seeds ' if findings else ''}{findings or ''}"
    )
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
