"""Is the training lost? A loss that is not finite, or one that stays above where it began.

watch = Watch(patience=500)
watch.see(step, loss)               # on the device; nothing is waited for
problem = watch.judge()             # now and then: None, or a Divergence that says which step and why
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

__all__ = ["Divergence", "Lost", "Watch"]

FIRST = 20  # steps whose mean loss is the start
SMOOTH = 0.98  # weight of the past in the running loss
ABOVE = 1.05  # times the start: a model that learns nothing stays at it, give or take, and is not lost


@dataclass(frozen=True, kw_only=True)
class Divergence:
    step: int
    why: str


class Lost(Exception):  # noqa: N818 (nothing is broken but the training)
    """The training cannot go on from here; whoever runs it may go back, or give up."""

    def __init__(self, divergence: Divergence):
        super().__init__(divergence.why)
        self.divergence = divergence


class Watch:
    """Looks at every loss; asks the device for its findings only when judged."""

    def __init__(self, *, patience: int):
        self.patience = patience
        self.start = math.nan
        """The mean loss of the first steps."""
        self.running = math.nan
        self.above_since: int | None = None
        self._pending: list[tuple[int, Tensor]] = []
        self._first: list[float] = []

    def see(self, step: int, loss: Tensor) -> None:
        self._pending.append((step, loss.detach() if loss.requires_grad else loss))

    def judge(self) -> Divergence | None:
        """What the losses since the last time say."""
        if not self._pending:
            return None
        steps = [step for step, _ in self._pending]
        losses = torch.stack([loss for _, loss in self._pending]).float().tolist()
        self._pending.clear()
        for step, loss in zip(steps, losses, strict=True):
            if not math.isfinite(loss):
                return Divergence(step=step, why=f"the loss became {loss}")
            if len(self._first) < FIRST:
                self._first.append(loss)
                self.start = sum(self._first) / len(self._first)
                self.running = loss
                continue
            self.running = SMOOTH * self.running + (1 - SMOOTH) * loss
            if self.running <= ABOVE * self.start:
                self.above_since = None
            elif self.above_since is None:
                self.above_since = step
            elif step - self.above_since >= self.patience:
                return Divergence(
                    step=step,
                    why=f"the loss, {self.running:.4g} on average, has been above its start, {self.start:.4g}, since "
                    f"step {self.above_since}",
                )
        return None

    def state_dict(self) -> dict[str, Any]:
        return {
            "start": self.start,
            "running": self.running,
            "above_since": self.above_since,
            "first": list(self._first),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.start, self.running, self.above_since = state["start"], state["running"], state["above_since"]
        self._first = list(state["first"])
        self._pending.clear()
