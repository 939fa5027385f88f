"""A stand-in for Apache SINGA: the part of its Python API that training a small network needs.

SINGA's only wheel on PyPI (3.0.0.dev1, for Python 3.6) was built without NumPy and cannot read a
tensor, so the tests train with this; on that wheel, repaired, they pass as well (see
singa_mended.py). It follows what SINGA publishes, not what horo_lite needs: `singa_wrap` is the
extension that SWIG makes from src/api/*.i, here over NumPy; `tensor`, `autograd` and `opt` have the
interface of SINGA's modules of these names. `opt.DistOpt` does what SINGA's does with the
`singa_wrap.Communicator` that only builds for CUDA have.
"""
