"""A forward and backward pass, and on one GPU its replay.

passes = Passes(config, task, parts, here)
loss = passes(batch)                             # for one part of a batch; gradients are left in the parameters
loss = passes(batch, hooked=True)                # as it is, so that hooks are called
"""

from collections.abc import Callable

import torch
from torch import Tensor

from wellcond.data import Batch
from wellcond.numerics.trust import trusted_input
from wellcond.train.computing import autocast
from wellcond.train.config import Config
from wellcond.train.processes import Processes
from wellcond.train.replay import Replayed, can_replay
from wellcond.train.setup import Parts
from wellcond.train.tasks import Task

__all__ = ["Passes"]


class Passes:
    """Knows nothing of the training that uses it: with a way back, neither would be freed when it is over."""

    def __init__(self, config: Config, task: Task, parts: Parts, here: Processes):
        self._plain = _make_pass(config, task, parts, here.device)
        self._usual = self._plain
        if can_replay(config, here.device, world=here.world):
            self._usual = Replayed(self._plain, parts.parameters, here.device)

    def __call__(self, batch: Batch, *, hooked: bool = False) -> Tensor:
        """The part's share of the loss."""
        return (self._plain if hooked else self._usual)(batch)


def _make_pass(config: Config, task: Task, parts: Parts, device: torch.device) -> Callable[[Batch], Tensor]:
    def one_pass(batch: Batch) -> Tensor:
        with autocast(config, device), trusted_input():  # what data give is finite
            loss = task.loss(parts.called, batch)
        loss = loss if config.accumulate == 1 else loss / config.accumulate
        parts.scaler.scale(loss).backward()
        return loss.detach()

    return one_pass
