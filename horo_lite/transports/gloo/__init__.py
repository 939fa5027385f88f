"""PyTorch's gloo as what carries bytes between hosts, where MPI did not start the ranks."""
