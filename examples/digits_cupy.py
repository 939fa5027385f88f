"""Handwritten digits with the network of digits_numpy.py on GPUs: its array module is CuPy.

python digits_cupy.py                        one GPU
mpiexec -n 2 python digits_cupy.py           two GPUs, the same result

Everything else is the same: the flags, the table, the check at the end.
"""

from __future__ import annotations

import digits_numpy

try:
    import cupy

    cupy.cuda.runtime.getDeviceCount()
except Exception as error:  # no CuPy, no GPU, or too old a driver
    raise SystemExit(f"this example needs CuPy and an NVIDIA GPU: {error}") from None

if __name__ == "__main__":
    digits_numpy.__doc__ = __doc__  # the text of --help
    digits_numpy.xp = cupy
    digits_numpy.main()
