"""Running several pieces of GPU work at the same time, each on a stream of its own.

side_by_side(device, [first_half, second_half])     # whatever comes later waits for both
"""

import functools
from collections.abc import Callable, Sequence

import torch

__all__ = ["side_by_side"]


def side_by_side(device: torch.device, works: Sequence[Callable[[], object]]) -> None:
    """Calls every function, the first on the current stream; what they read was made, and stays alive, on that one.

    What they allocate belongs to their own streams, so they must free it themselves: by returning.
    """
    if len(works) == 1 or device.type != "cuda":
        for work in works:
            work()
        return
    here = torch.cuda.current_stream(device)
    lanes = [_lane(str(device), number) for number in range(len(works) - 1)]
    for lane in lanes:
        lane.wait_stream(here)
    for lane, work in zip([here, *lanes], works, strict=True):
        with torch.cuda.stream(lane):
            work()
    for lane in lanes:
        here.wait_stream(lane)


@functools.cache
def _lane(device: str, number: int) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
