"""A job of `make soak`: random calls of every kind, while ranks are killed, stopped or mistaken.

All ranks make the same calls, with numbers that depend on the rank, and compare the results with
the expected ones: whole numbers, exactly. The plan says which rank is in trouble, when and how.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

# The possible troubles. Times are in milliseconds after the call began, or None for just before it.
BY_SIGNAL = ("SIGKILL", "SIGTERM", "SIGINT", "SIGSTOP")
BY_ITSELF = ("exception", "exit 0", "exit 3", "_exit 0", "_exit 3", "skip")
# With fault tolerance these are the death of one rank, and the others end normally.
SURVIVABLE = ("SIGKILL", "SIGTERM", "exception", "exit 3")
N_STEPS = 24


@dataclass(frozen=True)
class Trouble:
    """What happens to one rank, at a step."""

    rank: int
    step: int
    how: str
    after_ms: float | None = None


@dataclass(frozen=True)
class Plan:
    """A job, entirely determined by its seed."""

    seed: int
    n: int
    hosts: str
    elastic: bool
    calls: Sequence[str]
    troubles: Sequence[Trouble]

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> Plan:
        plan = json.loads(text)
        return Plan(**plan | {"troubles": [Trouble(**each) for each in plan["troubles"]]})

    def expected(self) -> str:
        """Return `good`: exit code 0, and all survivors have finished; `bad`: any other code."""
        hows = {trouble.how for trouble in self.troubles} - {"SIGSTOP"}
        if not hows or (self.elastic and hows <= set(SURVIVABLE)):
            return "good"
        # Open MPI may or may not notice os._exit(), and one death may hide another rank's trouble.
        # A skipped call may make all wait for each other, and then the late rank counts as lost.
        depends = len(hows) > 1 or any(how.startswith(("_exit", "skip")) for how in hows)
        return "any" if self.elastic and depends else "bad"

    def survivors(self) -> range:
        """Return how many ranks may finish, if any do.

        Whether the others notice that a rank has skipped a call depends on what they do meanwhile:
        join() takes part in whatever that rank does next.
        """
        lost = {t.rank for t in self.troubles if t.how not in ("SIGSTOP", "skip")}
        skipped = {t.rank for t in self.troubles if t.how == "skip"} - lost
        if not self.elastic:
            return range(self.n, self.n + 1)
        return range(self.n - len(lost | skipped), self.n - len(lost) + 1)


def plan_of(seed: int, *, elastic: bool, torch: bool) -> Plan:
    """Return the job of that seed."""
    rng = random.Random(seed)
    n = rng.choice([2, 2, 3, 3, 4, 5])
    hosts = ""
    if rng.random() < 0.4:
        first = rng.randint(1, n - 1)
        hosts = f"{first},{n - first}" if rng.random() < 0.7 or n == 2 else f"1,1,{n - 2}"
    kinds = [name for name in CALLS if torch or not name.startswith("torch")]
    kinds.remove("mistake")
    if elastic:  # elastic.run itself makes new worlds
        kinds.remove("init_again")
    # Few kinds in one job, so that each is hit often.
    kinds = rng.sample(kinds, rng.choice([2, 4, 8, len(kinds)]))
    troubles: list[Trouble] = []
    mistaken = rng.random() < 0.25
    if mistaken:
        kinds = [*kinds[:3], "mistake", "mistake"]
    elif rng.random() < 0.85:
        n_troubles = rng.choice([1, 1, 1, 2]) if n > 2 else 1
        hows = [*BY_SIGNAL, "SIGKILL", *BY_ITSELF]
        for rank in rng.sample(range(n), n_troubles):
            how = rng.choice(hows)
            after_ms = rng.choice([0, 1, 5, 30]) * rng.random() if how in BY_SIGNAL else None
            troubles.append(Trouble(rank, rng.randrange(N_STEPS - 1), how, after_ms))
    calls = [rng.choice(kinds) for _ in range(N_STEPS)]
    for trouble in troubles:
        # Unnamed calls are matched by position: the next one of the same kind could not be told
        # from the one that a rank has skipped. And if the next one is join(), the rank correctly
        # adds zeros to the call that it has skipped.
        unnoticed = calls[trouble.step], "join"
        if trouble.how == "skip" and calls[trouble.step + 1] in unnoticed:
            others = [kind for kind in (*kinds, "barrier", "objects") if kind not in unnoticed]
            calls[trouble.step + 1] = rng.choice(others)
    return Plan(seed, n, hosts, elastic, calls, troubles)


# --- on a rank ------------------------------------------------------------------------------------


class Rank:
    """One rank of the job, at one step: the data for its calls."""

    def __init__(self, plan: Plan) -> None:
        import horo_lite as hvd

        self.hvd = hvd
        self.plan = plan
        self.step = 0
        self.rng = random.Random()  # the same on all ranks
        self.me = hvd.rank()  # in the first world
        self.kept: dict[str, Any] = {}  # optimizers live as long as the job
        self.seen = hashlib.sha256()
        self.timers: list[threading.Timer] = []
        self.is_beside_joined = False

    @property
    def rank(self) -> int:
        return self.hvd.rank()

    @property
    def size(self) -> int:
        return self.hvd.size()

    def array(self, rank: int, shape: Sequence[int], dtype: str) -> np.ndarray:
        """Return that rank's contribution: small whole numbers, so that no sum is rounded."""
        n = int(np.prod(shape))
        return ((np.arange(n) % 5 + rank + 1) % 11).astype(dtype).reshape(shape)

    def arrays(self, shape: Sequence[int], dtype: str) -> list[np.ndarray]:
        return [self.array(rank, shape, dtype) for rank in range(self.size)]

    def some_shape(self) -> list[int]:
        rows = self.rng.choice([1, 3, 17, 1000, 5000, 100_000, 300_000])
        # No other step has this shape: a skipped call cannot go unnoticed.
        return [rows + self.step, self.rng.choice([1, 2])]

    def some_dtype(self) -> str:
        return self.rng.choice(["float32", "float64", "float16", "int32", "int64", "uint8"])

    def expect(self, what: str, got: Any, want: Any) -> None:
        """Check a result that is the same on all ranks."""
        if isinstance(want, np.ndarray):
            got = np.asarray(got)
            same = got.dtype == want.dtype and np.array_equal(got, want)
            self.seen.update(got.tobytes())
        else:
            same = got == want
            self.seen.update(repr(got).encode())
        if not same and not self.is_beside_joined:
            print(f"WRONG {what} at step {self.step} on rank {self.rank}", flush=True)
            raise AssertionError(f"{what}: {got!r:.300} instead of {want!r:.300}")

    def go_through(self, step: int) -> None:
        """Make the call of that step, with this rank's troubles."""
        self.step = step
        self.rng.seed(f"{self.plan.seed} {step}")
        mine = [t for t in self.plan.troubles if (t.rank, t.step) == (self.me, step)]
        for trouble in mine:
            if trouble.how == "skip":
                # The others stay in join(), and correctly add zeros to this rank's next calls.
                self.is_beside_joined = self.plan.calls[step] == "join"
                return
            self.suffer(trouble)
        CALLS[self.plan.calls[step]](self)

    def suffer(self, trouble: Trouble) -> None:
        kind, _, code = trouble.how.partition(" ")
        if kind == "exception":
            raise ValueError(f"the exception of rank {self.me}")
        if kind == "exit":
            sys.exit(int(code))
        if kind == "_exit":
            os._exit(int(code))
        number = getattr(signal, kind)

        def hit() -> None:
            if number == signal.SIGSTOP:
                waker = ["sh", "-c", f"sleep 0.7; kill -CONT {os.getpid()}"]
                subprocess.Popen(waker, stdin=-3, stdout=-3, stderr=-3)
            os.kill(os.getpid(), number)

        assert trouble.after_ms is not None
        timer = threading.Timer(trouble.after_ms / 1000, hit)
        timer.daemon = True
        timer.start()
        self.timers.append(timer)

    def finish(self) -> None:
        """Wait for pending troubles of this rank."""
        for timer in self.timers:
            timer.join()
        time.sleep(0.01)


def sum_of(arrays: Sequence[np.ndarray]) -> np.ndarray:
    """Return the sum in the arrays' own dtype."""
    return np.add.reduce(arrays, dtype=arrays[0].dtype)


def reductions(r: Rank) -> None:
    hvd, shape, dtype = r.hvd, r.some_shape(), r.some_dtype()
    everyone = r.arrays(shape, dtype)
    op, of = r.rng.choice(
        [(hvd.Sum, sum_of), (hvd.Min, np.minimum.reduce), (hvd.Max, np.maximum.reduce)]
    )
    want = of(everyone)
    x = everyone[r.rank].copy()
    how = r.rng.choice(["new", "in place", "grouped", "grouped in place", "wire", "average"])
    if how == "new":
        r.expect("allreduce", hvd.allreduce(x, op=op), want)
    elif how == "in place":
        hvd.allreduce_(x, op=op)
        r.expect("allreduce_", x, want)
    elif how == "average":
        mean = hvd.allreduce(x.astype("float32") * r.size)
        r.expect("average", mean, sum_of([each.astype("float32") for each in everyone]))
    elif how == "wire":
        out = hvd.allreduce(x.astype("float32"), op=hvd.Sum, compression=hvd.Compression.fp16)
        r.expect("fp16", out, sum_of([each.astype("float32") for each in everyone]))
    else:
        more = r.arrays([3, r.step + 1], "float64")
        xs = [x, more[r.rank].copy(), x[:0].copy()]
        call = hvd.grouped_allreduce if how == "grouped" else hvd.grouped_allreduce_
        for got, right in zip(call(xs, op=op), [want, of(more), x[:0]], strict=True):
            r.expect(how, got, right)


def movements(r: Rank) -> None:
    hvd, shape, dtype = r.hvd, r.some_shape(), r.some_dtype()
    everyone = r.arrays(shape, dtype)
    x, root = everyone[r.rank].copy(), r.rng.randrange(r.size)
    how = r.rng.choice(["allgather", "broadcast", "broadcast_", "alltoall", "reducescatter"])
    if how == "allgather":
        parts = [each[: len(each) // (rank + 1)] for rank, each in enumerate(everyone)]
        r.expect(how, hvd.allgather(parts[r.rank]), np.concatenate(parts))
    elif how == "broadcast":
        r.expect(how, hvd.broadcast(x, root), everyone[root])
    elif how == "broadcast_":
        hvd.broadcast_(x, root)
        r.expect(how, x, everyone[root])
    elif how == "alltoall":
        splits = [(i * 7) % (shape[0] // r.size + 1) for i in range(r.size)]
        ends = np.cumsum(splits)
        mine = slice(ends[r.rank] - splits[r.rank], ends[r.rank])
        got, rows = hvd.alltoall(x[: ends[-1]], splits)
        want = np.concatenate([each[mine] for each in everyone])
        assert np.array_equal(got, want), f"WRONG alltoall: {got!r:.300}, {want!r:.300}"
        assert rows.tolist() == [splits[r.rank]] * r.size, "WRONG rows of alltoall"
    else:
        want = np.array_split(sum_of(everyone), r.size)[r.rank]
        got = hvd.reducescatter(x, op=hvd.Sum)
        assert np.array_equal(got, want), f"WRONG reducescatter: {got!r:.300}, {want!r:.300}"


def asynchronous(r: Rank) -> None:
    """Several at once, named and unnamed, submitted by each rank in its own order."""
    hvd, submit = r.hvd, {}
    wants: dict[str, Any] = {}

    def add(kind: str, name: str) -> None:
        shape, dtype = r.some_shape(), r.some_dtype()
        everyone = r.arrays(shape, dtype)
        x, root = everyone[r.rank].copy(), r.rng.randrange(r.size)
        if kind == "allreduce":
            submit[name] = lambda: hvd.allreduce_async(x, op=hvd.Sum, name=name)
            wants[name] = sum_of(everyone)
        elif kind == "allreduce_":
            submit[name] = lambda: hvd.allreduce_async_(x, op=hvd.Max, name=name)
            wants[name] = np.maximum.reduce(everyone)
        elif kind == "grouped":
            xs = [x, x.astype("float64")]
            submit[name] = lambda: hvd.grouped_allreduce_async(xs, op=hvd.Sum, name=name)
            total = sum_of(everyone)
            wants[name] = [total, sum_of([e.astype("float64") for e in everyone])]
        elif kind == "allgather":
            submit[name] = lambda: hvd.allgather_async(x, name=name)
            wants[name] = np.concatenate(everyone)
        elif kind == "broadcast":
            submit[name] = lambda: hvd.broadcast_async(x, root, name=name)
            wants[name] = everyone[root]
        elif kind == "alltoall":
            rows = x[: len(x) // r.size * r.size]
            submit[name] = lambda: hvd.alltoall_async(rows, name=name)
            parts = [np.array_split(each[: len(rows)], r.size) for each in everyone]
            own = np.concatenate([part[r.rank] for part in parts])
            wants[name] = ("own", own)
        else:
            submit[name] = lambda: hvd.reducescatter_async(x, op=hvd.Sum, name=name)
            wants[name] = ("own", np.array_split(sum_of(everyone), r.size)[r.rank])

    kinds = ["allreduce", "allreduce_", "grouped", "allgather", "broadcast", "alltoall", "scatter"]
    for i in range(r.rng.randint(1, 5)):
        add(r.rng.choice(kinds), f"{r.step}.{i}")
    order = sorted(submit)
    random.Random(f"{r.plan.seed} {r.rank}").shuffle(order)
    handles = {name: submit[name]() for name in order}
    if r.rng.random() < 0.5:
        r.expect("beside", hvd.allreduce(np.ones(5), op=hvd.Sum), np.full(5, float(r.size)))
    for name in sorted(handles):
        got, want = hvd.synchronize(handles[name]), wants[name]
        if isinstance(want, tuple):
            assert np.array_equal(got, want[1]), f"WRONG {name}"
        elif isinstance(want, list):
            for one, right in zip(got, want, strict=True):
                r.expect(name, one, right)
        else:
            r.expect(name, got, want)


def objects(r: Rank) -> None:
    hvd, root = r.hvd, r.rng.randrange(r.size)
    n = r.rng.choice([1, 100, 10_000, 1_000_000])
    everyone = [{"rank": rank, "text": "é" * n, "step": r.step} for rank in range(r.size)]
    if r.rng.random() < 0.5:
        got = hvd.broadcast_object(everyone[r.rank], root)
        assert got == everyone[root], "WRONG broadcast_object"
    else:
        assert hvd.allgather_object(everyone[r.rank]) == everyone, "WRONG allgather_object"


def barrier(r: Rank) -> None:
    r.hvd.barrier()


def messages(r: Rank) -> None:
    if r.size == 1:
        return
    hvd, shape, dtype = r.hvd, r.some_shape(), r.some_dtype()
    to, of = (r.rank + 1) % r.size, (r.rank - 1) % r.size
    want, x = r.array(of, shape, dtype), r.array(r.rank, shape, dtype)
    got = np.zeros_like(x)
    if r.rng.random() < 0.5:
        sent, received = hvd.isend(x, to, tag=r.step), hvd.irecv(got, of, tag=r.step)
        received.wait()
        sent.wait()
    elif r.rank % 2 == 0:
        hvd.send(x, to, tag=r.step)
        hvd.recv(got, of, tag=r.step)
    else:
        hvd.recv(got, of, tag=r.step)
        hvd.send(x, to, tag=r.step)
    assert np.array_equal(got, want), "WRONG message"


def join(r: Rank) -> None:
    """Each rank has its own number of batches."""
    hvd, shape = r.hvd, r.some_shape()
    counts = [(rank * 5 + r.step) % 3 for rank in range(r.size)]
    everyone = r.arrays(shape, "float32")
    for i in range(counts[r.rank]):
        there = [everyone[rank] for rank in range(r.size) if counts[rank] > i]
        x = everyone[r.rank].copy()
        if r.rng.random() < 0.5:
            got = hvd.allreduce(x, op=hvd.Sum)
        else:
            got = hvd.synchronize(hvd.allreduce_async(x, op=hvd.Sum, name=f"{r.step}, batch {i}"))
        assert np.array_equal(got, sum_of(there)), "WRONG sum beside join()"
    last = hvd.join()
    assert counts[last] == max(counts), "WRONG last rank of join()"


def parameters(r: Rank) -> None:
    hvd, root = r.hvd, r.rng.randrange(r.size)
    everyone = r.arrays(r.some_shape(), "float32")
    tree = {"w": everyone[r.rank].copy(), "b": [np.full(3, float(r.rank))]}
    hvd.broadcast_parameters(tree, root_rank=root)
    r.expect("broadcast_parameters", tree["w"], everyone[root])
    assert hvd.check_in_sync(tree), "WRONG check_in_sync"


class Weights:
    """A model of one array, and its optimizer."""

    def __init__(self) -> None:
        self.params = [self]
        self.data = np.zeros(5000, np.float32)
        self.grad: np.ndarray | None = None

    def step(self) -> None:
        self.data -= self.grad


def optimizer(r: Rank) -> None:
    if "optimizer" not in r.kept:
        inner = Weights()
        r.kept["optimizer"] = inner, r.hvd.DistributedOptimizer(inner)
    inner, opt = r.kept["optimizer"]
    inner.data[:] = 0
    everyone = r.arrays([5000], "float32")
    inner.grad = everyone[r.rank] * r.size
    opt.step()
    r.expect("optimizer.step", inner.data, -sum_of(everyone))


def torch_step(r: Rank) -> None:
    """Three layers, whose gradients are sent during backward(), in separate buckets."""
    import torch

    import horo_lite.torch as hvt

    views = r.rng.random() < 0.5
    wire = r.rng.choice(["none", "fp16"])
    key = f"torch {views} {wire}"
    if key not in r.kept:
        sizes = [3000, 50_000, 7]
        layers = [torch.nn.Parameter(torch.zeros(n)) for n in sizes]
        opt = hvt.DistributedOptimizer(
            torch.optim.SGD(layers, 1.0),
            [(f"layer {i}", layer) for i, layer in enumerate(layers)],
            compression=getattr(hvt.Compression, wire),
            num_groups=r.rng.choice([0, 3]),
            gradient_as_bucket_view=views and not r.plan.hosts and wire == "none",
        )
        r.kept[key] = layers, opt
    layers, opt = r.kept[key]
    for step in range(2):
        with torch.no_grad():
            for layer in layers:
                layer.zero_()
        opt.zero_grad()
        inputs = [torch.from_numpy(r.array(r.rank + step, [p.numel()], "float32")) for p in layers]
        loss = sum((layer * x * r.size).sum() for layer, x in zip(layers, inputs, strict=True))
        loss.backward()
        if r.rng.random() < 0.5:
            opt.synchronize()
        opt.step()
        for layer in layers:
            n = layer.numel()
            total = sum_of([r.array(i + step, [n], "float32") for i in range(r.size)])
            r.expect("torch step", layer.detach().numpy(), -total)


def torch_ops(r: Rank) -> None:
    import torch

    import horo_lite.torch as hvt

    shape = r.some_shape()
    everyone = [torch.from_numpy(each) for each in r.arrays(shape, "float32")]
    x = everyone[r.rank].clone().requires_grad_()
    total = hvt.allreduce(x, op=hvt.Sum, name=f"torch {r.step}")
    r.expect("torch allreduce", total.detach().numpy(), torch.stack(everyone).sum(0).numpy())
    total.sum().backward()
    r.expect("its gradient", x.grad.numpy(), np.full(shape, float(r.size), np.float32))
    handles = [hvt.allreduce_async_(everyone[r.rank].clone(), op=hvt.Sum) for _ in range(3)]
    for handle in handles:
        r.expect("torch async", hvt.synchronize(handle).numpy(), total.detach().numpy())


def groups(r: Rank) -> None:
    from horo_lite import free_group, new_group

    members = r.rng.sample(range(r.size), r.rng.randint(1, r.size))
    everyone = r.arrays(r.some_shape(), "float32")
    part = new_group(members)
    if not part:
        return
    want = sum_of([everyone[rank] for rank in members])
    assert np.array_equal(r.hvd.allreduce(everyone[r.rank], r.hvd.Sum, group=part), want), (
        "WRONG sum in a group"
    )
    assert r.hvd.allgather_object(r.rank, group=part) == members, "WRONG objects in a group"
    handle = r.hvd.allreduce_async(everyone[r.rank], r.hvd.Sum, name="part", group=part)
    assert np.array_equal(part.synchronize(handle), want), "WRONG asynchronous sum in a group"
    free_group(part)


def init_again(r: Rank) -> None:
    r.hvd.shutdown()
    r.hvd.init()
    assert r.rank == r.me, "WRONG rank after init()"


def mistake(r: Rank) -> None:
    """One rank, or each, makes a mistake; the ranks get an error, catch it, and continue."""
    hvd = r.hvd
    shape = r.some_shape()
    everyone = r.arrays(shape, "float32")
    x = everyone[r.rank].copy()
    want = sum_of(everyone)
    name = f"good {r.step}"

    def good() -> None:
        r.expect("allreduce after a mistake", hvd.allreduce(x, op=hvd.Sum, name=name), want)

    def asynchronous() -> None:
        handle = hvd.allreduce_async(x, op=hvd.Sum, name=name)
        r.expect("async after a mistake", hvd.synchronize(handle), want)

    def wait(*args: Any, **options: Any) -> None:
        hvd.synchronize(hvd.allreduce_async(*args, **options))

    disagreements: list[Callable[[], Any]] = [
        lambda: hvd.allreduce(x[:-1], op=hvd.Sum, name=name),
        lambda: hvd.allreduce(x.astype("float64"), op=hvd.Sum, name=name),
        lambda: hvd.allreduce(x, op=hvd.Max, name=name),
        lambda: hvd.allreduce(x, op=hvd.Sum, name="another"),
        lambda: hvd.allreduce(x, op=hvd.Sum, name="ä" * 3000),
        lambda: hvd.allreduce(x.reshape(-1), op=hvd.Sum, name=name),
        lambda: hvd.grouped_allreduce([x, x], op=hvd.Sum, name=name),
        lambda: hvd.broadcast(x, 0, name=name),
        lambda: hvd.allgather(x, name=name),
        lambda: hvd.alltoall(x, [len(x), *[0] * (r.size - 1)], name=name),
        lambda: hvd.reducescatter(x, op=hvd.Sum, name=name),
        lambda: hvd.barrier(),
        lambda: hvd.broadcast_object("x", 0),
        lambda: hvd.allgather_object("x"),
        lambda: hvd.check_in_sync({"w": x}),
        lambda: hvd.broadcast_parameters({"w": x}),
        lambda: hvd.new_group([0]),
    ]
    disagreements_async: list[Callable[[], Any]] = [
        lambda: wait(x[:-1], op=hvd.Sum, name=name),
        lambda: wait(x.astype("float64"), op=hvd.Sum, name=name),
        lambda: wait(x, op=hvd.Min, name=name),
        lambda: hvd.synchronize(hvd.broadcast_async(x, 0, name=name)),
        lambda: hvd.synchronize(hvd.allgather_async(x, name=name)),
    ]
    invalid: list[Callable[[], Any]] = [
        lambda: hvd.allreduce(np.array([object(), None]), op=hvd.Sum),
        lambda: hvd.allreduce(np.array(["a", "b"]), op=hvd.Sum),
        lambda: hvd.allreduce(None, op=hvd.Sum),
        lambda: hvd.allreduce("text", op=hvd.Sum),
        lambda: hvd.allreduce(x, op="sum"),
        lambda: hvd.allreduce_(x[::2][0], op=None),
        lambda: hvd.allreduce(x, op=hvd.Sum, prescale_factor="much"),
        lambda: hvd.allreduce(x, op=hvd.Sum, compression="fp16"),
        lambda: hvd.broadcast(x, r.size),
        lambda: hvd.broadcast(x, -1),
        lambda: hvd.broadcast(x, "0"),
        lambda: hvd.broadcast(x, 0.5),
        lambda: hvd.broadcast_object(lambda: 0, r.rank),
        lambda: hvd.allgather_object(threading.Lock()),
        lambda: hvd.alltoall(x, [-1] * r.size),
        lambda: hvd.alltoall(x, [len(x) + 1, *[0] * (r.size - 1)]),
        lambda: hvd.alltoall(x, [0] * (r.size + 1)),
        lambda: hvd.send(x, r.rank),
        lambda: hvd.send(x, r.size),
        lambda: hvd.recv(3, 0),
        lambda: hvd.synchronize(None),
        lambda: hvd.check_in_sync({"w": x}, on_drift="nonsense"),
        lambda: hvd.check_in_sync(object()),
        lambda: hvd.broadcast_parameters(object()),
        lambda: hvd.DistributedOptimizer(object()),
        lambda: hvd.DistributedOptimizer(Weights(), op="sum"),
        lambda: hvd.init(threads="many"),
        lambda: wait(np.array([object()]), op=hvd.Sum),
        lambda: wait(x, op="sum"),
        lambda: hvd.broadcast_async(x, r.size).wait(),
    ]
    right, bad, alone = good, r.rng.choice(invalid), r.rng.random() < 0.7
    if r.rng.random() < 0.5:
        right, choices = r.rng.choice([(good, disagreements), (asynchronous, disagreements_async)])
        bad, alone = r.rng.choice(choices), True
    if r.size > 1 and (not alone or r.rank == r.rng.randrange(r.size)):
        # If one rank refuses a call itself, the others do not learn of it; they match its next
        # call.
        try:
            bad()
        except Exception as error:
            print(f"REFUSED {type(error).__name__}: {error}"[:300].replace("\n", " "), flush=True)
        else:
            print(f"ACCEPTED at step {r.step}", flush=True)
            raise AssertionError("a mistake was not noticed")
        right()
        return
    try:
        right()
    except hvd.MismatchError:
        right()


CALLS: dict[str, Callable[[Rank], None]] = {
    "reductions": reductions,
    "movements": movements,
    "asynchronous": asynchronous,
    "objects": objects,
    "barrier": barrier,
    "messages": messages,
    "join": join,
    "parameters": parameters,
    "optimizer": optimizer,
    "torch_step": torch_step,
    "torch_ops": torch_ops,
    "groups": groups,
    "init_again": init_again,
    "mistake": mistake,
}


def main() -> None:
    plan = Plan.from_json(os.environ["SOAK_PLAN"])
    import horo_lite as hvd

    hvd.init()
    rank = Rank(plan)

    def train(state: Any) -> None:
        for state.step in range(state.step, N_STEPS):  # noqa: B020
            rank.go_through(state.step)
            if state.step % 7 == 6:
                state.commit()
        rank.finish()

    state = hvd.elastic.State(step=0)
    if plan.elastic:
        hvd.elastic.run(train)(state)
    else:
        train(state)
        hvd.barrier()
        # Results seen by all ranks must be equal.
        rank.expect("digests", len(set(hvd.allgather_object(rank.seen.digest()))), 1)
    print("ENDS", hvd.rank(), hvd.size(), flush=True)


if __name__ == "__main__":
    main()
