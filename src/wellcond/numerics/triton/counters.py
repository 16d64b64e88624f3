"""Zeros that programs count in, to tell who is the last (landmark_solve.is_last); that one sets its own back.

counters = Counters(matrices, device)
launch(…, counters())
"""

import torch
from torch import Tensor
from triton.runtime import driver

__all__ = ["Counters"]


class Counters:
    """One number a matrix, made once for each stream: two streams must not count in the same."""

    def __init__(self, matrices: int, device: torch.device):
        self.matrices: int = matrices
        self.device: torch.device = device
        self._of_streams: dict[int, Tensor] = {}

    def __call__(self) -> Tensor:
        """Those of the current stream."""
        if self.device.type != "cuda":
            stream = 0
        elif torch.cuda.is_current_stream_capturing():  # a graph has its own memory, and fills it at each replay
            return self.fresh()
        else:
            stream = driver.active.get_current_stream(self.device.index)
        zeros = self._of_streams.get(stream)
        if zeros is None:
            zeros = self._of_streams[stream] = self.fresh()
        return zeros

    def fresh(self) -> Tensor:
        """For one launch, where nothing may be kept: compiled code may run in memory that a graph takes back."""
        return torch.zeros(self.matrices, dtype=torch.int32, device=self.device)
