"""A statement in words, and small helpers for saying what was found about it.

STATEMENT = Statement(id="asa-eq6", title=…, claim=…, instead=…, tested=…, not_tested=…)
"""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from wellcond.theory.findings import Case

__all__ = ["Statement", "median", "share"]


@dataclass(frozen=True, kw_only=True)
class Statement:
    """What a paper says, what is true, and what a verdict rests on."""

    id: str
    title: str
    plain: str
    """What came out, for a reader in a hurry."""
    claim: str
    """The paper's statement, with its constants."""
    instead: str
    """The statement that we found to be true in its place, or how the claim may be sharpened."""
    tested: str
    not_tested: str


def median(values: Tensor) -> float:
    return float(values.flatten().median())


def share(cases: Sequence[Case]) -> str:
    """`12 of 400 (3 %)`: the failures of several cases together, among the draws that could be decided."""
    failures = sum(case.failures for case in cases)
    decided = sum(case.draws - case.undecided for case in cases)
    return f"{failures} of {decided} ({100 * failures / decided:.1f} %)" if decided else "none of the (undecidable)"
