"""Variables with which JAX's ranks share what they compile, until the end of the test session."""

from __future__ import annotations

import tempfile

_FOLDER = tempfile.TemporaryDirectory(prefix="hvd")
COMPILE_ONCE = {
    "JAX_COMPILATION_CACHE_DIR": _FOLDER.name,
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
}
