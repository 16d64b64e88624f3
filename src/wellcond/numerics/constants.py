"""Tensors that follow from a few numbers, made once for each device and kept.

    @kept_constants(64)
    def basis(length: int, device: str) -> Tensor: ...

As `functools.lru_cache`, so many of them, but with an eye on CUDA graphs. What a graph read while it was captured is
kept for good: at every replay it reads the same memory again, whatever the cache has given up since. And what is made
while a graph is captured is that graph's alone: until a replay nobody has computed it. Nor is anything kept that was
made under a tracer or a dispatch mode, such as a fake tensor.
"""

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from .fastpaths import followed

__all__ = ["kept_constants"]

Made = TypeVar("Made", Tensor, tuple[Tensor, Tensor])


def kept_constants(most: int) -> Callable[[Callable[..., Made]], Callable[..., Made]]:
    """Of a function of hashable, positional arguments that returns one tensor or two."""

    def keeping(make: Callable[..., Made]) -> Callable[..., Made]:
        recent: dict[Any, Made] = {}
        read_by_graphs: dict[Any, Made] = {}

        @functools.wraps(make)
        def kept(*numbers: Any) -> Made:
            if followed():
                return make(*numbers)
            made = read_by_graphs.get(numbers)
            if made is not None:
                return made
            made, capturing = recent.pop(numbers, None), _capturing()
            if made is None:
                with torch.inference_mode(False), torch.no_grad():  # whoever asks first, a gradient may need it later
                    made = make(*numbers)
                if capturing:
                    return made
            recent[numbers] = made  # the last one used stands last
            if capturing:
                read_by_graphs[numbers] = made
            if len(recent) > most:
                del recent[next(iter(recent))]
            return made

        return kept

    return keeping


def _capturing() -> bool:
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
