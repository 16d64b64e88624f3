"""Free GPU memory, queried rarely: the driver takes a millisecond or more to answer.

free_memory(torch.device("cuda"))         # bytes, including those that torch holds unused
"""

import time

import torch

__all__ = ["free_memory"]

GOOD_FOR_SECONDS = 2.0

_known: dict[torch.device, tuple[float, int]] = {}


def free_memory(device: torch.device) -> int:
    """Return the free memory as of at most two seconds ago: good enough to size a chunk of work with a wide margin."""
    now = time.monotonic()
    when, free = _known.get(device, (-GOOD_FOR_SECONDS, 0))
    if now - when >= GOOD_FOR_SECONDS:
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        free = torch.cuda.mem_get_info(device)[0] + unused
        _known[device] = now, free
    return free
