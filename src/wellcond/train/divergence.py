"""Detect divergence: a loss that is not finite, or one that stays, or ends, above that of an untrained model.

watch = Watch(patience=500, chance=math.log(10), skip_limit=10)
watch.see(step, loss, skipped)      # tensors on the device; does not wait for them
problem = watch.judge()             # from time to time: None, or a Divergence with its step and the reason
problem = watch.judge(at_end=True)  # after the last step: no more patience

The start is the loss of the first batch, before the first update, or `chance`, the loss of guessing, if that is higher
(a small batch may be lucky, or the weights pretrained). Later losses are not considered: they may have exploded
already.

A step that was skipped because its gradient was not finite (update.py) has changed nothing, whatever its loss was: it
is counted, and `skip_limit` of them in a row count as divergence.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median_low
from typing import Any

import torch
from torch import Tensor

__all__ = ["Divergence", "Lost", "Watch"]

WINDOW = 20  # losses whose median is the current loss
ABOVE = 1.05  # times the start: a model that learns nothing hovers around it, and has not diverged
EXPLODED = 1.5  # times the start: the weights were thrown far off,
BACK = 0.98  # and have recovered once the loss is below this times the start; a loss at chance is no recovery
RESCALED = 24  # more steps in a row that float16's scaler may skip, with a finite loss: its scale falls from 2¹⁶ to 2⁻⁸


@dataclass(frozen=True, kw_only=True)
class Divergence:
    step: int
    why: str


class Lost(Exception):  # noqa: N818 (nothing is broken but the training)
    """The training has diverged; the caller may go back to an earlier state, or give up."""

    def __init__(self, divergence: Divergence):
        super().__init__(divergence.why)
        self.divergence = divergence


class Watch:
    """Collects every loss, and reads the values from the device only in `judge`."""

    def __init__(self, *, patience: int, chance: float = -math.inf, skip_limit: int = 0, scaled: bool = False):
        self.patience: int = patience
        self.chance: float = chance
        self.skip_limit: int = skip_limit
        self.scaled: bool = scaled
        self.start: float = math.nan
        self.highest: float = -math.inf
        self.above_since: int | None = None
        self.exploded: bool = False
        """Whether the loss was far above its start and has not been below it since."""
        self.bad_since: int | None = None
        """The first step of the current streak in which every loss was far above the start or not finite, or the step
        skipped."""
        self.skipped = self.in_a_row = 0
        """The number of steps skipped so far, and in a row since the last one that was not."""
        self.untold: list[int] = []
        """The skipped steps still to be reported, without those by which float16 finds its scale."""
        self._recent: list[float] = []
        self._pending: list[tuple[int, Tensor, Tensor | None]] = []

    def see(self, step: int, loss: Tensor, skipped: Tensor | None = None) -> None:
        """Note the loss of a step, and whether it was skipped, which is the same in all processes."""
        self._pending.append((step, loss.detach() if loss.requires_grad else loss, skipped))

    def judge(self, mean: Callable[[Tensor], Tensor] | None = None, *, at_end: bool = False) -> Divergence | None:
        """Judge the losses since the last call. `mean` averages them over all processes, which then all agree."""
        if not self._pending:
            return None
        steps = [step for step, _, _ in self._pending]
        stacked = torch.stack([loss for _, loss, _ in self._pending]).float()
        flags = torch.stack([loss.new_zeros((), dtype=torch.bool) if f is None else f for _, loss, f in self._pending])
        self._pending.clear()
        losses = (stacked if mean is None else mean(stacked)).tolist()
        for step, loss, skipped in zip(steps, losses, flags.tolist(), strict=True):
            bad = skipped or not loss <= _times(EXPLODED, loss if math.isnan(self.start) else self.start)
            self.bad_since = (self.bad_since or step) if bad else None
            if skipped:
                problem = self._left_out(step, loss, last=at_end and step == steps[-1])
                if problem is not None:
                    return problem
                continue
            self.in_a_row: int = 0
            if not math.isfinite(loss):
                return Divergence(step=step, why=f"the loss became {loss}")
            if math.isnan(self.start):
                self.start = max(loss, self.chance)
            self.highest = max(self.highest, loss)
            self._recent = [*self._recent, loss][-WINDOW:]
            now = median_low(self._recent)
            self.exploded = now > _times(EXPLODED, self.start) or (self.exploded and now > _times(BACK, self.start))
            if now <= _times(ABOVE, self.start):
                self.above_since = None
            elif self.above_since is None:
                self.above_since = step
            elif step - self.above_since >= self.patience:
                return Divergence(
                    step=step,
                    why=f"the loss, {now:.4g}, has been above its start, {self.start:.4g}, since step "
                    f"{self.above_since}",
                )
        if at_end and (self.above_since is not None or self.exploded):
            now = median_low(self._recent)
            how = "above" if now > self.start else "no better than"
            return Divergence(
                step=steps[-1],
                why=f"the loss rose to {self.highest:.4g} and ended at {now:.4g}, {how} its start, {self.start:.4g}",
            )
        return None

    def _left_out(self, step: int, loss: float, *, last: bool) -> Divergence | None:
        self.skipped: int = self.skipped + 1
        self.in_a_row = self.in_a_row + 1
        rescaled = self.scaled and math.isfinite(loss)
        if not rescaled:
            self.untold.append(step)
        limit = self.skip_limit + (RESCALED if rescaled else 0)
        if self.in_a_row < (min(limit, 2) if last else limit):  # no good step can follow the last
            return None
        row = f" in {self.in_a_row} steps in a row" if self.in_a_row > 1 else ""
        return Divergence(step=step, why=f"the gradient was not finite{row}, with a loss of {loss:.4g} at the last")

    @property
    def sound(self) -> bool:
        """Whether a state saved now would be one to go back to, judging by its losses."""
        return self.above_since is None and not self.exploded and self.bad_since is None

    def state_dict(self) -> dict[str, Any]:
        names = ("start", "highest", "above_since", "bad_since", "exploded", "sound", "skipped", "in_a_row")
        return {**{name: getattr(self, name) for name in names}, "recent": list(self._recent)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.start, self.above_since = state["start"], state["above_since"]
        self.highest, self.exploded = state.get("highest", -math.inf), state.get("exploded", False)  # since 0.1
        self.bad_since, self._recent = state.get("bad_since"), list(state.get("recent", []))
        self.skipped, self.in_a_row = state.get("skipped", 0), state.get("in_a_row", 0)
        self.untold.clear()
        self._pending.clear()


def _times(factor: float, start: float) -> float:
    """Return start + (factor − 1)·|start|: `factor` times a loss, and as far above one that is negative."""
    return (factor if start >= 0 else 2 - factor) * start
