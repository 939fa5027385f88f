"""All ways in which one rank can end while the others need it: one row and one job each."""

from __future__ import annotations

import signal
import time

import pytest
from _pytest.mark import ParameterSet
from launch import start_ranks
from runner import (
    ALLREDUCE,
    ASYNCHRONOUS,
    LIMIT_S,
    Fault,
    check_words,
    named_segments,
    run,
)

pytestmark = pytest.mark.launches

ITSELF = "[horo_lite] rank {rank} of 3 ({host}, pid {pid})"
PEERS = "PeerLostError: rank {rank} (pid {pid} on {host}) "
RAISED = (f"{ITSELF} ends the job with an exception:", "[rank {rank}] ValueError: no such file")
LEFT = (
    f"{PEERS}has left (its program ended; a rank with fewer batches than others calls "
    "hvd.join() first)",
    " while rank ",
)
KILLED = (f"{PEERS}was killed by signal 9 (Killed)",)

IMPATIENT = "from horo_lite.start import mpi\nmpi._GRACE_S = 3.0"
PART = "from horo_lite import new_group\npart = new_group([0, 1])"
SOON = f"from stall_limits import limit_waits\nlimit_waits(3)\n{ALLREDUCE}"
TORCH = """
import torch, horo_lite.torch as hvt
layer = torch.nn.Linear(3, 1)
opt = hvt.DistributedOptimizer(torch.optim.SGD(layer.parameters(), 0.1))
def step(n):
    opt.zero_grad()
    layer(torch.ones(2, 3)).sum().backward()
    opt.step()
    print("step", n, flush=True)
step(0)
"""
A_WORKER = """
class Samples(torch.utils.data.Dataset):
    def __len__(self): return 8
    def __getitem__(self, i):
        fault()
        os.kill(os.getpid(), signal.SIGKILL)
next(iter(torch.utils.data.DataLoader(Samples(), num_workers=1, multiprocessing_context="fork")))
"""

ENDS = [
    # A rank that raises reports it itself, and its victims are silent.
    Fault("an exception", "fail()", ("Traceback", *RAISED)),
    Fault("an exception on rank 0", "fail()", RAISED, rank=0),
    Fault("MemoryError", "np.ones(1 << 50)", ("MemoryError: Unable to allocate",)),
    Fault("RecursionError", "def f(): f()\nf()", ("RecursionError",)),
    Fault("KeyboardInterrupt", "signal.raise_signal(signal.SIGINT)", (f"{ITSELF}: KeyboardInt",)),
    Fault("an exception in a thread",
          "threading.Thread(target=fail, name='loader').start()\ntime.sleep(60)",
          (f"{ITSELF} ends the job with an exception in thread 'loader':", RAISED[1])),
    Fault("an exception in a thread, with the others far away",
          "threading.Thread(target=fail, daemon=True).start()\ntime.sleep(60)",
          (RAISED[1],), others="time.sleep(60)"),
    Fault("an exception in a backward hook",
          TORCH + "layer.weight.register_hook(lambda gradient: fail())\nfault()\nstep(1)",
          RAISED, late=True, others=TORCH + "step(1)", needs="torch"),
    Fault("a data loader's worker is killed", "import torch\n" + A_WORKER,
          ("[rank {rank}] RuntimeError: DataLoader worker (pid",), late=True, needs="torch"),
    Fault("an exception with stdout closed", "os.close(1)\nfail()", RAISED),
    Fault("an exception between hosts", "fail()", RAISED, hosts="1,1,1", messages=None),
    Fault("an exception, mixed hosts", "fail()", RAISED, hosts="2,1", messages=None),
    Fault("an exception, asynchronous", "fail()", RAISED, others=ASYNCHRONOUS),
    Fault("an exception in shutdown()", """
          def ring(*_): raise TimeoutError("rang")
          signal.signal(signal.SIGALRM, ring)
          signal.alarm(1)
          hvd.allreduce_async(np.ones(3), name="not everybody's")
          hvd.shutdown()
          """, ("[rank {rank}] TimeoutError: rang",), others="time.sleep(60)"),
    Fault("a thread's sys.exit() ends the thread",
          f"threading.Thread(target=sys.exit, args=(3,)).start()\ntime.sleep(0.5)\n{ALLREDUCE}",
          code=0, messages=0),
    # Python prints and ignores exceptions there; no rank was waiting.
    Fault("an exception in atexit", "atexit.register(fail)", ("ValueError: no such file",),
          others="pass", code=0, messages=0),
    # A rank that ends normally is reported by those that need it.
    Fault("the end of the program", "pass", LEFT),
    Fault("sys.exit(0)", "sys.exit(0)", (PEERS + "has left (sys.exit(0) at ",)),
    Fault("sys.exit(3)", "sys.exit(3)", (PEERS + "has left (sys.exit(3) at ",)),
    Fault("sys.exit(text)", "sys.exit('nothing to train on')",
          ("nothing to train on\n", PEERS + "has left (sys.exit('nothing to train on') at ")),
    Fault("a sys.exit() that was caught", "try: sys.exit(3)\nexcept SystemExit: pass", LEFT),
    Fault("raise SystemExit", "raise SystemExit(3)", LEFT),
    Fault("shutdown()", "hvd.shutdown()\ntime.sleep(60)",
          (PEERS + "has left (it called shutdown())",)),
    Fault("the end, asynchronous", "pass", LEFT, others=ASYNCHRONOUS),
    Fault("sys.exit(0), asynchronous", "sys.exit(0)", (PEERS + "has left (sys.exit(0) at ",),
          others=ASYNCHRONOUS),
    Fault("the end, between hosts", "pass", LEFT, hosts="1,1,1", messages=None),
    Fault("the end, mixed hosts", "pass", LEFT, hosts="2,1", messages=None),
    Fault("sys.exit(0), asynchronous, between hosts", "sys.exit(0)",
          (PEERS + "has left (sys.exit(0) at ",), hosts="1,1,1", others=ASYNCHRONOUS,
          messages=None),
    Fault("sys.exit(0), asynchronous, mixed hosts", "sys.exit(0)",
          (PEERS + "has left (sys.exit(0) at ",), hosts="2,1", others=ASYNCHRONOUS, messages=None),
    Fault("one step less",
          "for i in range(3): hvd.allreduce(np.ones(9), name=f'gradients of step {i}')",
          (LEFT[0] + ", last seen in allreduce 'gradients of step 2', while rank ",
           "waited in allreduce 'gradients of step 3'"),
          others="for i in range(4): hvd.allreduce(np.ones(9), name=f'gradients of step {i}')"),
    Fault("one step less, as backward() finds out", TORCH + "fault()",
          # In the ranks' agreement, or in the exchange, if the engine's thread is quicker.
          (LEFT[0], "waited in ", "gradients of optimizer 1, step 2", " (at ", ", step)\n"),
          late=True, others=TORCH + "step(1)", needs="torch"),
    Fault("one step more, and nobody asks what became of it",
          "hvd.allreduce_async(np.ones(9), name='one more')",
          (f"{ITSELF}: PeerLostError: rank ", "has left", "allreduce 'one more'"), others="pass"),
    Fault("all ranks exit with 3", "sys.exit(3)", others="sys.exit(3)", code=3, messages=0),
    # MPI's own calls do not notice that a rank ends; it would wait for them in MPI_Finalize.
    Fault("sys.exit(3), with the others in MPI's barrier", f"{IMPATIENT}\nsys.exit(3)",
          (f"{ITSELF} ends the job: sys.exit(3) at ", "; 3 s later ranks 0 and 2 still run (in an"),
          others="from mpi4py import MPI\nMPI.COMM_WORLD.Barrier()", code=3),
    # All others, since Open MPI's launcher may crash if one is in MPI_Finalize while another rank
    # aborts (5.0.11: 11 of 60 times, without this package).
    Fault("sys.exit(text), with the others in MPI's recv, between hosts",
          f"{IMPATIENT}\nsys.exit('nothing to train on')",
          ("nothing to train on\n", f"{ITSELF} ends the job: sys.exit('nothing to train on') at ",
           "; 3 s later ranks 0 and 2 still run (in an MPI call"),
          others="from mpi4py import MPI\nMPI.COMM_WORLD.recv(source=1)", code=1,
          hosts="1,1,1"),
    Fault("an exception that a part of the world waits for",
          f"{PART}\nfail()", RAISED,
          others=f"{PART}\nhvd.barrier(group=part) if part else time.sleep(60)"),
    # An uncaught mismatch.
    Fault("a mismatch", "hvd.allreduce(np.ones(4), name='weights')",
          ("MismatchError: ranks disagree on allreduce 'weights': first difference: ranks "
           "0 and 2: tensor 0: float64[3]; rank 1: tensor 0: float64[4]",),
          others="hvd.allreduce(np.ones(3), name='weights')", messages=None),
    Fault("a mismatch that nobody asks about",
          "hvd.allreduce_async(np.ones(4), name='weights')",
          ("MismatchError: ranks disagree on allreduce 'weights': first difference: ranks "
           "0 and 2: tensor 0: float64[3]; rank 1: tensor 0: float64[4]",),
          others="hvd.allreduce_async(np.ones(3), name='weights')", messages=None),
    Fault("direct here, asynchronous there", ALLREDUCE,
          ("MismatchError: allreduce 'w' was ", "and every rank is waiting, rank "),
          others=ASYNCHRONOUS, messages=None),
    Fault("direct here, asynchronous there, between hosts", ALLREDUCE,
          ("MismatchError: allreduce 'w' was ", "and every rank is waiting, rank "),
          hosts="1,1,1", others=ASYNCHRONOUS, messages=None),
    Fault("one asynchronous operation more",
          "hvd.synchronize([hvd.allreduce_async(np.ones(3)) for _ in range(3)][-1])",
          ("allreduce number 3", "barrier", "and every rank is waiting, rank "),
          others="[hvd.allreduce_async(np.ones(3)) for _ in range(2)]\nhvd.barrier()",
          hosts="2,1", messages=None),
    # Sudden deaths: only the peers can report them.
    Fault("SIGKILL", "os.kill(os.getpid(), signal.SIGKILL)",
          (*KILLED, ", last seen in allreduce, while rank ", "waited in allreduce 'w'"),
          by_signal=True),
    Fault("SIGKILL on rank 0", "os.kill(os.getpid(), signal.SIGKILL)", KILLED, rank=0,
          by_signal=True),
    Fault("SIGKILL, asynchronous", "os.kill(os.getpid(), signal.SIGKILL)", KILLED,
          others=ASYNCHRONOUS, by_signal=True),
    Fault("SIGKILL, with the others in recv", "os.kill(os.getpid(), signal.SIGKILL)",
          (*KILLED, "waited in recv from rank 1 (tag 0)"), others="hvd.recv(np.ones(3), 1)",
          by_signal=True),
    Fault("SIGKILL, with the others in send", "os.kill(os.getpid(), signal.SIGKILL)", KILLED,
          others="hvd.send(np.ones(5000), 1)", by_signal=True),
    Fault("an exception, with the others in recv", "fail()", RAISED,
          others="hvd.recv(np.ones(3))"),
    Fault("the end, with the others in recv", "pass", LEFT, others="hvd.recv(np.ones(3), 1)"),
    Fault("the end, with the others in recv, mixed hosts", "pass", LEFT, hosts="2,1",
          others="hvd.recv(np.ones(3), 1)", messages=None),
    Fault("SIGKILL between hosts", "os.kill(os.getpid(), signal.SIGKILL)",
          hosts="1,1,1", messages=None),
    Fault("SIGKILL, mixed hosts", "os.kill(os.getpid(), signal.SIGKILL)",
          hosts="2,1", messages=None),
    Fault("SIGSEGV", "os.kill(os.getpid(), signal.SIGSEGV)",
          (PEERS + "was killed by signal 11 (Segmentation fault)",), by_signal=True),
    Fault("SIGTERM", "os.kill(os.getpid(), signal.SIGTERM)",
          (PEERS + "was killed by signal 15 (Terminated)",), by_signal=True),
    Fault("abort()", "os.abort()", (PEERS + "was killed by signal 6 (Aborted)",), by_signal=True),
    Fault("os._exit(0)", "os._exit(0)", (PEERS + "ended with os._exit(0)",), by_exit=True),
    Fault("os._exit(3)", "os._exit(3)", (PEERS + "ended with os._exit(3)",), by_exit=True),
    Fault("SIGSTOP", "os.kill(os.getpid(), signal.SIGSTOP)",
          ("rank {rank} (pid {pid} on {host}) was last in allreduce", "is stopped (SIGSTOP",
           "StallError: nothing has moved for 3"), others=SOON, messages=None),
    Fault("an endless loop, between hosts", "while True: time.sleep(0.01)", ("StallError: ",),
          hosts="1,1,1", others=SOON, messages=None),
    # Before init(), MPI does not know this rank yet, and the others wait in init().
    Fault("an import that fails", "import no_such_module",
          ("ModuleNotFoundError: No module named 'no_such_module'",), before_init=True,
          messages=None),
    Fault("sys.exit(3) before init()", "sys.exit(3)", before_init=True, messages=None),
    Fault("SIGKILL before init()", "os.kill(os.getpid(), signal.SIGKILL)", before_init=True,
          messages=None),
    Fault("an argument of init() on one rank", "hvd.init(threads='many')",
          ("threads must be a positive number, not 'many'",), before_init=True, messages=None),
    Fault("no memory during init()", """
          import horo_lite.transports as transports
          def connect(*_, **__): raise OSError("no memory for this rank")
          transports.connect = connect
          """, (f"{ITSELF} ends the job with an exception:", "OSError: no memory for this rank"),
          before_init=True),
]  # fmt: skip


# One row for each mechanism by which the MPI library or its launcher takes part in an end: what a
# rank ends with, while the others wait in shared memory, in MPI, or in MPI_Init.
UNDER_BOTH_LAUNCHERS = {
    "an exception", "an exception between hosts", "the end of the program", "sys.exit(3)",
    "the end, between hosts", "all ranks exit with 3",
    "sys.exit(3), with the others in MPI's barrier", "SIGKILL", "SIGKILL between hosts",
    "os._exit(0)", "os._exit(3)", "SIGSTOP", "sys.exit(3) before init()", "SIGKILL before init()",
    "no memory during init()",
}  # fmt: skip
# `make test` runs them beside two other files: none of these asserts who reports first.
QUICK = {
    "an exception between hosts", "the end, between hosts", "a mismatch", "SIGKILL between hosts",
    "sys.exit(3) before init()",
}  # fmt: skip


def rows() -> list[ParameterSet]:
    assert {fault.name for fault in ENDS} >= UNDER_BOTH_LAUNCHERS | QUICK
    assert not [fault for fault in ENDS if fault.messages == 1 and fault.name in QUICK]
    return [
        pytest.param(
            fault,
            id=fault.name,
            marks=[
                *[pytest.mark.mpi] * (fault.name in UNDER_BOTH_LAUNCHERS),
                *[pytest.mark.quick] * (fault.name in QUICK),
                # Who reports first silences the others.
                *[pytest.mark.two_at_a_time] * (fault.messages == 1),
            ],
        )
        for fault in ENDS
    ]


@pytest.mark.parametrize("fault", rows())
def test_the_job_ends(fault: Fault) -> None:
    if fault.needs:
        pytest.importorskip(fault.needs)
    result = run(fault)
    check_words(fault, result)


@pytest.mark.two_at_a_time
def test_what_all_ranks_raise_alike_is_told_once() -> None:
    """The others add where they were, if the launcher lets them."""
    drift = "hvd.check_in_sync({{'w': np.full(3, {})}})"
    result = run(Fault("", drift.format(1.0), others=drift.format(2.0)))
    assert result.stderr.count("DriftError: the replicas differ") == 1, str(result)


@pytest.mark.mpi
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_launcher_is_told_to_end(number: int) -> None:
    """By Ctrl-C or a scheduler: no rank outlives the launcher for long."""
    before = named_segments()
    waiting = Fault("", "print('asleep', flush=True)\ntime.sleep(60)").script()
    with start_ranks(waiting, 3) as job:
        job.wait_for("asleep")
        time.sleep(0.2)
        began = time.monotonic()
        job.launcher.send_signal(number)
        assert job.launcher.wait(LIMIT_S) != 0
        while job.processes():
            assert time.monotonic() - began < LIMIT_S, f"{job.processes().keys()} are left"
            time.sleep(0.05)
    assert named_segments() <= before
