"""From numbers to a verdict: paired seeds, means with 95 % intervals, equivalence, and how parts make a whole.

    gain = interval([0.4, 0.7, 0.5])                     # mean, low, high: Student's t, since seeds are few
    part = at_least("drop(sa) ≥ 3 × drop(mlp)", [16.1, 15.2, 17.0], 0.0)     # decided by the interval, not by the mean
    part = within("no difference", [0.2, -0.1, 0.3], 1.0)                    # equivalence: the interval inside ± 1
    combine([part, …]).verdict                                               # "holds in part"

A part is decided where its whole interval lies on one side. Where it does not, the part is undecided and says the
smallest effect that these runs would have seen four times out of five.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any, Literal

__all__ = [
    "Interval",
    "Outcome",
    "Part",
    "Verdict",
    "Whole",
    "at_least",
    "combine",
    "differences",
    "interval",
    "not_run",
    "smallest_effect",
    "undecided",
    "within",
]

Outcome = Literal["holds", "does not hold", "undecided", "not run"]
Verdict = Literal["holds", "holds in part", "does not hold", "undecided", "out of reach here"]
CONFIDENCE, POWER = 0.95, 0.8


@dataclass(frozen=True, kw_only=True)
class Interval:
    """A mean, and where it may lie: 95 % confidence. Of a single value the interval is everything."""

    mean: float
    low: float
    high: float
    count: int

    def __str__(self) -> str:
        if self.count < 2:
            return f"{_signed(self.mean)} (one seed, no interval)"
        return f"{_signed(self.mean)} [{_signed(self.low)}, {_signed(self.high)}]"


@dataclass(frozen=True, kw_only=True)
class Part:
    """One statement inside a claim: what was asked, what came out, and the numbers for it."""

    name: str
    outcome: Outcome
    why: str
    found: Interval | None = None


@dataclass(frozen=True, kw_only=True)
class Whole:
    """The verdict on a claim, with its parts."""

    verdict: Verdict
    parts: tuple[Part, ...]

    def as_json(self) -> dict[str, Any]:
        return {"verdict": self.verdict, "parts": [_part_json(part) for part in self.parts]}


def interval(values: Sequence[float], *, confidence: float = CONFIDENCE) -> Interval:
    """The mean of `values` with its interval by Student's t. ValueError for none, or for a value that is not finite."""
    if not values or not all(math.isfinite(value) for value in values):
        raise ValueError(f"an interval needs finite values, at least one; these are {list(values)}")
    mean = fmean(values)
    if len(values) < 2:
        return Interval(mean=mean, low=-math.inf, high=math.inf, count=1)
    half = t_quantile((1 + confidence) / 2, len(values) - 1) * _standard_error(values)
    return Interval(mean=mean, low=mean - half, high=mean + half, count=len(values))


def differences(first: Mapping[int, float], second: Mapping[int, float]) -> list[float]:
    """first − second, seed by seed. ValueError where the seeds are not the same: nothing would be paired."""
    if first.keys() != second.keys():
        raise ValueError(f"seeds {sorted(first)} and {sorted(second)} are not the same; run both arms with one set")
    return [first[seed] - second[seed] for seed in sorted(first)]


def smallest_effect(values: Sequence[float]) -> float:
    """How far from a bound the true mean has to be for four in five such experiments to decide; inf for one value."""
    if len(values) < 2:
        return math.inf
    free = len(values) - 1
    return (t_quantile((1 + CONFIDENCE) / 2, free) + t_quantile(POWER, free)) * _standard_error(values)


def at_least(name: str, values: Sequence[float], bound: float, *, unit: str = "") -> Part:
    """Is the mean at least `bound`? Decided where the whole interval is on one side of it."""
    found = interval(values)
    said = f"{found}{unit}, asked: at least {_signed(bound)}{unit}"
    if found.low >= bound:
        return Part(name=name, outcome="holds", why=said, found=found)
    if found.high < bound:
        return Part(name=name, outcome="does not hold", why=said, found=found)
    return Part(name=name, outcome="undecided", why=f"{said}; {_could_see(values, unit)}", found=found)


def within(name: str, values: Sequence[float], margin: float, *, unit: str = "") -> Part:
    """Is there no difference, up to `margin`? Shown by the interval inside ± margin, not by a wide one around 0."""
    if not margin > 0:
        raise ValueError(f"the margin of an equivalence must be positive, got {margin}")
    found = interval(values)
    said = f"{found}{unit}, asked: within ± {margin:g}{unit}"
    if -margin <= found.low and found.high <= margin:
        return Part(name=name, outcome="holds", why=said, found=found)
    if found.low > margin or found.high < -margin:
        return Part(name=name, outcome="does not hold", why=said, found=found)
    return Part(name=name, outcome="undecided", why=f"{said}; {_could_see(values, unit)}", found=found)


def undecided(part: Part, why: str) -> Part:
    """The same part, not decided because a rule of the experiment is not met; its numbers stay."""
    return Part(name=part.name, outcome="undecided", why=f"{part.why}; not decided: {why}", found=part.found)


def not_run(name: str) -> Part:
    return Part(name=name, outcome="not run", why="no runs yet")


def combine(parts: Sequence[Part]) -> Whole:
    """A claim holds if all of it does. One part that fails refutes the whole, and then it counts what is left of it."""
    outcomes = {part.outcome for part in parts}
    if not outcomes:
        raise ValueError("a verdict needs at least one part")
    verdict: Verdict = "undecided"
    if outcomes == {"holds"}:
        verdict = "holds"
    elif "does not hold" in outcomes:
        verdict = "holds in part" if "holds" in outcomes else "does not hold"
    return Whole(verdict=verdict, parts=tuple(parts))


def t_quantile(probability: float, free: int) -> float:
    """The quantile of Student's t with `free` degrees of freedom, from 0.5 up; by bisection of its closed form."""
    assert 0.5 <= probability < 1, probability
    assert free >= 1, free
    low, high = 0.0, 1.0
    while _t_cdf(high, free) < probability:
        high *= 2
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if _t_cdf(middle, free) < probability else (low, middle)
    return (low + high) / 2


def _t_cdf(t: float, free: int) -> float:
    """P(T ≤ t) for t ≥ 0. For whole degrees of freedom the integral of (1 + x²/ν)^(−(ν+1)/2) is a finite sum."""
    angle = math.atan2(t, math.sqrt(free))
    cosine, sine = math.cos(angle), math.sin(angle)
    total, term = 0.0, cosine if free % 2 else 1.0
    for k in range(1 + free % 2, free, 2):  # the powers of the cosine up to ν − 2
        total += term
        term *= cosine**2 * k / (k + 1)
    inside = 2 / math.pi * (angle + sine * total) if free % 2 else sine * total
    return 0.5 + inside / 2


def _standard_error(values: Sequence[float]) -> float:
    return stdev(values) / math.sqrt(len(values))


def _could_see(values: Sequence[float], unit: str) -> str:
    effect = smallest_effect(values)
    if math.isinf(effect):
        return "one seed can show nothing"
    return f"these {len(values)} seeds could have seen a distance of {effect:.2g}{unit}"


def _signed(value: float) -> str:
    if math.isinf(value):
        return "∞" if value > 0 else "−∞"
    return f"{value:.2f}".replace("-", "−")


def _part_json(part: Part) -> dict[str, Any]:
    found = part.found
    numbers = {"mean": found.mean, "low": found.low, "high": found.high, "seeds": found.count} if found else None
    return {"name": part.name, "outcome": part.outcome, "why": part.why, "found": numbers}
