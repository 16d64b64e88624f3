"""What plans have in common: a cache by the layout of their tensors, the device they launch on, shares of tokens,
buffers of many parts, and counters by which programs tell which is the last (landmark_solve.is_last).

_plans: Kept["Plan"] = Kept(1024)
plan = _plans.get(given) or _plans.add(given, Plan(…))
"""

import contextlib
from typing import Any, TypeVar

import torch
from torch import Tensor
from triton.runtime import driver

from .tiles import ceil_div, padded

__all__ = ["LARGE_BLOCK", "Counters", "Kept", "on_device", "padded_alike", "shares_of", "side_by_side"]

LARGE_BLOCK = 128  # tokens at a time
SHARE = 512  # tokens per program, at least
MOST_SHARES = 64  # most shares whose sums one program adds up
T = TypeVar("T")

_HERE = contextlib.nullcontext()


class Kept(dict[Any, T]):
    """A cache of at most `most` entries; when it is full, it is cleared."""

    def __init__(self, most: int):
        super().__init__()
        self.most = most

    def add(self, key: Any, made: T) -> T:
        if len(self) >= self.most:
            self.clear()
        self[key] = made
        return made


def on_device(device: torch.device) -> Any:
    """Return a context in which `device` is the current device, which is where Triton launches."""
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return _HERE
    return torch.cuda.device(device)


def padded_alike(width: int, values: int) -> int:
    """Pad tokens and values alike, to at least 32: otherwise Triton 3.6 made kernels with illegal memory accesses."""
    return max(32, padded(max(width, values)))


def shares_of(n: int) -> tuple[int, int]:
    """Return the number of shares of the tokens, and the tokens in each: a multiple of a large block.

    Depends on the length alone: if it depended on the batch size, so would the order of sums, and their last bits.
    """
    shares = max(1, min(MOST_SHARES, n // SHARE))
    each = ceil_div(ceil_div(n, LARGE_BLOCK), shares) * LARGE_BLOCK
    return ceil_div(n, each), each


def side_by_side(matrices: int, **lengths: int) -> dict[str, int]:
    """Return where each part of a buffer begins, given its numbers per matrix; and the buffer's "end"."""
    found, total = {}, 0
    for name, length in lengths.items():
        found[name] = total
        total += matrices * length
    return found | {"end": total}


class Counters:
    """One counter per matrix, zero before each launch and after it: the last program resets its own.

    Allocated once per stream: two streams must not share counters.
    """

    def __init__(self, matrices: int, device: torch.device):
        self.matrices: int = matrices
        self.device: torch.device = device
        self._of_streams: dict[int, Tensor] = {}

    def __call__(self) -> Tensor:
        """Return the counters of the current stream."""
        if self.device.type != "cuda":
            stream = 0
        elif torch.cuda.is_current_stream_capturing():  # a graph has its own memory, zeroed at each replay
            return self.fresh()
        else:
            stream = driver.active.get_current_stream(self.device.index)
        zeros = self._of_streams.get(stream)
        if zeros is None:
            zeros = self._of_streams[stream] = self.fresh()
        return zeros

    def fresh(self) -> Tensor:
        """Return counters for one launch, where none may be kept: a CUDA graph may reclaim compiled code's memory."""
        return torch.zeros(self.matrices, dtype=torch.int32, device=self.device)
