"""Token Graying for several claims: one arm for each method and ε, and κ before and after attention.

    GRAYED["svd-0.7"], GRAYED["dct-0.95"], GRAYED[PLAIN]        # claims that share an arm share its runs
    kappa_of(result)            # {"epochs": [0.0, 2.5, …], "in": [5.7, …], "out": [5.6, …]}: log κ at a run's marks
    least_falls(found, ["both", "svd-0.9", "svd-0.7"], "out")   # at each mark, for each seed

A block's input is the output of the block before (`+mlp`) or, for the first block, the embedding (`embed`). Attention's
output is taken after the skip is added (`+sa`). Averaged over blocks, these are κ_in and κ_out of the paper's Table 3.
"""

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from statistics import fmean
from typing import Any

from wellcond.claims.arms import GRID
from wellcond.claims.comparison import Arm, Comparison
from wellcond.claims.runs import Result
from wellcond.words import BLOCK_SITES

__all__ = ["EPSILONS", "GRAYED", "METHODS", "PLAIN", "QUICK_GRID", "WATCHED", "grayed", "kappa_of", "least_falls"]

PLAIN = "both"  # the arm of asa-fig1c with both skips
METHODS = {"svd": "SVD", "dct": "DCT"}
EPSILONS = {"svd": (0.9, 0.8, 0.7, 0.6, 0.5), "dct": (0.97, 0.95, 0.93, 0.9, 0.85)}
"""The ε of Table 3, the mildest first."""
QUICK_GRID: dict[str, tuple[float, ...]] = {**GRID, "smoke": (3e-3,)}
WATCHED: dict[str, dict[str, Any]] = {
    "smoke": {"probe_marks": True, "probe_sites": ["embed", *BLOCK_SITES], "probe_samples": 8}
}
"""Settings that make smoke trainings record κ while they train, as every lab training does."""


def grayed(method: str, epsilon: float, *, title: str = "", seeds: int | None = None, **settings: Any) -> Arm:
    title = title or f"{METHODS[method]} ε {epsilon:g}"
    return Arm(title=title, settings={"gray": method, "epsilon": epsilon, **settings}, seeds=seeds)


GRAYED = {
    PLAIN: Arm(title="plain"),
    **{f"{method}-{epsilon:g}": grayed(method, epsilon) for method in METHODS for epsilon in EPSILONS[method]},
}


def kappa_of(run: Result) -> dict[str, list[float]] | None:
    """Return log κ at blocks' inputs and after attention, at each mark of a finished run; None if not measured."""
    steps, sites = run["measured"]["steps"], run["measured"].get("log_kappa", {})
    embeds, attended, outputs = sites.get("embed"), sites.get("+sa"), sites.get("+mlp")
    if run["status"] != "finished" or not (embeds and attended and outputs):
        return None
    inputs = [[*embed, *blocks[:-1]] for embed, blocks in zip(embeds, outputs, strict=True)]
    return {
        "epochs": [round(run["config"]["epochs"] * step / run["steps"], 3) for step in steps],
        "in": [round(fmean(values), 5) for values in inputs],
        "out": [round(fmean(values), 5) for values in attended],
    }


def least_falls(found: Comparison, arms: Sequence[str], where: str) -> list[list[float]]:
    """Return the smallest fall of log κ from one arm to the next, at each mark and for each seed that all arms have.

    Seeds with a value that is not finite are left out."""
    curves: list[Mapping[int, Sequence[float]]] = [
        {run["seed"]: run["kappa"][where] for run in found.runs(arm) if run.get("kappa")} for arm in arms
    ]
    seeds = sorted(set.intersection(*map(set, curves)))
    seeds = [seed for seed in seeds if all(math.isfinite(value) for curve in curves for value in curve[seed])]
    by_seed = [
        [
            min(higher - lower for higher, lower in pairwise(values))
            for values in zip(*(curve[seed] for curve in curves), strict=True)
        ]
        for seed in seeds
    ]
    return [list(values) for values in zip(*by_seed, strict=True)]
