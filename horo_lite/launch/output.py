"""Copying each rank's output to its own files: `--output-filename`.

Run as `python -m horo_lite.launch.output FOLDER RANKS command`, in place of the command.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from horo_lite import files
from horo_lite.start import launcher


def wrapped(folder: str, n: int, command: Sequence[str]) -> list[str]:
    """Return the command that runs `command`, as one of n ranks, and copies its output."""
    return [sys.executable, "-m", __name__, os.path.abspath(folder), str(n), *command]


def main(arguments: Sequence[str]) -> None:
    """Become the command, whose output passes through `tee` to this rank's files."""
    folder, n, *command = arguments
    launch = launcher.detect(os.environ)
    rank = 0 if launch is None or launch.rank is None else launch.rank
    place = Path(folder, f"rank.{rank:0{len(str(int(n) - 1))}}")  # named as by Horovod
    files.folder(place)
    for stream, name in ((sys.stdout, "stdout"), (sys.stderr, "stderr")):
        stream.flush()
        # A Ctrl-C on the terminal ends only the rank, so that its last output is still copied.
        copy = files.renewed(place / name, files.ORDINARY)
        tee = subprocess.Popen(
            ["tee", f"/dev/fd/{copy}"],
            pass_fds=[copy],
            stdin=subprocess.PIPE,
            stdout=stream.fileno(),
            start_new_session=True,
        )
        assert tee.stdin is not None
        os.dup2(tee.stdin.fileno(), stream.fileno())
        tee.stdin.close()
        os.close(copy)
    os.execvp(command[0], command)


if __name__ == "__main__":
    main(sys.argv[1:])
