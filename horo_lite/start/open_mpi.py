"""Parameters of Open MPI that `init()` sets: no fabrics that nobody needs, files of one job only.

What the user has selected (`--mca btl …`, OMPI_MCA_btl, a parameter file) is used.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path

from horo_lite import files

_MCA = "OMPI_MCA_"
_FILES = "mca_base_param_files"
_FOLDER = "btl_sm_backing_directory"
_SHM = Path("/dev/shm")


@contextlib.contextmanager
def parameters() -> Iterator[Callable[[], None]]:
    """Set parameters for the MPI_Init in this block, not for programs that this process starts.

    Yields:
        A function to be called after MPI_Finalize, which removes what Open MPI leaves.
    """
    ours: dict[str, str] = {}
    file = folder = None
    n_here, n_ranks = map(os.environ.get, ("OMPI_COMM_WORLD_LOCAL_SIZE", "OMPI_COMM_WORLD_SIZE"))
    if n_here is not None:
        chosen = {name.removeprefix(_MCA) for name in os.environ if name.startswith(_MCA)}
        chosen.update(*map(_set_in, _parameter_files()))
        if n_here == n_ranks:
            ours = _without_fabrics(chosen)
        if not chosen & {_FOLDER, _FILES}:
            file = _file_of_this_rank()
        if file is not None and file.parent != _SHM:
            folder = file.parent
            ours[_FOLDER] = str(folder)
    os.environ.update({f"{_MCA}{name}": value for name, value in ours.items()})
    try:
        yield partial(_remove, folder)
    finally:
        for name in ours:
            del os.environ[f"{_MCA}{name}"]
        with contextlib.suppress(OSError):  # whatever has removed them
            if file is not None and not file.stat().st_size:
                file.unlink()  # this Open MPI does not use it
            if folder is not None and (not os.listdir(folder) or _n_mapped() >= int(n_here or 0)):
                _remove(folder)  # from here, a kill leaves nothing


def _without_fabrics(chosen: set[str]) -> dict[str, str]:
    """Save most of the time that MPI_Init takes if all ranks are on one host.

    The component for remote memory access over fabrics (btl ofi) sleeps for a second when it is
    closed, which it is if there is no fabric, on most machines. Within one host it is not used.
    That for messages (mtl ofi) takes half of the remaining 0.3 s to look for a fabric. It is left
    out only where there is none, so that programs which MPI_Comm_spawn starts select the same.
    """
    ours = {}
    if not chosen & {"btl", _FILES}:
        ours["btl"] = "^ofi"
    if not chosen & {"mtl", "pml", _FILES} and not _has_fabric():
        ours["mtl"] = "^ofi"
    return ours


def _file_of_this_rank() -> Path | None:
    """Return a file that no other job has, for the memory that this rank shares with its host's.

    Open MPI 5 puts the files of all jobs in /dev/shm, named by 16 bits of a hash of the host's name
    and the launcher's process ID. Two jobs of the same name use each other's: they crash, or hang.
    Containers that share /dev/shm (`--ipc=host`) have the same process IDs, too. So the file is
    created here, or, if another job has it, one in a new folder. MPI tells the peers where it is.
    """
    try:
        file = _SHM / _name(os.environ)
        with contextlib.suppress(FileExistsError):
            os.close(files.create(file))
            return file
        folder = files.folder(_SHM / f"horo_lite.{os.getpid()}.{os.urandom(8).hex()}")
        file = folder / file.name
        os.close(files.create(file))
    except (OSError, KeyError, ValueError):  # Open MPI uses what there is
        return None
    return file


def _name(env: Mapping[str, str]) -> str:
    """Return the name of a rank's file: of its host, user, job and number on the host.

    As in Open MPI 5.0's mca_btl_sm_component_init(); the job's number is that which
    opal_pmix_convert_nspace() returns.
    """
    launcher, _, job = env["PMIX_NAMESPACE"].rpartition("@")
    bits = 0
    for byte in launcher.encode():  # "one at a time", by Bob Jenkins
        bits = (bits + byte) * 0x401 & 0xFFFFFFFF
        bits ^= bits >> 6
    bits = bits * 9 & 0xFFFFFFFF
    bits = (bits ^ bits >> 11) * 0x8001 & 0xFFFFFFFF
    number = (bits >> 16 ^ bits & 0xFFFF) << 16 | int(job)
    place = env["OMPI_COMM_WORLD_NODE_RANK"]
    return f"sm_segment.{env['PMIX_HOSTNAME']}.{os.geteuid()}.{number:x}.{place}"


def _n_mapped() -> int:
    """Return how many ranks' memory is mapped: after MPI_Init that of all, if messages use it."""
    with contextlib.suppress(OSError), open("/proc/self/maps") as maps:
        return len({line.split()[5] for line in maps if "/sm_segment." in line})
    return 0


def _remove(folder: Path | None) -> None:
    if folder is not None:
        with contextlib.suppress(OSError):  # it is removed already
            for file in folder.iterdir():
                file.unlink()
            folder.rmdir()


def _has_fabric() -> bool:
    """Return whether this host has InfiniBand, Omni-Path, EFA (all the first) or Slingshot."""
    return any(any(Path("/sys/class", kind).glob("*")) for kind in ("infiniband", "cxi"))


def _parameter_files() -> list[Path]:
    """Return Open MPI's parameter files: the user's, and those of the library that is loaded."""
    prefixes = [Path(path).resolve().parent.parent for path in loaded_libraries()]
    if "OPAL_PREFIX" in os.environ:
        prefixes.append(Path(os.environ["OPAL_PREFIX"]))
    folders = [prefix / "etc" for prefix in prefixes]
    if any(prefix.is_relative_to("/usr") for prefix in prefixes):  # a distribution's
        folders += Path("/etc").glob("openmpi*")
    user = Path(os.path.expanduser("~/.openmpi/mca-params.conf"))
    return [user, *(folder / "openmpi-mca-params.conf" for folder in folders)]


def _set_in(file: Path) -> set[str]:
    """Return the names of the parameters that a file sets."""
    with contextlib.suppress(OSError, UnicodeDecodeError):
        return set(re.findall(r"^\s*(\w+)\s*=", file.read_text(), re.M))
    return set()


def loaded_libraries() -> list[str]:
    """Return the files of the MPI library that this process has loaded."""
    with contextlib.suppress(OSError), open("/proc/self/maps") as maps:
        return sorted({line.split()[-1] for line in maps if "/libmpi" in line})
    return []
