"""`horo-lite model`: predict how long exchanges and steps take on other numbers of hosts."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from horo_lite.launch.model import Costs, Network, allreduce, eight_bits, step, two_levels
from horo_lite.training.plan import DEFAULT_BUCKET_BYTES, LAST_BUCKETS, is_one_bucket

INT8 = "int8"
_EXAMPLES = """\
examples:
  %(prog)s --parameters 25.6e6 --compute-s 0.2 --gbit 10
  %(prog)s --bytes 4e8 --hosts 8 64 --ranks 8 --cores 64 --gbit 100 --latency-us 10
  %(prog)s --costs node.json --json > forecast.json

The costs of a host's cores are measured on this machine, in a few seconds, unless --costs names a
file with those of another one ("costs" in the output of --json).
"""


def _number(is_valid: Callable[[float], bool], words: str) -> Callable[[str], float]:
    """Return a converter of an argument to a number, which checks its range."""

    def number(text: str) -> float:
        value = float(text)  # argparse shows a ValueError as "invalid number value"
        if not is_valid(value):
            raise argparse.ArgumentTypeError(f"must be {words}, not {text}")
        return value

    return number


_positive = _number(lambda x: 0 < x < math.inf, "more than 0")
_not_negative = _number(lambda x: 0 <= x < math.inf, "0 or more")
_share = _number(lambda x: 0 <= x <= 1, "from 0 to 1")


def _count(text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be an integer more than 0, not {text}")
    return value


def parser(prog: str) -> argparse.ArgumentParser:
    """Return the parser of the command's arguments."""
    made = argparse.ArgumentParser(
        prog=prog,
        description="Predict how long averaging the gradients and a training step take on several "
        "hosts, and where compression and fewer exchanges pay off. docs/scaling.md explains the "
        "model and its errors.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = made.add_argument
    size = made.add_mutually_exclusive_group()
    size.add_argument(
        "--parameters", type=_positive, metavar="N", help="number of float32 gradients"
    )
    size.add_argument("--bytes", type=_positive, metavar="N", help="or their bytes (1.024e8)")
    add("--hosts", type=_count, nargs="+", default=[1, 2, 8, 64, 1024], metavar="H")
    add("--ranks", type=_count, default=1, metavar="R", help="ranks on each host (1)")
    add("--cores", type=_positive, metavar="C", help="a host's cores for its ranks (as here)")
    add("--gbit", type=_positive, default=10.0, metavar="B", help="rate of a host's link (10)")
    add(
        "--flow-gbit",
        type=_positive,
        metavar="B",
        help="rate of one TCP connection, if it is limited",
    )
    add("--latency-us", type=_not_negative, default=50.0, metavar="T", help="of a message (50)")
    add("--message-us", type=_not_negative, metavar="T", help="core time per message (see docs)")
    add("--compute-s", type=_positive, default=0.2, metavar="S", help="computation per step (0.2)")
    add(
        "--overlap",
        type=_share,
        default=2 / 3,
        metavar="SHARE",
        help="share of it in which gradients leave: backward()'s (0.67)",
    )
    add(
        "--bucket-bytes",
        type=_positive,
        default=DEFAULT_BUCKET_BYTES,
        metavar="N",
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
        type=_count,
        nargs="+",
        default=[1, 4],
        metavar="K",
        help="steps per exchange: backward_passes_per_step (1 4)",
    )
    add("--costs", type=Path, metavar="FILE", help="JSON file with a host's costs: do not measure")
    add("--json", action="store_true", help="print everything as JSON, in seconds")
    return made


def main(arguments: Sequence[str], prog: str) -> int:
    """Run the command; return its exit code."""
    made = parser(prog)
    args = made.parse_args(arguments)
    n_elements = (1.024e8 if args.bytes is None else args.bytes) / 4
    if args.parameters is not None:
        n_elements = args.parameters
    network = Network(args.gbit, args.latency_us, args.flow_gbit)
    try:
        costs = _costs(args)
    except (OSError, ValueError, TypeError, KeyError) as error:
        made.error(f"--costs {args.costs}: {type(error).__name__}: {error}")
    rows = [
        _row(hosts, name, every, n_elements, costs, network, args)
        for hosts in args.hosts
        for name in args.wires
        for every in args.every
    ]
    if args.json:
        asked = {name: value for name, value in vars(args).items() if name not in ("json", "costs")}
        print(json.dumps({"asked": asked, "costs": costs.data(), "rows": rows}, indent=1))
    else:
        _print(rows, n_elements, costs, network, args)
    return 0


def _costs(args: argparse.Namespace) -> Costs:
    if args.costs is not None:
        data = json.loads(args.costs.read_text())
        costs = Costs.read(data.get("costs", data))
        costs = costs if args.cores is None else replace(costs, cores=args.cores)
    else:
        from horo_lite.launch import measure  # needs the core

        costs = measure.costs(args.cores)
    if args.message_us is not None:
        costs = replace(costs, message_us=args.message_us)
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
