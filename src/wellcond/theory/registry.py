"""The statements by id, and how to check one.

    STATEMENTS                                          # asa-prop41, …, sky-lemma3, in the papers' order
    finding = check("asa-eq6", draws=400, seed=0)       # cases, examples, chart, verdict
    finding.verdict, finding.headline.margin

The same seed and draws give the same finding. Statements do not share random numbers, so checking one alone gives the
same result as checking all of them.
"""

import importlib
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType

from wellcond.theory.findings import Case, Finding, Statement, verdict
from wellcond.theory.trained import describe, read_blocks

__all__ = ["DRAWS", "STATEMENTS", "check", "statement"]

DRAWS = 400
STATEMENTS: dict[str, str] = {
    "asa-prop41": "asa_prop41",
    "asa-prop42": "asa_prop42",
    "asa-eq6": "asa_eq6",
    "asa-eq24": "asa_eq24",
    "sky-lemma1": "sky_lemma1",
    "sky-lemmaC1": "sky_lemma_c1",
    "sky-lemmaC2": "sky_lemma_c2",
    "sky-theorem2": "sky_theorem2",
    "sky-lemma3": "sky_lemma3",
}  # fmt: skip
"""Every statement by its id, and the module that checks it."""


def statement(name: str) -> Statement:
    """Return what the statement says. Raises ValueError for an unknown id, and lists the known ones."""
    return _module(name).STATEMENT


def check(
    name: str,
    *,
    draws: int = DRAWS,
    seed: int = 0,
    trained: Sequence[str | Path] = (),
    on_case: Callable[[Case], None] | None = None,
) -> Finding:
    """Check one statement.

    Args:
        draws: draws per case; a few expensive cases use fewer, and record how many.
        trained: files for `wellcond.theory.trained`; without any, no trained weights are used, and the finding says so.
        on_case: called after each case, for a progress bar.

    Raises ValueError for an unknown id, fewer than 40 draws, or a file that holds no blocks.
    """
    module = _module(name)
    if draws < 40:
        raise ValueError(f"{draws} draws cannot show a failure rate below 0.1; take 40 or more")
    blocks = read_blocks(trained)
    cases: list[Case] = []
    for case in module.cases(draws, seed, blocks):
        cases.append(case)
        if on_case is not None:
            on_case(case)
    chart = module.chart(draws, seed)
    used = any("trained" in case.name for case in cases)
    return Finding(
        statement=name,
        verdict=verdict(cases),
        headline=_headline(cases),
        findings=module.summary(cases, chart),
        cases=cases,
        examples=module.examples(),
        chart=chart,
        draws=draws,
        trained=describe(trained) if used or not trained else "not used here",
    )


def _headline(cases: Sequence[Case]) -> Case:
    """Return the case of the claim with the smallest margin."""
    return min((case for case in cases if case.part == "claim"), key=lambda case: (case.margin, math.inf))


def _module(name: str) -> ModuleType:
    if name not in STATEMENTS:
        raise ValueError(f"unknown statement {name!r}; there are {', '.join(STATEMENTS)}")
    return importlib.import_module(f"wellcond.theory.{STATEMENTS[name]}")
