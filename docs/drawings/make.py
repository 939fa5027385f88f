"""Draw the figures of the pages: `python docs/drawings/make.py` writes SVG files beside it.

Boxes, lines and texts only, in few colours; each figure has a background of its own, since the page
may be dark.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from dataclasses import replace
from html import escape
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

import scaling as model  # noqa: E402  needs neither the core nor NumPy

INK, SOFT, PAPER = "#24292f", "#8c959f", "#ffffff"
COLORS = ["#0a7d91", "#c26401", "#5b57c7", "#4d7c0f"]


class Figure:
    """An SVG in the making."""

    def __init__(self, width: int, height: int, title: str) -> None:
        self._parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
            f'font-family="system-ui, sans-serif" font-size="13" fill="{INK}">',
            f"<title>{escape(title)}</title>",
            '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" '
            f'markerHeight="7" orient="auto"><path d="M0 0L8 4L0 8z" fill="{SOFT}"/></marker>'
            "</defs>",
            f'<rect width="{width}" height="{height}" rx="6" fill="{PAPER}"/>',
        ]

    def text(self, x: float, y: float, text: str, anchor: str = "start", **style: str) -> None:
        """Write a line."""
        more = "".join(f' {name.replace("_", "-")}="{value}"' for name, value in style.items())
        self._parts.append(
            f'<text x="{x}" y="{y}" text-anchor="{anchor}"{more}>{escape(text)}</text>'
        )

    def box(
        self, x: float, y: float, width: float, height: float, text: str = "", color: str = SOFT,
        filled: bool = True,
    ) -> None:  # fmt: skip
        """Draw a box with a text in its middle."""
        fill = color if filled else "none"
        self._parts.append(
            f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="3" fill="{fill}" '
            f'stroke="{color}" fill-opacity="0.9"/>'
        )
        if text:
            ink = PAPER if filled else INK
            self.text(x + width / 2, y + height / 2 + 4.5, text, "middle", fill=ink)

    def arrow(self, x: float, y: float, to_x: float, to_y: float) -> None:
        """Draw an arrow."""
        self._parts.append(
            f'<line x1="{x}" y1="{y}" x2="{to_x}" y2="{to_y}" stroke="{SOFT}" '
            'stroke-width="1.5" marker-end="url(#tip)"/>'
        )

    def line(
        self, points: Sequence[tuple[float, float]], color: str = SOFT, dashed: bool = False,
        width: float = 1,
    ) -> None:  # fmt: skip
        """Draw a line through points."""
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        dashes = ' stroke-dasharray="5 4"' if dashed else ""
        self._parts.append(
            f'<polyline points="{path}" fill="none" stroke="{color}" '
            f'stroke-width="{width}"{dashes}/>'
        )

    def write(self, name: str) -> None:
        """Write the file NAME.svg."""
        path = Path(__file__).with_name(f"{name}.svg")
        path.write_text("\n".join([*self._parts, "</svg>"]) + "\n")


def plan() -> None:
    """Gradients of many sizes, in the order of the plan, in buckets."""
    figure = Figure(720, 190, "Gradients are grouped into buckets, in an order alike on all ranks")
    figure.text(20, 30, "gradients, in the plan's order: alike on all ranks", font_weight="bold")
    sizes, x = [60, 26, 90, 18, 44, 30, 120, 22, 70, 40, 50, 26], 20.0
    edges, filled, begin = [], 0, x
    for i, size in enumerate(sizes):
        bucket = 0 if i < 4 else 1 if i < 7 else 2
        figure.box(x, 44, size - 4, 28, color=COLORS[bucket])
        filled += size
        x += size
        if i in (3, 6, 11):
            edges.append((begin, x - 4, COLORS[bucket]))
            begin = x
    for i, (left, right, color) in enumerate(edges):
        figure.arrow((left + right) / 2, 78, (left + right) / 2, 104)
        figure.box(left, 110, right - left, 32, f"bucket {i}", color)
    figure.text(
        20, 170, "A bucket leaves when all of its gradients, and all buckets before it, are ready.",
        fill=SOFT,
    )  # fmt: skip
    figure.write("plan")


def shared_memory() -> None:
    """One chunk of an all-reduce among three ranks of a host."""
    figure = Figure(720, 330, "One chunk of an all-reduce through shared memory, with three ranks")
    columns = [(110, "own gradients"), (310, "slots in shared memory"), (540, "result")]
    for x, text in columns:
        figure.text(x + 70, 28, text, "middle", font_weight="bold")
    for rank in range(3):
        y = 52 + 78 * rank
        figure.text(20, y + 24, f"rank {rank}", font_weight="bold")
        for share in range(3):
            figure.box(110 + 48 * share, y, 44, 38, "abc"[share], COLORS[share])
            if share == rank:
                figure.box(310 + 48 * share, y, 44, 38, "Σ" + "abc"[share], COLORS[share])
            else:
                figure.box(310 + 48 * share, y, 44, 38, "abc"[share], COLORS[share], filled=False)
            figure.box(540 + 48 * share, y, 44, 38, "Σ" + "abc"[share], COLORS[share])
        figure.arrow(258, y + 19, 304, y + 19)
        figure.arrow(458, y + 19, 534, y + 19)
    figure.text(200, 296, "1  encode", "middle")
    figure.text(200, 313, "the others' shares", "middle", fill=SOFT)
    figure.text(382, 296, "2  reduce", "middle")
    figure.text(382, 313, "own share, in rank order", "middle", fill=SOFT)
    figure.text(580, 296, "3  decode", "middle")
    figure.text(580, 313, "the others' sums", "middle", fill=SOFT)
    figure.write("shared-memory")


def overlap() -> None:
    """Buckets on their way while backward() still runs."""
    figure = Figure(720, 200, "Buckets are exchanged while backward() still computes")
    figure.text(20, 30, "time →", fill=SOFT)
    rows = [("compute", 44), ("exchange", 92)]
    for text, y in rows:
        figure.text(20, y + 22, text, font_weight="bold")
    figure.box(110, 44, 130, 34, "forward", SOFT)
    for i, x in enumerate((246, 346, 446)):
        figure.box(x, 44, 96, 34, f"backward {i}", COLORS[i])
        figure.arrow(x + 96, 80, x + 102, 90)
        figure.box(x + 102, 92, 84, 34, f"bucket {i}", COLORS[i])
    figure.box(640, 44, 60, 34, "step", SOFT)
    figure.text(
        110, 160, "Only the last bucket is waited for. backward() returns when it has arrived.",
        fill=SOFT,
    )  # fmt: skip
    figure.write("overlap")


def hosts() -> None:
    """Two hosts with two ranks each."""
    figure = Figure(720, 230, "Between hosts, every rank sends a part of its host's sum")
    for host, x in enumerate((30, 420)):
        figure.box(x, 36, 270, 170, color=SOFT, filled=False)
        figure.text(x + 135, 26, f"host {host}", "middle", font_weight="bold")
        figure.box(x + 20, 146, 230, 40, "shared memory of the host", SOFT)
        for i in range(2):
            rank = 2 * host + i
            figure.box(x + 20 + 125 * i, 60, 105, 36, f"rank {rank}", COLORS[rank])
            figure.arrow(x + 62 + 125 * i, 100, x + 62 + 125 * i, 142)
            figure.arrow(x + 84 + 125 * i, 142, x + 84 + 125 * i, 100)
    figure.arrow(304, 72, 414, 72)
    figure.arrow(416, 88, 306, 88)
    figure.text(360, 60, "host sums", "middle", fill=SOFT)
    figure.text(360, 108, "total sums", "middle", fill=SOFT)
    figure.text(360, 130, "one flow", "middle", fill=SOFT)
    figure.text(360, 146, "a rank", "middle", fill=SOFT)
    figure.write("hosts")


def scaling() -> None:
    """How much of a step computes, by the model of docs/scaling.md."""
    results = ROOT / "benchmarks" / "results" / "intel-xeon-2-cores-costs-openmpi.json"
    costs = model.Costs.read(json.loads(results.read_text()))
    wires = {**costs.wires, "int8": model.eight_bits(costs.wires["fp16"])}
    shown = [  # what travels, every how many steps, in levels
        ("fp32", 1, False, COLORS[0]),
        ("fp16", 1, False, COLORS[1]),
        ("int8", 1, False, COLORS[2]),
        ("fp32", 4, False, COLORS[3]),
        ("fp32", 1, True, COLORS[0]),
    ]
    panels = [(1.0, 1), (10.0, 1), (100.0, 8)]
    figure = Figure(760, 330, "The share of a training step in which ranks compute, as modelled")
    counts = [2**i for i in range(11)]
    for panel, (gbit, ranks) in enumerate(panels):
        left, top, width, height = 50 + 240 * panel, 50, 200, 190
        ranks_text = f"{ranks} ranks" if ranks > 1 else "1 rank"
        title = f"{gbit:g} Gbit/s, {ranks_text} a host"
        figure.text(left + width / 2, 32, title, "middle", font_weight="bold")
        for share in (0, 25, 50, 75, 100):
            y = top + height * (1 - share / 100)
            figure.line([(left, y), (left + width, y)], width=0.5)
            if panel == 0:
                figure.text(left - 6, y + 4, f"{share} %", "end", fill=SOFT)
        for hosts in (1, 8, 64, 1024):
            x = left + width * math.log2(hosts) / 10
            figure.text(x, top + height + 18, f"{hosts}", "middle", fill=SOFT)
        figure.text(left + width / 2, top + height + 36, "hosts", "middle", fill=SOFT)
        network = model.Network(gbit, latency_us=30)
        for name, every, leveled, color in shown:
            points = []
            for hosts in counts:
                exchange = model.allreduce(
                    25.6e6, hosts, ranks, wires[name], replace(costs, cores=ranks), network,
                    model.two_levels(hosts) if leveled else None,
                )  # fmt: skip
                step = model.step(0.2, exchange, last=1 / 8, every=every)
                x = left + width * math.log2(hosts) / 10
                points.append((x, top + height * (1 - step.efficiency)))
            figure.line(points, color, dashed=leveled, width=2)
    x = 50.0
    for name, every, leveled, color in shown:
        figure.line([(x, 306), (x + 24, 306)], color, dashed=leveled, width=2)
        text = name + (", every 4th step" if every > 1 else ", two levels" if leveled else "")
        figure.text(x + 30, 310, text)
        x += 60 + 7.2 * len(text)
    figure.write("scaling")


if __name__ == "__main__":
    scaling()
    plan()
    shared_memory()
    overlap()
    hosts()
