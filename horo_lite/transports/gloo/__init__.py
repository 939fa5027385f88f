"""PyTorch's gloo as a carrier between hosts, if MPI did not start the ranks."""
