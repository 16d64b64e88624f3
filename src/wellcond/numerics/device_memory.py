"""How much memory a GPU has left, asked for rarely: the question takes a driver a millisecond, and more.

free_memory(torch.device("cuda"))         # bytes, torch's own unused ones among them
"""

import time

import torch

__all__ = ["free_memory"]

GOOD_FOR_SECONDS = 2.0

_known: dict[torch.device, tuple[float, int]] = {}


def free_memory(device: torch.device) -> int:
    """As it was at most two seconds ago: good enough to decide how much is done at a time, within a wide margin."""
    now = time.monotonic()
    when, free = _known.get(device, (-GOOD_FOR_SECONDS, 0))
    if now - when >= GOOD_FOR_SECONDS:
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        free = torch.cuda.mem_get_info(device)[0] + unused
        _known[device] = now, free
    return free
