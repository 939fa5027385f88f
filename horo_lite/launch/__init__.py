"""Starting jobs: finding mpiexec, hvd.run, the command line's tools."""
