"""The name `horovod` for this package: found if it was requested, and nowhere else."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import textwrap
from importlib import import_module
from pathlib import Path

import pytest

from horo_lite.horovod import aliases

LIMIT_S = 60
needs_torch = pytest.mark.skipif(
    importlib.util.find_spec("torch") is None, reason="PyTorch is not installed"
)


def python(
    *arguments: str, path: object = None, ok: bool = True
) -> subprocess.CompletedProcess[str]:
    """Return what a Python with these arguments prints; `path` is put on its search path."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, filter(None, [path, *sys.path])))}
    command = [sys.executable, *arguments]
    found = subprocess.run(
        command, capture_output=True, text=True, timeout=LIMIT_S, env=env, check=False
    )
    assert not ok or found.returncode == 0, found
    return found


def code(text: str) -> tuple[str, str]:
    return "-c", textwrap.dedent(text)


@pytest.fixture
def real(tmp_path: Path) -> Path:
    """Return a folder that stands for a real Horovod."""
    folder = tmp_path / "horovod"
    folder.mkdir()
    (folder / "__init__.py").write_text("__version__ = 'real'\n")
    return tmp_path


@pytest.mark.launches
def test_nobody_finds_it_who_did_not_ask() -> None:
    found = python(*code("import horo_lite, horo_lite.horovod\nimport horovod"), ok=False)
    assert "ModuleNotFoundError: No module named 'horovod'" in found.stderr


@pytest.mark.launches
def test_nothing_is_imported_before_it_is_used() -> None:
    python(
        *code(
            """
            import sys
            import horo_lite.horovod
            horo_lite.horovod.install()
            horo_lite.horovod.install()
            import horovod, horovod.runner
            from horovod.common.exceptions import HorovodInternalError, HostsUpdatedInterrupt
            from horovod.common.util import num_rank_is_power_2, split_list
            from horovod.common.process_sets import ProcessSet
            from horo_lite import HoroLiteError
            assert not {"torch", "tensorflow", "keras", "mpi4py"} & set(sys.modules)
            assert horovod.run is horovod.runner.run
            assert horovod.__version__.split(".")[:2] == ["0", "28"]
            assert HorovodInternalError is HoroLiteError
            assert issubclass(HostsUpdatedInterrupt, RuntimeError)
            assert [num_rank_is_power_2(n) for n in (0, 1, 3, 4)] == [False, True, False, True]
            assert split_list([1, 2, 3, 4, 5], 2) == [[1, 2, 3], [4, 5]]
            assert split_list([1], 2) == [[1]] and split_list([], 2) == []
            """
        )
    )


@pytest.mark.launches
@needs_torch
def test_the_modules_are_this_packages() -> None:
    python(
        *code(
            """
            import horo_lite, pickle
            horo_lite.horovod.install()
            import horovod.torch as hvd
            import horo_lite.torch as ours
            from horovod.torch import *
            from horovod.torch.compression import Compression
            from horovod.torch.elastic import TorchState
            from horovod.torch.elastic.sampler import ElasticSampler
            from horovod.torch.mpi_ops import Average, init, rank, size, synchronize
            from horovod.torch.optimizer import DistributedOptimizer as same, _DistributedOptimizer
            assert init is ours.init and synchronize is ours.synchronize
            assert same is DistributedOptimizer is hvd.DistributedOptimizer
            import torch
            sgd = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
            assert TorchState is hvd.elastic.TorchState is ours.elastic.TorchState
            assert ElasticSampler is ours.elastic.ElasticSampler
            assert pickle.loads(pickle.dumps(hvd.Average)) is Average
            assert "DistributedOptimizer" in dir(hvd) and hvd.__name__ == "horovod.torch"
            hvd.init()
            assert (hvd.rank(), size()) == (0, 1)
            assert isinstance(same(sgd), _DistributedOptimizer)
            hvd.rank = lambda: 7                     # as tests of scripts do
            assert hvd.rank() == 7 and ours.rank() == 0
            for call, error in ((lambda: hvd.nothing, AttributeError),
                                (lambda: __import__("horovod.mxnet"), ModuleNotFoundError)):
                try:
                    call()
                except error as raised:
                    assert "horo_lite" in str(raised), raised
                else:
                    raise AssertionError(error)
            """
        )
    )


@pytest.mark.launches
def test_a_real_horovod_is_kept_unless_told(real: Path) -> None:
    script = """
        import sys
        import horo_lite.horovod
        {}
        try:
            horo_lite.horovod.install(replace={})
        except RuntimeError as error:
            print(error)
        import horovod
        print(horovod.__version__)
    """
    kept = python(*code(script.format("", False)), path=real).stdout
    assert "a real Horovod, of unknown version, is installed here" in kept
    assert "replace=True" in kept
    assert kept.endswith("real\n")
    assert python(*code(script.format("", True)), path=real).stdout == f"{aliases.VERSION}\n"
    late = python(*code(script.format("import horovod", True)), path=real).stdout
    assert "has already been imported" in late
    assert late.endswith("real\n")


@pytest.mark.launches
def test_the_command_line(real: Path, tmp_path: Path) -> None:
    script = tmp_path / "scripts" / "train.py"
    script.parent.mkdir()
    # Also in the processes that a script starts, such as a data loader's.
    script.write_text(
        "import subprocess, sys\n"
        "show = 'import horovod.common as h, horovod; print(horovod.__version__, h.__name__)'\n"
        "exec(show)\n"
        "subprocess.run([sys.executable, '-c', show], check=True)\n"
    )
    flag = "--as-horovod"
    shown = f"{aliases.VERSION} horovod.common\n"
    assert python("-m", "horo_lite", "-n", "1", flag, str(script)).stdout == 2 * shown
    refused = python("-m", "horo_lite", "-n", "1", flag, str(script), path=real, ok=False)
    assert refused.returncode == 2
    assert "a real Horovod" in refused.stderr
    assert "--as-horovod-anyway" in refused.stderr
    anyway = python("-m", "horo_lite", "-n", "1", f"{flag}-anyway", str(script), path=real)
    assert anyway.stdout == 2 * shown
    plain = python("-m", "horo_lite", "-n", "1", str(script), ok=False)
    assert "No module named 'horovod'" in plain.stderr


@pytest.mark.mpi
def test_horovods_run(tmp_path: Path) -> None:
    """The arguments of 0.28; results in rank order; each rank has its own."""
    script = tmp_path / "launch.py"
    script.write_text(
        textwrap.dedent(
            """
            import warnings
            import horo_lite.horovod
            horo_lite.horovod.install()
            import horovod
            import numpy as np

            def train(scale, *, plus):
                import horo_lite as hvd
                hvd.init()
                return hvd.rank(), float(hvd.allreduce(np.float64(hvd.rank() + scale))) + plus

            if __name__ == "__main__":
                found = horovod.run(
                    train, (1.0,), {"plus": 10}, num_proc=2, use_mpi=True, verbose=2,
                    start_timeout=60, disable_cache=True,
                )
                assert found == [(0, 11.5), (1, 11.5)], found
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore", DeprecationWarning)
                    assert horovod.run(train, (2.0,), dict(plus=0), np=1) == [(0, 2.0)]
                for wrong, words in (
                    ({"use_gloo": True}, "use_gloo"), ({"min_num_proc": 1}, "no driver"),
                    ({"hosts": "a:1", "hostfile": "b"}, "not both"),
                ):
                    try:
                        horovod.run(train, num_proc=2, **wrong)
                    except ValueError as error:
                        assert words in str(error), error
                    else:
                        raise AssertionError(words)
                print("all is well")
            """
        )
    )
    assert "all is well" in python(str(script)).stdout


def test_every_alias_has_a_home() -> None:
    known = [home for homes in aliases.SOURCES.values() for home in homes]
    for home in sorted(set(known)):
        needs_more = ("torch", "tensorflow", "keras", "horovod.ray")
        if not home.startswith(tuple(f"horo_lite.{name}" for name in needs_more)):
            import_module(home)
        else:
            assert importlib.util.find_spec("horo_lite") is not None
            path = Path(aliases.__file__).parents[1].joinpath(*home.split(".")[1:])
            assert path.is_dir() or path.with_suffix(".py").is_file(), home
