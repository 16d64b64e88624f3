"""What pages use from the evidence: the log κ of its models, and which advice has a verdict.

    like = reference().nearest(tokens=197, width=192)      # the models whose token matrices have the nearest shape
    reference().too_far(1370, 384)                         # a sentence, where not even the nearest are near
    like.trained["sa"]                                     # Band(low=10.5, median=11.7, high=13.2)
    like.about                                             # "11 runs on CIFAR-10, CIFAR-100, …, 65 tokens of …"
    verdict_on("gray")                                     # "we have no verdict yet: asa-table2"

All of it comes from reference.json, which `wellcond ledger` writes from evidence/ and `--check` compares with it.
"""

import functools
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any, NamedTuple

from wellcond.words import VERDICTS

__all__ = ["Band", "Reference", "ReferenceModels", "reference", "verdict_on"]

FILE = "reference.json"
FAR = math.hypot(math.log(4), math.log(4))
"""The distance between two shapes beyond which no band is shown: four times the tokens of four times the width."""


class Band(NamedTuple):
    """log κ of the middle 90 % of the blocks of all runs."""

    low: float
    median: float
    high: float

    def __str__(self) -> str:
        return f"{self.low:.1f} to {self.high:.1f}"


@dataclass(frozen=True, kw_only=True)
class ReferenceModels:
    """Models of one kind and shape in the evidence, and their log κ by site."""

    model: str
    tokens: int
    width: int
    sets: Sequence[str]
    runs: int
    trained: Mapping[str, Band]
    untrained: Mapping[str, Band]

    @property
    def shape(self) -> str:
        return f"{self.tokens} tokens of {self.width} values"

    @property
    def them(self) -> str:
        """What a table calls them."""
        return f"{self.model}s" if self.runs > 1 else self.model

    @property
    def about(self) -> str:
        """How many and what they are, phrased to follow a comma."""
        many = f"{self.runs} runs" if self.runs > 1 else "one run"
        return f"{many} on {', '.join(self.sets)}, {self.shape}"

    def beside(self, shape: tuple[int, int], which: Iterable[str]) -> str:
        """Explain the bands of `which` (trained, untrained) that are shown beside matrices of this shape."""
        tokens, width = shape
        other = f"; here {tokens} of {width}, and κ grows as a matrix gets closer to square"
        other = "" if shape == (self.tokens, self.width) else other
        them = self.them if self.runs > 1 else f"a {self.them}"
        return f"{', '.join(which)}: the middle 90 % of the blocks of {them} in our evidence, {self.about}{other}."


@dataclass(frozen=True, kw_only=True)
class Reference:
    """The content of reference.json."""

    models: Sequence[ReferenceModels]
    """Sorted by number of runs, largest first."""
    advice: Mapping[str, Mapping[str, str]]
    """Advice → the claim that tests it, its verdict and finding."""

    @classmethod
    def of(cls, payload: Mapping[str, Any]) -> "Reference":
        def bands(found: Mapping[str, Sequence[float]]) -> dict[str, Band]:
            return {site: Band(*ends) for site, ends in found.items()}

        models = [
            ReferenceModels(**{**one, "trained": bands(one["trained"]), "untrained": bands(one["untrained"])})
            for one in payload["models"]
        ]
        return cls(models=models, advice=payload["advice"])

    def nearest(self, tokens: int = 0, width: int = 0) -> ReferenceModels | None:
        """Return the models whose matrices are nearest in shape, None if none are near; without a shape, the first.

        The aspect ratio alone would take a small model for a large one: 17 tokens of 64 values for 197 of 768.
        """
        if not tokens or not width:
            return next(iter(self.models), None)
        found = self._nearest(tokens, width)
        return found if found and _distance(found, tokens, width) <= FAR else None

    def too_far(self, tokens: int, width: int) -> str:
        """Say why there are no bands for this shape; empty if there are."""
        found = self._nearest(tokens, width)
        if found is None or self.nearest(tokens, width):
            return ""
        return (
            f"No reference ranges: the nearest models in our evidence have {found.shape}; here {tokens} of {width}, "
            "too far for a comparison, since κ depends on the shape."
        )

    def _nearest(self, tokens: int, width: int) -> ReferenceModels | None:
        return min(self.models, key=lambda one: _distance(one, tokens, width), default=None)


def _distance(models: ReferenceModels, tokens: int, width: int) -> float:
    return math.hypot(math.log(models.tokens / tokens), math.log(models.width / width))


@functools.cache
def reference() -> Reference:
    return Reference.of(json.loads(resources.files("wellcond.report").joinpath(FILE).read_text(encoding="utf-8")))


def verdict_on(advice: str) -> str:
    """Return our verdict on a piece of advice, for the parentheses after it."""
    found = reference().advice[advice]
    if found["verdict"] in VERDICTS:
        return f"our own verdict: {found['verdict']}, {found['claim']}"
    return f"we have no verdict yet: {found['claim']}"
