"""The learning rate of one arm: a small grid, judged on held-out images, extended while the best lies at its edge.

chosen = tune(lambda lr: accuracy_after_training(lr), grid=(1e-4, 3e-4, 1e-3))
chosen.lr, chosen.scores, chosen.at_edge        # 3e-4, {1e-4: 0.61, …}, False

Every arm gets the same grid and the same budget. A run that diverged has the score −∞ and is reported as that.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

__all__ = ["Tuned", "tune"]

LADDER = (1e-5, 3e-5, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2)  # where a grid may be extended to


@dataclass(frozen=True, kw_only=True)
class Tuned:
    lr: float
    scores: dict[float, float]
    """Every rate that was tried, the whole grid, ascending."""
    at_edge: bool
    """Whether a better rate may lie outside: the best is the smallest or the largest that was tried."""


Together = Callable[[Sequence[Callable[[], float]]], list[float]]


def tune(
    score: Callable[[float], float], *, grid: Sequence[float], extend: bool = True, together: Together | None = None
) -> Tuned:
    """Try each rate of the grid; while the best is at an edge, the next rung of the ladder as well.

    The rates of the grid do not depend on each other: `together` may call them side by side.
    """
    if not grid:
        raise ValueError("a grid needs at least one learning rate")
    rates = sorted(grid)
    calls = [partial(score, lr) for lr in rates]
    scores = dict(zip(rates, together(calls) if together else [call() for call in calls], strict=True))
    while extend:
        beyond = _beyond(scores)
        if beyond is None:
            break
        scores[beyond] = score(beyond)
    ordered = dict(sorted(scores.items()))
    best = _best(ordered)
    return Tuned(lr=best, scores=ordered, at_edge=best in (min(ordered), max(ordered)))


def _best(scores: dict[float, float]) -> float:
    """The rate with the best score; of equals the smallest, which is also where to look if all diverged."""
    return max(sorted(scores), key=lambda lr: (scores[lr], -lr))


def _beyond(scores: dict[float, float]) -> float | None:
    """The next rate to try; None where the best is inside, or the ladder ends."""
    best = _best(scores)
    if best == min(scores):
        return max((lr for lr in LADDER if lr < best * 0.99), default=None)
    if best == max(scores) and math.isfinite(scores[best]):
        return min((lr for lr in LADDER if lr > best * 1.01), default=None)
    return None
