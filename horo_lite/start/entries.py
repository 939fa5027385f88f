"""Entries of a store that other users can reach: signed with a secret of the job.

The secret is HORO_LITE_JOB_TOKEN, which all launchers of this package set; or, among ranks of one
host that were started otherwise, one that rank 0 offers in memory that only processes of the same
user can open. So every entry that the ranks act on was written by a rank of the same user.
"""

from __future__ import annotations

import errno
import hmac
import os
import secrets
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

from horo_lite.errors import LauncherError
from horo_lite.start.launcher import JOB_TOKEN

_TIMEOUT = timedelta(minutes=5)  # of torch's stores
_OFFER, _N_BYTES = "horo_lite_secret", 32


def job_token() -> bytes:
    """Return the job's token from the environment; empty if there is none."""
    return os.environ.get(JOB_TOKEN, "").encode(errors="surrogateescape")


def signature(secret: bytes, key: str, data: bytes) -> bytes:
    """Return what proves that a process with the secret wrote an entry; b"" without a secret."""
    if not secret:
        return b""
    return hmac.new(secret, key.encode() + b" " + data, "sha256").hexdigest().encode()


def sign(secret: bytes, key: str, data: bytes) -> bytes:
    """Return an entry of the store that holds the data."""
    return signature(secret, key, data) + b" " + data


def verify(secret: bytes, key: str, entry: bytes) -> bytes | None:
    """Return the data of an entry, or None if it was not written with this secret."""
    found, _, data = entry.partition(b" ")
    return data if hmac.compare_digest(found, signature(secret, key, data)) else None


def signed_store(
    store: Any,
    prefix: str,
    secret: bytes,
    forged: Callable[[str], str],
    is_over: Callable[[], bool] = lambda: False,
) -> Any:
    """Return a torch store with signed entries, for libraries that do not check what they read.

    Args:
        store: The store that holds them.
        prefix: Precedes the keys in that store.
        secret: The secret; without one, entries are not signed.
        forged: Returns the message of the error for the entry with that key.
        is_over: Returns whether the library's thread, which may still wait, should end.
    """
    from torch.distributed import Store

    class SignedStore(Store):
        """Verifies an entry before the library, which may be in C++, parses it."""

        def set(self, key: str, value: Any) -> None:  # bytes, although torch declares str
            name = f"{prefix}/{key}"
            store.set(name, sign(secret, name, value))

        def get(self, key: str) -> bytes:
            name = f"{prefix}/{key}"
            data = verify(secret, name, store.get(name))
            if data is None:
                raise LauncherError(forged(name))
            return data

        def wait(self, keys: Sequence[str], *timeout: Any) -> None:
            # In many requests, so that others can be made on this connection meanwhile.
            names = [f"{prefix}/{key}" for key in keys]
            until = time.monotonic() + (timeout[0] if timeout else _TIMEOUT).total_seconds()
            while not store.check(names):
                if is_over() or time.monotonic() > until:
                    raise RuntimeError(f"timed out while it waited for {', '.join(names)}")
                time.sleep(0.01)

    return SignedStore()


class Offer:
    """A new secret in memory that only processes of this user can open, as long as this exists."""

    def __init__(self) -> None:
        self.secret = secrets.token_bytes(_N_BYTES)
        self.descriptor = os.memfd_create(_OFFER, os.MFD_CLOEXEC)
        os.fchmod(self.descriptor, 0o600)
        os.write(self.descriptor, self.secret)

    def close(self) -> None:
        """Free the memory; the secret remains."""
        if self.descriptor >= 0:
            self._close(self.descriptor)
        self.descriptor = -1

    __del__ = close
    # At interpreter shutdown the module `os` may be cleared before this object is deleted.
    _close = staticmethod(os.close)


def offered(pid: int, descriptor: int) -> bytes:
    """Return the secret that a process of this host offers.

    The numbers are not trusted: whichever file they refer to is only opened if it is an `Offer` of
    this user, and so contains nothing that another user knows.

    Raises:
        OSError: It is not one, or cannot be opened.
    """
    # O_PATH opens neither a device nor a FIFO, and nothing can replace what it refers to.
    place = os.open(f"/proc/{pid}/fd/{descriptor}", os.O_PATH | os.O_CLOEXEC)
    try:
        own = f"/proc/self/fd/{place}"
        about = os.fstat(place)
        is_offer = os.readlink(own) == f"/memfd:{_OFFER} (deleted)"
        if not is_offer or about.st_uid != os.geteuid() or about.st_size != _N_BYTES:
            raise PermissionError(errno.EPERM, "it is not memory of a rank of this user")
        file = os.open(own, os.O_RDONLY | os.O_CLOEXEC)
    finally:
        os.close(place)
    try:
        return os.pread(file, _N_BYTES, 0)
    finally:
        os.close(file)
