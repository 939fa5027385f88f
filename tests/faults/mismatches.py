"""All ways in which calls of ranks can differ: one row each. Run on ranks that serve many tests.

Each row is a call in two forms, the odd rank's (the last one's) and that of all others, and words
that must be in the MismatchError which every rank raises. The world remains usable: after each row
the ranks synchronize, and reduce something.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any, NamedTuple

import numpy as np
from home_made import SGD, Parameter

import horo_lite as hvd
from horo_lite import new_group, world

fp16, none = hvd.Compression.fp16, hvd.Compression.none


def ones(*shape: int, dtype: Any = np.float32) -> np.ndarray:
    return np.ones(shape, dtype)


def parameter(n: int, dtype: Any = np.float32) -> Parameter:
    return Parameter(ones(n, dtype=dtype), ones(n, dtype=dtype))


def step(names: str, *params: Parameter, compression: Any = none) -> None:
    named = list(zip(names.split(), params, strict=True))
    hvd.DistributedOptimizer(
        SGD(list(params)), named_parameters=named, compression=compression
    ).step()


def wait(*handles: hvd.Handle) -> None:
    for handle in handles:
        hvd.synchronize(handle)


class Row(NamedTuple):
    """`odd` runs on the last rank, `others` on all others; `says` is in every rank's message."""

    name: str
    others: Callable[[], Any]
    odd: Callable[[], Any]
    says: Sequence[str]


# Options of every reduction, direct and asynchronous: the others', the odd rank's, words.
REDUCTIONS: list[tuple[str, dict[str, Any], dict[str, Any], list[str]]] = [
    ("op", {"op": hvd.Sum}, {"op": hvd.Max}, ["op Sum", "op Max"]),
    ("compression", {}, {"compression": fp16}, ["compression none", "compression fp16"]),
    ("prescale", {}, {"prescale_factor": 2.0}, ["prescale_factor 1.0", "prescale_factor 2.0"]),
    ("postscale", {}, {"postscale_factor": 2.0}, ["postscale_factor 1.0", "postscale_factor 2.0"]),
    ("shape", {"x": ones(4, 3)}, {"x": ones(4, 2)}, ["float32[4, 3]", "float32[4, 2]"]),
    ("dtype", {"x": ones(4)}, {"x": ones(4, dtype=np.int32)}, ["float32[4]", "int32[4]"]),
]


def reductions() -> list[Row]:
    rows = []
    for what, others, odd, says in REDUCTIONS:
        for kind in ("allreduce", "reducescatter"):

            def direct(options: dict[str, Any], kind: str = kind) -> Callable[[], Any]:
                call, given = getattr(hvd, kind), {"x": ones(4), "name": "w"} | options
                return lambda: call(given.pop("x"), **given)

            def later(options: dict[str, Any], kind: str = kind) -> Callable[[], Any]:
                call, given = getattr(hvd, f"{kind}_async"), {"x": ones(4), "name": "w"} | options
                return lambda: wait(call(given.pop("x"), **given))

            words = [f"{kind} 'w'", *says]
            rows.append(Row(f"{kind}: {what}", direct(others), direct(odd), words))
            rows.append(Row(f"{kind}_async: {what}", later(others), later(odd), words))
    return rows


def generic() -> list[Row]:
    one, two = ones(1), ones(2)
    g = hvd
    return [
        *reductions(),
        Row("allreduce: name", lambda: g.allreduce(two, name="a"),
            lambda: g.allreduce(two, name="b"), ["allreduce 'a'", "allreduce 'b'"]),
        Row("allreduce: named or not", lambda: g.allreduce(two, name="a"),
            lambda: g.allreduce(two), ["allreduce 'a'", ": allreduce"]),
        Row("allreduce: out of order", lambda: (g.allreduce(two, name="a"), ...),
            lambda: (g.allreduce(two, name="b"), ...), ["allreduce 'a'", "allreduce 'b'"]),
        Row("grouped_allreduce: number", lambda: g.grouped_allreduce([two, two], name="w"),
            lambda: g.grouped_allreduce([two], name="w"), ["tensor 1", "nothing more"]),
        Row("grouped_allreduce: order", lambda: g.grouped_allreduce([one, two], name="w"),
            lambda: g.grouped_allreduce([two, one], name="w"), ["tensor 0", "[1]", "[2]"]),
        Row("grouped_allreduce_async: number",
            lambda: wait(g.grouped_allreduce_async([two, two], name="w")),
            lambda: wait(g.grouped_allreduce_async([two], name="w")), ["tensor 1", "nothing"]),
        Row("allgather: rows", lambda: g.allgather(ones(2, 3), name="w"),
            lambda: g.allgather(ones(2, 4), name="w"), ["allgather 'w'", "[3]", "[4]"]),
        Row("allgather: dtype", lambda: g.allgather(ones(2)),
            lambda: g.allgather(ones(2, dtype=np.float64)), ["float32 rows", "float64 rows"]),
        Row("allgather: dimensions", lambda: g.allgather(ones(2, 3)),
            lambda: g.allgather(ones(2)), ["rows of [3]", "rows of []"]),
        Row("allgather_async: rows", lambda: wait(g.allgather_async(ones(2, 3), name="w")),
            lambda: wait(g.allgather_async(ones(2, 4), name="w")), ["'w'", "[3]", "[4]"]),
        Row("broadcast: root", lambda: g.broadcast(two, 0, name="w"),
            lambda: g.broadcast(two, 1, name="w"), ["root_rank 0", "root_rank 1", "'w'"]),
        Row("broadcast: shape", lambda: g.broadcast(ones(2), 0, name="w"),
            lambda: g.broadcast(ones(3), 0, name="w"), ["float32[2]", "float32[3]"]),
        Row("broadcast_: dtype", lambda: g.broadcast_(ones(2), 0),
            lambda: g.broadcast_(ones(2, dtype=np.int8), 0), ["float32[2]", "int8[2]"]),
        Row("broadcast_async: root", lambda: wait(g.broadcast_async(two, 0, name="w")),
            lambda: wait(g.broadcast_async(two, 1, name="w")), ["root_rank 0", "root_rank 1"]),
        Row("alltoall: rows", lambda: g.alltoall(ones(6, 1), name="w"),
            lambda: g.alltoall(ones(6, 2), name="w"), ["alltoall 'w'", "[1]", "[2]"]),
        Row("alltoall: dtype", lambda: g.alltoall(ones(6)),
            lambda: g.alltoall(ones(6, dtype=np.int64)), ["float32 rows", "int64 rows"]),
        Row("alltoall_async: rows", lambda: wait(g.alltoall_async(ones(6, 1), name="w")),
            lambda: wait(g.alltoall_async(ones(6, 2), name="w")), ["'w'", "[1]", "[2]"]),
        Row("broadcast_object: root", lambda: g.broadcast_object("x", 0),
            lambda: g.broadcast_object("x", 1), ["root_rank 0", "root_rank 1"]),
        Row("allgather_object: name", lambda: g.allgather_object("x", name="a"),
            lambda: g.allgather_object("x", name="b"), ["'a'", "'b'"]),
        Row("allgather or allreduce", lambda: g.allreduce(two), lambda: g.allgather(two),
            ["allreduce", "allgather"]),
        Row("broadcast or allreduce", lambda: g.allreduce(two), lambda: g.broadcast(two),
            ["allreduce", "broadcast"]),
        Row("alltoall or reducescatter", lambda: g.reducescatter(ones(6)),
            lambda: g.alltoall(ones(6)), ["reducescatter", "alltoall"]),
        Row("barrier or allreduce", lambda: g.allreduce(two, name="w"), lambda: g.barrier(),
            ["allreduce 'w'", "barrier"]),
        Row("broadcast_object or allgather_object", lambda: g.allgather_object(1),
            lambda: g.broadcast_object(1), ["allgather_object", "broadcast_object"]),
        Row("asynchronous: one is missing", lambda: wait(g.allreduce_async(two, name="w")),
            lambda: wait(g.allreduce_async(two, name="v")), ["submitted by rank", "every rank is"]),
        Row("asynchronous: another operation", lambda: wait(g.allreduce_async(two, name="w")),
            lambda: wait(g.allgather_async(two, name="w")), ["submitted by rank", "'w'"]),
        Row("new_group: ranks", lambda: new_group([0]), lambda: new_group([1]), ["[0]", "[1]"]),
        Row("broadcast_parameters: names", lambda: g.broadcast_parameters({"weight": two}),
            lambda: g.broadcast_parameters({"bias": two}), ["weight", "bias"]),
        Row("broadcast_parameters: number", lambda: g.broadcast_parameters({"a": two}),
            lambda: g.broadcast_parameters({"a": two, "b": two}), ["b"]),
        Row("gradients: names", lambda: step("weight bias", parameter(2), parameter(3)),
            lambda: step("weight other", parameter(2), parameter(3)), ["bias", "other"]),
        Row("gradients: shapes", lambda: step("weight bias", parameter(2), parameter(3)),
            lambda: step("weight bias", parameter(2), parameter(4)), ["bias", "3", "4"]),
        Row("gradients: dtypes", lambda: step("weight", parameter(2)),
            lambda: step("weight", parameter(2, np.float64)), ["weight", "float32", "float64"]),
        Row("gradients: number", lambda: step("weight", parameter(2)),
            lambda: step("weight more", parameter(2), parameter(3)), ["1", "2"]),
        Row("gradients: order", lambda: step("a b", parameter(2), parameter(3)),
            lambda: step("b a", parameter(3), parameter(2)), ["a", "b"]),
        Row("gradients: compression", lambda: step("weight", parameter(2)),
            lambda: step("weight", parameter(2), compression=fp16), ["none", "fp16"]),
    ]  # fmt: skip


def torch_rows() -> list[Row]:
    import torch

    import horo_lite.torch as g

    one, two = torch.ones(1), torch.ones(2)
    torch.optim.SGD([torch.nn.Parameter(one)])  # the first optimizer imports for seconds

    def train(*sizes: int, **options: Any) -> None:
        layers = torch.nn.Sequential(*map(torch.nn.Linear, sizes, sizes[1:]))
        opt = g.DistributedOptimizer(
            torch.optim.SGD(layers.parameters(), 0.1), layers.named_parameters(), **options
        )
        layers(torch.ones(1, sizes[0])).sum().backward()
        opt.step()

    return [
        Row("torch allreduce: op", lambda: g.allreduce(two, name="w", op=g.Sum),
            lambda: g.allreduce(two, name="w", op=g.Max), ["'w'", "op Sum", "op Max"]),
        Row("torch allreduce: shape", lambda: g.allreduce(one, name="w"),
            lambda: g.allreduce(two, name="w"), ["'w'", "[1]", "[2]"]),
        Row("torch allreduce: dtype", lambda: g.allreduce(two, name="w"),
            lambda: g.allreduce(two.double(), name="w"), ["'w'", "float32", "float64"]),
        Row("torch grouped_allreduce: number", lambda: g.grouped_allreduce([one, two], name="w"),
            lambda: g.grouped_allreduce([one], name="w"), ["'w'"]),
        Row("torch allgather: rows", lambda: g.allgather(torch.ones(2, 3), name="w"),
            lambda: g.allgather(torch.ones(2, 4), name="w"), ["'w'", "[3]", "[4]"]),
        Row("torch broadcast: root", lambda: g.broadcast(two, 0, name="w"),
            lambda: g.broadcast(two, 1, name="w"), ["'w'", "root_rank 0", "root_rank 1"]),
        Row("torch alltoall: rows", lambda: g.alltoall(torch.ones(6, 1), name="w"),
            lambda: g.alltoall(torch.ones(6, 2), name="w"), ["'w'", "[1]", "[2]"]),
        Row("torch reducescatter: op", lambda: g.reducescatter(torch.ones(6), name="w", op=g.Sum),
            lambda: g.reducescatter(torch.ones(6), name="w", op=g.Average), ["op Sum", "op Av"]),
        Row("torch: another operation", lambda: g.allreduce(two, name="w"),
            lambda: g.allgather(two, name="w"), ["'w'", "submitted by rank"]),
        Row("torch: another name", lambda: g.allreduce(two, name="w"),
            lambda: g.allreduce(two, name="v"), ["submitted by rank"]),
        Row("torch barrier or allreduce", lambda: g.allreduce(two, name="w"), g.barrier, []),
        Row("torch broadcast_object: root", lambda: g.broadcast_object(1, 0),
            lambda: g.broadcast_object(1, 1), ["root_rank 0", "root_rank 1"]),
        Row("torch gradients: number", lambda: train(2, 3), lambda: train(2, 3, 1), ["1.weight"]),
        Row("torch gradients: shapes", lambda: train(2, 3), lambda: train(2, 4),
            ["weight", "[3, 2]", "[4, 2]"]),
        Row("torch gradients: compression", lambda: train(2, 3),
            lambda: train(2, 3, compression=g.Compression.fp16), ["none", "fp16"]),
        Row("torch gradients: op", lambda: train(2, 3), lambda: train(2, 3, op=g.Sum),
            ["Average", "Sum"]),
    ]  # fmt: skip


TABLES = {"generic": generic, "torch": torch_rows}


class Told(NamedTuple):
    """What a rank was told in a row, and after how many seconds."""

    said: str
    took_s: float


def run(table: str) -> dict[str, Told]:
    """Run all rows of a table in the world that `init()` finds; return what this rank is told."""
    import_module("horo_lite.torch" if table == "torch" else "horo_lite").init()
    odd = hvd.rank() == hvd.size() - 1
    told = {}
    for row in TABLES[table]():
        hvd.barrier()
        began = time.monotonic()
        try:
            (row.odd if odd else row.others)()
            said = "nothing was raised"
        except hvd.MismatchError as error:
            said = " ".join(str(error).split())
        except Exception as error:
            said = f"another error: {error!r}"
        told[row.name] = Told(said, time.monotonic() - began)
        hvd.barrier()
        total = hvd.allreduce(np.full(3, hvd.rank()), op=hvd.Sum)
        assert np.all(total == sum(range(hvd.size())))
    assert world().size == 3
    return told
