"""Links between files of the repository, which GitHub shows, become links between pages."""

from __future__ import annotations

import os
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = {
    "README.md": "/index.md",
    "ARCHITECTURE.md": "/architecture.md",
    "CONTRIBUTING.md": "/contributing.md",
    "CHANGELOG.md": "/changelog.md",
}
"""The pages that include files which lie outside of docs/."""


def to_pages(text: str, folder: Path) -> str:
    """Return Markdown whose links to files of the repository lead to pages of the site.

    A link to a file that is no page offers it for download; a folder is only named.

    Args:
        text: Markdown with links relative to `folder`.
        folder: Where the text lies.
    """

    def replace(match: re.Match[str]) -> str:
        label, path, anchor = match["label"], match["path"], match["anchor"] or ""
        if not path or re.match(r"[a-z]+:|/", path):
            return match[0]
        target = os.path.relpath(folder / path, ROOT)
        page = PAGES.get(target + anchor)
        if page is None and target in PAGES:
            page = PAGES[target] + anchor
        if page is None and target.startswith("docs/"):
            page = target.removeprefix("docs") + anchor
        if page is None:
            page = f"/../{target}" if (ROOT / target).is_file() else None
        return f"[{label}]({page})" if page else label

    return re.sub(
        r"(?<!\w)\[(?P<label>(?:[^][]|\[[^]]*\])*)\]\((?P<path>[^)#\s]*)(?P<anchor>#[^)\s]*)?\)",
        replace,
        text,
    )
