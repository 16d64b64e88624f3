"""The words that code, JSON, plots and prose share, defined once: sites, skips, statuses and verdicts.

    from wellcond.words import BLOCK_SITES, DEFAULT_SITES, SITES, SKIPS, STATUSES, VERDICTS, Site
    our_word("attention"), our_word("+ffn")          # "sa", "+mlp": from what others call them
    meant("skyfomer", ATTENTIONS)                    # "; did you mean skyformer?", for the end of an error

This file imports nothing from wellcond and next to nothing else, so that every module may import it.
"""

import difflib
from collections.abc import Iterable
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
    "meant",
    "our_word",
]

OutsideSite = Literal["tokens", "embed"]
BlockSite = Literal["in", "sa", "+sa", "mlp", "+mlp"]
Site = Literal[OutsideSite, BlockSite]
"""Where a row was measured."""

OUTSIDE_SITES: tuple[str, ...] = get_args(OutsideSite)
"""Before the first block: the raw patches, and what the first block reads."""
BLOCK_SITES: tuple[str, ...] = get_args(BlockSite)
"""In a block, in order of execution: what the attention reads; its branch; the stream after the add; the MLP's two."""
SITES = (*OUTSIDE_SITES, *BLOCK_SITES)
"""All sites, in the order of a table's columns."""
DEFAULT_SITES = ("sa", "+sa", "mlp", "+mlp")
"""The sites that are measured by default."""

SKIPS = ("sa", "mlp")
"""The identity branches of a block: around the attention and around the MLP."""
BRANCH_SITES = SKIPS
"""The sites before the add are named after the skips that are added; those after it have a plus: `+sa`, `+mlp`."""

_OTHERS = {
    "sa": ("attention", "attn", "selfattention", "selfattn", "msa", "mha", "mhsa"),
    "mlp": ("ffn", "ff", "feedforward"),
}

End = Literal["input", "output"]
"""What a module or a whole block reads, or what it returns. These are not sites, and no rows are about them."""
ENDS: tuple[End, ...] = get_args(End)
"""Both ends."""

Status = Literal["ok", "ceiling", "low_precision", "non_finite", "zero", "single"]
"""How far a value can be relied on."""
STATUSES: tuple[str, ...] = get_args(Status)
"""All statuses, in the order of their codes in tensors (`numerics.singular`)."""
NO_KAPPA: tuple[str, ...] = ("non_finite", "zero", "single")
"""Statuses of values that are not condition numbers."""
LEFT_OUT: tuple[str, ...] = ("non_finite", "zero")
"""Statuses of samples that are left out of means."""

Decided = Literal["holds", "does not hold", "undecided"]
"""The possible outcomes of one test."""
Outcome = Literal[Decided, "out of reach here", "not run"]
"""The possible outcomes of one part of a claim."""
Judgement = Literal["holds", "holds in part", "does not hold", "undecided"]
"""The possible results of several tests together."""
Verdict = Literal[Judgement, "out of reach here"]
"""The ledger's verdict on a claim."""
OUTCOMES: tuple[str, ...] = get_args(Outcome)
"""All outcomes of a part."""
VERDICTS: tuple[str, ...] = get_args(Verdict)
"""All verdicts on a claim."""


def our_word(name: str) -> str:
    """Return `sa`, `+sa`, `mlp` or `+mlp` for what others call attention or feed-forward; other names unchanged."""
    plain = name.strip().lower().replace("-", "").replace("_", "").replace(" ", "")
    plus = "+" if plain.startswith("+") else ""
    found = next((ours for ours, theirs in _OTHERS.items() if plain.removeprefix("+") in (ours, *theirs)), None)
    return plus + found if found else name


def meant(name: str, known: Iterable[str], *, most: int = 1) -> str:
    """Return `; did you mean …?` with the known names that are nearest to an unknown one; "" if none is near."""
    known, wanted = list(known), str(name).lower()
    words = [*known, *(word for ours, theirs in _OTHERS.items() if ours in known for word in theirs)]
    near = difflib.get_close_matches(wanted, words, n=most, cutoff=0.5)
    near = near or [word for word in known if len(wanted) > 2 and word.startswith(wanted[:5])][:most]
    found = dict.fromkeys(word if word in known else our_word(word) for word in near)
    return f"; did you mean {', '.join(found)}?" if found else ""
