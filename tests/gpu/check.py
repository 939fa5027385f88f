"""Everything that only a GPU can prove, on one GPU, in tables: `make gpu-check`.

Builds the extension for this machine's GPU into build/gpu-check/, with the Python that runs this
and its packages: nothing is downloaded. Every step is a separate process (or one per rank) with a
time limit, so that a hang costs one step. Each line says what passed, FAILED or was not checked and
why; the last one is `N passed, N failed`, and the exit status is 0 only if none failed.

    HORO_LITE_TEST_GPU_STAGE  "check" (the default), all but the following; "smoke", what is most
                          likely to fail; "extra", optimizers of torch; "tune", which of NCCL's
                          settings two ranks on one GPU need, with its log
    OUT                   a file for the same lines
    HORO_LITE_TEST_GPUS   "a": a dry run on the fake device, which tests these checks, not a GPU
    HORO_LITE_TEST_GPU_ONLY  parts of steps' names, separated by semicolons: only those
"""

from __future__ import annotations

import importlib.util
import os
import platform
import queue
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
TESTS = HERE.parent
SUPPORT, CSRC = TESTS / "support", TESTS / "csrc"
PROJECT = TESTS.parent
WORK = PROJECT / "build" / "gpu-check"
PACKAGE = Path(os.environ.get("HORO_LITE_TEST_GPU_PACKAGE") or WORK / "package")
LIMIT_S = 480.0
FAKE = bool(os.environ.get("HORO_LITE_TEST_GPUS"))
LIBRARIES = ["fake device"] if FAKE else ["torch", "cupy", "jax"]

# Two ranks on one GPU are treated as if they were on two hosts, and connect over the loopback.
NCCL_ON_ONE_GPU = {
    "HORO_LITE_NCCL_SHARED_GPU": "1",
    "HORO_LITE_NCCL_TIMEOUT_S": "30",
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_NET": "Socket",
    "NCCL_IB_DISABLE": "1",
    "NCCL_P2P_DISABLE": "1",
    "NCCL_SHM_DISABLE": "1",
    "NCCL_MNNVL_ENABLE": "0",
    "NCCL_RAS_ENABLE": "0",
    "NCCL_DEBUG": "WARN",
}
STAGE = os.environ.get("HORO_LITE_TEST_GPU_STAGE") or "check"


@dataclass
class Step:
    """A script, the number of ranks that run it, and its time limit.

    It prints `begin WHAT`, `passed WHAT`, `FAILED WHAT` and `not checked: WHAT (why)`; with
    `counts`, the step is one check: its exit status is the verdict, and its last line the detail.
    """

    name: str
    command: Sequence[str]
    limit_s: float
    ranks: int = 0  # 0: not part of a world
    needs: Sequence[str] = ()  # Python packages, or programs
    env: Mapping[str, str] = field(default_factory=dict)
    counts: bool = False  # its exit status is the verdict
    expect: str = ""  # then its output must contain this
    dies: Sequence[int] = ()  # ranks that are killed on purpose
    dry: bool = True  # also possible on the fake device
    shows: bool = False  # its output, even if it passes


class Table:
    def __init__(self) -> None:
        self.n = {"passed": 0, "FAILED": 0, "not checked": 0}
        out = os.environ.get("OUT")
        self._file = open(out, "w") if out else None  # noqa: SIM115 (open while this runs)

    def line(self, text: str = "") -> None:
        print(text, flush=True)
        if self._file:
            print(text, file=self._file, flush=True)

    def verdict(self, word: str, text: str) -> None:
        self.n[word] += 1
        self.line(f"  {word + ':':<12} {text}")

    def end(self) -> int:
        self.line(f"{self.n['not checked']} not checked")
        self.line(f"{self.n['passed']} passed, {self.n['FAILED']} failed")
        return int(self.n["FAILED"] > 0 or self.n["passed"] == 0)


def python(script: str | Path, *args: str) -> list[str]:
    return [sys.executable, str(script), *args]


def kernels() -> Step:
    return Step(
        "kernels against their host versions",
        [
            *(sys.executable, "-m", "pytest", "-c", os.devnull, "--rootdir", str(TESTS)),
            *("-q", "--no-header", "--tb=short", "-p", "kernels", "-p", "no:cacheprovider"),
            *("-k", "not pairs_without and not no_pieces", str(CSRC / "test_gpu_kernels.py")),
        ],
        limit_s=150,
        needs=["pytest", "ml_dtypes"],
    )


def smoke() -> list[Step]:
    """Return the steps that show whether there is anything to go on with."""
    script = python(HERE / "collectives.py", LIBRARIES[0])
    needs = ["ml_dtypes", LIBRARIES[0]]
    return [
        kernels(),
        Step("1 rank, NCCL", [*script, "alone"], 90, 1, needs),
        Step("2 ranks, NCCL", [*script, "nccl"], 120, 2, needs, NCCL_ON_ONE_GPU),
    ]


def extra() -> list[Step]:
    """Return the steps with optimizers of torch."""
    script = python(HERE / "torch_steps.py")
    return [
        Step("torch's optimizers, 1 rank", [*script, "alone"], 120, 1, ["torch"]),
        Step("torch's optimizers, 2 ranks", [*script, "nccl"], 180, 2, ["torch"], NCCL_ON_ONE_GPU),
    ]


def tune() -> list[Step]:
    """Return the same step with less and less of what two ranks on one GPU may need."""
    script = python(HERE / "collectives.py", LIBRARIES[0], "nccl", "--only", "shapes and groups")
    log = {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,ENV,NET"}
    found, env = [], {**NCCL_ON_ONE_GPU, **log}
    names = ("NCCL_RAS_ENABLE", "NCCL_MNNVL_ENABLE", "NCCL_SHM_DISABLE", "NCCL_P2P_DISABLE")
    for dropped in (None, *names):
        if dropped:
            del env[dropped]
        name = f"2 ranks without {dropped}, too" if dropped else "2 ranks with all settings"
        needs = ["ml_dtypes", LIBRARIES[0]]
        found.append(Step(name, script, 60, 2, needs, dict(env), shows=True))
    return found


def check() -> list[Step]:
    """Return all steps but those of the other stages."""
    found = [kernels(), Step("bandwidth", python(HERE / "bandwidth.py"), 60, needs=["torch"])]
    for library in LIBRARIES:
        script = python(HERE / "collectives.py", library)
        needs = ["ml_dtypes", library]
        found.append(Step(f"{library}, 1 rank, NCCL", [*script, "alone"], 60, 1, needs))
    for library in LIBRARIES:
        script = python(HERE / "collectives.py", library)
        needs = ["ml_dtypes", library]
        found += [
            Step(f"{library}, 2 ranks, NCCL", [*script, "nccl"], 75, 2, needs, NCCL_ON_ONE_GPU),
            Step(f"{library}, 2 ranks, through the host", [*script, "staged"], 60, 2, needs),
        ]
    lost = python(HERE / "collectives.py", LIBRARIES[0], "nccl", "--lose-a-peer")
    needs = ["ml_dtypes", LIBRARIES[0]]
    found.append(
        Step("a killed peer, NCCL", lost, 45, 2, needs, NCCL_ON_ONE_GPU, dies=[1]),
    )
    step_time = python(HERE / "bandwidth.py", "--host-time")
    found += [
        Step("host time, 1 rank", [*step_time, "alone"], 40, 1, ["torch"]),
        Step("host time, 2 ranks", [*step_time, "nccl"], 60, 2, ["torch"], NCCL_ON_ONE_GPU),
    ]
    for ranks, options in [(1, []), (2, []), (2, ["--fp16-allreduce"])]:
        # Through ranks.py, since there may be no launcher.
        script = python(HERE / "example.py", "digits_cupy.py", *options)
        name = " ".join([f"digits_cupy.py, {ranks} rank{'s' * (ranks > 1)}", *options])
        needs = ["cupy", "sklearn", "tqdm"]
        env = NCCL_ON_ONE_GPU if ranks > 1 else {}
        found.append(Step(name, script, 60, ranks, needs, env, dry=False))
    sanitizer = ["compute-sanitizer", "--error-exitcode", "9", "--target-processes", "all"]
    quiet = ["--report-api-errors", "no"]  # libraries query drivers for missing features
    clean = "ERROR SUMMARY: 0 errors"
    for tool, script, packages in [
        ("memcheck", python(HERE / "kernels.py"), ["pytest", "ml_dtypes"]),
        ("racecheck", python(HERE / "kernels.py"), ["pytest", "ml_dtypes"]),
        ("memcheck", python(HERE / "sanitized.py"), ["cupy"]),
    ]:
        what = "the kernels" if script[1].endswith("kernels.py") else "a CuPy script"
        expect = clean if tool == "memcheck" else "RACECHECK SUMMARY: 0 hazards"
        needs = ["compute-sanitizer", *packages]
        command = [*sanitizer, "--tool", tool, *(quiet if tool == "memcheck" else []), *script]
        found.append(Step(f"{tool} of {what}", command, 90, 0, needs, {}, True, expect, dry=False))
    return found


STAGES = {"smoke": smoke, "check": check, "extra": extra, "tune": tune}


def missing(step: Step) -> str:
    """Return why the step cannot run here, or ""."""
    if FAKE and not step.dry:
        return "a dry run, without a GPU"
    for need in step.needs:
        if need == "fake device" or importlib.util.find_spec(need) or program(need):
            continue
        return f"{need} is not installed"
    return ""


def program(name: str) -> str | None:
    beside = Path(sys.executable).parent  # for a Python that is not on PATH
    home = os.environ.get("CUDA_HOME", "/usr/local/cuda")
    path = os.pathsep.join([os.environ.get("PATH", ""), f"{beside}", f"{home}/bin"])
    return shutil.which(name, path=path)


# --- a step ---------------------------------------------------------------------------------------


def environment(step: Step, rank: int, limit_s: float) -> dict[str, str]:
    env = dict(os.environ)
    places = [PACKAGE, HERE, SUPPORT, CSRC, PROJECT / "examples", PROJECT / "benchmarks"]
    places.append(env.get("PYTHONPATH", ""))
    env["PYTHONPATH"] = os.pathsep.join(filter(None, map(str, places)))
    env["PYTHONDONTWRITEBYTECODE"] = "1"
    env["PYTHONUNBUFFERED"] = "1"
    env["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"  # two ranks share one GPU's memory
    env["HORO_LITE_TEST_GPU_S"] = str(limit_s)
    env |= step.env
    if step.ranks > 1 and step.env:
        env["NCCL_HOSTID"] = f"horo_lite-check-{rank}"
    if FAKE:
        import fake_nccl

        env["HORO_LITE_NCCL_LIB"] = os.environ.get("HORO_LITE_NCCL_LIB") or fake_nccl.compiled()
        env["HORO_LITE_TEST_GPUS"] = "ab"[rank] if step.env else "a"
    return env


def run(step: Step, table: Table, left_s: float) -> None:
    """Run the step; add its lines to the table, and how it ended if it failed."""
    limit_s = min(step.limit_s, left_s)
    began = time.monotonic()
    table.line(f"{step.name}")
    command = [program(step.command[0]) or step.command[0], *step.command[1:]]
    logs: list[Any] = []
    processes: list[subprocess.Popen[str]] = []
    lines: queue.Queue[str | None] = queue.Queue()
    kept: Any = None
    try:
        for rank in range(max(step.ranks, 1)):
            log = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115 (read below)
            logs.append(log)
            processes.append(
                subprocess.Popen(
                    command,
                    stdin=subprocess.PIPE if step.ranks else subprocess.DEVNULL,
                    stdout=subprocess.PIPE if rank == 0 else log,
                    stderr=log,
                    text=True,
                    errors="replace",
                    env=environment(step, rank, limit_s),
                    cwd=WORK,  # not the project, whose horo_lite/ may contain another build
                    start_new_session=True,
                )
            )
        if step.ranks:
            from ranks import invite

            kept = invite(processes)
        threading.Thread(target=pump, args=(processes[0], lines), daemon=True).start()
        current, said = follow(step, table, lines, began + limit_s)
        timed_out = False
        for process in processes:
            try:
                process.wait(max(0.1, began + limit_s - time.monotonic()))
            except subprocess.TimeoutExpired:
                timed_out = True
        codes = [process.poll() for process in processes]
    finally:
        for process in processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        del kept
    bad = [
        f"rank {rank} ended with {code}" if step.ranks else f"ended with {code}"
        for rank, code in enumerate(codes)
        if code != 0 and rank not in step.dies
    ]
    if timed_out:
        bad = [f"not done within {limit_s:.0f} s"]
    text = "\n".join(said)
    if step.counts:
        if step.expect not in text:
            bad = bad or [f"its output has no {step.expect!r}"]
        word = "FAILED" if bad else "passed"
        table.verdict(word, f"{step.name}: {'; '.join(bad) or step.expect}")
    elif bad and (timed_out or current or not any(line.startswith("FAILED") for line in said)):
        where = f" in {current!r}" if current else ""
        table.verdict("FAILED", f"{step.name}: {'; '.join(bad)}{where}")
        table.verdict("not checked", f"what would have come after that in {step.name!r}")
    if bad or step.shows:
        show(table, logs, said if step.counts else [])
    table.line(f"  ({time.monotonic() - began:.1f} s)")


def pump(process: subprocess.Popen[str], lines: queue.Queue[str | None]) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        lines.put(line.rstrip("\n"))
    lines.put(None)


def follow(
    step: Step, table: Table, lines: queue.Queue[str | None], until: float
) -> tuple[str, list[str]]:
    """Add verdicts to the table as they come; return the unfinished check, and all lines."""
    current, said = "", []
    while True:
        try:
            line = lines.get(timeout=max(0.0, until - time.monotonic()))
        except queue.Empty:
            return current, said
        if line is None:
            return current, said
        said.append(line)
        word, _, rest = line.partition(" ")
        if word == "begin":
            current = rest
        elif word in ("passed", "FAILED") and not step.counts:
            current = ""
            table.verdict(word, rest)
        elif line.startswith("not checked: "):
            table.verdict("not checked", line.removeprefix("not checked: "))
        elif word == "|":  # a remark
            table.line(f"               {rest}")


def show(table: Table, logs: Sequence[Any], said: Sequence[str]) -> None:
    """Show the ends of a failed step's outputs."""
    texts = ["\n".join(said)]
    for log in logs:
        log.seek(0)
        texts.append(log.read())
    for i, text in enumerate(texts):
        for line in text.strip().splitlines()[-25:]:
            table.line(f"      {'output' if i == 0 else f'rank {i - 1}'}| {line[:300]}")


# --- before the steps -----------------------------------------------------------------------------


def output(*command: str) -> str:
    try:
        found = program(command[0]) or command[0]
        ended = subprocess.run(
            [found, *command[1:]], capture_output=True, text=True, timeout=60, check=True
        )
        return ended.stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


def describe(table: Table) -> None:
    """Describe the machine, for readers of the table elsewhere."""
    query = "--query-gpu=name,memory.total,driver_version,compute_cap"
    gpu = output("nvidia-smi", query, "--format=csv,noheader").splitlines()
    release = [line for line in output("nvcc", "--version").splitlines() if "release" in line]
    cpu = [
        line.partition(":")[2].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    ]
    versions = """
import importlib, platform
parts = ["Python " + platform.python_version()]
for name in ["numpy", "torch", "cupy", "jax"]:
    try:
        parts.append(name + " " + importlib.import_module(name).__version__)
    except Exception as error:
        parts.append(name + ": " + type(error).__name__)
try:
    import torch
    parts.append("torch's CUDA " + str(torch.version.cuda))
    parts.append("torch's NCCL " + ".".join(map(str, torch.cuda.nccl.version())))
except Exception:
    pass
print(", ".join(parts))"""
    table.line(f"GPU     {gpu[0] if gpu else 'none'}")
    table.line(f"CUDA    {release[-1].strip() if release else 'no nvcc'}")
    cores = len(os.sched_getaffinity(0))
    table.line(
        f"CPU     {cpu[0] if cpu else platform.machine()}, {cores} cores, {platform.release()}"
    )
    table.line(f"Python  {output(sys.executable, '-c', versions)}")
    commit = output("git", "-C", str(PROJECT), "describe", "--always", "--dirty")
    table.line(f"commit  {commit or 'unknown'}")


def build(table: Table) -> bool:
    """Build the package in PACKAGE, with an extension for this GPU only."""
    table.line("build")
    began = time.monotonic()
    capability = output("nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader")
    generation = capability.partition("\n")[0].replace(".", "") or "native"
    tree = WORK / f"cmake-{sys.implementation.cache_tag}"
    nanobind = output(sys.executable, "-m", "nanobind", "--cmake_dir")
    cmake, ninja = program("cmake"), program("ninja")
    if not nanobind or not cmake:
        what = "cmake" if nanobind else "nanobind"
        table.verdict("FAILED", f"{what} is missing: {sys.executable} -m pip install {what}")
        return False
    configure = [
        *(cmake, "-S", str(PROJECT / "csrc"), "-B", str(tree)),
        *((f"-DCMAKE_MAKE_PROGRAM={ninja}", "-G", "Ninja") if ninja else ()),
        f"-DPython_EXECUTABLE={sys.executable}",
        f"-Dnanobind_DIR={nanobind}",
        f"-DHORO_LITE_CUDA_ARCHITECTURES={generation}",
        f"-DHORO_LITE_CUDA={0 if FAKE else 1}",
    ]
    cache = tree / "CMakeCache.txt"
    home = f"CMAKE_HOME_DIRECTORY:INTERNAL={PROJECT}/csrc\n"
    if cache.exists() and home not in cache.read_text():
        shutil.rmtree(tree)  # the checkout was moved
    jobs = str(len(os.sched_getaffinity(0)))
    for command in (configure, [cmake, "--build", str(tree), "--parallel", jobs]):
        try:
            ended = subprocess.run(command, capture_output=True, text=True, timeout=240)
        except subprocess.TimeoutExpired:
            table.verdict("FAILED", f"{command[0]} was not done within 240 s")
            return False
        if ended.returncode:
            table.verdict("FAILED", f"the extension could not be built: {' '.join(command)}")
            for line in (ended.stdout + ended.stderr).strip().splitlines()[-30:]:
                table.line(f"      {line}")
            return False
    package = PACKAGE / "horo_lite"
    shutil.rmtree(package, ignore_errors=True)
    kind = ["*.so", "__pycache__"]
    shutil.copytree(PROJECT / "horo_lite", package, ignore=shutil.ignore_patterns(*kind))
    for module in ("_native", "_testing"):
        shutil.copy2(tree / f"{module}{sysconfig.get_config_var('EXT_SUFFIX')}", package)
    seconds = time.monotonic() - began
    what = "without CUDA" if FAKE else f"for compute capability {capability or generation}"
    table.verdict("passed" if seconds < 120 else "FAILED", f"built {what} in {seconds:.0f} s")
    return True


def why_no_gpu() -> str:
    """Return why there is no GPU; in its own process, since users of a GPU cannot fork."""
    code = """
from horo_lite import _native
version, gpus, why = _native.gpus()
try:
    _native.DeviceQueue(0)
except Exception as error:
    print(why or error)
"""
    env = {**os.environ, "PYTHONPATH": str(PACKAGE)}
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, cwd=WORK, env=env
    )
    return (ended.stdout + ended.stderr).strip()


def main() -> int:
    began = time.monotonic()
    WORK.mkdir(parents=True, exist_ok=True)
    table = Table()
    if FAKE:
        table.line("a dry run on the fake device, in host memory: it proves the checks, no GPU")
    else:
        if not output("nvidia-smi", "-L") and not Path("/dev/nvidiactl").exists():
            table.line(
                "no NVIDIA GPU: nvidia-smi finds none, and this command proves what needs one"
            )
            return 2
        describe(table)
    if "HORO_LITE_TEST_GPU_PACKAGE" not in os.environ and not build(table):
        return table.end()
    why = why_no_gpu()
    if why:
        table.line(f"no GPU to be used: {why}")
        return 2
    sys.path[:0] = [str(PACKAGE), str(HERE), str(SUPPORT)]
    only = os.environ.get("HORO_LITE_TEST_GPU_ONLY", "").split(";")
    for step in STAGES[STAGE]():
        if not any(part in step.name for part in only):
            continue
        left_s = LIMIT_S - (time.monotonic() - began)
        why = missing(step) or ("no time was left" if left_s < 10 else "")
        if why:
            table.verdict("not checked", f"{step.name} ({why})")
            continue
        run(step, table, left_s)
    table.line(f"all in {time.monotonic() - began:.0f} s")
    return table.end()


if __name__ == "__main__":
    sys.exit(main())
