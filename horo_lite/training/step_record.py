"""A record of an optimizer's steps, in a file, so that `horo-lite compare` can compare two runs.

With HORO_LITE_RECORD_STEPS, rank 0 writes a line of JSON for each exchange of gradients: a *sketch*
of every parameter, and of the average of every gradient. It is N_SUMS sums of all elements with
random signs, always the same ones, each element in one sum. A sketch is linear, and its squared
norm is on average that of the array (Alon, Matias and Szegedy, 1996). So the sketches of two runs
show how far their arrays are apart, in which proportion they are, and, from one line to the next,
what a step has done to the parameters.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from horo_lite import files, settings
from horo_lite.errors import warn
from horo_lite.state.hashes import Readable
from horo_lite.transports.hosts.carrier import memory_at

if TYPE_CHECKING:
    from horo_lite._native import Tensors
    from horo_lite.collectives.group import Group

FORMAT = 1
"""The version of the format, which the first line of a file has as "horo_lite_steps"."""
N_SUMS = 8
_BLOCK = 1 << 13
_BLOCKS_AT_ONCE = 1 << 6

Named = Iterable[tuple[str, Any]]


def is_on() -> bool:
    """Return whether steps are recorded."""
    return _writer.path() is not None


def record_for(
    group: Group, title: str, gradients: Named, parameters: Named, compression: str = "none"
) -> None:
    """Write a line after an exchange of `group`, if steps are recorded and this is rank 0.

    Not collective. The other arguments are those of `record`.
    """
    ranks = group.transport.ranks
    if is_on() and ranks[group.rank] == 0:
        record(title, gradients, parameters, Readable(group), compression, size=len(ranks))


def record(
    title: str,
    gradients: Named,
    parameters: Named,
    readable: Readable | None = None,
    compression: str = "none",
    *,
    size: int,
) -> None:
    """Write a line. A file that cannot be written is a warning: the other ranks train, too.

    Args:
        title: Whose exchange it was, in the same words each time.
        gradients: The averages by name; those that are None are left out.
        parameters: The parameters by name, as before the step, likewise.
        readable: Reads the arrays.
        compression: The name of the gradients' compression.
        size: The number of ranks.
    """
    readable = readable or Readable(None)
    try:
        line = {
            "of": title,
            "compression": compression,
            "gradients": _sketches(gradients, readable),
            "parameters": _sketches(parameters, readable),
        }
        _writer.write(line, size)
    except OSError as error:
        _writer.give_up()
        warn(f"the steps are no longer recorded, since their file cannot be written: {error}")


class _Writer:
    """Writes lines to the file of which the environment has the path."""

    def __init__(self) -> None:
        self._file: IO[str] | None = None
        self._open: Path | None = None  # the path of the file, which may have been given up
        self._n_steps: Counter[str] = Counter()

    def path(self) -> Path | None:
        path = settings.steps_file()
        return None if path is None or (path == self._open and self._file is None) else path

    def write(self, line: dict[str, Any], size: int) -> None:
        path = self.path()
        assert path is not None
        if self._file is None or path != self._open:
            self.close()
            self._open = path
            self._file = os.fdopen(files.renewed(path, files.ORDINARY), "w", encoding="utf-8")
            command = [os.path.basename(sys.executable), *sys.argv]
            self._put({"horo_lite_steps": FORMAT, "size": size, "command": command})
        self._n_steps[line["of"]] += 1
        self._put({"step": self._n_steps[line["of"]]} | line)

    def _put(self, line: dict[str, Any]) -> None:
        assert self._file is not None
        self._file.write(json.dumps(line, separators=(",", ":")) + "\n")
        self._file.flush()  # the job may be killed

    def give_up(self) -> None:
        """Write nothing more to this path."""
        path = self._open
        self.close()
        self._open = path

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
        self._file = self._open = None
        self._n_steps.clear()


_writer = _Writer()
atexit.register(_writer.close)


# Sketches.


def _sketches(named: Named, readable: Readable) -> dict[str, list[Any]]:
    """Return the dtype of each dense array of real or complex numbers, and its sketch's sums."""
    found: dict[str, list[Any]] = {}
    for name, value in named:
        if value is None:
            continue
        try:
            tensors = readable.plain(value)
        except (TypeError, ValueError, BufferError, RuntimeError):  # such as a sparse gradient
            continue
        if tensors.is_float(0):
            numbers = [float(f"{x:.12g}") for x in sketch(reals(tensors))]
            found[name] = [tensors.dtype(0), *numbers]
    return found


def sketch(reals: NDArray[Any]) -> list[float]:
    """Return sums of these numbers with random signs."""
    sums = np.zeros(_BLOCK)
    for begin in range(0, len(reals), step := _BLOCK * _BLOCKS_AT_ONCE):
        part = reals[begin : begin + step]
        blocks = np.zeros((-(-len(part) // _BLOCK), _BLOCK))
        blocks.reshape(-1)[: len(part)] = part
        first = begin // _BLOCK
        sums += _signs_of_blocks(first + len(blocks))[first:] @ blocks
    found: list[float] = (sums * _signs()).reshape(-1, N_SUMS).sum(0).tolist()
    return found


@functools.cache
def _signs() -> NDArray[np.float64]:
    """Return the signs of the elements of a block."""
    return _random_signs(0, _BLOCK)


@functools.cache
def _signs_of_blocks(n: int) -> NDArray[np.float64]:
    return _random_signs(1, n)


def _random_signs(seed: int, n: int) -> NDArray[np.float64]:
    # The generator whose numbers are the same in all versions of NumPy.
    signs = np.array([-1.0, 1.0])
    return signs[np.random.RandomState(seed).randint(0, 2, n)]


def reals(tensors: Tensors) -> NDArray[Any]:
    """Return the real numbers in an array in host memory, or the parts of complex ones."""
    address, n_bytes = tensors.buffers()[0]
    if not n_bytes:
        return np.zeros(0)
    raw = memory_at(address, n_bytes)
    kind = tensors.dtype(0)
    if kind == "bfloat16":
        return (raw.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    numbers = raw.view(kind)
    return numbers.view(numbers.real.dtype)
