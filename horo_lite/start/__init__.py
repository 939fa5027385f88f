"""Start and end of a rank in a job: the world, launchers, detection of late ranks."""
