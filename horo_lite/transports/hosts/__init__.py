"""Ranks of several hosts: shared memory inside a host, and any `Carrier` between hosts."""
