"""A stand-in for Apache SINGA: as much of its Python interface as training a small network takes.

SINGA's only wheel on PyPI (3.0.0.dev1, for Python 3.6) was built without NumPy and cannot read a
tensor, so this is what the tests train with; on that wheel, mended, they pass as well (see
singa_mended.py). It follows what SINGA publishes, not what horo_lite needs: `singa_wrap` is the
extension that SWIG makes of src/api/*.i, here over NumPy; `tensor`, `autograd` and `opt` are
SINGA's modules of those names, in other words. `opt.DistOpt` does what SINGA's does with the
`singa_wrap.Communicator` that only builds for CUDA have.
"""
