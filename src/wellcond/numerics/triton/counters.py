"""Counters, initially zero, by which programs tell which is the last (landmark_solve.is_last); that one resets its own.

counters = Counters(matrices, device)
launch(…, counters())
"""

import torch
from torch import Tensor
from triton.runtime import driver

__all__ = ["Counters"]


class Counters:
    """One counter per matrix, allocated once per stream: two streams must not share counters."""

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
