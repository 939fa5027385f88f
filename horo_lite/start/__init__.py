"""How a rank's part in a job begins and ends: the world, launchers, who is late."""
