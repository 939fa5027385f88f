"""What the ranks did last, and when: recorded always, and written as a flight record or a trace."""
