"""The ranks of test_bad_arguments.py."""

from collections import OrderedDict
from fractions import Fraction
from functools import partial

import numpy as np

import horo_lite as hvd
from horo_lite import ops

world = hvd.init(device="cpu", stall_warn_s=5, stall_abort_s=10)
rank, size = world.rank, world.size
x = np.full(2 * size, rank + 1.0)
peer = (rank + 1) % size
nan, inf = float("nan"), float("inf")


class Opaque:
    pass


class Index:  # like integers of other libraries
    def __init__(self, value):
        self.value = value

    def __index__(self):
        return self.value


def table():
    integers = [1.0, np.float32(1), "1", None, True, [1], nan, Fraction(1), Opaque(), 1j]
    out_of_range = [-1, size, 10**30]
    rooted = {
        "broadcast": lambda root: hvd.broadcast(x, root),
        "broadcast_": lambda root: hvd.broadcast_(x.copy(), root),
        "broadcast_async": lambda root: hvd.synchronize(hvd.broadcast_async(x, root)),
        "broadcast_async_": lambda root: hvd.synchronize(hvd.broadcast_async_(x.copy(), root)),
        "broadcast_object": lambda root: hvd.broadcast_object({}, root),
        "grouped_broadcast": lambda root: ops.grouped_broadcast([x], root),
        "grouped_broadcast_": lambda root: ops.grouped_broadcast_([x.copy()], root),
        "send": lambda to: hvd.send(x, to),
        "isend": lambda to: hvd.isend(x, to),
        "recv": lambda source: source is None or hvd.recv(x.copy(), source),
        "irecv": lambda source: source is None or hvd.irecv(x.copy(), source),
    }
    for name, call in rooted.items():
        for value in integers:
            if not (value is None and "recv" in name):
                yield name, TypeError, call, value
        for value in out_of_range:
            yield name, ValueError, call, value
    for value in integers:
        yield "tag", TypeError, lambda tag: hvd.send(x, peer, tag=tag), value
        yield "tag", TypeError, lambda tag: hvd.irecv(x.copy(), peer, tag=tag), value
    yield "tag", ValueError, lambda tag: hvd.send(x, peer, tag=tag), 1 << 70

    shares = [
        (TypeError, [2.0] * size),
        (TypeError, [True] * size),
        (TypeError, ["2"] * size),
        (TypeError, 2),
        (TypeError, "22"),
        (TypeError, [None] * size),
        (TypeError, Opaque()),
        (ValueError, [-2] + [2] * (size - 1)),
        (ValueError, [2] * (size + 1)),
        (ValueError, []),
        (ValueError, [[2] * size]),
        (ValueError, [10**30] * size),
        (ValueError, [3] * size),
    ]
    for kind, splits in shares:
        yield "alltoall", kind, lambda s: hvd.alltoall(x, s), splits
        yield "alltoall_async", kind, lambda s: hvd.synchronize(hvd.alltoall_async(x, s)), splits

    reductions = {
        "allreduce": lambda **o: hvd.allreduce(x, **o),
        "allreduce_": lambda **o: hvd.allreduce_(x.copy(), **o),
        "grouped_allreduce": lambda **o: hvd.grouped_allreduce([x], **o),
        "grouped_allreduce_": lambda **o: hvd.grouped_allreduce_([x.copy()], **o),
        "reducescatter": lambda **o: hvd.reducescatter(x, **o),
        "allreduce_async": lambda **o: hvd.synchronize(hvd.allreduce_async(x, **o)),
        "reducescatter_async": lambda **o: hvd.synchronize(hvd.reducescatter_async(x, **o)),
    }
    for name, call in reductions.items():
        for op in ("sum", 1, None, True, hvd.Op, Opaque()):
            yield name + " op", (TypeError, ValueError), lambda op, c=call: c(op=op), op
        for factor in ("2", None, nan, inf, -inf, [1.0, 2.0], 1j, Opaque()):
            kind = ValueError if isinstance(factor, float) else TypeError
            yield name + " prescale", kind, lambda f, c=call: c(prescale_factor=f), factor
            yield name + " postscale", kind, lambda f, c=call: c(postscale_factor=f), factor
        for compression in ("fp16", hvd.Compression, None, np.float16):
            kind = (TypeError, ValueError)
            yield name + " compression", kind, lambda v, c=call: c(compression=v), compression
        for label in (1, b"x", Opaque(), ["x"]):
            yield name + " name", TypeError, lambda n, c=call: c(name=n), label
    yield "a name in no encoding", ValueError, lambda n: hvd.allreduce(x, name=n), "caf\udce9"
    for label in (1, b"x", Opaque()):
        yield "allgather name", TypeError, lambda n: hvd.allgather(x, name=n), label
        yield "allgather_async name", TypeError, lambda n: hvd.allgather_async(x, name=n), label
        yield "alltoall name", TypeError, lambda n: hvd.alltoall(x, name=n), label
        yield "broadcast name", TypeError, lambda n: hvd.broadcast(x, 0, name=n), label
        yield "broadcast_async name", TypeError, lambda n: hvd.broadcast_async(x, 0, name=n), label
        yield "objects' name", TypeError, lambda n: hvd.allgather_object(0, name=n), label
        yield "object's name", TypeError, lambda n: hvd.broadcast_object(0, 0, name=n), label

    only_moved = {
        "strings": np.array(["a"] * size),
        "times": np.zeros(size, "M8[s]"),
        "records": np.zeros(size, "i4,f4"),
    }
    arrays = {
        "objects": np.array([object()] * size),
        "a set": {1, 2},
        "nothing": None,
        "opaque": Opaque(),
        "a function": len,
        "a dictionary": {"a": x},
    }
    anything = (TypeError, ValueError, BufferError)
    reducing = {
        "allreduce": lambda a: hvd.allreduce(a),
        "allreduce_": lambda a: hvd.allreduce_(a),
        "grouped_allreduce": lambda a: hvd.grouped_allreduce([x, a]),
        "reducescatter": lambda a: hvd.reducescatter(a),
        "allreduce_async": lambda a: hvd.synchronize(hvd.allreduce_async(a)),
    }
    taking = reducing | {
        "allgather": lambda a: hvd.allgather(a),
        "broadcast": lambda a: hvd.broadcast(a, 0),
        "broadcast_": lambda a: hvd.broadcast_(a, 0),
        "alltoall": lambda a: hvd.alltoall(a),
        "send": lambda a: hvd.send(a, peer),
        "irecv": lambda a: hvd.irecv(a, peer),
        "allgather_async": lambda a: hvd.synchronize(hvd.allgather_async(a)),
        "alltoall_async": lambda a: hvd.synchronize(hvd.alltoall_async(a)),
    }
    for name, call in taking.items():
        for what, array in arrays.items():
            yield f"{name} of {what}", anything, call, array
    for name, call in reducing.items():
        for what, array in only_moved.items():
            yield f"{name} of {what}", anything, call, array
    grouped = {
        "grouped_allreduce": hvd.grouped_allreduce,
        "grouped_allreduce_": hvd.grouped_allreduce_,
        "grouped_allreduce_async": hvd.grouped_allreduce_async,
        "grouped_allreduce_async_": hvd.grouped_allreduce_async_,
        "grouped_broadcast": ops.grouped_broadcast,
        "grouped_broadcast_": ops.grouped_broadcast_,
    }
    for name, call in grouped.items():
        for many in ({"a": x}, {1, 2}, None, 3, Opaque(), len):
            yield name, TypeError, call, many
    for handle in (None, 0, x, Opaque()):
        yield "synchronize", TypeError, hvd.synchronize, handle
        yield "poll", TypeError, hvd.poll, handle
    for params in (None, "model", len, Opaque(), Opaque, {1, 2}):
        yield "broadcast_parameters", TypeError, hvd.broadcast_parameters, params
    for optimizer in (None, "sgd", 0, x, [x], {"w": x}, OrderedDict(w=x), {1, 2}, Opaque(), Opaque):
        yield "broadcast_optimizer_state", TypeError, hvd.broadcast_optimizer_state, optimizer
    masked = np.ma.array(x, mask=x > 1)
    twice = {"prescale_factor": 2}
    taking["broadcast_parameters"] = lambda a: hvd.broadcast_parameters({"w": a})
    taking["average_gradients"] = lambda a: hvd.average_gradients([a])
    for name, call in taking.items():
        if name != "irecv":
            yield f"{name} of a masked array", TypeError, call, masked
    yield "average of truth values", ValueError, hvd.allreduce, x > 1
    yield "weight 0 on every rank", ValueError, lambda a: hvd.allreduce(a, weight=0), x
    yield "truth values twice", ValueError, partial(hvd.allreduce, op=hvd.Sum, **twice), x > 1
    yield "reducescatter of a scalar", ValueError, hvd.reducescatter, np.float64(1)
    yield "unpicklable", (*anything, AttributeError), hvd.allgather_object, lambda: 0
    # None means all ranks, whose next call would match this one.
    outside = [hvd.new_group([0]), hvd.new_group([1])][1 if rank == 0 else 0]
    on_groups = {
        "allreduce": lambda g: hvd.allreduce(x, group=g),
        "barrier": lambda g: hvd.barrier(group=g),
        "broadcast_parameters": lambda g: hvd.broadcast_parameters([x], group=g),
        "broadcast_optimizer_state": lambda g: hvd.broadcast_optimizer_state(Opaque(), group=g),
        "check_in_sync": lambda g: hvd.check_in_sync([x], group=g),
        "average_gradients": lambda g: hvd.average_gradients([x], group=g),
    }
    for name, call in on_groups.items():
        yield f"{name} outside of the group", ValueError, call, outside
        for group in ([0, 1], 0, "world", Opaque(), hvd.Group):
            yield f"{name} group", TypeError, call, group
    for handle in (x, None, 1, Opaque()):
        yield "synchronize", TypeError, hvd.synchronize, handle
        yield "poll", TypeError, hvd.poll, handle
    for ranks in ([0, 0], [], [size], [-1], [0.0], [None], 0, None, ["0"], [True]):
        yield "new_group", (TypeError, ValueError), hvd.new_group, ranks


n = 0
for what, kind, call, value in table():
    try:
        result = call(value)
    except (hvd.PeerLostError, hvd.StallError):
        raise
    except kind as error:
        assert str(error), (what, value)
    except Exception as error:
        raise AssertionError(f"{what}({value!r}) raised {error!r}, not {kind}") from error
    else:
        raise AssertionError(f"{what}({value!r}) returned {result!r}")
    n += 1
    total = hvd.allreduce(np.array([rank + 1.0]), hvd.Sum)
    assert total[0] == size * (size + 1) / 2, (what, value)

for one in (1, np.int64(1), np.uint8(1), Index(1), np.array(1)):
    assert hvd.broadcast(np.array([rank]), one)[0] == 1
    assert hvd.synchronize(hvd.broadcast_async(np.array([rank]), one))[0] == 1
    assert hvd.broadcast_object(rank, one) == 1
    sent = hvd.isend(np.array([rank]), Index(peer), tag=one)
    source, received = (rank - 1) % size, np.zeros(1, np.int64)
    assert hvd.recv(received, np.int32(source), tag=one) == source == received[0]
    sent.wait()
mine, theirs = np.array([rank]), np.array([rank + 1])
total = size * (size - 1) // 2
for many in ([mine, theirs], iter([mine, theirs]), {"a": mine, "b": theirs}.values()):
    assert hvd.grouped_allreduce(many, hvd.Sum) == [total, total + size]
assert hvd.synchronize(hvd.grouped_allreduce_async(iter([mine]), hvd.Sum)) == [total]
assert ops.grouped_broadcast(iter([mine, theirs]), 1) == [1, 2]
assert hvd.grouped_allreduce_(iter([mine]), hvd.Sum)[0] is mine
assert mine == total
two = [Index(2)] * size, np.full(size, 2, np.uint16), (np.int8(2),) * size
for splits in two:
    rows, counts = hvd.alltoall(x, splits)
    assert rows.tolist() == [r + 1.0 for r in range(size) for _ in range(2)]
    assert counts.tolist() == [2] * size
print(n, "refused", flush=True)
