"""How a training computes: precision, determinism, and the random numbers of a step.

with deterministic(config), autocast(config, device):
    seed_by(device, config.seed, step, rank)        # dropout, masks and landmarks depend on these numbers alone
"""

import contextlib
import hashlib
import os
from collections.abc import Iterator
from typing import Any

import torch

from wellcond.train.config import Config

__all__ = ["autocast", "deterministic", "seed_by"]


def autocast(config: Config, device: torch.device) -> Any:
    if config.amp_dtype == "float32":
        return contextlib.nullcontext()
    return torch.autocast(device.type, dtype=getattr(torch, config.amp_dtype))


def seed_by(device: torch.device, *numbers: int) -> None:
    """As torch.manual_seed with a number made of these, which would seed every device there could be, at every step."""
    digest = hashlib.blake2b(repr(numbers).encode(), digest_size=8).digest()
    seed = int.from_bytes(digest, "little") >> 1
    if device.type not in ("cpu", "cuda"):
        torch.manual_seed(seed)
        return
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.init()  # there are no generators before
        index = torch.cuda.current_device() if device.index is None else device.index
        torch.cuda.default_generators[index].manual_seed(seed)


@contextlib.contextmanager
def deterministic(config: Config) -> Iterator[None]:
    """The same bits from run to run, where the configuration asks for it."""
    before = torch.are_deterministic_algorithms_enabled()
    if config.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when CUDA's matrix products start
        torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)
