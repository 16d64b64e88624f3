"""The words that code, JSON, plots and prose share: sites, skips, statuses and verdicts. They stand here once.

    from wellcond.words import BLOCK_SITES, DEFAULT_SITES, SITES, SKIPS, STATUSES, VERDICTS, Site

This file imports nothing of ours, and nothing but typing, so that everybody may import it.
"""

from typing import Literal, get_args

__all__ = [
    "BLOCK_SITES",
    "BRANCH_SITES",
    "DEFAULT_SITES",
    "ENDS",
    "LEFT_OUT",
    "NO_KAPPA",
    "OUTCOMES",
    "OUTSIDE_SITES",
    "SITES",
    "SKIPS",
    "STATUSES",
    "VERDICTS",
    "Decided",
    "End",
    "Judgement",
    "Outcome",
    "Site",
    "Status",
    "Verdict",
]

OutsideSite = Literal["tokens", "embed"]
BlockSite = Literal["in", "sa", "+sa", "mlp", "+mlp"]
Site = Literal[OutsideSite, BlockSite]
"""Where a row was measured."""

OUTSIDE_SITES: tuple[str, ...] = get_args(OutsideSite)
"""Before the first block: the raw patches, and what the first block reads."""
BLOCK_SITES: tuple[str, ...] = get_args(BlockSite)
"""In a block, in order of execution: what the attention reads; its branch, and the stream after the add; the MLP's."""
SITES = (*OUTSIDE_SITES, *BLOCK_SITES)
"""All of them, in the order of a table's columns."""
DEFAULT_SITES = ("sa", "+sa", "mlp", "+mlp")
"""What is measured unless somebody asks for more."""

SKIPS = ("sa", "mlp")
"""The identity branches of a block: around the attention and around the MLP."""
BRANCH_SITES = SKIPS
"""The sites before the add have the names of the skips that are added there; after it, with a plus: `+sa`, `+mlp`."""

End = Literal["input", "output"]
"""Of a module or of a whole block: what it reads, or what it gives out. No sites, and no rows are about them."""
ENDS: tuple[End, ...] = get_args(End)

Status = Literal["ok", "ceiling", "low_precision", "non_finite", "zero", "single"]
"""What a value is worth."""
STATUSES: tuple[str, ...] = get_args(Status)
"""The order is that of the codes in tensors of statuses (`numerics.singular`)."""
NO_KAPPA: tuple[str, ...] = ("non_finite", "zero", "single")
"""Statuses of values that are no condition numbers."""
LEFT_OUT: tuple[str, ...] = ("non_finite", "zero")
"""Statuses of samples that no mean counts."""

Decided = Literal["holds", "does not hold", "undecided"]
"""What can come out of one test."""
Outcome = Literal[Decided, "out of reach here", "not run"]
"""What can come out of one part of a claim."""
Judgement = Literal["holds", "holds in part", "does not hold", "undecided"]
"""What several tests can add up to."""
Verdict = Literal[Judgement, "out of reach here"]
"""What the ledger says of a claim."""
OUTCOMES: tuple[str, ...] = get_args(Outcome)
VERDICTS: tuple[str, ...] = get_args(Verdict)
