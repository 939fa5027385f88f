"""Ranks of several hosts: shared memory inside a host, MPI (through mpi4py) across hosts."""
