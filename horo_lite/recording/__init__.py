"""The ranks' last operations and their times, always recorded, for a flight record or a trace."""
