"""Every bound of both papers, computed: one file per statement, and the functions that they leave to users.

    from wellcond.theory import STATEMENTS, check, statistical_dimension
    check("asa-prop41").verdict              # "holds in part"

What came out: docs/theory.md.
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
