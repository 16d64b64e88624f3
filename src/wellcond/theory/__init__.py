"""Every bound of both papers, computed: one file per statement, plus functions that are useful on their own.

    from wellcond.theory import STATEMENTS, check, statistical_dimension
    check("asa-prop41").verdict              # "holds in part"

Results: docs/theory.md.
"""

from .findings import Case, Example, Finding
from .leverage import leverage_scores, statistical_dimension, sufficient_landmarks
from .registry import STATEMENTS, check, statement

__all__ = [
    "STATEMENTS",
    "Case",
    "Example",
    "Finding",
    "check",
    "leverage_scores",
    "statement",
    "statistical_dimension",
    "sufficient_landmarks",
]
