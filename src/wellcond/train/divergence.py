"""Is the training lost? A loss that is not finite, or one that stays, or ends, above that of a fresh model.

watch = Watch(patience=500, chance=math.log(10))
watch.see(step, loss)               # on the device; nothing is waited for
problem = watch.judge()             # now and then: None, or a Divergence that says which step and why
problem = watch.judge(at_end=True)  # after the last step there is no more patience

The start is the loss of the first batch, which the model gets before its first update, or `chance`, the loss of who
only guesses, where that is higher (a small batch is lucky, or the weights were trained before). Losses that come later
have no say in it: they may have exploded already.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median_low
from typing import Any

import torch
from torch import Tensor

__all__ = ["Divergence", "Lost", "Watch"]

WINDOW = 20  # losses whose median is the loss at present
ABOVE = 1.05  # times the start: a model that learns nothing stays at it, give or take, and is not lost
EXPLODED = 1.5  # times the start: the weights were thrown far away,
BACK = 0.98  # and are back when the loss is below so many times the start; at chance nothing has come back


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

    def __init__(self, *, patience: int, chance: float = -math.inf):
        self.patience, self.chance = patience, chance
        self.start = math.nan
        self.highest = -math.inf
        self.above_since: int | None = None
        self.exploded = False
        """Far above its start, and not below it since."""
        self.bad_since: int | None = None
        """The first of the losses since which each was far above the start, or not finite."""
        self._recent: list[float] = []
        self._pending: list[tuple[int, Tensor]] = []

    def see(self, step: int, loss: Tensor) -> None:
        self._pending.append((step, loss.detach() if loss.requires_grad else loss))

    def judge(self, mean: Callable[[Tensor], Tensor] | None = None, *, at_end: bool = False) -> Divergence | None:
        """What the losses since the last time say; `mean` is theirs over all processes, which then find the same."""
        if not self._pending:
            return None
        steps = [step for step, _ in self._pending]
        stacked = torch.stack([loss for _, loss in self._pending]).float()
        self._pending.clear()
        for step, loss in zip(steps, (stacked if mean is None else mean(stacked)).tolist(), strict=True):
            bad = not loss <= EXPLODED * (loss if math.isnan(self.start) else self.start)
            self.bad_since = (self.bad_since or step) if bad else None
            if not math.isfinite(loss):
                return Divergence(step=step, why=f"the loss became {loss}")
            if math.isnan(self.start):
                self.start = max(loss, self.chance)
            self.highest = max(self.highest, loss)
            self._recent = [*self._recent, loss][-WINDOW:]
            now = median_low(self._recent)
            self.exploded = now > EXPLODED * self.start or (self.exploded and now > BACK * self.start)
            if now <= ABOVE * self.start:
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

    @property
    def sound(self) -> bool:
        """Whether a state of now is one to go back to, as far as its own losses tell."""
        return self.above_since is None and not self.exploded and self.bad_since is None

    def state_dict(self) -> dict[str, Any]:
        names = ("start", "highest", "above_since", "bad_since", "exploded", "sound")
        return {**{name: getattr(self, name) for name in names}, "recent": list(self._recent)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.start, self.above_since = state["start"], state["above_since"]
        self.highest, self.exploded = state.get("highest", -math.inf), state.get("exploded", False)  # since 0.1
        self.bad_since, self._recent = state.get("bad_since"), list(state.get("recent", []))
        self._pending.clear()
