"""What plans have in common: being kept by the layout of their tensors, the device they launch on, shares of tokens,
buffers of many parts.

_plans: Kept["Plan"] = Kept(1024)
plan = _plans.get(given) or _plans.add(given, Plan(…))
"""

import contextlib
from typing import Any, TypeVar

import torch

from .tiles import ceil_div, padded

__all__ = ["LARGE_BLOCK", "Kept", "on_device", "padded_alike", "shares_of", "side_by_side"]

LARGE_BLOCK = 128  # tokens at a time
SHARE = 512  # tokens that one program has, at least
MOST_SHARES = 64  # whose sums one program adds up
T = TypeVar("T")

_HERE = contextlib.nullcontext()


class Kept(dict[Any, T]):
    """What was made for a key; so many, then all are given up."""

    def __init__(self, most: int):
        super().__init__()
        self.most = most

    def add(self, key: Any, made: T) -> T:
        if len(self) >= self.most:
            self.clear()
        self[key] = made
        return made


def on_device(device: torch.device) -> Any:
    """Triton launches on the current device: a context in which that is `device`."""
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return _HERE
    return torch.cuda.device(device)


def padded_alike(width: int, values: int) -> int:
    """Tokens and values are padded alike, and to 32 at least: else Triton 3.6 made kernels that went astray."""
    return max(32, padded(max(width, values)))


def shares_of(n: int) -> tuple[int, int]:
    """Into how many shares the tokens go, and how many are in each: a multiple of a large block.

    It follows from the length alone: with the batch's size the order of sums would change, and their last bits.
    """
    shares = max(1, min(MOST_SHARES, n // SHARE))
    each = ceil_div(ceil_div(n, LARGE_BLOCK), shares) * LARGE_BLOCK
    return ceil_div(n, each), each


def side_by_side(matrices: int, **lengths: int) -> dict[str, int]:
    """Where each part of a buffer begins, of so many numbers for each matrix; and its "end"."""
    found, total = {}, 0
    for name, length in lengths.items():
        found[name] = total
        total += matrices * length
    return found | {"end": total}
