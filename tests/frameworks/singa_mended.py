"""Repair SINGA's old wheel: the tests of test_singa.py then run on SINGA's own C++ tensors.

    pip download --no-deps --python-version 3.6 --only-binary=:all: singa==3.0.0.dev1
    python tests/frameworks/singa_mended.py singa-*.whl FOLDER
    HORO_LITE_TEST_SINGA=FOLDER pytest tests/frameworks/test_singa.py

The wheel is the only one on PyPI, from 2020 and for Python 3.6. Its extension was built without
NumPy, so that no tensor can be read, and without `VecTensor`; its Python files need a NumPy that
had `np.float`. Here the functions that copy values are called past the extension's interface: the
same that later builds expose as `GetFloatValue(n)` and `CopyFloatDataFromHostPtr(x)`.

By hand only: it is luck that an extension for Python 3.6 works in a later one at all (3.7 to 3.11
were tried).
"""

from __future__ import annotations

import sys
import zipfile
from pathlib import Path

MENDED = """
import ctypes
import sys
import types

import numpy as np

np.float, np.int = float, int
deprecated = types.ModuleType("deprecated")
deprecated.deprecated = lambda **_: lambda function: function
sys.modules.setdefault("deprecated", deprecated)

from . import singa_wrap

_library = ctypes.CDLL(singa_wrap._singa_wrap.__file__)


def _mend(word, dtype, letter):
    get = getattr(_library, f"_ZNK5singa6Tensor8GetValueI{letter}EEvPT_m")
    copy = getattr(_library, f"_ZNK5singa6Tensor19CopyDataFromHostPtrI{letter}EEvPKT_mm")

    def get_value(self, n):
        values = np.empty(n, dtype)
        get(ctypes.c_void_p(int(self.this)), values.ctypes, ctypes.c_size_t(n))
        return values

    def copy_from(self, source):
        source = np.ascontiguousarray(source, dtype)
        zero = ctypes.c_size_t(0)
        copy(ctypes.c_void_p(int(self.this)), source.ctypes, ctypes.c_size_t(source.size), zero)

    setattr(singa_wrap.Tensor, f"Get{word}Value", get_value)
    setattr(singa_wrap.Tensor, f"Copy{word}DataFromHostPtr", copy_from)


_mend("Float", np.float32, "f")
_mend("Int", np.int32, "i")
singa_wrap.Tensor.__itruediv__ = singa_wrap.Tensor.__idiv__
singa_wrap.VecTensor = lambda tensors: [singa_wrap.Tensor(t) for t in tensors]
"""


def mend(wheel: Path, folder: Path) -> None:
    """Make a package `singa` in `folder` that can be imported."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    package = folder / "singa"
    (extension,) = package.glob("_singa_wrap.*.so")
    extension.rename(package / "_singa_wrap.so")
    (package / "__init__.py").write_text(MENDED)


if __name__ == "__main__":
    mend(Path(sys.argv[1]), Path(sys.argv[2]))
