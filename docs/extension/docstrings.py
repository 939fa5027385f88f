"""Docstrings are plain text, as `help()` shows it; Sphinx reads reStructuredText.

Three things are translated: names in single backticks become links to the reference, or code;
blocks that are indented after a blank line become code; what reStructuredText would take for
markup (`x_r`, `|x|`, `*`) is escaped.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable

_QUOTED = re.compile(r"(``[^`]+``|`[^`]+`)")
_MARKUP = re.compile(r"([*|\\]|_(?=\W|$))")


def to_rst(lines: Iterable[str], link: Callable[[str], str | None]) -> list[str]:
    """Return the lines of a docstring as reStructuredText.

    Args:
        lines: The docstring, without the indentation that it has in the source.
        link: Returns what a name in backticks refers to, None if it is only code.
    """
    translated: list[str] = []
    block: int | None = None  # the indentation of the text before the code that is being read
    last = 0
    for line in lines:
        indent = len(line) - len(line.lstrip())
        if not line.strip():
            translated.append("")
            continue
        if block is not None and indent > block:
            translated.append(line)
            continue
        block = None
        if translated and translated[-1] == "" and indent > last:
            block = last
            translated += [" " * last + "::", "", line]
            continue
        translated.append(_prose(line, link))
        last = indent
    return translated


def _prose(line: str, link: Callable[[str], str | None]) -> str:
    text = ""
    for part in _QUOTED.split(line):
        if part.startswith("`"):
            part = _code(part, link)
        else:
            # `NdArray`s: the end of what is quoted must be told apart from a word.
            glue = "\\ " if text.endswith("`") and part[:1].isalnum() else ""
            part = glue + _MARKUP.sub(r"\\\1", part)
        text += part
    return text


def _code(quoted: str, link: Callable[[str], str | None]) -> str:
    text = quoted.strip("`")
    target = link(text.removesuffix("()"))
    return f":py:obj:`{text} <{target}>`" if target else f"``{text}``"
