"""From numbers to a verdict: paired seeds, means with their intervals, equivalence, and how parts make a whole.

    gain = interval([0.4, 0.7, 0.5])                     # mean, low, high: Student's t, since seeds are few
    part = at_least("drop(sa) ≥ 3 × drop(mlp)", [16.1, 15.2, 17.0], 0.0)     # decided by the interval, not by the mean
    part = at_most("a ratio", [0.8, 0.7, 0.9], 1.0)
    part = within("no difference", [0.2, -0.1, 0.3], 1.0)                    # equivalence: the interval inside ± 1
    combine([part, …]).verdict                                               # "holds in part"
    clopper_pearson(0, 400)                              # (0.0, 0.0092): the exact interval of a rate
    rank_correlation([[(1, 2), (2, 3)], …])              # Spearman's, of pairs that come in groups, with its interval

A part is decided where its whole interval lies on one side. Where it does not, the part is undecided and says the
smallest effect that these runs would have seen four times out of five. Theory and claims judge by the same words.
"""

import functools
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, stdev
from typing import Any, Final

from scipy.special import betaincinv, stdtrit  # quantiles; scipy.stats would take a second to import

from wellcond.words import Decided, Judgement, Outcome, Verdict

__all__ = [
    "CONFIDENCE",
    "SECOND_LOOK",
    "Interval",
    "Part",
    "Whole",
    "at_least",
    "at_most",
    "clopper_pearson",
    "combine",
    "differences",
    "in_most",
    "interval",
    "judgement",
    "not_run",
    "written",
    "out_of_reach",
    "rank_correlation",
    "reaches",
    "smallest_effect",
    "undecided",
    "within",
]

POWER = 0.8
OUT_OF_REACH: Final = "out of reach here"
NOT_DECIDED = "; not decided: "
DRAWS = 1000  # of a bootstrap
CONFIDENCE = 0.95
"""The confidence of an interval."""
SECOND_LOOK = 0.975
"""The confidence where the first seeds left it undecided and more were added: two looks, each with half the risk."""


@dataclass(frozen=True, kw_only=True)
class Interval:
    """A mean, and where it may lie. Of a single value the interval is everything."""

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
    asked: tuple[float, float] | None = None
    """Where the whole interval has to lie; an end may be infinite."""
    unit: str = ""
    about: tuple[str, ...] = ()
    """Of a comparison of arms, those that it is about, if it is not all of them: it does not wait for the others."""


@dataclass(frozen=True, kw_only=True)
class Whole:
    """The verdict on a claim, with its parts."""

    verdict: Verdict
    parts: tuple[Part, ...]

    def as_json(self) -> dict[str, Any]:
        """The verdict and its parts as evidence files hold them."""
        return {"verdict": self.verdict, "parts": [_part_json(part) for part in self.parts]}


def interval(values: Sequence[float], *, confidence: float = CONFIDENCE) -> Interval:
    """The mean of `values` with its interval by Student's t. ValueError for none, or for a value that is not finite."""
    if not values or not all(math.isfinite(value) for value in values):
        raise ValueError(f"an interval needs finite values, at least one; these are {list(values)}")
    mean = fmean(values)
    if len(values) < 2:
        return Interval(mean=mean, low=-math.inf, high=math.inf, count=1)
    half = _t_quantile((1 + confidence) / 2, len(values) - 1) * _standard_error(values)
    return Interval(mean=mean, low=mean - half, high=mean + half, count=len(values))


def clopper_pearson(failures: int, draws: int, confidence: float = CONFIDENCE) -> tuple[float, float]:
    """The interval of rates under which `failures` of `draws` are not surprising: exact, never too narrow.

    Raises ValueError unless 0 ≤ failures ≤ draws, draws ≥ 1 and 0 < confidence < 1.
    """
    if not 0 <= failures <= draws or draws < 1:
        raise ValueError(f"{failures} failures of {draws} draws make no rate; draw at least once")
    if not 0 < confidence < 1:
        raise ValueError(f"a confidence lies between 0 and 1, not at {confidence}")
    tail = (1 - confidence) / 2
    low = 0.0 if failures == 0 else float(betaincinv(failures, draws - failures + 1, tail))
    high = 1.0 if failures == draws else float(betaincinv(failures + 1, draws - failures, 1 - tail))
    return low, high


def rank_correlation(groups: Sequence[Sequence[tuple[float, float]]], *, confidence: float = CONFIDENCE) -> Interval:
    """Spearman's correlation of all pairs of numbers, with an interval from drawing whole groups anew.

    Pairs of one group, as the blocks and states of one training, are alike, so that they are drawn together
    (a cluster bootstrap, the same for the same numbers). ValueError where all pairs have one value.
    """
    return _rank_correlation(tuple(tuple(map(tuple, group)) for group in groups if len(group)), confidence)


@functools.lru_cache(maxsize=64)  # verdict, finding and figure of a claim ask for the same
def _rank_correlation(groups: tuple[tuple[tuple[float, ...], ...], ...], confidence: float) -> Interval:
    import numpy as np
    from scipy.stats import rankdata

    def correlation(chosen: Sequence[int]) -> float:
        pairs = np.concatenate([parts[index] for index in chosen])
        ranks = rankdata(pairs, axis=0) - (len(pairs) + 1) / 2
        scale = float(np.sqrt((ranks**2).sum(0).prod()))
        return float(ranks.prod(1).sum()) / scale if scale else math.nan

    parts = [np.asarray(group, dtype=float) for group in groups]
    found = correlation(range(len(parts))) if parts else math.nan
    if not math.isfinite(found):
        raise ValueError("a rank correlation needs several pairs, of more than one value each")
    draw = np.random.default_rng(0)
    drawn = [correlation(draw.integers(len(parts), size=len(parts)).tolist()) for _ in range(DRAWS)]
    low, high = np.nanquantile(drawn, [(1 - confidence) / 2, (1 + confidence) / 2]).tolist()
    return Interval(mean=found, low=low, high=high, count=len(parts))


def differences(first: Mapping[int, float], second: Mapping[int, float]) -> list[float]:
    """first − second, seed by seed. ValueError where the seeds are not the same: nothing would be paired."""
    if first.keys() != second.keys():
        raise ValueError(f"seeds {sorted(first)} and {sorted(second)} are not the same; run both arms with one set")
    return [first[seed] - second[seed] for seed in sorted(first)]


def smallest_effect(values: Sequence[float], *, confidence: float = CONFIDENCE) -> float:
    """How far from a bound the true mean has to be for four in five such experiments to decide; inf for one value."""
    if len(values) < 2:
        return math.inf
    free = len(values) - 1
    return (_t_quantile((1 + confidence) / 2, free) + _t_quantile(POWER, free)) * _standard_error(values)


def at_least(
    name: str, values: Sequence[float], bound: float, *, unit: str = "", confidence: float = CONFIDENCE,
    of: str = "seeds",
) -> Part:  # fmt: skip
    """Is the mean at least `bound`? Decided where the whole interval is on one side of it. The values are `of` seeds,
    or of what else was drawn."""
    part = reaches(name, interval(values, confidence=confidence), bound, unit=unit)
    return _with_power(part, values, unit, confidence, of)


def at_most(
    name: str, values: Sequence[float], bound: float, *, unit: str = "", confidence: float = CONFIDENCE,
    of: str = "seeds",
) -> Part:  # fmt: skip
    """Is the mean at most `bound`? The other way round."""
    found, asked = interval(values, confidence=confidence), f"asked: at most {_signed(bound)}{unit}"
    part = _inside(name, found, (-math.inf, bound), asked, unit=unit)
    return _with_power(part, values, unit, confidence, of)


def reaches(name: str, found: Interval, bound: float, *, unit: str = "") -> Part:
    """Is it at least `bound`? As `at_least`, of an interval that is there already."""
    return _inside(name, found, (bound, math.inf), f"asked: at least {_signed(bound)}{unit}", unit=unit)


def within(
    name: str, values: Sequence[float], margin: float, *, around: float = 0.0, unit: str = "",
    confidence: float = CONFIDENCE,
) -> Part:  # fmt: skip
    """Is there no difference, up to `margin`? Shown by the interval inside ± margin, not by a wide one around 0. A
    ratio has none `around` 1."""
    if not margin > 0:
        raise ValueError(f"the margin of an equivalence must be positive, got {margin}")
    found = interval(values, confidence=confidence)
    asked = f"asked: within {f'{around:g} ' if around else ''}± {margin:g}{unit}"
    part = _inside(name, found, (around - margin, around + margin), asked, unit=unit)
    return _with_power(part, values, unit, confidence)


def _inside(name: str, found: Interval, asked: tuple[float, float], said: str, *, unit: str) -> Part:
    """Holds where the whole interval is inside, does not where it is outside."""
    outcome: Decided = "undecided"
    if asked[0] <= found.low and found.high <= asked[1]:
        outcome = "holds"
    elif found.high < asked[0] or asked[1] < found.low:
        outcome = "does not hold"
    return Part(name=name, outcome=outcome, why=f"{found}{unit}, {said}", found=found, asked=asked, unit=unit.strip())


def _with_power(part: Part, values: Sequence[float], unit: str, confidence: float, of: str = "seeds") -> Part:
    """Where it is undecided, what these values could have decided."""
    if part.outcome != "undecided":
        return part
    return replace(part, why=f"{part.why}; {_could_see(values, unit, confidence, of)}")


def in_most(
    name: str, found: Sequence[Interval], bound: float, *, share: float, of: str = "blocks", unit: str = ""
) -> Part:
    """Does the mean reach `bound` in at least this share of the blocks? Each counts by its whole interval.

    Decided where those that surely do are enough, or those that perhaps do are too few.
    """
    need = share * len(found) - 1e-9
    surely, perhaps = sum(one.low >= bound for one in found), sum(one.high >= bound for one in found)
    lowest = min(found, key=lambda one: one.mean)
    why = f"in {surely} of {len(found)} {of}, by the interval of each; the smallest gap is {lowest}"
    outcome: Decided = "holds" if surely >= need else "undecided" if perhaps >= need else "does not hold"
    if outcome == "undecided":
        why += f"; in {perhaps} the interval reaches {bound:g}"
    return Part(name=name, outcome=outcome, why=why, found=lowest, asked=(bound, math.inf), unit=unit)


def undecided(part: Part, why: str) -> Part:
    """The same part, not decided because a rule of the experiment is not met; its numbers stay."""
    if part.outcome == OUT_OF_REACH:
        return part
    joined = "; " if NOT_DECIDED in part.why else NOT_DECIDED
    return replace(part, outcome="undecided", why=f"{part.why}{joined}{why}")


def not_run(name: str) -> Part:
    """A part of a claim without runs."""
    return Part(name=name, outcome="not run", why="no runs yet")


def out_of_reach(name: str, takes: str) -> Part:
    """A part that cannot be tested here, and what that would take."""
    return Part(name=name, outcome=OUT_OF_REACH, why=takes)


def combine(parts: Sequence[Part]) -> Whole:
    """A claim holds if all of it does. One part that fails refutes the whole, and then it counts what is left of it.

    What is out of reach is not judged; beside it the rest, if all of it holds, holds in part."""
    if not parts:
        raise ValueError("a verdict needs at least one part")
    outcomes = {part.outcome for part in parts}
    tested = outcomes - {OUT_OF_REACH}
    verdict: Verdict = judgement(tested) if tested else OUT_OF_REACH
    if verdict == "holds" and tested != outcomes:
        verdict = "holds in part"
    return Whole(verdict=verdict, parts=tuple(parts))


def judgement(outcomes: Collection[str]) -> Judgement:
    """All parts hold; some do and some do not; none does; or nothing was refuted, but not everything was shown."""
    if set(outcomes) == {"holds"}:
        return "holds"
    if "does not hold" not in outcomes:
        return "undecided"
    return "holds in part" if "holds" in outcomes else "does not hold"


def _t_quantile(probability: float, free: int) -> float:
    return float(stdtrit(free, probability))


def _standard_error(values: Sequence[float]) -> float:
    return stdev(values) / math.sqrt(len(values))


def _could_see(values: Sequence[float], unit: str, confidence: float, of: str) -> str:
    effect = smallest_effect(values, confidence=confidence)
    if math.isinf(effect):
        return "one seed can show nothing"
    return f"these {len(values)} {of} could have seen a distance of {effect:.2g}{unit}"


def written(value: float, form: str = "z.1f") -> str:
    """For prose: with a minus, not a hyphen; `z` in the form is no minus before a zero."""
    return f"{value:{form}}".replace("-", "−")


def _signed(value: float) -> str:
    if math.isinf(value):
        return "∞" if value > 0 else "−∞"
    return written(value, ",.0f" if abs(value) >= 1e4 else ".2f")


def _part_json(part: Part) -> dict[str, Any]:
    found = part.found
    numbers = {"mean": found.mean, "low": found.low, "high": found.high, "seeds": found.count} if found else None
    return {"name": part.name, "outcome": part.outcome, "why": part.why, "found": numbers}
