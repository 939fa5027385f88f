"""A rank's numbers, what init() does with the launcher's variables, and reports of failures."""

from __future__ import annotations

import itertools
import math
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
from launch import PATIENCE, Result, environment, mpi_name, mpiexec_path, run_ranks, start_ranks
from worlds import on_ranks, script_on_ranks

import horo_lite as hvd
from horo_lite.start import cores, launcher, open_mpi
from horo_lite.start.cores import Cores
from horo_lite.start.launcher import Launch
from horo_lite.start.rank_info import position_of

# --- without any launcher ------------------------------------------------------------------------


def alone(code: str, env: dict[str, str] | None = None) -> Result:
    return run_ranks(code, 1, env=env, launcher=False)


@pytest.mark.launches
def test_a_world_of_one_needs_nothing_and_leaves_everything_alone() -> None:
    result = alone(
        """
        import os, sys, numpy, threadpoolctl
        threads = lambda: [pool["num_threads"] for pool in threadpoolctl.threadpool_info()]
        before = (threads(), dict(os.environ), sys.excepthook, os.sched_getaffinity(0))
        import horo_lite as hvd
        try:
            hvd.rank()
        except hvd.NotInitializedError as error:
            assert "horo_lite.init() first" in str(error), error
        world = hvd.init()
        rank, device = world
        assert (rank, str(device)) == (0, "cpu")
        assert hvd.init() is world is hvd.world()
        assert (hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size()) == (0, 1, 0, 1)
        assert (hvd.cross_rank(), hvd.cross_size(), hvd.is_homogeneous()) == (0, 1, True)
        assert world.transport == "solo" and world.thread_multiple and hvd.is_initialized()
        assert before == (threads(), dict(os.environ), sys.excepthook, os.sched_getaffinity(0))
        assert "mpi4py" not in sys.modules
        try:
            hvd.init(device="cuda")
        except ValueError as error:
            assert "device" in str(error) and "shutdown" in str(error), error
        else:
            raise AssertionError("other arguments were accepted")
        hvd.shutdown()
        hvd.shutdown()
        assert not hvd.is_initialized()
        try:
            hvd.size()
        except hvd.NotInitializedError as error:
            assert "again" in str(error), error
        assert hvd.init(device="cpu", threads=1) is not world
        assert set(threads()) == {1}
        hvd.shutdown()
        assert before[:2] == (threads(), dict(os.environ))
        print("alone")
        """,
        {"HORO_LITE_DEVICE": "cpu"},
    )
    assert "alone" in result.check().stdout


@pytest.mark.launches
def test_an_exception_in_a_world_of_one_is_any_exception() -> None:
    result = alone("import horo_lite as hvd\nhvd.init()\nraise ValueError('as ever')")
    assert result.returncode == 1
    assert result.stderr.startswith("Traceback"), result


@pytest.mark.launches
@pytest.mark.parametrize(
    ("argument", "value", "words"),
    [
        ("device", "gpu", "'cuda:1'"),
        ("device", "cpu:0", "'cuda:1'"),
        ("device", "cuda:x", "'cuda:1'"),
        ("device", "cuda:99", "but"),
        ("threads", "none", "positive"),
        ("threads", "0", "positive"),
        ("binding", "core", "'keep'"),
        ("test_hosts", "2,1", "3 ranks, but the world has 1"),
        ("test_hosts", "1,,", "'2,1'"),
        ("test_hosts", "0,1", "'2,1'"),
    ],
)
def test_a_wrong_argument_says_what_would_be_right(argument: str, value: str, words: str) -> None:
    code = f"""
    import horo_lite as hvd, os
    for given in ({{"{argument}": "{value}"}}, {{}}):
        try:
            hvd.init(**given)
        except ValueError as error:
            assert {argument!r} in str(error) and {words!r} in str(error), error
        else:
            raise AssertionError("accepted")
        os.environ["HORO_LITE_{argument.upper()}"] = "{value}"
    """
    alone(code).check()


# --- pure parts ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, None),
        ({"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "1"}, ("Open MPI", 1, 2)),
        (
            {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "0", "PMIX_RANK": "0"},
            ("Open MPI", 0, 2),
        ),
        ({"PMI_SIZE": "4", "PMI_RANK": "3", "HYDI_CONTROL_FD": "7"}, ("MPICH", 3, 4)),
        ({"PMI_SIZE": "4", "PMI_RANK": "3", "I_MPI_HYDRA_UUID": "e4a1"}, ("Intel MPI", 3, 4)),
        ({"PMI_SIZE": "4", "PMI_RANK": "3"}, ("PMI", 3, 4)),
        ({"MV2_COMM_WORLD_SIZE": "2", "MV2_COMM_WORLD_RANK": "0"}, ("MVAPICH", 0, 2)),
        ({"SLURM_STEP_NUM_TASKS": "8", "SLURM_PROCID": "5"}, ("Slurm", 5, 8)),
        # The single process of an sbatch script has these two.
        ({"SLURM_NTASKS": "8", "SLURM_PROCID": "0"}, None),
        ({"PMIX_RANK": "1"}, ("PMIx", 1, None)),
        ({"RANK": "1", "WORLD_SIZE": "2"}, None),
        # One torchrun per host, started by srun.
        (
            {"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1", "TORCHELASTIC_RUN_ID": "none"}
            | {"RANK": "5", "WORLD_SIZE": "8"},
            ("torchrun", 5, 8),
        ),
    ],
)
def test_launchers_are_known_by_their_environment(
    environ: dict[str, str], expected: tuple[str, int, int] | None
) -> None:
    assert launcher.detect(environ) == (expected and Launch(*expected))


@pytest.mark.parametrize(
    "host_of_rank", [[0], [0, 0, 0], [0, 1, 2], [0, 0, 1], [0, 1, 1, 1], [0, 1, 0, 1, 2, 0]]
)
def test_places_on_hosts_of_any_size(host_of_rank: list[int]) -> None:
    places = [position_of(rank, host_of_rank) for rank in range(len(host_of_rank))]
    for host in set(host_of_rank):
        here = [places[r] for r, h in enumerate(host_of_rank) if h == host]
        assert [place[0] for place in here] == list(range(len(here)))
        assert {place[1] for place in here} == {len(here)}
    for local_rank in range(len(host_of_rank)):
        across = [place for place in places if place[0] == local_rank]
        assert [place[2] for place in across] == list(range(len(across)))
        assert {place[3] for place in across} <= {len(across)}


def test_cores_are_divided_among_those_who_may_use_them() -> None:
    inf = math.inf
    for n, ranks in itertools.product(range(1, 9), range(1, 9)):
        free = [range(n)] * ranks
        assert cores.share(free[0], free, inf) == pytest.approx(n / ranks)
    assert cores.share([0], [[0], [1]], inf) == 1
    assert cores.share(range(4), [range(4), range(4), range(4, 8)], inf) == 2
    assert cores.share(range(64), [range(64)] * 2, 4.0) == 2
    assert cores.share(range(64), [range(64)] * 2, 0.5) == 0.25


def test_who_leaves_the_cores_where_open_mpi_put_him() -> None:
    host = tuple(range(8))

    def bound(*own: int, chosen: bool | None = False) -> Cores:
        return Cores(own, host, chosen, math.inf)

    # Two ranks on one of eight cores each, which was not requested.
    assert cores.usable([bound(0), bound(1)], [0, 1]) == [host, host]
    # It was requested, or this is unknown.
    assert cores.usable([bound(0, chosen=True), bound(1)], [0, 1]) == [(0,), (1,)]
    unseen = [bound(0, chosen=None), bound(1, chosen=None)]
    assert cores.usable(unseen, [0, 1]) == [(0,), (1,)]
    assert cores.binding(unseen) is None
    # The hosts without mpiexec learn it from the one that has it.
    assert cores.usable([bound(0), bound(0, chosen=None)], [1]) == [host]
    # A fair share, on any cores, is kept: there is a reason, such as memory locality.
    halves = [bound(0, 1, 2, 3), bound(4, 5, 6, 7)]
    assert cores.usable(halves, [0, 1]) == [halves[0].own, halves[1].own]
    # Other launchers bind only on request.
    assert cores.usable([Cores((0,), (), None, math.inf)], [0]) == [(0,)]


# --- ranks ---------------------------------------------------------------------------------------

SAY = """
import horo_lite as hvd
w = hvd.init()
print("I", w.rank, w.size, w.local_rank, w.local_size, w.cross_rank, w.cross_size,
      w.transport, hvd.is_homogeneous(), flush=True)
"""


def said(result: Result) -> list[str]:
    lines = result.check().stdout.splitlines()
    return sorted(line[2:] for line in lines if line.startswith("I "))


@pytest.mark.mpi
def test_one_host() -> None:
    assert said(run_ranks(SAY, 2)) == [f"{r} 2 {r} 2 0 1 shm True" for r in range(2)]


@pytest.mark.mpi
def test_one_rank_under_a_launcher_is_a_world_of_one() -> None:
    code = SAY + "import sys; assert 'mpi4py' not in sys.modules"
    assert said(run_ranks(code, 1)) == ["0 1 0 1 0 1 solo True"]


@pytest.mark.served
@pytest.mark.mpi
def test_simulated_hosts_of_unequal_size() -> None:
    assert said(script_on_ranks(SAY, 3, env={"HORO_LITE_TEST_HOSTS": "2,1"})) == [
        "0 3 0 2 0 2 mpi False",
        "1 3 1 2 0 1 mpi False",
        "2 3 0 1 1 2 mpi False",
    ]


@pytest.mark.launches
def test_hosts_that_do_not_add_up_fail_on_every_rank() -> None:
    result = run_ranks(
        """
        import horo_lite as hvd
        try:
            hvd.init()
        except ValueError as error:
            print("I", error)
        """,
        2,
        env={"HORO_LITE_TEST_HOSTS": "2,1"},
    )
    assert said(result) == ["test_hosts [2, 1] have 3 ranks, but the world has 2"] * 2


@pytest.mark.launches
@pytest.mark.parametrize(
    ("odd", "words"),
    [
        ("os.environ['HORO_LITE_TEST_HOSTS'] = '1,1'", "test_hosts is None on rank 0"),
        ("hvd.__version__ = '99'", "version is"),
        ("os.environ['HORO_LITE_DEVICE'] = 'cuda:99'", "init() failed on rank 1 of 2: device"),
        (
            "import horo_lite._native as n; n.gpus = lambda: (99000, ['a'], '')",
            "the kind of device is cpu on rank 0",
        ),
    ],
)
def test_ranks_that_differ_all_hear_of_it(odd: str, words: str) -> None:
    result = run_ranks(
        f"""
        import os
        import horo_lite as hvd
        import horo_lite._native as native
        native.gpus = lambda: (0, [], 'there is no NVIDIA driver here')
        if (os.environ.get("OMPI_COMM_WORLD_RANK") or os.environ["PMI_RANK"]) == "1":
            {odd}
        try:
            hvd.init()
        except (hvd.MismatchError, ValueError) as error:
            print("I", type(error).__name__, error)
        """,
        2,
    )
    lines = said(result)
    assert len(lines) == 2
    assert lines[0].startswith("MismatchError")
    assert words in lines[0]
    assert "rank 1" in lines[0]


@pytest.mark.launches
def test_a_driver_that_is_too_old_leaves_the_gpus_alone() -> None:
    result = run_ranks(
        """
        import warnings
        import horo_lite as hvd
        import horo_lite._native as native
        native.gpus = lambda: (12000, ["a"], "")
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            print("I 1", hvd.init().device, [str(w.message) for w in caught])
        hvd.shutdown()
        try:
            hvd.init(device="cuda")
        except ValueError as error:
            print("I 2", error)
        native.gpus = lambda: (99000, ["a"], "")
        print("I 3", hvd.init().device)
        """,
        1,
        launcher=False,
    )
    warned, refused, fine = said(result)
    assert warned.startswith("1 cpu")
    assert "the NVIDIA driver is for CUDA 12.0" in warned
    assert "update it" in refused
    assert fine == "3 cuda:0"


def devices() -> list[str]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("horo_lite._native.gpus", lambda: (99000, ["a", "b"], ""))
        found = [str(hvd.init().device)]
        for wanted in ("cuda:1", "cpu", "cuda"):
            hvd.shutdown()
            found.append(str(hvd.init(device=wanted).device))
        hvd.shutdown()
    return found


@pytest.mark.served
def test_gpus_by_local_rank() -> None:
    expected = [[f"cuda:{r % 2}", "cuda:1", "cpu", f"cuda:{r % 2}"] for r in range(3)]
    assert on_ranks(devices, 3) == expected


@pytest.mark.mpi
def test_communicators_of_the_callers() -> None:
    result = run_ranks(
        """
        from mpi4py import MPI
        import horo_lite as hvd
        everyone = MPI.COMM_WORLD
        part = everyone.Split(everyone.rank == 2, -everyone.rank)
        w = hvd.init(comm=part)
        assert hvd.init(comm=part) is w
        assert hvd.allgather_object(everyone.rank) == ([2] if everyone.rank == 2 else [1, 0])
        print("I", everyone.rank, w.rank, w.size, w.transport, flush=True)
        hvd.shutdown()
        assert hvd.init().size == 3  # MPI was initialised by other code
        assert hvd.allreduce(1.0, op=hvd.Sum) == 3
        hvd.shutdown()
        for wrong in (3, [0, 1], MPI.COMM_NULL):
            try:
                hvd.init(comm=wrong)
            except (TypeError, ValueError) as error:
                assert str(error).startswith("comm "), error
            else:
                raise AssertionError("accepted")
        """,
        3,
    )
    assert said(result) == ["0 1 2 shm", "1 0 2 shm", "2 0 1 solo"]


@pytest.mark.launches
@pytest.mark.skipif(mpi_name() != "openmpi", reason="Open MPI's components")
@pytest.mark.parametrize(
    ("framework", "chosen"),
    [("btl", "btl = self,sm,ofi"), ("mtl", "mtl = ofi"), ("mtl", "pml = ob1,cm")],
)
def test_fabrics_are_left_out_on_one_host_unless_somebody_has_chosen(
    framework: str, chosen: str, tmp_path: Path
) -> None:
    """Open MPI's component btl ofi makes every rank sleep for a second if there are none."""
    if framework == "mtl" and open_mpi._has_fabric():
        pytest.skip("this host has a fabric, which is used")
    name, value = chosen.split(" = ")
    (tmp_path / ".openmpi").mkdir()
    (tmp_path / ".openmpi" / "mca-params.conf").write_text(f"# ours\n {chosen}\n")
    result = run_ranks(
        """
        import os, sys
        import horo_lite as hvd
        me = os.environ["OMPI_COMM_WORLD_RANK"]
        framework, name, value, home = sys.argv[1:]
        if me == "1":
            os.environ["OMPI_COMM_WORLD_LOCAL_SIZE"] = "2"  # as on two hosts
        if me == "2":
            os.environ[f"OMPI_MCA_{name}"] = value
        if me == "3":
            os.environ["HOME"] = home
        before = dict(os.environ)
        hvd.init(test_hosts="1,1,1,1")
        assert {name: os.environ.get(name) for name in before} == before
        assert (me == "2" and framework == name) or f"OMPI_MCA_{framework}" not in os.environ
        print("I", me, os.getpid())
        """,
        4,
        args=[framework, name, value, str(tmp_path)],
        env={f"OMPI_MCA_{framework}_base_verbose": "10"},
    )
    for line in said(result):
        rank, pid = line.split()
        opened = re.findall(rf":0*{pid}\] .*found loaded component (\w+)", result.stderr)
        if framework == "btl":
            assert {"self", "sm"} <= set(opened), str(result)
        assert ("ofi" in opened) == (rank != "0"), str(result)


def test_only_the_loaded_open_mpi_has_its_parameter_file_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A distribution's package, which selects components, says nothing of one in a venv."""
    loaded = str(tmp_path / "lib" / "libmpi.so.40")
    monkeypatch.setattr(open_mpi, "loaded_libraries", lambda: [loaded])
    monkeypatch.setattr(Path, "glob", lambda self, pattern: [self / "openmpi"])
    monkeypatch.delenv("OPAL_PREFIX", raising=False)
    distributions = Path("/etc/openmpi/openmpi-mca-params.conf")
    assert tmp_path / "etc" / "openmpi-mca-params.conf" in open_mpi._parameter_files()
    assert distributions not in open_mpi._parameter_files()
    loaded = "/usr/lib/x86_64-linux-gnu/openmpi/lib/libmpi.so.40.30.4"
    assert distributions in open_mpi._parameter_files()


JOB_OF_A_CONTAINER = """
import os, sys, time
from pathlib import Path
import numpy as np
import horo_lite as hvd
from horo_lite.start import open_mpi

folder, me = Path(sys.argv[1]), int(sys.argv[2])
world = hvd.init(test_hosts="1,1")
hvd.barrier()
(folder / f"{me} {world.rank}").touch()
while len(list(folder.iterdir())) < 4:
    time.sleep(0.01)
for i in range(300):
    mine = np.full(1000, 10.0 * me + world.rank + i)
    assert (hvd.allreduce(mine, op=hvd.Sum) == 20 * me + 1 + 2 * i).all(), i
with open("/proc/self/maps") as maps:
    files = {tuple(line.split()[5:]) for line in maps if "/sm_segment." in line}
for path, *removed in files:
    assert removed == (["(deleted)"] if "/horo_lite." in path else []), files
numbers = [{"OMPI_COMM_WORLD_NODE_RANK": str(rank)} for rank in range(2)]
names = [open_mpi._name(os.environ | number) for number in numbers]
assert sorted(Path(path).name for path, *_ in files) == names, (files, names)
print("I", me, world.rank, *names)
"""


@pytest.mark.launches
@pytest.mark.skipif(mpi_name() != "openmpi", reason="Open MPI's names of files")
def test_jobs_in_containers_with_one_dev_shm_do_not_share_files(tmp_path: Path) -> None:
    """Open MPI names them by the launcher's process ID, which is that of the other job as well."""
    prefix = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"]
    if os.getuid():
        prefix[1:1] = ["--user", "--map-root-user"]
    if not shutil.which("unshare") or subprocess.run([*prefix, "true"], check=False).returncode:
        pytest.skip("not allowed to make PID namespaces")
    jobs = [
        start_ranks(JOB_OF_A_CONTAINER, 2, args=[str(tmp_path), me], prefix=prefix) for me in "12"
    ]
    with jobs[0] as first, jobs[1] as second:
        results = [job.wait(30).check() for job in (first, second)]
    names = said(results[0])[0].split()[2:]
    assert [said(result) for result in results] == [
        [" ".join([job, str(rank), *names]) for rank in range(2)] for job in "12"
    ]


def test_open_mpis_file_is_that_of_one_job(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    setting = "OMPI_MCA_btl_sm_backing_directory"
    monkeypatch.setattr(open_mpi, "_parameter_files", list)
    monkeypatch.setattr(open_mpi, "_SHM", tmp_path)
    monkeypatch.setattr(open_mpi, "_n_mapped", lambda: n_mapped)
    n_mapped = 1
    monkeypatch.delenv(setting, raising=False)
    monkeypatch.delenv("OMPI_COMM_WORLD_LOCAL_SIZE", raising=False)

    def files() -> list[str]:
        return sorted(path.name for path in tmp_path.rglob("*"))

    with open_mpi.parameters():  # another MPI's job
        assert setting not in os.environ
        assert not files()
    monkeypatch.setenv("OMPI_COMM_WORLD_LOCAL_SIZE", "2")
    monkeypatch.setenv("OMPI_COMM_WORLD_NODE_RANK", "1")
    monkeypatch.setenv("PMIX_NAMESPACE", "prterun-node-29194@3")
    monkeypatch.setenv("PMIX_HOSTNAME", "node")
    monkeypatch.setenv(setting, "/the/users/own")
    with open_mpi.parameters():
        assert os.environ[setting] == "/the/users/own"
        assert not files()
    assert os.environ[setting] == "/the/users/own"
    monkeypatch.delenv(setting)
    with open_mpi.parameters():  # MPI selects other memory
        assert setting not in os.environ
        (name,) = files()
    assert not files()
    with open_mpi.parameters() as remove:
        (tmp_path / name).write_text("memory")
    remove()
    assert files() == [name]  # Open MPI removes it
    with open_mpi.parameters() as remove:  # another job's is there
        folder = Path(os.environ[setting])
        assert files() == sorted([folder.name, name, name])
        (folder / name).write_text("memory")
    assert setting not in os.environ
    assert (folder / name).exists()  # one of two has not mapped it
    remove()
    assert files() == [name]
    remove()
    with open_mpi.parameters():  # MPI selects other memory
        assert len(files()) == 3
    assert files() == [name]
    n_mapped = 2
    with open_mpi.parameters():
        folder = Path(os.environ[setting])
        (folder / name).write_text("memory")
    assert files() == [name]
    with open_mpi.parameters() as remove:
        shutil.rmtree(os.environ[setting])  # as some hosts do when their user logs out
    remove()
    monkeypatch.setenv("PMIX_NAMESPACE", "as of another launcher")
    with open_mpi.parameters():
        assert setting not in os.environ
        assert files() == [name]


# --- launchers and libraries that are strangers --------------------------------------------------


@pytest.mark.launches
def test_a_launcher_of_another_make_is_refused() -> None:
    """The other MPI's launcher has set the environment, and the library is this one."""
    marks = {
        "mpich": {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "1", "PMIX_RANK": "1"},
        "openmpi": {"PMI_SIZE": "2", "PMI_RANK": "1", "HYDI_CONTROL_FD": "7"},
    }[mpi_name()]
    check_refusal(alone("import horo_lite as hvd\nhvd.init()", marks), "rank 1 of 2")


@pytest.mark.launches
def test_a_library_that_does_not_know_slurm_is_refused() -> None:
    env = {"SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "2"}
    result = alone("import horo_lite as hvd\nhvd.init()", env)
    check_refusal(result, "rank 2 of 4")
    assert "srun --mpi=" in result.stderr


def other_mpiexec() -> Path:
    """Return the other environment's launcher: `make test` makes .venv and .venv-mpich."""
    name = ".venv" if mpi_name() == "mpich" else ".venv-mpich"
    return Path(sys.prefix).with_name(name) / "bin/mpiexec"


@pytest.mark.mpi
def test_the_other_environments_mpiexec_is_refused() -> None:
    if not other_mpiexec().exists():
        pytest.skip(f"no {other_mpiexec()}")
    ran = started_by(str(other_mpiexec()), ["-n", "2"], "import horo_lite as hvd; hvd.init()")
    check_refusal(Result("the other mpiexec", ran.returncode, "", ran.stderr, 0), "of 2")


def started_by(
    mpiexec: str, options: Sequence[str], code: str, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [mpiexec, *options, sys.executable, "-c", code],
        env={k: v for k, v in environment(env).items() if "oversubscribe" not in k},
        cwd=os.sep,  # with -c, Python looks here first
        capture_output=True,
        text=True,
        timeout=PATIENCE * 30,
        stdin=subprocess.DEVNULL,
        check=False,
    )


def check_refusal(result: Result, who: str) -> None:
    assert result.returncode != 0
    text = result.stderr[result.stderr.index("LauncherError: ") :]
    library = {"openmpi": "Open MPI v", "mpich": "MPICH"}[mpi_name()]
    for words in (
        who,
        library,
        "one MPI in an environment",
        "mpiexec on PATH",
        "--mpi-lib-version",
    ):
        assert words in text, str(result)


@pytest.mark.mpi
def test_one_rank_alone_may_import_mpi4py_after_init() -> None:
    """MPI_Init is collective: init() has called it on all ranks, also where MPI carries nothing."""
    code = """
        import numpy as np
        import horo_lite as hvd
        if hvd.init().rank == 0:
            from mpi4py import MPI
            assert MPI.Is_initialized()
        assert hvd.allreduce(np.ones(2), op=hvd.Sum)[0] == 2
        """
    run_ranks(code, 2, timeout_s=30).check()


@pytest.mark.launches
def test_no_mpi_library_says_what_to_install() -> None:
    result = alone(
        "import horo_lite as hvd\nhvd.init()",
        {"MPI4PY_LIBMPI": "/nowhere/libmpi.so", "PMI_SIZE": "2", "PMI_RANK": "0"},
    )
    assert result.returncode == 1
    assert "LauncherError" in result.stderr
    assert "horo_lite[openmpi]" in result.stderr


# --- cores and threads ---------------------------------------------------------------------------

THREADS = """
import os, numpy, threadpoolctl
def threads():
    return [pool["num_threads"] for pool in threadpoolctl.threadpool_info()]
before = threads()
import horo_lite as hvd
hvd.init()
n = len(os.sched_getaffinity(0))
assert n >= max(before)
"""


@pytest.mark.mpi
def test_each_rank_gets_its_share_of_the_cores() -> None:
    result = run_ranks(
        THREADS
        + """
assert set(threads()) == {max(1, n // 2)}, threads()
assert os.environ["OMP_NUM_THREADS"] == os.environ["MKL_NUM_THREADS"] == str(max(1, n // 2))
os.environ["MKL_NUM_THREADS"] = "7"
hvd.shutdown()
assert threads() == before
assert "OMP_NUM_THREADS" not in os.environ and os.environ["MKL_NUM_THREADS"] == "7"
""",
        2,
    )
    result.check()


@pytest.mark.launches
@pytest.mark.parametrize("name", ["OMP_NUM_THREADS", "MKL_NUM_THREADS"])
def test_who_has_chosen_threads_keeps_them(name: str) -> None:
    code = THREADS + f"assert threads() == before and os.environ['{name}'] == '2'"
    run_ranks(code, 2, env={name: "2"}).check()


@pytest.mark.launches
def test_threads_can_be_given() -> None:
    code = THREADS + "assert set(threads()) == {3}; assert os.environ['OMP_NUM_THREADS'] == '3'"
    run_ranks(code, 2, env={"HORO_LITE_THREADS": "3"}).check()


def plain_mpiexec(code: str, *options: str, **env: str) -> str:
    """Return what one rank prints without --oversubscribe, with which Open MPI does not bind."""
    ran = started_by(mpiexec_path(), [*options, "-n", "1"], code, env)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout.strip()


@pytest.mark.launches
def test_open_mpis_binding_is_left_unless_asked_for() -> None:
    if mpi_name() != "openmpi":
        pytest.skip("only Open MPI binds by default")
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("needs two cores")
    before = "import os; print(len(os.sched_getaffinity(0)))"
    everything = len(os.sched_getaffinity(0))
    if int(plain_mpiexec(before)) == everything:
        pytest.skip("this Open MPI does not bind by default")
    after = (
        "import os, numpy, horo_lite as hvd; hvd.init()\n"
        "from threadpoolctl import threadpool_info\n"
        "counts = {len(os.sched_getaffinity(int(t))) for t in os.listdir('/proc/self/task')}\n"
        "print(counts, {pool['num_threads'] for pool in threadpool_info()})"
    )
    # The pools that NumPy made while bound have grown as well.
    assert plain_mpiexec(after) == f"{{{everything}}} {{{everything}}}"
    assert plain_mpiexec(after, "--bind-to", "core").startswith("{1}")
    assert plain_mpiexec(after, PRTE_MCA_hwloc_default_binding_policy="core").startswith("{1}")
    assert plain_mpiexec(after, HORO_LITE_BINDING="keep").startswith("{1}")


# --- ends (more of them, seen from outside, in tests/faults) --------------------------------------


@pytest.mark.mpi
@pytest.mark.parametrize("over", ["", "1,1"])
def test_the_traceback_is_headed_by_the_rank_and_comes_first(over: str) -> None:
    """It is longer than a pipe's buffer, so that an abort could overtake it."""
    result = run_ranks(
        """
        import horo_lite as hvd
        if hvd.init().rank == 1:
            raise ValueError("first\\n" + 100_000 * "x" + "\\nlast")
        hvd.barrier()
        """,
        2,
        env={"HORO_LITE_TEST_HOSTS": over},
    )
    assert result.returncode != 0
    lines = result.stderr.replace("\0", "").splitlines()
    assert lines[0].startswith("[horo_lite] rank 1 of 2 ("), lines[0]
    end = lines.index("[rank 1] last")
    assert all(line.startswith("[rank 1] ") for line in lines[1 : end + 1])
    assert lines[end - 1] == "[rank 1] " + 100_000 * "x"


@pytest.mark.launches
def test_an_earlier_excepthook_is_called() -> None:
    result = run_ranks(
        """
        import sys
        sys.excepthook = lambda kind, error, trace: print("mine:", error, file=sys.stderr)
        import horo_lite as hvd
        if hvd.init().rank == 1:
            raise ValueError("to be seen")
        hvd.barrier()
        """,
        2,
    )
    assert result.returncode != 0
    assert "mine: to be seen" in result.stderr
    assert "[horo_lite] rank 1 of 2" in result.stderr


@pytest.mark.launches
def test_after_shutdown_the_excepthook_is_what_it_was() -> None:
    run_ranks(
        """
        import sys, threading
        def hooks():
            return sys.excepthook, threading.excepthook, sys.exit
        before = hooks()
        import horo_lite as hvd
        hvd.init()
        assert not set(hooks()) & set(before)
        hvd.shutdown()
        assert hooks() == before
        """,
        2,
    ).check()


@pytest.mark.launches
def test_a_childs_end_is_its_own() -> None:
    result = run_ranks(
        """
        import os, sys
        import horo_lite as hvd
        w = hvd.init()
        for end, code in (("sys.exit(5)", 5), ("raise ValueError('its own')", 1), ("pass", 0)):
            pid = os.fork()
            if pid == 0:
                assert (hvd.rank(), hvd.size()) == (w.rank, w.size)
                try:
                    hvd.init()
                except hvd.HoroLiteError as error:
                    assert "forked" in str(error)
                exec(end)
                sys.exit(0)
            assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == code
        hvd.barrier()
        print("I", "went on")
        """,
        2,
    )
    assert said(result) == ["went on"] * 2
    assert "[horo_lite]" not in result.stderr


def test_names_are_exported() -> None:
    assert hvd.Device("cuda", 1) == hvd.Device("cuda", 1)
    assert str(hvd.Device("cuda", 1)) == "cuda:1"
    assert str(hvd.Device("cpu")) == "cpu"


# --- threads and signals --------------------------------------------------------------------------


@pytest.mark.launches
@pytest.mark.parametrize("hosts", ["", pytest.param("1,1", marks=pytest.mark.mpi)])
def test_threads_that_call_init_and_shutdown_at_once_have_one_world_after_another(
    hosts: str,
) -> None:
    result = run_ranks(
        """
        import threading
        import numpy as np, horo_lite as hvd

        def at_once(*functions):
            barrier, results = threading.Barrier(len(functions)), [None] * len(functions)

            def call(i):
                barrier.wait()
                try:
                    results[i] = functions[i]()
                except ValueError as error:
                    results[i] = error

            threads = [threading.Thread(target=call, args=(i,)) for i in range(len(functions))]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            return results

        for turn in range(3):
            worlds = at_once(hvd.init, hvd.init, hvd.init)
            assert all(world is hvd.world() for world in worlds), worlds
            assert hvd.allreduce(np.ones(3) + hvd.rank(), hvd.Sum).tolist() == [3.0] * 3
            (other,) = at_once(lambda: hvd.init(stall_warn_s=77))
            assert "stall_warn_s" in str(other), other
            at_once(hvd.shutdown, hvd.shutdown)
            assert not hvd.is_initialized()
        print("one after another", flush=True)
        """,
        2,
        env={"HORO_LITE_TEST_HOSTS": hosts},
    )
    assert result.check().stdout.count("one after another") == 2


@pytest.mark.launches
@pytest.mark.parametrize("hosts", ["", pytest.param("1,1", marks=pytest.mark.mpi)])
def test_a_signal_handlers_collective_is_refused_and_the_one_under_way_goes_on(hosts: str) -> None:
    """So is a finalizer's, and a wait. What they submit asynchronously is completed later.

    But they may call shutdown(), which then ends the call, and completes nothing.
    """
    result = run_ranks(
        """
        import os, signal, threading, time
        from pathlib import Path
        import numpy as np, horo_lite as hvd

        world = hvd.init(device="cpu")
        refused, handles, handled = [], [], Path("handled")

        class Last:
            def __del__(self):
                handle()

        def submit():
            mine = np.full(3, 1.0 + world.rank)
            handles.append(hvd.allreduce_async(mine, hvd.Sum, name=f"later {len(handles)}"))

        def handle():
            if world.group.transport.label == "barrier":  # and not while it waits in join()
                submit()
            inner = lambda: hvd.allreduce(np.ones(3), name="inner")
            for call in inner, hvd.join, lambda: hvd.synchronize(handles[-1]):
                try:
                    call()
                except hvd.HoroLiteError as error:
                    refused.append(str(error))

        def on_signal(*_):
            handle()
            last = Last()
            del last
            handled.touch()

        def signal_in_a_call():
            while world.group.transport.label not in ("barrier", "join()"):
                time.sleep(0.001)
            time.sleep(0.1)
            os.kill(os.getpid(), signal.SIGALRM)

        def be_interrupted(outer, title, names):  # which rank 1 reaches after the signal
            hvd.allreduce(np.ones(1))
            if world.rank == 0:
                threading.Thread(target=signal_in_a_call).start()
                outer()
                where = f"was called while this thread was in '{title}'"
                texts = [f"{name}() {where}" for name in names] * 2
                assert [text.partition(":")[0] for text in refused] == texts, refused
                refused.clear()
            else:
                while not handled.exists():
                    time.sleep(0.01)
                handled.unlink()
                outer()

        signal.signal(signal.SIGALRM, on_signal)
        be_interrupted(hvd.barrier, "barrier", ["allreduce", "join", "synchronize"])
        if world.rank == 1:
            submit()
            submit()
        assert all(hvd.synchronize(one).tolist() == [3.0] * 3 for one in handles)
        be_interrupted(hvd.join, "join()", ["allreduce", "join"])
        assert hvd.allreduce(np.ones(2) + world.rank, hvd.Sum).tolist() == [3.0] * 2
        print("went on", flush=True)

        def shut_down(*_):
            try:
                hvd.shutdown()
            except hvd.PeerLostError as error:
                assert str(error).endswith("in the middle of barrier; in flight: allreduce 'alone'")
                handled.touch()

        signal.signal(signal.SIGALRM, shut_down)
        if world.rank == 0:
            hvd.allreduce_async(np.ones(1), name="alone")
            threading.Thread(target=signal_in_a_call).start()
            try:
                hvd.barrier()
            except hvd.PeerLostError:
                print("was shut down", flush=True)
        while not handled.exists():
            time.sleep(0.01)
        """,
        2,
        env={"HORO_LITE_TEST_HOSTS": hosts},
    )
    assert result.check().stdout.count("went on") == 2
    assert "was shut down" in result.stdout


@pytest.mark.launches
def test_a_signal_handler_shuts_down_while_the_call_waits_for_the_progress_thread() -> None:
    result = run_ranks(
        """
        import os, signal, sys, threading, time, traceback
        from pathlib import Path
        import numpy as np
        import horo_lite as hvd

        class Interrupted(Exception):
            pass

        def interrupt(*_):
            signal.signal(signal.SIGALRM, shut_down)
            raise Interrupted

        def shut_down(*_):
            try:
                hvd.shutdown()
            except hvd.MismatchError as error:
                print("rank 0:", str(error).partition(",")[0], flush=True)

        def until_in(function):
            main = threading.main_thread().ident
            while function not in str(traceback.extract_stack(sys._current_frames()[main])):
                time.sleep(0.01)

        def signal_in_calls():
            until_in("synchronize")
            while "the matching of" not in world.group.transport.label:
                time.sleep(0.01)  # the progress thread has not announced that this rank waits
            for function in ("synchronize", "barrier"):
                until_in(function)
                time.sleep(0.1)
                os.kill(os.getpid(), signal.SIGALRM)
            until_in("shutdown")
            ends.touch()

        world, ends = hvd.init(), Path("rank 0 ends")
        try:
            if world.rank == 1:
                while not ends.exists():
                    time.sleep(0.01)
            else:
                handle = hvd.allreduce_async(np.ones(1), name="a")
                signal.signal(signal.SIGALRM, interrupt)
                try:
                    threading.Thread(target=signal_in_calls).start()
                    hvd.synchronize(handle)
                except Interrupted:
                    pass
            hvd.barrier()
        except hvd.HoroLiteError as error:
            print(f"rank {world.rank}:", str(error).partition(",")[0], flush=True)
        """,
        2,
    )
    assert sorted(result.check().stdout.splitlines()) == [
        "rank 0: allreduce 'a' was submitted by rank 0 but not by rank 1",
        "rank 0: shutdown() was called in the middle of barrier",
        "rank 1: barrier was called by rank 1 but not by rank 0",
    ]


@pytest.mark.mpi
def test_without_shared_memory_the_ranks_say_why_and_go_on_through_mpi() -> None:
    """They give the actual cause, such as a limit, instead of a guess."""
    body = """
    import errno, os, resource
    import numpy as np
    from horo_lite import _native
    import horo_lite as hvd

    class Segment(_native.Segment):
        @staticmethod
        def open(*where):
            held = []
            limit = resource.getrlimit(resource.RLIMIT_NOFILE)
            highest = max(map(int, os.listdir("/proc/self/fd")))
            resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 1, limit[1]))
            try:
                while True:
                    held.append(os.dup(0))
            except OSError:
                pass
            try:
                return real.open(*where)
            finally:
                for descriptor in held:
                    os.close(descriptor)
                resource.setrlimit(resource.RLIMIT_NOFILE, limit)

    real, _native.Segment = _native.Segment, Segment
    world = hvd.init(device="cpu")
    assert world.transport == "mpi"
    assert hvd.allreduce(np.full(3, world.rank + 1.0), hvd.Sum).tolist() == [3.0] * 3
    """
    result = run_ranks(body, 2).check()
    warning = r"cannot share memory \(rank 1: .*Too many open files: raise `ulimit -n`\)"
    assert re.search(warning, result.stderr), str(result)


def groups_of_one_tag() -> None:
    from horo_lite.start import groups

    world = hvd.init(device="cpu")
    real, groups._native = groups._native, SimpleNamespace(hash64=lambda _: 7)
    try:
        with pytest.raises(hvd.MismatchError, match=r"rank 0: a of ranks \[0, 1\]; rank 1: b"):
            groups.new_group_of_members([0, 1], "ab"[world.rank])
        group = groups.new_group_of_members([0, 1], "c")
    finally:
        groups._native = real
    assert hvd.allreduce(1.0, hvd.Sum, group=group) == 2


@pytest.mark.served
@pytest.mark.mpi
def test_groups_that_mpi_mixes_up_are_an_error() -> None:
    """If their tags, which are hashes of their names, are equal by chance."""
    on_ranks(groups_of_one_tag, 2, hosts="1,1")
