"""The words that code, JSON, plots and prose share: sites, skips, statuses and verdicts. They stand here once.

    from wellcond.words import BLOCK_SITES, DEFAULT_SITES, SITES, SKIPS, STATUSES, VERDICTS, Site
    our_word("attention"), our_word("+ffn")          # "sa", "+mlp": what others call them
    meant("skyfomer", ATTENTIONS)                    # "; did you mean skyformer?", for the end of an error

This file imports nothing of ours, and next to nothing of others, so that everybody may import it.
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
"""In a block, in order of execution: what the attention reads; its branch, and the stream after the add; the MLP's."""
SITES = (*OUTSIDE_SITES, *BLOCK_SITES)
"""All of them, in the order of a table's columns."""
DEFAULT_SITES = ("sa", "+sa", "mlp", "+mlp")
"""What is measured unless somebody asks for more."""

SKIPS = ("sa", "mlp")
"""The identity branches of a block: around the attention and around the MLP."""
BRANCH_SITES = SKIPS
"""The sites before the add have the names of the skips that are added there; after it, with a plus: `+sa`, `+mlp`."""

_OTHERS = {
    "sa": ("attention", "attn", "selfattention", "selfattn", "msa", "mha", "mhsa"),
    "mlp": ("ffn", "ff", "feedforward"),
}

End = Literal["input", "output"]
"""Of a module or of a whole block: what it reads, or what it gives out. No sites, and no rows are about them."""
ENDS: tuple[End, ...] = get_args(End)
"""Both."""

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
"""All outcomes of a part, by their words."""
VERDICTS: tuple[str, ...] = get_args(Verdict)
"""All verdicts, by their words."""


def our_word(name: str) -> str:
    """`sa`, `+sa`, `mlp` or `+mlp` for what others call attention or feed-forward; any other name as it is."""
    plain = name.strip().lower().replace("-", "").replace("_", "").replace(" ", "")
    plus = "+" if plain.startswith("+") else ""
    found = next((ours for ours, theirs in _OTHERS.items() if plain.removeprefix("+") in (ours, *theirs)), None)
    return plus + found if found else name


def meant(name: str, known: Iterable[str], *, most: int = 1) -> str:
    """`; did you mean …?` for a name that is not among the known ones, with the nearest of them; "" if none is near."""
    known, wanted = list(known), str(name).lower()
    words = [*known, *(word for ours, theirs in _OTHERS.items() if ours in known for word in theirs)]
    near = difflib.get_close_matches(wanted, words, n=most, cutoff=0.5)
    near = near or [word for word in known if len(wanted) > 2 and word.startswith(wanted[:5])][:most]
    found = dict.fromkeys(word if word in known else our_word(word) for word in near)
    return f"; did you mean {', '.join(found)}?" if found else ""
