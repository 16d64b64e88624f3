"""A statement in words, and small helpers to describe what was found about it.

STATEMENT = Statement(id="asa-eq6", title=…, claim=…, instead=(Fact(key="product", says=…, proof=…), …), tested=…, …)
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from wellcond.theory.findings import Case

__all__ = ["Fact", "Statement", "median", "share"]


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
