"""MPI (through mpi4py) as a carrier between hosts, and for starting a world."""
