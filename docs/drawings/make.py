"""Draw the figures of docs/concepts.md: `python docs/drawings/make.py` writes SVG files beside it.

Boxes, arrows and texts only, in few colours; each figure has a background of its own, since the
page may be dark.
"""

from __future__ import annotations

from html import escape
from pathlib import Path

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


if __name__ == "__main__":
    plan()
    shared_memory()
    overlap()
    hosts()
