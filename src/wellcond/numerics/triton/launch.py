"""Launching a Triton kernel again and again with little work for the CPU.

    launch(kernel, (blocks, heads), key, (x, y, n, scale), WIDTH=32, num_warps=4)

At every call Triton works out from all arguments which compiled variant they need, which for two dozen of them takes
longer than a small kernel runs. The caller knows better: `key` is what they follow from, such as shapes, strides,
dtypes and alignments. The first launch with a key goes through Triton, the others straight to the variant it compiled.
"""

from typing import Any

import torch
from torch import Tensor

__all__ = ["launch", "layout"]

_compiled: dict[Any, Any] = {}
MOST_VARIANTS = 4096


def layout(*tensors: Tensor | None) -> tuple[Any, ...]:
    """What a kernel's variant can depend on: a key for `launch`."""
    return tuple(
        None if t is None else (t.shape, t.stride(), t.dtype, t.device.index, t.data_ptr() & 15) for t in tensors
    )


def launch(
    kernel: Any,
    grid: tuple[int, ...],
    key: Any,
    args: tuple[Any, ...],
    *,
    num_warps: int = 4,
    num_stages: int = 2,
    **constants: Any,
) -> None:
    """Run `kernel`: its arguments in order, then its constants by name, in the order of its signature."""
    device = args[0].device.index
    if device is not None and device != torch.cuda.current_device():  # which is where Triton launches
        with torch.cuda.device(device):
            launch(kernel, grid, key, args, num_warps=num_warps, num_stages=num_stages, **constants)
        return
    key = (kernel, key, num_warps, num_stages, *constants.values())
    compiled = _compiled.get(key)
    if compiled is not None:
        compiled[(*grid, 1, 1)[:3]](*args, *constants.values())
        return
    compiled = kernel[grid](*args, **constants, num_warps=num_warps, num_stages=num_stages)
    if compiled is None:  # the interpreter
        return
    if len(_compiled) >= MOST_VARIANTS:
        _compiled.clear()
    _compiled[key] = compiled
