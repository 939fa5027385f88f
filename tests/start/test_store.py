"""Worlds without MPI: under torchrun, from variables, from arguments of init()."""

from __future__ import annotations

import contextlib
import gc
import re
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from launch import PATIENCE, run_ranks
from without_mpi import ended, free_port, started
from worlds import on_ranks

import horo_lite as hvd
from horo_lite.horovod.world import init as init_as_horovod
from horo_lite.settings import Settings
from horo_lite.start import rendezvous
from horo_lite.start.mpi import failing_together
from horo_lite.start.rendezvous import Rendezvous
from horo_lite.start.rendezvous_spec import RendezvousSpec, rendezvous_spec
from horo_lite.transports.peers import asked

torch = pytest.importorskip("torch")

# --- a world -------------------------------------------------------------------------------------

WORLD = """
import os, sys
sys.modules["mpi4py"] = None  # it may not be installed
import warnings
import numpy as np
import horo_lite as hvd
import horo_lite.torch as hvt
from home_made import SGD, Parameter

world = hvd.init()
rank, size = world.rank, world.size
several = "HORO_LITE_TEST_HOSTS" in os.environ
assert world.transport == ("gloo" if several else "shm")
assert several or (world.local_rank, world.local_size) == (rank, size)
assert hvt.init() is world and not hvt.mpi_enabled()
try:
    hvt.init([0, 1])
except ValueError as error:
    assert "MPI did not start this job" in str(error), error
else:
    raise AssertionError("a communicator without MPI")
ranks = np.arange(size)

got = np.empty(5000)
for n in 5, 5000:
    sent = hvd.isend(np.full(n, rank), (rank + 1) % size)
    assert hvd.recv(got[:n].view(np.int64), (rank - 1) % size) == (rank - 1) % size
    sent.wait()
    assert (got[:n].view(np.int64) == (rank - 1) % size).all()

# Direct, by name in any order, in groups and in process sets.
assert hvd.allgather_object({"rank": rank}) == [{"rank": r} for r in ranks]
assert hvd.allreduce(np.full(5, rank), op=hvd.Sum).tolist() == [ranks.sum()] * 5
names = ["a", "b"][:: 1 if rank else -1]
handles = {name: hvd.allreduce_async(np.full(9, rank + len(name)), name=name) for name in names}
assert hvd.synchronize(handles["a"]).tolist() == [int(np.mean(ranks + 1))] * 9
hvd.synchronize(handles["b"])
first, last = hvd.new_group([1, 0]), hvd.new_group([size - 1, 0])
for part, members in (first, [1, 0]), (last, [size - 1, 0]):
    assert bool(part) == (rank in members)
    if part:
        assert hvd.allgather(np.array([rank]), group=part).tolist() == members
        handle = hvd.allreduce_async(np.ones(3), name="p", op=hvd.Sum, group=part)
        assert handle.wait().tolist() == [2] * 3
alone = hvd.new_group([1])
assert bool(alone) == (rank == 1)
evens = hvt.add_process_set([0, size - 1])
if evens.included():
    assert hvt.allgather_object(rank, process_set=evens) == [0, size - 1]

# An optimizer on shards, against one process; one rank without a last batch.
p = Parameter(np.full(3, float(rank), np.float32))
hvd.broadcast_parameters([p], root_rank=1)
opt = hvd.DistributedOptimizer(SGD([p], 0.1), check_every=1)
alone = np.full(3, 1.0, np.float32)
for step in range(4):
    batch = np.arange(size * 2, dtype=np.float32).reshape(size, 2) - step
    p.grad = batch[rank].mean() * p.data
    opt.step()
    alone -= 0.1 * np.float32(batch.mean()) * alone
np.testing.assert_allclose(p.data, alone, rtol=1e-6)
if rank == 0:
    assert hvd.allreduce(np.ones(2), op=hvd.Sum)[0] == 1  # the others have no more batches
hvd.join()

try:
    hvd.allreduce(np.ones(rank + 1), name="sizes")
except hvd.MismatchError as error:
    assert "sizes" in str(error), error
else:
    raise AssertionError("sizes differ")

with warnings.catch_warnings(record=True) as warned:
    warnings.simplefilter("always")
    state = hvd.elastic.State(model=[p], epoch=0)
    assert hvd.elastic.run(lambda state: "done")(state) == "done"
assert ("MPI did not start" in " ".join(str(w.message) for w in warned)) == (rank == 0), warned

# Again: nothing of the first world interferes.
hvd.shutdown()
again = hvd.init()
assert again is not world and hvd.allgather_object(rank) == list(ranks)
print("rank", rank, "is done", flush=True)
"""


@pytest.mark.launches
@pytest.mark.parametrize("hosts", ["", "2,1"])
def test_a_world_from_variables(tmp_path: Path, hosts: str) -> None:
    env = {"HORO_LITE_TEST_HOSTS": hosts} if hosts else {}
    result = ended(WORLD, 3, tmp_path, env=env).check()
    assert sorted(re.findall(r"rank (\d) is done", result.stdout)) == ["0", "1", "2"]


TORCHRUN = r"""
import os
import torch
import torch.distributed
import horo_lite.torch as hvd

rank = hvd.init().rank


@hvd.elastic.run
def train(state):
    print(f"begins at {state.epoch}\n", end="", flush=True)  # one write, under torchrun's -u
    while state.epoch < 2:
        hvd.barrier()  # now rank 0 has written the commit
        if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and (rank, state.epoch) == (1, 1):
            raise ValueError("once")
        hvd.barrier()  # and does not write another
        state.epoch += 1
        state.commit()


train(hvd.elastic.State(epoch=0, checkpoint="run.ckpt"))
# In the same store; last, because PyTorch 2.13's own groups do not survive a restart of torchrun.
torch.distributed.init_process_group("gloo")
total = torch.tensor([float(rank + 1)])
torch.distributed.all_reduce(total)
assert torch.equal(hvd.allreduce(torch.tensor([rank + 1.0]), op=hvd.Sum), total)
torch.distributed.destroy_process_group()
print("done", flush=True)
"""


@pytest.mark.launches
def test_torchrun_starts_and_restarts_jobs(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2"]
    # As under `srun -n 1`, whose variables the ranks of torchrun also have.
    slurm = {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}
    result = ended(TORCHRUN, 2, tmp_path, [*command, "--max-restarts=1"], slurm).check()
    assert re.findall(r"begins at (\d)", result.stdout) == ["0", "0", "1", "1"], str(result)
    assert result.stdout.count("done") == 2
    assert "RuntimeWarning" not in result.stderr
    assert "ends the job with an exception" in result.stderr
    assert "ValueError: once" in result.stderr


SPAWN = """
import sys
import torch.multiprocessing as mp
import numpy as np
import horo_lite as hvd

def train(rank, size, address):
    world = hvd.init(rank=rank, size=size, address=address)
    total = hvd.allreduce(np.full(3, rank + 1.0), op=hvd.Sum)
    assert total.tolist() == [3.0] * 3 and hvd.size() == size
    if rank == 1:
        raise ValueError("no such file")
    hvd.allreduce(np.ones(3), name="more")

if __name__ == "__main__":
    mp.spawn(train, (2, sys.argv[1]), nprocs=2)
"""


@pytest.mark.launches
def test_torch_multiprocessing(tmp_path: Path) -> None:
    script = tmp_path / "spawn.py"
    script.write_text(SPAWN)
    address = f"tcp://127.0.0.1:{free_port()}"
    result = run_ranks(script, 1, args=[address], launcher=False, timeout_s=40)
    assert result.returncode != 0
    assert re.search("ValueError: no such file|rank 1 .*has left", result.stderr), str(result)


GPUS = """
import os
import numpy as np
import fake_nccl
rank = int(os.environ["RANK"])
os.environ.update(HORO_LITE_TEST_GPUS=f"{rank}a", HORO_LITE_NCCL_LIB=fake_nccl.compiled())
import fake_device
import horo_lite as hvd
world = hvd.init()
for group in (world.group, hvd.new_group([1, 0])):
    mine = fake_device.array(np.full(10, rank + 1.0), np.float32)
    assert np.all(hvd.allreduce(mine, hvd.Sum, group=group).numpy() == 3)
assert (str(world.device), world.transport) == ("cuda:0", "nccl")
x = np.full(5000, float(rank))
request = hvd.isend(x, 1 - rank)
hvd.recv(y := np.empty(5000), 1 - rank)
request.wait()
assert np.all(y == 1 - rank)
"""


@pytest.mark.launches
def test_gpus_of_one_host(tmp_path: Path) -> None:
    """With stand-ins for GPUs and NCCL."""
    ended(GPUS, 2, tmp_path).check()


# --- ends ----------------------------------------------------------------------------------------

ENDS = """
import os, signal, sys, threading, time
import torch
import numpy as np
import horo_lite as hvd
from horo_lite.start import rendezvous

def fault():
    print("FAULT", time.monotonic(), os.getpid(), flush=True)

def fail():
    raise ValueError("no such file")

if {before}:
    if os.environ["RANK"] == "1":
        def ended(*_):
            fault()
            os._exit(3)
        rendezvous.Rendezvous.allgather = ended
world = hvd.init()
hvd.allreduce(np.ones(10))
if world.rank == 1:
    time.sleep(0.2)
    fault()
    {does}
else:
    {others}
"""


@pytest.mark.launches
@pytest.mark.parametrize(
    ("does", "says"),
    [
        (
            "threading.Thread(target=fail, name='loader').start(); time.sleep(60)",
            ["ends the job with an exception in thread 'loader'", "[rank 1] ValueError: no such"],
        ),
        (
            "os.kill(os.getpid(), signal.SIGKILL)",
            ["rank 0 of 2 ", "PeerLostError: rank 1 (pid {pid} on ", "killed by signal 9 (Killed)"],
        ),
        ("sys.exit(0)", ["PeerLostError: rank 1 (pid {pid} on ", "has left (sys.exit(0) at "]),
        (
            "in init()",
            ["PeerLostError: rank 1 (pid {pid} on ", "died in init(), while rank 0 (pid"],
        ),
    ],
)
def test_one_end_is_the_end_of_all(does: str, says: list[str], tmp_path: Path) -> None:
    others = "hvd.allreduce(np.ones(9), name='w')"
    before = does == "in init()"
    code = ENDS.format(before=before, does="pass" if before else does, others=others)
    with started(code, 2, tmp_path) as job:
        result = job.wait(60)
        ended_at = time.monotonic()
        assert not job.processes(), f"processes are left: {result}"
    moment = re.search(r"FAULT (\S+) (\d+)", result.stdout)
    assert moment is not None, str(result)
    assert ended_at - float(moment[1]) < PATIENCE * 5, str(result)
    assert result.returncode != 0, str(result)
    for words in says:
        assert words.format(pid=moment[2]) in result.stderr, str(result)


# --- coming together, with ranks as threads -------------------------------------------------------


def meet(
    *ranks: tuple[int, int],
    timeout_s: float = 20,
    after_s: float = 0,
    meanwhile: Callable[[], object] = lambda: None,
    one_host: bool = True,
    port: int = 0,
) -> list[Any]:
    """Return what each process gets that claims one of these ranks (rank, size)."""
    port = port or free_port()
    found: list[Any] = [None] * len(ranks)

    def come(place: int, rank: int, size: int) -> None:
        time.sleep(after_s * place)
        try:
            with_others = Rendezvous(
                RendezvousSpec(rank, size, "localhost", port, False, "0", one_host), timeout_s
            )
            form = (int, int, str)
            with failing_together(with_others):
                found[place] = [with_others.allgather((rank, i, "x"), form) for i in range(3)]
        except Exception as error:
            found[place] = error

    threads = [
        threading.Thread(target=come, args=(place, rank, size))
        for place, (rank, size) in enumerate(ranks)
    ]
    for thread in threads:
        thread.start()
    meanwhile()
    for thread in threads:
        thread.join(30)
    return found


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0)])
def test_they_meet_in_whatever_order_they_come(order: Sequence[int]) -> None:
    found = meet(*((rank, 3) for rank in order), after_s=0.1)
    assert found == [[[(r, i, "x") for r in range(3)] for i in range(3)]] * 3


@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        ([(0, 3), (1, 3), (1, 3)], "two processes claim to be rank 1: rank 1 (pid "),
        ([(0, 2), (0, 2)], "two processes claim to be rank 0: rank 0 (pid "),
        ([(0, 2), (1, 3)], "the ranks have different world sizes: "),
        ([(0, 3), (1, 2), (2, 3)], "the ranks have different world sizes: "),
        ([(0, 2), (2, 2)], "is in a world of 2, whose ranks go from 0 to 1"),
    ],
)
def test_what_does_not_fit_is_an_error_on_every_rank(
    ranks: list[tuple[int, int]], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("horo_lite.start.rendezvous.GRACE_S", 0.3)
    for error in meet(*ranks):
        assert isinstance(error, hvd.LauncherError), error
        assert words in str(error)


def test_ranks_that_come_again_after_a_failure_make_a_world() -> None:
    """Whatever the failure was, and after any number of attempts of each."""
    port = free_port()

    def come(rank: int, timeout_s: float = 60.0, size: int = 2) -> Rendezvous:
        return Rendezvous(RendezvousSpec(rank, size, "localhost", port, False, "0"), timeout_s)

    def together() -> None:
        with ThreadPoolExecutor(2) as pool:
            worlds = list(pool.map(come, range(2)))
            said = pool.map(lambda world: world.allgather(10 + world.rank, int), worlds)
            assert list(said) == [[10, 11]] * 2

    for _ in range(2):
        with pytest.raises(hvd.LauncherError, match="rank 1 of 2 did not reach"):
            come(0, 0.1)
    together()  # rank 1 was late, but has not failed itself
    together()  # as after shutdown()
    with ThreadPoolExecutor(2) as pool:
        wrong = [pool.submit(come, rank, size=2 + rank) for rank in range(2)]
        for each in wrong:
            assert "different world sizes" in str(each.exception(30 * PATIENCE))
    together()


def test_a_store_that_has_ended_is_forgotten_when_ranks_come_again() -> None:
    """As when rank 0's process has died, and another one is started at the same address."""
    spec = RendezvousSpec(1, 2, "localhost", free_port(), False, "0")
    place = spec.host, spec.port
    kept = rendezvous.keep_store(spec)
    rendezvous._stores[place] = stale = rendezvous._connected(spec, 10)
    del kept
    gc.collect()
    with pytest.raises(RuntimeError):
        stale.check(["x"])
    found = meet((1, 2), (0, 2), after_s=0.1, port=spec.port)
    assert found == [[[(r, i, "x") for r in range(2)] for i in range(3)]] * 2
    # Nor does a rank's own connection replace the store that this process keeps.
    rendezvous._stores[place].check(["x"])
    with pytest.raises(OSError, match="in use"), socket.create_server(("", spec.port)):
        pass


def test_a_rank_that_fails_for_any_reason_is_named_by_the_others_at_once() -> None:

    def body(world: Rendezvous, failure: Exception, waits: Callable[[Rendezvous], Any]) -> Any:
        with failing_together(world):
            if world.rank == 1:
                raise failure
            return waits(world)

    port = free_port()
    specs = [RendezvousSpec(rank, 3, "localhost", port, False, "0") for rank in range(3)]
    for failure, waits in (
        (MemoryError("no memory"), lambda world: world.allgather(1, int)),
        (hvd.LauncherError("no interface"), lambda world: world.connections()),
    ):
        with ThreadPoolExecutor(3) as pool:
            worlds = list(pool.map(partial(Rendezvous, timeout_s=300), specs))
            running = [pool.submit(body, world, failure, waits) for world in worlds]
            errors = [each.exception(30 * PATIENCE) for each in running]
        assert errors[1] is failure
        for error in errors[0], errors[2]:
            if isinstance(failure, hvd.LauncherError):
                assert isinstance(error, hvd.LauncherError)
                assert str(error) == "no interface"
            else:
                assert isinstance(error, hvd.PeerLostError), error
                why = r"rank 1 \(pid .* failed in init\(\) \(MemoryError: no memory\)"
                assert re.match(why, str(error))


@pytest.fixture
def come(monkeypatch: pytest.MonkeyPatch) -> list[Rendezvous]:
    """Return the list of all rendezvous from now on, added as soon as they begin to wait."""
    come: list[Rendezvous] = []
    begin = Rendezvous._open

    def begin_noted(self: Rendezvous, spec: RendezvousSpec) -> Any:
        come.append(self)
        return begin(self, spec)

    monkeypatch.setattr(Rendezvous, "_open", begin_noted)
    return come


def give_up(come: Sequence[Rendezvous]) -> None:
    """Make each of them time out."""
    for each in come:
        each._phase.limit_s = 0


def test_who_does_not_come_is_named(come: list[Rendezvous]) -> None:
    def wait() -> None:
        assert until(lambda: len(come) == 2 and all(each._absent() == [1, 3] for each in come))
        give_up(come)

    for error in meet((0, 4), (2, 4), timeout_s=60, meanwhile=wait):
        assert isinstance(error, hvd.LauncherError), error
        assert "ranks 1 and 3 of 4 did not reach localhost:" in str(error)
    (error,) = meet((1, 2), timeout_s=0.5)
    assert isinstance(error, hvd.LauncherError), error
    assert "has waited 0 s for rank 0, which should keep a store at localhost:" in str(error)


NOTICE = re.compile(r"\[horo_lite\] rank (\d) .* has waited \d+ s in init\(\) for (.*) of 4, and")


@pytest.mark.parametrize(("ranks", "missing"), [((0, 2), "ranks 1 and 3"), ((3, 2, 1), "rank 0")])
def test_one_rank_reports_who_is_missing(
    ranks: Sequence[int],
    missing: str,
    come: list[Rendezvous],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Rank 0 does; before it has created the store, one rank of each host does."""
    monkeypatch.setattr("horo_lite.start.rendezvous.NOTICE_S", 1000.0)
    monkeypatch.setattr("horo_lite.start.rendezvous.GRACE_S", 0.3)

    def wait() -> None:
        assert until(lambda: len(come) == len(ranks))
        assert until(lambda: 0 not in ranks or all(each._absent() == [1, 3] for each in come))
        monkeypatch.setattr("horo_lite.start.rendezvous.NOTICE_S", 0.0)
        assert until(lambda: all(each._phase.is_noted for each in come))
        give_up(come)

    for error in meet(*((rank, 4) for rank in ranks), timeout_s=60, meanwhile=wait):
        assert isinstance(error, hvd.LauncherError), error
    ((who, whom),) = NOTICE.findall(capfd.readouterr().err)
    assert whom == missing
    assert who == "0" or missing == "rank 0"


def test_the_lowest_rank_of_a_round_reports_who_is_missing(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """All have arrived, and ranks 0 and 2 are late with their next message."""
    monkeypatch.setattr("horo_lite.start.rendezvous.NOTICE_S", 1000.0)
    port = free_port()
    come: dict[int, Rendezvous] = {}
    both_have_waited = threading.Event()

    def body(rank: int) -> None:
        spec = RendezvousSpec(rank, 4, "localhost", port, False, "0")
        mine = come[rank] = Rendezvous(spec, 60)
        if rank in (0, 2):
            assert both_have_waited.wait(60)
        elif rank == 3:
            assert until(lambda: 1 in come and come[1]._round and come[1]._is_here(1))
        assert mine.allgather(rank, int) == [0, 1, 2, 3]

    def waits(rank: int) -> bool:
        mine = come.get(rank)
        return mine is not None and bool(mine._round) and mine._absent() == [0, 2]

    with ThreadPoolExecutor(4) as pool:
        running = [pool.submit(body, rank) for rank in range(4)]
        both_wait = until(lambda: waits(1) and waits(3))
        monkeypatch.setattr("horo_lite.start.rendezvous.NOTICE_S", 0.0)
        noted = until(lambda: all(come[rank]._phase.is_noted for rank in (1, 3)))
        monkeypatch.setattr("horo_lite.start.rendezvous.NOTICE_S", 1000.0)
        both_have_waited.set()
        for each in running:
            each.result(60)
    assert both_wait
    assert noted
    assert NOTICE.findall(capfd.readouterr().err) == [("1", "ranks 0 and 2")]


def test_a_store_that_does_not_answer_is_no_silent_hang(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """As when rank 0 is stopped: the kernel still accepts connections to it."""
    monkeypatch.setattr("horo_lite.start.rendezvous.NOTICE_S", 0.2)
    monkeypatch.setattr("horo_lite.start.rendezvous.ANSWER_S", 0.5)
    with socket.create_server(("localhost", 0)) as silent:
        where = f"localhost:{silent.getsockname()[1]}"
        spec = RendezvousSpec(1, 2, "localhost", silent.getsockname()[1], False, "0")
        with pytest.raises(hvd.LauncherError, match=f"for an answer of the store at {where}: the "):
            Rendezvous(spec, 0.5)
    assert f"in init() for an answer of the store at {where}, and" in capfd.readouterr().err


def until(is_so: Callable[[], object]) -> bool:
    """Return whether the condition becomes true within a minute."""
    end = time.monotonic() + 60
    while not is_so() and time.monotonic() < end:
        time.sleep(0.01)
    return bool(is_so())


def test_a_port_of_another_program_is_named() -> None:
    with socket.create_server(("localhost", 0)) as server:
        port = server.getsockname()[1]

        def refuse() -> None:
            with contextlib.suppress(OSError):  # after shutdown()
                while True:
                    server.accept()[0].close()

        refusing = threading.Thread(target=refuse, daemon=True)
        refusing.start()
        with pytest.raises(hvd.LauncherError, match="is not a PyTorch store"):
            Rendezvous(RendezvousSpec(1, 2, "localhost", port, False, "0"), 1)
        server.shutdown(socket.SHUT_RDWR)
        refusing.join(10)


def test_a_store_that_is_gone_when_a_rank_connects_to_it_is_no_other_program() -> None:
    """Rank 0 has died between two connections, of which the first showed that it existed."""
    port = free_port()
    with socket.create_server(("localhost", port)) as server:

        def answer_once() -> None:
            server.accept()[0].close()
            server.close()

        threading.Thread(target=answer_once, daemon=True).start()
        with pytest.raises(hvd.PeerLostError, match=r"has lost the store .* rank 0, which"):
            Rendezvous(RendezvousSpec(1, 2, "localhost", port, False, "0"), 1)


def test_a_connection_with_itself_is_not_a_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel may assign it the very port that it connects to, before rank 0 has come."""
    port = free_port()
    connect = partial(socket.create_connection, source_address=("127.0.0.1", port))
    with connect(("127.0.0.1", port)) as connection:
        assert connection.getsockname() == connection.getpeername()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    monkeypatch.setattr(socket, "create_connection", connect)
    with pytest.raises(hvd.LauncherError, match="for rank 0, which should keep a store"):
        Rendezvous(RendezvousSpec(1, 2, "127.0.0.1", port, False, "0"), 0.5)


def test_rank_0_keeps_its_store_whatever_another_thread_connects_to(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As in these tests, whose ranks are threads: the store would end with its only reference."""

    class OfAllThreads(dict[Any, Any]):
        def __setitem__(self, where: Any, store: Any) -> None:
            super().__setitem__(where, "another thread's connection")

    monkeypatch.setattr("horo_lite.start.rendezvous._stores", OfAllThreads())
    (found,) = meet((0, 1))
    assert [list(map(tuple, everyone)) for everyone in found] == [[(0, i, "x")] for i in range(3)]


# --- what strangers write -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "entry"),
    [
        ("come", '[1, 2, "rank 1 (pid 1 on x)", "../1", ["a"]]'),
        ("come", '[1, 2, "rank 1 (pid 1 on x)", -1, ["a"]]'),
        ("come", '[1, 2, "\\u001b[2J", 7, ["a"]]'),
        ("come", "[1, 2]"),
        ("come", "\x1b[2J no JSON"),
        ("come", "[" * 100_000),
        ("said", '[1, 0, "y", 0]'),
        ("said", '{"0": 1, "1": 0, "2": "x"}'),
        ("said", '[1, true, "x"]'),
        ("said", '[1, 0, "y"]'),  # valid, but rank 1 has not written it
        ("unsigned", '[1, 0, "x"]'),  # even what rank 1 would write
        ("failure", '["\\u001b[2J"]'),
        ("lost", '["\\u001b[2J"]'),
    ],
)
def test_what_strangers_write_is_an_error_on_every_rank(
    key: str, entry: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Instead of what rank 1 writes, or in a place that is empty if all goes well."""
    if key == "said":
        on_two_hosts(monkeypatch)  # without a token, so that entries are not signed
    for error in meet_strangers(key, entry, monkeypatch):
        assert isinstance(error, hvd.LauncherError), error
        assert "\x1b" not in str(error)
        assert "if other users can reach that port" in str(error)


def meet_strangers(key: str, entry: str, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    replaced = "horo_lite/0/0/come/1" if key == "come" else "horo_lite/0/0/0/1"
    places = {"failure": "horo_lite/0/0/failure", "lost": "horo_lite/0/lost"}

    def planting(put: Callable[..., Any]) -> Callable[..., Any]:
        def planted(self: Rendezvous, name: str, obj: Any, **more: bool) -> Any:
            if (self.rank, name) != (1, replaced):
                return put(self, name, obj, **more)
            self._store.set(places.get(key, name), f" {entry}")
            return True

        return planted

    monkeypatch.setattr(Rendezvous, "_put", planting(Rendezvous._put))
    monkeypatch.setattr(Rendezvous, "_put_first", planting(Rendezvous._put_first))
    return meet((0, 2), (1, 2), timeout_s=20, one_host=False)


def on_two_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make ranks, as threads, claim to be on different hosts."""
    hosts = threading.local()
    begin = Rendezvous._open

    def begin_there(self: Rendezvous, spec: RendezvousSpec) -> Any:
        hosts.name = f"host {spec.rank}"
        return begin(self, spec)

    monkeypatch.setattr(Rendezvous, "_open", begin_there)
    monkeypatch.setattr("horo_lite.start.rendezvous._here", lambda: (hosts.name,))


def test_nobody_joins_a_job_of_one_host_from_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another user who claims to be on another host, and so cannot be asked for the secret."""
    monkeypatch.setattr("horo_lite.start.rendezvous.GRACE_S", 0.3)
    on_two_hosts(monkeypatch)
    for error in meet((0, 2), (1, 2)):
        assert isinstance(error, hvd.LauncherError), error
        assert "all ranks should be on one" in str(error)
        assert "Set HORO_LITE_JOB_TOKEN to the same random text" in str(error)


@pytest.mark.parametrize("token", ["", "secret"])
def test_ranks_of_several_hosts_without_a_token_are_warned_once(
    token: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    warned: list[str] = []
    monkeypatch.setattr("horo_lite.start.rendezvous.warn", warned.append)
    monkeypatch.setenv("HORO_LITE_JOB_TOKEN", token)
    on_two_hosts(monkeypatch)
    found = meet((0, 2), (1, 2), one_host=False)
    assert found == [[[(r, i, "x") for r in range(2)] for i in range(3)]] * 2
    assert len(warned) == (not token)
    assert all("can become one and run code as this user. Set HORO" in text for text in warned)


@pytest.mark.parametrize(
    ("address", "local", "expected"),
    [
        ("localhost", None, True),
        ("127.0.0.1", None, True),
        ("[::1]", None, True),
        ("0.0.0.0", None, True),
        ("10.0.0.1", None, False),
        ("node7", None, False),
        ("node7", "4", True),
        ("node7", "2", False),
    ],
)
def test_which_jobs_are_on_one_host(address: str, local: str | None, expected: bool) -> None:
    environ = STANDARD | {"MASTER_ADDR": address} | ({"LOCAL_WORLD_SIZE": local} if local else {})
    spec = rendezvous_spec(Settings.read({}, {}), environ)
    assert spec is not None
    assert spec.one_host == expected


def test_each_world_signs_with_a_key_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that entries of an earlier one cannot be written again."""
    monkeypatch.setenv("HORO_LITE_JOB_TOKEN", "secret")
    keys: list[bytes] = []
    make = Rendezvous._world_key

    def noted(self: Rendezvous, arrived: Sequence[Any]) -> bytes:
        keys.append(make(self, arrived))
        return keys[-1]

    monkeypatch.setattr(Rendezvous, "_world_key", noted)
    for _ in range(2):
        assert meet((0, 2), (1, 2)) == [[[(r, i, "x") for r in range(2)] for i in range(3)]] * 2
    assert len(keys) == 4
    assert len(set(keys)) == 2
    assert len(set(keys[:2])) == 1


def test_all_ranks_have_one_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("horo_lite.start.rendezvous.GRACE_S", 0.3)
    monkeypatch.setenv("HORO_LITE_JOB_TOKEN", "secret")
    assert meet((0, 2), (1, 2)) == [[[(r, i, "x") for r in range(2)] for i in range(3)]] * 2
    connect = Rendezvous._open
    for other in (b"", b"another"):

        def with_another(self: Rendezvous, spec: RendezvousSpec, other: bytes = other) -> Any:
            if self.rank == 1:
                self._job_token = other
            return connect(self, spec)

        monkeypatch.setattr(Rendezvous, "_open", with_another)
        for error in meet((0, 2), (1, 2)):
            assert isinstance(error, hvd.LauncherError), error
            assert "HORO_LITE_JOB_TOKEN" in str(error)
    monkeypatch.setattr(Rendezvous, "_open", connect)
    for error in meet_strangers("said", '[1, 0, "x"]', monkeypatch):  # what rank 1 writes
        assert isinstance(error, hvd.LauncherError), error
        assert "was not written with the HORO_LITE_JOB_TOKEN" in str(error)


PLANTED = """
import os, time
import numpy as np
import horo_lite as hvd
from horo_lite.transports import this_host

victim = open("victim", "r+b")
allgather = this_host.allgather_objects

def planted(comm, obj, form):
    if {inbox} and isinstance(obj, tuple) and comm.rank == 1:
        obj = *obj[:3], victim.fileno()
    if not {inbox} and isinstance(obj, tuple) and comm.rank == 0:  # as large, with the same token
        pid, name, (_, fd, token), inbox = obj
        victim.truncate(os.fstat(fd).st_size)
        victim.write(token.to_bytes(8, "little"))
        victim.flush()
        with open("before", "wb") as file:
            file.write(open("victim", "rb").read())
        obj = pid, name, (pid, victim.fileno(), token), inbox
    return allgather(comm, obj, form)

this_host.allgather_objects = planted
rank = int(os.environ["RANK"])
try:
    hvd.init()
    hvd.isend(np.ones(3), 1 - rank)
except (PermissionError, hvd.LauncherError, hvd.PeerLostError) as error:  # or the other's refusal
    print(f"refused {{error}}\\n", end="", flush=True)
# A rank that has ended could not have been written to.
open(f"tried {{rank}}", "w").close()
while not os.path.exists(f"tried {{1 - rank}}"):
    time.sleep(0.01)
"""


@pytest.mark.launches
@pytest.mark.parametrize("inbox", [True, False])
def test_no_file_that_a_stranger_names_is_written_to(inbox: bool, tmp_path: Path) -> None:
    """Every rank's init() refuses it, even if the store's contents have not been tampered with."""
    (tmp_path / "victim").write_text("precious")
    result = ended(PLANTED.format(inbox=inbox), 2, tmp_path)
    expected = (tmp_path / "before").read_bytes() if not inbox else b"precious"
    assert (tmp_path / "victim").read_bytes() == expected, "a rank has written to it"
    why = "is not the inbox of a rank" if inbox else "cannot share memory"
    assert len(re.findall(f"refused .*{why}", result.stdout)) == 2, str(result)


# --- who says which rank this is ------------------------------------------------------------------

STANDARD = {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "node7", "MASTER_PORT": "29500"}
BY_TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "none",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
    "TORCHELASTIC_RESTART_COUNT": "2",
}
MPIEXEC = {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "0"}
# srun: --mpi=none sets the first, --mpi=pmix and --mpi=pmi2 also set the others.
SRUN = {"SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "2"}
BY_PMIX, BY_PMI2 = SRUN | {"PMIX_RANK": "2"}, SRUN | {"PMI_RANK": "2", "PMI_SIZE": "4"}
MASTER = {"MASTER_ADDR": "node7", "MASTER_PORT": "29500"}
ADDRESS = {"address": "node9:8"}
# Two nodes for eight GPUs, as Alibaba's PAI-DLC and Kubeflow's PyTorchJob describe the second.
PAI_DLC = MASTER | {"RANK": "1", "WORLD_SIZE": "2", "NPROC_PER_NODE": "4"}
PYTORCHJOB = MASTER | {"RANK": "1", "WORLD_SIZE": "8", "PET_NPROC_PER_NODE": "4"}
TRAINER = {"PET_NNODES": "2", "PET_NPROC_PER_NODE": "4", "PET_NODE_RANK": "1"}
NUMBER_NODES = "number the nodes of this job and not its ranks: "
EXPLICIT = {"rank": 3, "size": 8, "address": "[fe80::1]:7"}


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_call_that_ends_without_an_answer_is_an_error() -> None:
    """Its thread may be ended by more than an Exception, and a tracer can stop it before."""

    def ended() -> None:
        raise SystemExit

    assert asked(lambda: None, lambda: None) is None
    with pytest.raises(RuntimeError, match="ended without an answer"):
        asked(ended, lambda: None)


@pytest.mark.parametrize(
    ("given", "environ", "expected"),
    [
        ({}, {}, None),
        ({}, {"RANK": "3"}, None),
        ({}, {"MASTER_ADDR": "node7"}, None),
        ({}, STANDARD, RendezvousSpec(1, 4, "node7", 29500, False, "0")),
        ({}, STANDARD | BY_TORCHRUN, RendezvousSpec(1, 4, "node7", 29500, True, "2")),
        ({}, STANDARD | MPIEXEC, None),
        ({}, STANDARD | BY_TORCHRUN | MPIEXEC, RendezvousSpec(1, 4, "node7", 29500, True, "2")),
        ({}, {"WORLD_SIZE": "1"}, RendezvousSpec(0, 1, "", 0, False, "")),
        ({}, {"WORLD_SIZE": "1"} | MPIEXEC, None),
        (EXPLICIT, {}, RendezvousSpec(3, 8, "fe80::1", 7, False, "0")),
        (EXPLICIT, STANDARD | BY_TORCHRUN, RendezvousSpec(3, 8, "fe80::1", 7, False, "2")),
        (EXPLICIT, STANDARD | MPIEXEC, RendezvousSpec(3, 8, "fe80::1", 7, False, "0")),
        ({"rank": "2", "size": "3"}, STANDARD, RendezvousSpec(2, 3, "node7", 29500, False, "0")),
        ({"rank": 0, "size": 1}, {}, RendezvousSpec(0, 1, "", 0, False, "")),
        ({}, {"RANK": "1", "WORLD_SIZE": "2"}, "lacks MASTER_ADDR and MASTER_PORT"),
        ({}, {"RANK": "1", "MASTER_ADDR": "a", "MASTER_PORT": "1"}, "lacks WORLD_SIZE"),
        ({"rank": 1}, {}, "(rank 1), but lacks WORLD_SIZE and MASTER_ADDR and MASTER_PORT"),
        ({"rank": -1, "size": 2}, {}, "rank must be a number, and at least 0, not -1"),
        (
            {},
            STANDARD | {"WORLD_SIZE": "many"},
            "size must be a number, and at least 1, not 'many'",
        ),
        ({"rank": 1, "size": 1}, {}, "rank is 1, but size is 1"),
        (EXPLICIT | {"address": "node7"}, {}, "rank 0's host and a port, not 'node7'"),
        (EXPLICIT | {"address": "node7:x"}, {}, "rank 0's host and a port, not 'node7:x'"),
        # The launcher's variables take precedence if only the address is given.
        (ADDRESS, MPIEXEC | STANDARD, RendezvousSpec(0, 2, "node9", 8, False, "0")),
        (ADDRESS, SRUN, RendezvousSpec(2, 4, "node9", 8, False, "0")),
        (ADDRESS, BY_PMIX, RendezvousSpec(2, 4, "node9", 8, False, "0")),
        (ADDRESS, BY_PMI2, RendezvousSpec(2, 4, "node9", 8, False, "0")),
        (ADDRESS, {"PMIX_RANK": "2"}, "lacks WORLD_SIZE"),
        ({}, SRUN, None),
        ({}, SRUN | MASTER, RendezvousSpec(2, 4, "node7", 29500, False, "0")),
        # Started by a script, of which srun starts one on each node.
        ({}, SRUN | STANDARD, RendezvousSpec(1, 4, "node7", 29500, False, "0")),
        ({}, BY_PMIX | STANDARD, None),
        ({}, BY_PMI2 | STANDARD, None),
        # Variables that number nodes.
        ({}, PAI_DLC, f"RANK=1 and WORLD_SIZE=2 {NUMBER_NODES}NPROC_PER_NODE is 4, but that many"),
        ({}, PYTORCHJOB, f"RANK=1 and WORLD_SIZE=8 {NUMBER_NODES}PET_NPROC_PER_NODE is 4"),
        ({}, PYTORCHJOB | {"PET_NPROC_PER_NODE": "auto"}, NUMBER_NODES),
        (ADDRESS, PAI_DLC, NUMBER_NODES),
        ({}, PAI_DLC | {"NPROC_PER_NODE": "1"}, RendezvousSpec(1, 2, "node7", 29500, False, "0")),
        ({}, PAI_DLC | BY_TORCHRUN, RendezvousSpec(1, 2, "node7", 29500, True, "2")),
        ({}, PAI_DLC | {"LOCAL_RANK": "1"}, RendezvousSpec(1, 2, "node7", 29500, False, "0")),
        (EXPLICIT, PAI_DLC, RendezvousSpec(3, 8, "fe80::1", 7, False, "0")),
        ({}, PAI_DLC | MPIEXEC, None),
        ({}, TRAINER, "PET_NNODES is 2, but this process has not been started as a rank"),
        ({}, {"AWS_BATCH_JOB_NUM_NODES": "3"}, "AWS_BATCH_JOB_NUM_NODES is 3, but this process"),
        ({}, TRAINER | {"PET_NNODES": "1"}, None),
        ({}, TRAINER | MPIEXEC, None),
        ({"rank": 0, "size": 1}, TRAINER, RendezvousSpec(0, 1, "", 0, False, "")),
    ],
)
def test_who_says_which_rank_this_is(
    given: dict[str, Any], environ: dict[str, str], expected: RendezvousSpec | str | None
) -> None:
    if not isinstance(expected, str):
        assert rendezvous_spec(Settings.read(given, {}), environ) == expected
        return
    with pytest.raises((ValueError, hvd.LauncherError)) as raised:
        rendezvous_spec(Settings.read(given, {}), environ)
    assert expected in str(raised.value)


@pytest.mark.parametrize("variables", [True, False])
def test_ranks_that_mpi_did_not_start_cannot_be_chosen(
    variables: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    place: dict[str, Any] = {"rank": 0, "size": 2, "address": "127.0.0.1:9"}
    if variables:
        for name, value in place.items():
            monkeypatch.setenv("HORO_LITE_" + name.upper(), str(value))
    for ranks in ([0], [0, 1]):
        with pytest.raises(ValueError, match="MPI did not start this job"):
            init_as_horovod(ranks, **({} if variables else place), start_timeout_s=1)


@pytest.mark.launches
def test_without_torch(tmp_path: Path) -> None:
    """Errors say what such a world cannot do, and what to do instead; one rank needs nothing."""
    alone = "import horo_lite as hvd, sys\nassert hvd.init(rank=0, size=1).size == 1\n"
    alone += "assert 'torch' not in sys.modules and 'mpi4py' not in sys.modules\nhvd.shutdown()\n"
    result = ended(
        alone + "sys.modules['torch'] = None\nhvd.init(rank=0, size=2, address='localhost:1')",
        1,
        tmp_path,
        [sys.executable],
    )
    assert "pip install torch; or start the job with mpiexec or `python -m" in result.stderr


SRUN_RANK = """
import os, sys
sys.modules["mpi4py"] = None
import numpy as np
import horo_lite as hvd

rank = int(os.environ.pop("RANK"))
os.environ.update(SLURM_PROCID=str(rank), SLURM_STEP_NUM_TASKS=os.environ.pop("WORLD_SIZE"))
if {by_address}:
    address = os.environ.pop("MASTER_ADDR") + ":" + os.environ.pop("MASTER_PORT")
    os.environ["HORO_LITE_ADDRESS"] = address
world = hvd.init()
assert (world.rank, world.size) == (rank, 2)
assert hvd.allreduce(np.full(3, rank + 1.0), op=hvd.Sum).tolist() == [3.0] * 3
print("rank", rank, "is done", flush=True)
"""


@pytest.mark.launches
@pytest.mark.parametrize("by_address", [True, False])
def test_srun_without_mpi(by_address: bool, tmp_path: Path) -> None:
    """With the variables that `srun --mpi=none` sets."""
    result = ended(SRUN_RANK.format(by_address=by_address), 2, tmp_path).check()
    assert sorted(re.findall(r"rank (\d) is done", result.stdout)) == ["0", "1"], str(result)


def take_another_rank(address: str) -> list[int]:
    world = hvd.init()
    assert world.size == 2
    number = world.rank
    hvd.shutdown()
    with pytest.MonkeyPatch.context() as patch:
        for name, value in ("RANK", 1 - number), ("SIZE", 2), ("ADDRESS", address):
            patch.setenv(f"HORO_LITE_{name}", str(value))
        hvd.init()
        return hvd.allgather_object(number)


@pytest.mark.served
def test_what_counts_inside_mpiexec() -> None:
    """horo_lite's own variables and the arguments take precedence, but not an additional RANK."""
    address = f"localhost:{free_port()}"
    assert on_ranks(take_another_rank, 2, address, env=STANDARD) == [[1, 0]] * 2
