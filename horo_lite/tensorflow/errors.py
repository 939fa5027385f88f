"""Errors that are TensorFlow's too: those that Horovod's operations raise outside of graphs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import tensorflow as tf

from horo_lite import errors


class MismatchError(errors.MismatchError, tf.errors.FailedPreconditionError):  # type: ignore[misc]
    """The ranks' calls differ: horo_lite.MismatchError, and what Horovod raises."""

    def __init__(self, message: str) -> None:
        tf.errors.FailedPreconditionError.__init__(self, None, None, message)
        self.args = (message,)


class ArgumentError(ValueError, tf.errors.InvalidArgumentError):  # type: ignore[misc]
    """An argument of this rank is wrong: ValueError, and what Horovod raises."""

    def __init__(self, message: str) -> None:
        tf.errors.InvalidArgumentError.__init__(self, None, None, message)
        self.args = (message,)


@contextmanager
def raised_as_tensorflows() -> Iterator[None]:
    """Make such errors of the body TensorFlow's, too."""
    try:
        yield
    except (errors.MismatchError, ValueError) as error:
        for plain, both in ((errors.MismatchError, MismatchError), (ValueError, ArgumentError)):
            if type(error) is plain:
                raise both(str(error)).with_traceback(error.__traceback__) from error.__cause__
        raise
