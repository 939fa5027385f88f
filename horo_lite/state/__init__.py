"""A model as a whole: parameters and optimizer state, broadcast and compared."""
