"""From the CPU to a device without waiting for it.

order = send(order, device)         # an ordinary `.to` would first wait for all that the GPU still has to do
"""

import torch
from torch import Tensor

__all__ = ["send"]


def send(tensor: Tensor, device: torch.device) -> Tensor:
    if device.type == "cuda" and tensor.device.type == "cpu":
        tensor = tensor.pin_memory()  # only from pinned memory a copy goes on by itself
    return tensor.to(device, non_blocking=True)
