"""`exchange-times`: a bar chart of the exchange times in docs/measurements.md, drawn as SVG."""

from __future__ import annotations

import re
from html import escape
from typing import NamedTuple

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

from .links import ROOT


class Bar(NamedTuple):
    """A row of the table: what was measured, its time as it is written, and in memcpys."""

    label: str
    shown: str
    memcpys: float
    ours: bool


def bars(page: str) -> tuple[str, list[Bar]]:
    """Return the heading and the rows of the first column of the page's first table of times."""
    lines = page.splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("| | ResNet-50"))
    heading = lines[start].split("|")[2].strip()
    rows = []
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            break
        label, cell = (re.sub(r"\*", "", part).strip() for part in line.split("|")[1:3])
        time, memcpys = cell.split(" · ")
        rows.append(Bar(label, time, float(memcpys), label.startswith("horo_lite")))
    return heading, rows


def svg(heading: str, rows: list[Bar], *, narrow: bool = False) -> str:
    """Return the chart. Colours are the theme's, so that it fits its dark mode too.

    Args:
        heading: What was averaged.
        rows: The bars.
        narrow: For phones, with the labels above the bars and not beside them.
    """
    width, left, height = (360, 0, 46) if narrow else (800, 370, 30)
    longest = max(row.memcpys for row in rows)
    described = f"Time to average the gradients of {heading}, in multiples of one memcpy"
    parts = [
        f'<svg class="exchange-times {"narrow" if narrow else "wide"}" role="img" '
        f'viewBox="0 0 {width} {height * len(rows) + 6}" '
        f'aria-label="{escape(described)}" xmlns="http://www.w3.org/2000/svg">'
    ]
    for i, row in enumerate(rows):
        y = height * i + 4
        label = f'x="0" y="{y + 12}"' if narrow else f'x="{left - 10}" y="{y + 16}"'
        weight = ' font-weight="bold"' if row.ours else ""
        bar = (width - left - (70 if narrow else 110)) * row.memcpys / longest
        y += height - 30
        parts.append(
            f"<text {label}{weight}>{escape(row.label)}</text>"
            f'<rect x="{left}" y="{y}" width="{bar:.1f}" height="22" rx="3" '
            f'class="{"ours" if row.ours else "theirs"}"/>'
            f'<text class="time" x="{left + bar + 8:.1f}" y="{y + 16}">{escape(row.shown)}</text>'
        )
    return "".join([*parts, "</svg>"])


class ExchangeTimes(SphinxDirective):
    """The chart."""

    def run(self) -> list[nodes.Node]:
        page = ROOT / "docs" / "measurements.md"
        self.env.note_dependency(str(page))
        found = bars(page.read_text())
        return [nodes.raw("", svg(*found) + svg(*found, narrow=True), format="html")]


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the directive."""
    app.add_directive("exchange-times", ExchangeTimes)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
