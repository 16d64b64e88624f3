"""Whether input is looked at for a NaN or Inf, which makes a GPU wait at every call.

with trusted_input():           # for whoever knows where the numbers come from
    model(images)
"""

import contextlib
from collections.abc import Iterator

__all__ = ["is_trusted", "trusted_input"]

_trusted = False


@contextlib.contextmanager
def trusted_input() -> Iterator[None]:
    """Within it nobody looks."""
    global _trusted
    before, _trusted = _trusted, True
    try:
        yield
    finally:
        _trusted = before


def is_trusted() -> bool:
    return _trusted
