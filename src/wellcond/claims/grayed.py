"""Token Graying for several claims: one arm for each method and ε, and κ before and after attention.

    GRAYED["svd-0.7"], GRAYED["dct-0.95"], GRAYED[PLAIN]        # claims that share an arm share its runs
    kappa_of(result)            # {"epochs": [0.0, 2.5, …], "in": [5.7, …], "out": [5.6, …]}: log κ at a run's marks
    least_falls(found, ["both", "svd-0.9", "svd-0.7"], "out")   # at each mark, for each seed
    other_graying(config, Path("runs/a"))       # {"plain": {"top1": 0.41, …}, "svd-0.7": …}: by graying at test time

A block's input is the output of the block before (`+mlp`) or, for the first block, the embedding (`embed`). Attention's
output is taken after the skip is added (`+sa`). Averaged over blocks, these are κ_in and κ_out of the paper's Table 3.
"""

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from wellcond.claims.arms import GRID
from wellcond.claims.comparison import Arm, Comparison
from wellcond.claims.measurements import register_measurement
from wellcond.claims.runs import Result
from wellcond.models import gray, ungray
from wellcond.train.checkpoint import final_state
from wellcond.train.config import Config
from wellcond.train.processes import Processes
from wellcond.train.setup import data_of
from wellcond.train.tasks import Validation, make_task
from wellcond.verdicts import listed
from wellcond.words import BLOCK_SITES

__all__ = [
    "EPSILONS", "GRAYED", "METHODS", "PLAIN", "QUICK_GRID", "TESTED", "WATCHED", "grayed", "kappa_of", "least_falls",
    "other_graying",
]  # fmt: skip

PLAIN = "both"  # the arm of asa-fig1c with both skips
METHODS = {"svd": "SVD", "dct": "DCT"}
EPSILONS = {"svd": (0.9, 0.8, 0.7, 0.6, 0.5), "dct": (0.97, 0.95, 0.93, 0.9, 0.85)}
"""The ε of Table 3, the mildest first."""
QUICK_GRID: dict[str, tuple[float, ...]] = {**GRID, "smoke": (3e-3,)}
TESTED: dict[str, tuple[str, float] | None] = {"plain": None, "svd-0.7": ("svd", 0.7), "dct-0.95": ("dct", 0.95)}
"""The grayings that `other_graying` tests a trained model with."""
WATCHED: dict[str, dict[str, Any]] = {
    "smoke": {"probe_marks": True, "probe_sites": ["embed", *BLOCK_SITES], "probe_samples": 8}
}
"""Settings that make smoke trainings record κ while they train, as every lab training does."""


def grayed(
    method: str, epsilon: float, *, title: str = "", seeds: int | None = None, measures: tuple[str, ...] = (),
    **settings: Any,
) -> Arm:  # fmt: skip
    title = title or f"{METHODS[method]} ε {epsilon:g}"
    return Arm(title=title, settings={"gray": method, "epsilon": epsilon, **settings}, seeds=seeds, measures=measures)


GRAYED = {
    PLAIN: Arm(title="plain"),
    **{f"{method}-{epsilon:g}": grayed(method, epsilon) for method in METHODS for epsilon in EPSILONS[method]},
}


@register_measurement("other_graying")
def other_graying(config: Config, folder: Path, device: str | None = None) -> dict[str, dict[str, float]]:
    """Return the metrics on the test set of the run in `folder` with each graying of TESTED at test time, whichever it
    was trained with. ValueError without a checkpoint."""
    where = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    data = data_of(config, cache=folder / "cache")
    task = make_task(config, data)
    model = task.build().to(where)
    model.load_state_dict(final_state(folder).weights)
    validation = Validation(config, task, data.val, Processes(rank=0, world=1, device=where))
    found = {}
    for name, how in TESTED.items():
        ungray(model) if how is None else gray(model, how[0], epsilon=how[1], restore_scale=config.restore_scale)
        found[name] = {metric: round(value, 5) for metric, value in validation.of(model).items()}
    return found


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


def changes(found: Comparison, arm: str, where: str) -> dict[int, float]:
    """Return, by seed, by how much log κ at the end of training differs from that of the plain arm."""
    mine, plain = (
        {run["seed"]: run["kappa"][where][-1] for run in found.runs(one) if run.get("kappa")} for one in (arm, PLAIN)
    )
    return {seed: mine[seed] - plain[seed] for seed in sorted(mine.keys() & plain.keys())}


def changed(found: Comparison, arms: Sequence[str], where: str) -> str:
    """Say in words what `changes` there are, with their intervals, for those of the arms that have any."""
    told = {arm: found.interval(by_seed.values()) for arm in arms if (by_seed := changes(found, arm, where))}
    return listed(f"{one.with_unit('')} with {GRAYED[arm].title}" for arm, one in told.items())


def least_falls(found: Comparison, arms: Sequence[str], where: str) -> list[list[float]]:
    """Return, at each mark and for each seed that all arms have, how much log κ falls from one arm to the next: at the
    step whose interval reaches lowest. If κ falls there, it falls at every step.

    The smallest fall of each seed, whichever step that is, would be biased: its mean is below 0 even if every step is a
    small fall. Seeds with a value that is not finite are left out."""
    curves: list[Mapping[int, Sequence[float]]] = [
        {run["seed"]: run["kappa"][where] for run in found.runs(arm) if run.get("kappa")} for arm in arms
    ]
    seeds = sorted(set.intersection(*map(set, curves)))
    seeds = [seed for seed in seeds if all(math.isfinite(value) for curve in curves for value in curve[seed])]

    def lowest(falls: Sequence[float]) -> tuple[float, float]:
        one = found.interval(falls)
        return one.low, one.mean

    values = [list(zip(*(curve[seed] for seed in seeds), strict=True)) for curve in curves]  # by arm, mark and seed
    return [
        min(([before - after for before, after in zip(*step, strict=True)] for step in pairwise(mark)), key=lowest)
        for mark in zip(*values, strict=True)
    ]
