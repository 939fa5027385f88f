"""Starting jobs: which mpiexec, hvd.run, the command line's checks."""
