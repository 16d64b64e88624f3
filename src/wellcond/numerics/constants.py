"""Cache constant tensors that are computed from a few numbers, once for each device.

    @kept_constants(64)
    def basis(length: int, device: str) -> Tensor: ...

Like `functools.lru_cache` of that size, but safe with CUDA graphs. What a graph read during capture is kept for good:
every replay reads the same memory again, whatever the cache has evicted since. What is made during capture belongs to
that graph alone and is not cached: until a replay, nothing has computed it. Nor is anything cached that was made under
a tracer, a dispatch mode or torch.func, such as a fake tensor, or one that a transform has wrapped.
"""

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from .fastpaths import followed, transformed

__all__ = ["kept_constants"]

Made = TypeVar("Made", Tensor, tuple[Tensor, Tensor])


def kept_constants(most: int) -> Callable[[Callable[..., Made]], Callable[..., Made]]:
    """Cache the `most` recent results of a function of hashable positional arguments, one or two tensors each."""

    def keeping(make: Callable[..., Made]) -> Callable[..., Made]:
        recent: dict[Any, Made] = {}
        read_by_graphs: dict[Any, Made] = {}

        @functools.wraps(make)
        def kept(*numbers: Any) -> Made:
            if followed() or transformed():
                return make(*numbers)
            made = read_by_graphs.get(numbers)
            if made is not None:
                return made
            made, capturing = recent.pop(numbers, None), _capturing()
            if made is None:
                with torch.inference_mode(False), torch.no_grad():  # a gradient may need it later
                    made = make(*numbers)
                if capturing:
                    return made
            recent[numbers] = made  # most recently used last
            if capturing:
                read_by_graphs[numbers] = made
            if len(recent) > most:
                del recent[next(iter(recent))]
            return made

        return kept

    return keeping


def _capturing() -> bool:
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
