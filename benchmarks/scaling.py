"""Predict how long averaging the gradients and a training step take on several hosts.

    python benchmarks/scaling.py --parameters 25.6e6 --compute-s 0.2 --gbit 10
    python benchmarks/scaling.py --bytes 4e8 --hosts 8 64 --ranks 8 --cores 64 --gbit 100
    python benchmarks/scaling.py --json > node.json             # with the costs of this machine
    python benchmarks/scaling.py --costs node.json --hosts 32

A few formulas count what one all-reduce of the package does (csrc/hosts/hosts_allreduce.h,
csrc/shm): the bytes on a link, the work of a host's cores, the messages, and the parts of the first
and last windows that do not overlap. docs/scaling.md gives the source of every term, and its error.
The costs of a host's cores are measured on this machine, in a few seconds, unless --costs names a
file with those of another one.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

_MIB = 1 << 20
_BLOCK_ELEMENTS = 1024  # shares consist of such blocks
_HEADER_BYTES = 32  # a rank's part of the handshake


@dataclass(frozen=True)
class Wire:
    """A wire dtype, and the core time for a float32 element of it, in nanoseconds."""

    element_bytes: float
    """Bytes on the wire, including its part of the block's scale."""
    encode_ns: float
    reduce_ns: float
    """For one rank's, or one host's, contribution to an element of a sum."""
    decode_ns: float


@dataclass(frozen=True)
class Costs:
    """The costs of work on a host."""

    cores: float
    """A host's cores for its ranks."""
    tcp_ns: float
    """Core time to send a byte and receive one."""
    message_us: float
    """Core time for a message, sent and received, in addition to its bytes."""
    crowding: float
    """Extra work if very many ranks share a core, since they poll and evict each other's caches."""
    polling: float
    """The share of a core that a rank uses while it waits for other hosts."""
    wires: Mapping[str, Wire]

    @staticmethod
    def read(data: Mapping[str, Any]) -> Costs:
        """Return the costs that `data` was made from by `dataclasses.asdict`."""
        wires = {name: Wire(**wire) for name, wire in data["wires"].items()}
        return Costs(**{**data, "wires": wires})

    def data(self) -> dict[str, Any]:
        """Return the costs as data for JSON."""
        return asdict(self)

    def slowdown(self, ranks: int) -> float:
        """Return how much longer work takes with this number of ranks on a host than with one."""
        shared = max(1.0, ranks / self.cores)
        return shared * (1 + self.crowding * (1 - 1 / shared))


@dataclass(frozen=True)
class Network:
    """The network between the hosts."""

    gbit: float
    """Rate of a host's link in each direction, in 10^9 bits per second."""
    latency_us: float
    """Time until the first byte of a message arrives, including the MPI library's part."""
    flow_gbit: float | None = None
    """Rate of one TCP connection, if that is limited."""
    framing: float = 1538 / 1448
    """Bytes on an Ethernet per byte of a TCP stream."""
    largest_message: int = 60 << 10
    """Longer messages are split (Open MPI: see transports/mpi/point_to_point.py)."""


class AllReduceTimes(NamedTuple):
    """The predicted parts of one all-reduce."""

    link_s: float
    """Time for all bytes, at the rate of the link."""
    cpu_s: float
    """Time for all work, on all cores, or as many as there are ranks."""
    latency_s: float
    """Time for all windows if only messages took time: two in succession for every three."""
    fill_s: float
    """The parts of the first and last windows that do not overlap."""
    start_s: float
    """Time for the handshake."""
    n_messages: int
    """Messages sent by one of the ranks that send most."""
    polling: float
    """The share of each of a host's cores, or as many as it has ranks, that waiting uses."""

    @property
    def total_s(self) -> float:
        """The time that the all-reduce takes.

        The windows overlap link and cores, but not perfectly: a core that works on one window is
        late for another's messages. So the longer of the two counts, and the other one the more the
        closer it is to it. While messages are in flight, both are idle: if the latency is so long
        that the windows in flight cannot fill the link, it alone sets the pace.
        """
        paced_s = max(math.hypot(self.link_s, self.cpu_s), self.latency_s)
        return paced_s + self.fill_s + self.start_s

    @property
    def busy_s(self) -> float:
        """The time that it takes from cores that compute at the same time."""
        return self.cpu_s + self.polling * (self.total_s - self.cpu_s)


class Step(NamedTuple):
    """A predicted training step, on average if not every step exchanges."""

    compute_s: float
    exposed_s: float
    """The time that the exchange adds."""

    @property
    def total_s(self) -> float:
        """Both."""
        return self.compute_s + self.exposed_s

    @property
    def efficiency(self) -> float:
        """The share of the time in which ranks compute: 1 for linear scaling."""
        return self.compute_s / self.total_s if self.total_s else 1.0


def window_bytes(hosts: int, ranks: int) -> int:
    """Return the size of a window on the wire: `Hosts::window_bytes` of csrc/hosts."""
    room = (128 * _MIB) // (4 * (ranks + 2)) // 64 * 64
    most = min(max(room, _MIB), 4 * _MIB)
    return min(max((256 << 10) * hosts * ranks, _MIB), most)


def allreduce(
    n_elements: float,
    hosts: int,
    ranks: int,
    wire: Wire,
    costs: Costs,
    network: Network,
    levels: Sequence[int] | None = None,
) -> AllReduceTimes:
    """Predict an all-reduce of float32 elements.

    Args:
        n_elements: The number of elements on every rank.
        hosts: The number of hosts.
        ranks: The number of ranks on each host.
        wire: The wire dtype.
        costs: The costs of a host.
        network: The network between the hosts.
        levels: For comparison, since the package does not do it: hosts exchange in groups of
            `levels[0]`, then each host with its counterparts in other groups, and so on. The
            product of the levels is `hosts`.
    """
    levels = levels or (hosts,)
    if math.prod(levels) != hosts:
        raise ValueError(f"the product of the levels {levels} is not {hosts}, the number of hosts")
    if hosts * ranks == 1 or n_elements == 0:
        return AllReduceTimes(0, 0, 0, 0, 0, 0, 0)
    per_ns = costs.slowdown(ranks) * 1e-9  # seconds, for work of one rank
    if hosts == 1:
        others = (ranks - 1) / ranks
        work = others * (wire.encode_ns + wire.decode_ns) + wire.reduce_ns
        return AllReduceTimes(0, n_elements * work * per_ns, 0, 0, 0, 0, 0)

    # Shares consist of blocks. If there are more shares than blocks, some ranks have none.
    all_bytes = n_elements * wire.element_bytes
    window = min(window_bytes(hosts, ranks), all_bytes)
    n_windows = all_bytes / window
    block = min(_BLOCK_ELEMENTS * wire.element_bytes, window)
    per_host = window / block / hosts  # blocks
    parts = min(float(ranks), max(1.0, per_host))  # the ranks of a host that have some

    # Bytes: as many as a ring sends, over one connection for each pair of ranks. A host that owns a
    # block sends its sum to all others, even if there are fewer blocks than hosts.
    sent = (hosts - 1) / hosts * (1 + max(1.0, 1 / per_host)) * all_bytes
    flows = parts * (hosts - 1) * (network.flow_gbit or math.inf)
    rate = min(network.gbit, flows) * 1e9 / 8
    link_s = sent * network.framing / rate

    # Messages: in each window and for every part, the sum and the result to every other host of a
    # level.
    n_messages, share = 0.0, window / parts
    reduced = ranks / parts if ranks > 1 else 0.0  # contributions added, per element of a window
    for size in levels:
        reduced += share / window
        share /= size
        pieces = math.ceil(max(share, block) / network.largest_message)
        n_messages += (size - 1) * pieces * (1 + min(1.0, share / block))

    # Work in a window, for a rank that has a part.
    elements = window / wire.element_bytes
    encode, decode = elements * wire.encode_ns, elements * wire.decode_ns
    reduce = elements * reduced * wire.reduce_ns
    carry = sent / n_windows / parts * costs.tcp_ns
    carry += n_messages * costs.message_us * 1e3
    cpu_s = n_windows * (encode + reduce + carry + decode) * per_ns

    # Step w of the pipeline sends the sums of window w; step w + 1 receives them and sends their
    # result; step w + 2 receives that. So three steps take two messages in succession, each with
    # half of a window's bytes.
    latency_s = 2 / 3 * (n_windows * network.latency_us * 1e-6 + link_s / 2)
    fill_s = (encode + reduce + decode) * per_ns + 2 * len(levels) * network.latency_us * 1e-6
    rounds = math.ceil(math.log2(hosts * ranks))
    start_s = rounds * (network.latency_us + costs.message_us) * 1e-6
    start_s += hosts * ranks * _HEADER_BYTES / rate
    sent_messages = round(n_windows * n_messages)
    polling = min(1.0, costs.polling * max(1.0, ranks / costs.cores))
    return AllReduceTimes(link_s, cpu_s, latency_s, fill_s, start_s, sent_messages, polling)


def step(
    compute_s: float,
    exchange: AllReduceTimes,
    *,
    overlap: float = 2 / 3,
    last: float = 0.0,
    every: int = 1,
    free_cores: bool = True,
) -> Step:
    """Predict a training step.

    Args:
        compute_s: Seconds without communication.
        exchange: The exchange of all gradients.
        overlap: The share of `compute_s` in which gradients leave, that of backward().
        last: The share of the gradients that are in the last bucket, which does not overlap.
        every: Steps whose gradients are accumulated for one exchange: backward_passes_per_step.
        free_cores: Whether cores are free for the exchange while ranks compute.
    """
    exposed_s = max(exchange.total_s - overlap * compute_s, last * exchange.total_s)
    if not free_cores:
        exposed_s = max(exposed_s, exchange.busy_s)
    return Step(compute_s, exposed_s / every)


def eight_bits(fp16: Wire) -> Wire:
    """Return the costs of a hypothetical wire dtype of one byte, with a scale for every block.

    The package has none. Its kernels would read and write fewer bytes than those of fp16.
    """
    return replace(fp16, element_bytes=1 + 4 / _BLOCK_ELEMENTS)


def two_levels(hosts: int) -> tuple[int, int]:
    """Return two levels such that there are about as many groups as hosts in each group."""
    inner = next(n for n in range(math.isqrt(hosts), 0, -1) if hosts % n == 0)
    return inner, hosts // inner


# More than any cache holds, so that gradients are read from memory, as after backward().
_N_ELEMENTS = 8 << 20
_WINDOW_BYTES = 1 << 20
_REPEATS = 5
_BYTES_BY_TCP = 128 << 20
_PIECE_BYTES = 256 << 10
# For Open MPI over TCP, on an Intel Xeon (docs/scaling.md); measuring them needs two hosts.
_MESSAGE_US, _CROWDING, _POLLING = 12.0, 0.85, 0.2


def measured_costs() -> Costs:
    """Measure how long this machine's cores work for an exchange, in a second or two."""
    wires = {
        "fp32": measured_wire("none", 4.0),
        # With a block's exponent, or without.
        "fp16": measured_wire("fp16", 2 + 4 / 1024),
        "bf16": measured_wire("bf16", 2.0),
    }
    n_cores = len(os.sched_getaffinity(0))
    return Costs(n_cores, tcp_ns(), _MESSAGE_US, _CROWDING, _POLLING, wires)


def measured_wire(name: str, element_bytes: float) -> Wire:
    """Measure the kernels of a wire dtype, window by window, as an exchange runs them."""
    import numpy as np

    from horo_lite import _native

    gradient = np.ones(_N_ELEMENTS, np.float32)
    layout = _native.WireLayout(_native.Tensors([gradient]), "sum", name, _WINDOW_BYTES, 1)
    images = np.zeros((3, layout.largest_chunk), np.uint8)
    mine, other, total = (image.ctypes.data for image in images)
    windows = range(layout.n_chunks)

    def encode() -> None:
        for window in windows:
            layout.encode(window, mine)

    def reduce() -> None:
        for window in windows:
            layout.reduce(window, 0, [mine, other], 1.0, [], 1.0, 1.0, total)

    def decode() -> None:
        for window in windows:
            layout.decode(window, total)

    layout.encode(0, other)
    return Wire(element_bytes, _ns(encode), _ns(reduce) / 2, _ns(decode))


def _ns(work: Callable[[], None]) -> float:
    """Return the nanoseconds per element."""
    work()
    times = []
    for _ in range(_REPEATS):
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return min(times) / _N_ELEMENTS * 1e9


def tcp_ns() -> float:
    """Measure the CPU time for sending and receiving a byte, over this host's loopback."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        sender = socket.create_connection(server.getsockname())
        receiver, _ = server.accept()
    piece, room = bytes(_PIECE_BYTES), bytearray(_PIECE_BYTES)

    def send() -> None:
        with sender:
            for _ in range(_BYTES_BY_TCP // _PIECE_BYTES):
                sender.sendall(piece)

    thread = threading.Thread(target=send)
    with receiver:
        began = time.process_time()
        thread.start()
        while receiver.recv_into(room):
            pass
        thread.join()
        return (time.process_time() - began) / _BYTES_BY_TCP * 1e9


INT8 = "int8"


def arguments() -> argparse.Namespace:
    """Return the command's arguments."""
    from horo_lite.training.plan import DEFAULT_BUCKET_BYTES

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--parameters", type=float, help="number of float32 gradients")
    size.add_argument("--bytes", type=float, default=1.024e8, help="or their bytes (1.024e8)")
    add("--hosts", type=int, nargs="+", default=[1, 2, 8, 64, 1024])
    add("--ranks", type=int, default=1, help="ranks on each host (1)")
    add("--cores", type=float, help="a host's cores for its ranks (as here, or in --costs)")
    add("--gbit", type=float, default=10.0, help="rate of a host's link (10)")
    add("--flow-gbit", type=float, help="rate of one TCP connection, if it is limited")
    add("--latency-us", type=float, default=50.0, help="of a message (50)")
    add("--message-us", type=float, help="core time per message (12, or that of --costs)")
    add("--compute-s", type=float, default=0.2, help="computation per step (0.2)")
    add(
        "--overlap",
        type=float,
        default=2 / 3,
        help="share of it in which gradients leave: backward()'s (0.67)",
    )
    add(
        "--bucket-bytes",
        type=float,
        default=DEFAULT_BUCKET_BYTES,
        help="on the wire; the last bucket is an eighth, and leaves after backward() (25 MiB)",
    )
    add(
        "--busy-cores",
        action="store_true",
        help="computation uses all cores: the exchange's own work does not overlap",
    )
    add(
        "--wires",
        nargs="+",
        default=["fp32", "fp16"],
        choices=["fp32", "fp16", "bf16", INT8],
        help="wire formats; int8 stands for a compressor with one byte (fp32 fp16)",
    )
    add(
        "--every",
        type=int,
        nargs="+",
        default=[1, 4],
        help="steps per exchange: backward_passes_per_step (1 4)",
    )
    add("--costs", type=Path, metavar="FILE", help="JSON file with a host's costs: do not measure")
    add("--json", action="store_true", help="print everything as JSON, in seconds")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    n_elements = args.bytes / 4 if args.parameters is None else args.parameters
    network = Network(args.gbit, args.latency_us, args.flow_gbit)
    costs = _costs(args)
    rows = [
        _row(hosts, name, every, n_elements, costs, network, args)
        for hosts in args.hosts
        for name in args.wires
        for every in args.every
    ]
    if args.json:
        print(json.dumps({"costs": costs.data(), "rows": rows}, indent=1))
    else:
        _print(rows, n_elements, costs, network, args)


def _costs(args: argparse.Namespace) -> Costs:
    if args.costs is None:
        costs = measured_costs()
    else:
        data = json.loads(args.costs.read_text())
        costs = Costs.read(data.get("costs", data))
    given = {"cores": args.cores, "message_us": args.message_us}
    costs = replace(costs, **{name: value for name, value in given.items() if value is not None})
    return replace(costs, wires={**costs.wires, INT8: eight_bits(costs.wires["fp16"])})


def _row(
    hosts: int,
    name: str,
    every: int,
    n_elements: float,
    costs: Costs,
    network: Network,
    args: argparse.Namespace,
) -> dict[str, Any]:
    from horo_lite.training.plan import LAST_BUCKETS, is_one_bucket

    wire = costs.wires[name]
    found = allreduce(n_elements, hosts, args.ranks, wire, costs, network)
    leveled = allreduce(n_elements, hosts, args.ranks, wire, costs, network, two_levels(hosts))
    n_bytes = n_elements * wire.element_bytes
    alone = is_one_bucket(n_bytes, args.bucket_bytes)
    last = 1.0 if alone else args.bucket_bytes / LAST_BUCKETS[0] / n_bytes
    stepped = step(
        args.compute_s,
        found,
        overlap=args.overlap,
        last=last,
        every=every,
        free_cores=not args.busy_cores,
    )
    return {
        "hosts": hosts,
        "ranks": hosts * args.ranks,
        "wire": name,
        "every": every,
        "allreduce_s": found.total_s,
        **found._asdict(),
        "two_levels_s": leveled.total_s,
        "step_s": stepped.total_s,
        "exposed_s": stepped.exposed_s,
        "efficiency": stepped.efficiency,
    }


def _print(
    rows: Sequence[Mapping[str, Any]],
    n_elements: float,
    costs: Costs,
    network: Network,
    args: argparse.Namespace,
) -> None:
    source = f"of {args.costs}" if args.costs else "measured here"
    wires = "; ".join(
        f"{name} {wire.encode_ns:.2f} + {wire.reduce_ns:.2f} + {wire.decode_ns:.2f}"
        for name, wire in costs.wires.items()
        if name in args.wires and name != INT8
    )
    print(
        f"{4 * n_elements / 1e6:.1f} MB of float32 gradients, {args.ranks} rank(s) on each host, "
        f"{network.gbit:g} Gbit/s, {network.latency_us:g} us; computing takes "
        f"{1e3 * args.compute_s:g} ms\n"
        f"costs {source}: {costs.cores:g} core(s); encode + reduce + decode, ns per element: "
        f"{wires}; TCP {costs.tcp_ns:.2f} ns per byte sent and received; "
        f"{costs.message_us:g} us per message\n"
    )
    heads = ["hosts", "wire", "all-reduce", "link", "cores", "latency", "messages", "fill"]
    heads += ["two levels", "every", "step", "computing"]
    print("  ".join(f"{head:>10}" for head in heads))
    for row in rows:
        times = ("allreduce_s", "link_s", "cpu_s", "latency_s")
        cells = [f"{row['hosts']}", row["wire"], *(_ms(row[name]) for name in times)]
        cells += [f"{row['n_messages']}", _ms(row["fill_s"] + row["start_s"])]
        cells += [_ms(row["two_levels_s"]), f"{row['every']}", _ms(row["step_s"])]
        print("  ".join(f"{cell:>10}" for cell in [*cells, f"{row['efficiency']:.0%}"]))
    print(
        "\nlink, cores, latency: the time that each alone would take. messages: sent by a rank. "
        "fill: first and last\nwindow. two levels: hosts in groups, which the package does not "
        "do. every: steps per exchange.\ncomputing: share of a step; 100% is linear scaling."
    )


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.{1 if seconds < 1 else 0}f} ms"


if __name__ == "__main__":
    main()
