"""MPI (through mpi4py) as what carries bytes between hosts, and while a world begins."""
