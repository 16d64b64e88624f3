"""Mistakes of the caller, told apart from failures: the command line answers them with exit code 2, not 1.

with wrong_usage():            # a ValueError inside becomes WrongUsage, which is one, too
    check(arguments)
"""

import contextlib
from collections.abc import Iterator

__all__ = ["WrongUsage", "wrong_usage"]


class WrongUsage(ValueError):  # noqa: N818 (it is one)
    """The arguments are invalid; nothing has been started."""


@contextlib.contextmanager
def wrong_usage() -> Iterator[None]:
    """Turn a ValueError about arguments into WrongUsage."""
    try:
        yield
    except ValueError as error:
        raise WrongUsage(str(error)) from error
