"""Ranks of several hosts: shared memory inside a host, and between hosts any `Carrier`."""
