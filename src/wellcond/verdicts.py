"""From numbers to a verdict: paired seeds, means with intervals, equivalence, and how parts combine to a whole.

    gain = interval([0.4, 0.7, 0.5])                     # mean, low, high: Student's t, since seeds are few
    part = at_least("drop(sa) ≥ 3 × drop(mlp)", [16.1, 15.2, 17.0], 0.0)     # decided by the interval, not by the mean
    part = at_most("a ratio", [0.8, 0.7, 0.9], 1.0)
    part = within("no difference", [0.2, -0.1, 0.3], 1.0)                    # equivalence: the interval inside ± 1
    combine([part, …]).verdict                                               # "holds in part"
    clopper_pearson(0, 400)                              # (0.0, 0.0092): the exact interval of a rate
    rank_correlation([[(1, 2), (2, 3)], …])              # Spearman's, of pairs that come in groups, with its interval

A part is decided if its whole interval lies on one side of the bound. Otherwise it is undecided, and states the
smallest effect that these runs would have detected four times out of five. Theory and claims share these words.
"""

import functools
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from statistics import fmean, stdev
from typing import Any, Final

from scipy.special import betaincinv, stdtrit  # quantiles; scipy.stats would take a second to import

from wellcond.words import Decided, Judgement, Outcome, Verdict

__all__ = [
    "CONFIDENCE",
    "ONE_SEED",
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
    "listed",
    "not_run",
    "written",
    "out_of",
    "out_of_reach",
    "rank_correlation",
    "reaches",
    "resampled",
    "smallest_effect",
    "stays_below",
    "undecided",
    "within",
]

POWER = 0.8
OUT_OF_REACH: Final = "out of reach here"
NOT_DECIDED = "; not decided: "
DRAWS = 1000  # bootstrap samples
ONE_SEED = " (one seed)"
"""What follows a number that has no interval."""
CONFIDENCE = 0.95
"""The default confidence of an interval."""
SECOND_LOOK = 0.975
"""The confidence if the first seeds left it undecided and more were added: two looks, each with half the risk."""


@dataclass(frozen=True, kw_only=True)
class Interval:
    """A mean with its confidence interval, which is infinite for a single value."""

    mean: float
    low: float
    high: float
    count: int

    def __str__(self) -> str:
        return self.with_unit("")

    def with_unit(self, unit: str) -> str:
        """Return it in words, with a unit that brings its own space: 47.15 [46.41, 47.89] %."""
        if self.count < 2:
            return f"{_signed(self.mean)}{unit}{ONE_SEED}"
        return f"{_signed(self.mean)} [{_signed(self.low)}, {_signed(self.high)}]{unit}"


@dataclass(frozen=True, kw_only=True)
class Part:
    """One statement within a claim: what was asked, the outcome, and the numbers for it."""

    name: str
    outcome: Outcome
    why: str
    found: Interval | None = None
    asked: tuple[float, float] | None = None
    """Where the whole interval has to lie; an end may be infinite."""
    unit: str = ""
    about: tuple[str, ...] = ()
    """In a comparison of arms, those that it is about, if not all of them: it does not wait for the others."""


@dataclass(frozen=True, kw_only=True)
class Whole:
    """The verdict on a claim, with its parts."""

    verdict: Verdict
    parts: tuple[Part, ...]

    def as_json(self) -> dict[str, Any]:
        """Return the verdict and its parts in the form of evidence files."""
        return {"verdict": self.verdict, "parts": [_part_json(part) for part in self.parts]}


def interval(values: Collection[float], *, confidence: float = CONFIDENCE) -> Interval:
    """Return the mean of `values` with its interval by Student's t. ValueError if empty or if a value is not finite."""
    if not values or not all(math.isfinite(value) for value in values):
        raise ValueError(f"an interval needs finite values, at least one; these are {list(values)}")
    mean = fmean(values)
    if len(values) < 2:
        return Interval(mean=mean, low=-math.inf, high=math.inf, count=1)
    half = _t_quantile((1 + confidence) / 2, len(values) - 1) * _standard_error(values)
    return Interval(mean=mean, low=mean - half, high=mean + half, count=len(values))


def clopper_pearson(failures: int, draws: int, confidence: float = CONFIDENCE) -> tuple[float, float]:
    """Return the Clopper-Pearson interval of a rate, given `failures` of `draws`: exact, never too narrow.

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


def rank_correlation(groups: Sequence[Sequence[tuple[float, ...]]], *, confidence: float = CONFIDENCE) -> Interval:
    """Return Spearman's correlation of all pairs of numbers, with an interval from resampling whole groups.

    Pairs of one group, such as the blocks and states of one training, are alike, so they are drawn together
    (a cluster bootstrap, the same for the same numbers); a single group has an infinite interval. Of triples, the third
    numbers are held constant: a partial correlation. Raises ValueError if all pairs have one value, or the third
    numbers tell one of the others.
    """
    return _rank_correlation(tuple(tuple(map(tuple, group)) for group in groups if len(group)), confidence)


@functools.lru_cache(maxsize=64)  # verdict, finding and figure of a claim need the same
def _rank_correlation(groups: tuple[tuple[tuple[float, ...], ...], ...], confidence: float) -> Interval:
    import numpy as np
    from scipy.stats import rankdata

    def correlation(pairs: Any) -> float:
        ranks = rankdata(pairs, axis=0) - (len(pairs) + 1) / 2
        sizes = (ranks**2).sum(0)
        for given in range(2, ranks.shape[1]):
            ranks[:, :2] -= ranks[:, [given]] * (ranks[:, [given]] * ranks[:, :2]).sum(0) / (sizes[given] or 1.0)
        left = (ranks[:, :2] ** 2).sum(0)
        told = (left <= 1e-9 * sizes[:2]).any()
        return math.nan if told else float(ranks[:, :2].prod(1).sum() / np.sqrt(left.prod()))

    found = resampled(groups, correlation, confidence=confidence)
    if not math.isfinite(found.mean):
        raise ValueError("a rank correlation needs several pairs, of more than one value each")
    return found


def resampled(
    groups: Sequence[Sequence[tuple[float, ...]]], statistic: Callable[[Any], float], *, confidence: float = CONFIDENCE
) -> Interval:
    """Return a statistic of all rows of numbers, with its interval from resampling whole groups of them.

    `statistic` gets an array of rows. It may return nan for a sample that it cannot tell anything of. A single group
    has an infinite interval, for nothing is known of the spread between groups.
    """
    import numpy as np

    parts = [np.asarray(group, dtype=float) for group in groups]
    found = statistic(np.concatenate(parts)) if parts else math.nan
    if len(parts) < 2 or not math.isfinite(found):
        mean = found if math.isfinite(found) else math.nan
        return Interval(mean=mean, low=-math.inf, high=math.inf, count=len(parts))
    draw = np.random.default_rng(0)
    chosen = (draw.integers(len(parts), size=len(parts)).tolist() for _ in range(DRAWS))
    drawn = [statistic(np.concatenate([parts[index] for index in indices])) for indices in chosen]
    low, high = np.nanquantile(drawn, [(1 - confidence) / 2, (1 + confidence) / 2]).tolist()
    return Interval(mean=found, low=low, high=high, count=len(parts))


def differences(first: Mapping[int, float], second: Mapping[int, float]) -> list[float]:
    """Return first − second, seed by seed. Raises ValueError if the seeds differ: nothing would be paired."""
    if first.keys() != second.keys():
        raise ValueError(f"seeds {sorted(first)} and {sorted(second)} are not the same; run both arms with one set")
    return [first[seed] - second[seed] for seed in sorted(first)]


def smallest_effect(values: Collection[float], *, confidence: float = CONFIDENCE) -> float:
    """Return how far from a bound the true mean must be for 4 in 5 such experiments to decide; inf for one value."""
    if len(values) < 2:
        return math.inf
    free = len(values) - 1
    return (_t_quantile((1 + confidence) / 2, free) + _t_quantile(POWER, free)) * _standard_error(values)


def at_least(
    name: str, values: Collection[float], bound: float, *, unit: str = "", confidence: float = CONFIDENCE,
    of: str = "seeds", about: tuple[str, ...] = (),
) -> Part:  # fmt: skip
    """Test whether the mean is at least `bound`: decided if the whole interval is on one side of it, not run if there
    are no values. `of`: what there is one value of, seeds or whatever was drawn. `about`: as in `Part`."""
    judge = functools.partial(reaches, name, bound=bound, unit=unit)
    return _by_values(name, values, judge, unit, confidence, of, about)


def at_most(
    name: str, values: Collection[float], bound: float, *, unit: str = "", confidence: float = CONFIDENCE,
    of: str = "seeds", about: tuple[str, ...] = (),
) -> Part:  # fmt: skip
    """Test whether the mean is at most `bound`, like `at_least`."""
    judge = functools.partial(stays_below, name, bound=bound, unit=unit)
    return _by_values(name, values, judge, unit, confidence, of, about)


def reaches(name: str, found: Interval, bound: float, *, unit: str = "") -> Part:
    """Test whether a mean is at least `bound`, like `at_least`, given its interval."""
    return _inside(name, found, (bound, math.inf), f"asked: at least {_signed(bound)}{unit}", unit=unit)


def stays_below(name: str, found: Interval, bound: float, *, unit: str = "") -> Part:
    """Test whether a mean is at most `bound`, like `at_most`, given its interval."""
    return _inside(name, found, (-math.inf, bound), f"asked: at most {_signed(bound)}{unit}", unit=unit)


def within(
    name: str, values: Collection[float], margin: float, *, around: float = 0.0, unit: str = "",
    confidence: float = CONFIDENCE, about: tuple[str, ...] = (),
) -> Part:  # fmt: skip
    """Test whether there is no difference, up to `margin`. The whole interval has to lie inside ± margin; a wide one
    around 0 shows nothing. For a ratio, no difference is `around` 1. Not run if there are no values."""
    if not margin > 0:
        raise ValueError(f"the margin of an equivalence must be positive, got {margin}")
    said = f"asked: within {f'{around:g} ' if around else ''}± {margin:g}{unit}"
    judge = functools.partial(_inside, name, asked=(around - margin, around + margin), said=said, unit=unit)
    return _by_values(name, values, judge, unit, confidence, "seeds", about)


def _inside(name: str, found: Interval, asked: tuple[float, float], said: str, *, unit: str) -> Part:
    """Return a part that holds if the whole interval is inside `asked`, and does not hold if it is outside."""
    outcome: Decided = "undecided"
    if asked[0] <= found.low and found.high <= asked[1]:
        outcome = "holds"
    elif found.high < asked[0] or asked[1] < found.low:
        outcome = "does not hold"
    why = f"{found.with_unit(unit)}, {said}"
    return Part(name=name, outcome=outcome, why=why, found=found, asked=asked, unit=unit.strip())


def _by_values(
    name: str, values: Collection[float], judge: Callable[[Interval], Part], unit: str, confidence: float, of: str,
    about: tuple[str, ...],
) -> Part:  # fmt: skip
    """Judge the interval of the values; if that leaves it undecided, say what they could have decided."""
    if not values:
        return not_run(name)
    part = judge(interval(values, confidence=confidence))
    power = f"; {_could_see(values, unit, confidence, of)}" if part.outcome == "undecided" else ""
    return replace(part, why=f"{part.why}{power}", about=about)


def in_most(
    name: str, found: Sequence[Interval], bound: float, *, share: float, of: str = "blocks", unit: str = "",
    about: tuple[str, ...] = (),
) -> Part:  # fmt: skip
    """Test whether the mean reaches `bound` in at least this share of the blocks, each judged by its whole interval.

    Decided if those that surely reach it are enough, or those that possibly do are too few; not run without blocks. The
    part's interval is that of the block on which it hangs: the worst of the best so many.
    """
    if not found:
        return not_run(name)
    need = math.ceil(share * len(found) - 1e-9)
    surely, perhaps = sum(one.low >= bound for one in found), sum(one.high >= bound for one in found)
    lowest = min(found, key=lambda one: one.mean)
    why = f"in {surely} of {len(found)} {of}, by the interval of each; the smallest gap is {lowest}"
    outcome: Decided = "holds" if surely >= need else "undecided" if perhaps >= need else "does not hold"
    if outcome == "undecided":
        why += f"; in {perhaps} the interval reaches {bound:g}"
    ends = {"holds": "low", "does not hold": "high", "undecided": "mean"}
    deciding = sorted(found, key=attrgetter(ends[outcome]), reverse=True)[need - 1]
    shown = deciding if math.isfinite(deciding.mean) else lowest
    return Part(name=name, outcome=outcome, why=why, found=shown, asked=(bound, math.inf), unit=unit, about=about)


def undecided(part: Part, why: str) -> Part:
    """Return the part as undecided, because a rule of the experiment is not met; its numbers stay."""
    if part.outcome == OUT_OF_REACH:
        return part
    joined = "; " if NOT_DECIDED in part.why else NOT_DECIDED
    return replace(part, outcome="undecided", why=f"{part.why}{joined}{why}")


def not_run(name: str) -> Part:
    """Return a part of a claim that has no runs."""
    return Part(name=name, outcome="not run", why="no runs yet")


def out_of_reach(name: str, takes: str) -> Part:
    """Return a part that cannot be tested here, with what that would take."""
    return Part(name=name, outcome=OUT_OF_REACH, why=takes)


def combine(parts: Sequence[Part]) -> Whole:
    """Return the verdict on a claim, which holds if all parts do. If one fails, it holds in part if another holds.

    Parts that are out of reach are not judged: if all others hold, the claim holds in part."""
    if not parts:
        raise ValueError("a verdict needs at least one part")
    outcomes = {part.outcome for part in parts}
    tested = outcomes - {OUT_OF_REACH}
    verdict: Verdict = judgement(tested) if tested else OUT_OF_REACH
    if verdict == "holds" and tested != outcomes:
        verdict = "holds in part"
    return Whole(verdict=verdict, parts=tuple(parts))


def judgement(outcomes: Collection[str]) -> Judgement:
    """Return whether all parts hold, some do and some do not, none does, or none is refuted but not all are shown."""
    if set(outcomes) == {"holds"}:
        return "holds"
    if "does not hold" not in outcomes:
        return "undecided"
    return "holds in part" if "holds" in outcomes else "does not hold"


def _t_quantile(probability: float, free: int) -> float:
    return float(stdtrit(free, probability))


def _standard_error(values: Collection[float]) -> float:
    return stdev(values) / math.sqrt(len(values))


def _could_see(values: Collection[float], unit: str, confidence: float, of: str) -> str:
    effect = smallest_effect(values, confidence=confidence)
    if math.isinf(effect):
        return "one seed can show nothing"
    return f"these {len(values)} {of} could have seen a distance of {effect:.2g}{unit}"


def written(value: float, form: str = "z.1f") -> str:
    """Format a number for prose: with a minus sign, not a hyphen; `z` in `form` means no minus before a zero."""
    return f"{value:{form}}".replace("-", "−")


def listed(words: Iterable[str]) -> str:
    """Return words in prose: a, b and c."""
    listed = list(words)
    return " and ".join([", ".join(listed[:-1]), listed[-1]]) if len(listed) > 1 else "".join(listed)


def out_of(some: int, of: int) -> str:
    """Return a count in prose: none of 5, 4 of 5, all 5."""
    return f"all {of}" if some == of > 1 else f"{some or 'none'} of {of}"


def _signed(value: float) -> str:
    if math.isinf(value):
        return "∞" if value > 0 else "−∞"
    return written(value, ",.0f" if abs(value) >= 1e3 else ".2f")


def _part_json(part: Part) -> dict[str, Any]:
    found = part.found
    numbers = {"mean": found.mean, "low": found.low, "high": found.high, "seeds": found.count} if found else None
    return {"name": part.name, "outcome": part.outcome, "why": part.why, "found": numbers}
