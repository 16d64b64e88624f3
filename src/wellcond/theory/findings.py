"""A statement in words, and what a check of it returns: cases, minimal examples, a chart, the verdict they lead to.

    statement = Statement(id="asa-eq6", title=…, claim=…, instead=(Fact(key="product", says=…), …), tested=…, …)
    case = compare("Gaussian weights, n = 64", bound, measured, part="claim", n=64, d=32)   # one inequality, many draws
    case = rate("n = 64, δ = 0.1", failures=3, draws=400, allowed=0.1, part="claim")        # a failure rate against δ
    verdict([case, …])                                                                      # "holds in part"

A case belongs to one part. `claim`: within the assumptions that the paper states. `beyond`: where the paper, or common
practice, takes the statement further. `instead`: what we found to be true in its place. The verdict uses only `claim`.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from wellcond.verdicts import clopper_pearson, judgement
from wellcond.words import Decided, Judgement

__all__ = [
    "Case",
    "Example",
    "Fact",
    "Finding",
    "Line",
    "Lines",
    "Part",
    "Statement",
    "compare",
    "median",
    "rate",
    "share",
    "verdict",
]

Part = Literal["claim", "beyond", "instead"]

SEEN = 1e10  # beyond this, rounding in a chain of float64 products decides κ: it counts as "at least this"
SLACK = 1e-9  # relative; if a bound is attained, rounding must not look like a violation


@dataclass(frozen=True, kw_only=True)
class Fact:
    """Something true in place of a claim, or beside it: a theorem if it has a proof, otherwise an observation."""

    says: str
    proof: str = ""
    key: str = ""
    """For a theorem: the cases that check it have this key as their setting `fact`."""

    @property
    def mark(self) -> str:
        return "theorem" if self.proof else "observed"

    def as_dict(self) -> dict[str, str]:
        """Return a dictionary for a JSON file."""
        return {"mark": self.mark, "says": self.says, "proof": self.proof, "key": self.key}


@dataclass(frozen=True, kw_only=True)
class Statement:
    """What a paper says, what is true, and what a verdict rests on."""

    id: str
    title: str
    plain: str
    """The outcome, for readers in a hurry."""
    claim: str
    """The paper's statement, with its assumptions and constants."""
    instead: tuple[Fact, ...]
    """What is true in its place, or how the claim may be sharpened."""
    tested: str
    not_tested: str

    def as_dict(self) -> dict[str, Any]:
        """Return a dictionary for a JSON file, without the id, which the finding has."""
        words = {name: getattr(self, name) for name in ("title", "plain", "claim", "tested", "not_tested")}
        return {**words, "instead": [fact.as_dict() for fact in self.instead]}


@dataclass(frozen=True, kw_only=True)
class Case:
    """One setting, many draws."""

    name: str
    part: Part
    bound: float
    """For an inequality, the median bound; for a failure rate, the allowed rate δ."""
    measured: float
    """For an inequality, the median of what is bounded; for a failure rate, the rate."""
    margin: float
    """Bound over measured in the worst draw; for a rate, δ over the upper end of its interval. Below 1, not shown."""
    draws: int
    failures: int
    """Draws in which the inequality is violated, or in which the event of bounded probability happens."""
    undecided: int
    """Draws in which both sides are beyond what float64 can resolve."""
    interval: tuple[float, float]
    """95 % interval (Clopper-Pearson) of the probability of a failure."""
    outcome: Decided
    settings: Mapping[str, Any] = field(default_factory=dict)
    """n, d and the like, and numbers that explain the case."""


@dataclass(frozen=True, kw_only=True)
class Example:
    """The smallest matrices that show a point, with both sides of the inequality computed."""

    title: str
    text: str
    matrices: Mapping[str, Sequence[Sequence[float]]]
    bound: float
    measured: float


@dataclass(frozen=True, kw_only=True)
class Line:
    name: str
    x: Sequence[float]
    y: Sequence[float]
    dashed: bool = False
    """Bounds are dashed, measurements are not."""


@dataclass(frozen=True, kw_only=True)
class Lines:
    """A chart as data, to be drawn elsewhere."""

    title: str
    x: str
    y: str
    log_x: bool = False
    log_y: bool = False
    lines: Sequence[Line]
    caption: str


@dataclass(frozen=True, kw_only=True)
class Finding:
    """Everything that was found about one statement."""

    statement: str
    verdict: Judgement
    headline: Case
    """The case inside the claim with the smallest margin."""
    findings: Sequence[str]
    """What was found, in plain sentences with the measured numbers."""
    cases: Sequence[Case]
    examples: Sequence[Example]
    chart: Lines
    draws: int
    trained: str
    """Which trained matrices were used, or why none."""

    def as_dict(self) -> dict[str, Any]:
        """Return a dictionary for a JSON file."""
        return asdict(self)


def compare(
    name: str,
    bound: Tensor,
    measured: Tensor,
    *,
    part: Part,
    slack: float = SLACK,
    strict: bool = False,
    **settings: Any,
) -> Case:
    """Check measured ≤ bound in every draw (`strict`: <). Infinity means "beyond float64"; NaN raises ValueError."""
    bound, measured = torch.broadcast_tensors(bound.double(), measured.double())
    bound, measured = bound.flatten(), measured.flatten()
    if bool(bound.isnan().any() | measured.isnan().any()):
        raise ValueError(f"{name}: a bound or a measured value is NaN; a draw was not finite")
    seen = measured.clamp_max(SEEN)
    blind = (bound > SEEN) & (measured > SEEN)
    # κ of a product in float64 has a relative error of about eps·κ.
    room = 0.0 if strict else slack + 64 * torch.finfo(torch.float64).eps * seen
    violated = (seen >= bound) if strict else (seen > bound * (1 + room))
    violated &= ~blind
    failures, draws, unseen = int(violated.sum()), measured.numel(), int(blind.sum())
    ratios = torch.where(blind, math.inf, bound / seen)
    outcome: Decided = "does not hold" if failures else "undecided" if unseen == draws else "holds"
    return Case(
        name=name,
        part=part,
        bound=float(bound.median()),
        measured=float(measured.median()),
        margin=float(ratios.min()),
        draws=draws,
        failures=failures,
        undecided=unseen,
        interval=clopper_pearson(failures, draws - unseen) if draws > unseen else (0.0, 1.0),
        outcome=outcome,
        settings=settings,
    )


def rate(name: str, *, failures: int, draws: int, allowed: float, part: Part, **settings: Any) -> Case:
    """Check that an event has probability at most `allowed`: shown, refuted or left open by its 95 % interval."""
    low, high = clopper_pearson(failures, draws)
    outcome: Decided = "holds" if high <= allowed else "does not hold" if low > allowed else "undecided"
    return Case(
        name=name,
        part=part,
        bound=allowed,
        measured=failures / draws,
        margin=allowed / high,
        draws=draws,
        failures=failures,
        undecided=0,
        interval=(low, high),
        outcome=outcome,
        settings=settings,
    )


def verdict(cases: Iterable[Case]) -> Judgement:
    """Return the verdict on the cases inside the claim; see `wellcond.verdicts.judgement`."""
    outcomes = {case.outcome for case in cases if case.part == "claim"}
    if not outcomes:
        raise ValueError("there is no case inside the claim to judge by")
    return judgement(outcomes)


def median(values: Tensor) -> float:
    return float(values.flatten().median())


def share(cases: Sequence[Case]) -> str:
    """Format the failures of several cases together, among the draws that could be decided: `12 of 400 (3.0 %)`."""
    failures = sum(case.failures for case in cases)
    decided = sum(case.draws - case.undecided for case in cases)
    if not decided:
        return "none of the (undecidable)"
    percent = 100 * failures / decided
    return (
        f"{failures} of {decided} ({percent:.2g} %)"
        if 0 < percent < 1
        else f"{failures} of {decided} ({percent:.1f} %)"
    )
