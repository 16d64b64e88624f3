"""What runs look like early, and how they end: a row for every finished run of any claim.

    measure(options)["rows"]                    # [{"set": "tiny-imagenet", "arm": "both", "lr": 0.001, …}, …]
    arms_of(rows, "start")                      # {Group(…): [ArmAtRate(…), …]}: seeds averaged, arms of equal budget

Every training of a claim measures its model at its random start and at marks, the first after 5 % of its steps. Here
each quantity has one number at a mark: the mean over blocks, of the largest logit the maximum. The loss is that of the
batch at the mark.
"""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, NamedTuple

from wellcond.claims.claim import Options
from wellcond.claims.runs import ELSEWHERE, Result
from wellcond.train.config import Config

__all__ = ["MARKS", "QUANTITIES", "ArmAtRate", "Group", "arms_of", "diverges", "measure", "rows_of"]

MARKS = {"start": "at the random start", "early": "after 5 % of training"}
QUANTITIES = {
    "log_kappa": "log κ(+sa)",
    "log_kappa_sa": "log κ(sa)",
    "gradient_norm": "the gradient's norm",
    "attention_entropy": "attention entropy",
    "largest_logit": "the largest logit",
    "near_unit_share": "the share of near-unit eigenvalues",
    "loss": "the training loss",
}
_SITES = {"log_kappa": ("log_kappa", "+sa"), "log_kappa_sa": ("log_kappa", "sa"), "attention_entropy": ("", "sa"),
          "largest_logit": ("", "sa"), "near_unit_share": ("", "+mlp")}  # fmt: skip
NEAR_START = 0.01
"""How far above its start, as a share of it, a loss must end to count as diverged: one batch differs from another."""


class Group(NamedTuple):
    """Trainings that can be compared: equal in set, recipe, skips and budget."""

    set: str
    recipe: str
    skips: str
    """The skips that were removed: sa, sa and mlp, or none."""
    budget: str
    """10 epochs, or 50,000 steps."""
    mixed: bool
    held_out: bool
    """Whether a part of the training set was held out, to choose a learning rate by."""


@dataclass(frozen=True)
class ArmAtRate:
    """One arm at one learning rate: means over its seeds."""

    arm: str
    lr: float
    seeds: int
    log_kappa: float
    loss: float
    top1: float


def measure(options: Options) -> dict[str, Any]:
    """Return the rows of all runs of this scale, and the names of those that diverged without having one: what the
    claims that are made of them measure."""
    results = options.results("*/*/*/*")
    unseen = [run["name"] for run in results if run["status"] == "diverged" and not _measured(run)]
    return {"rows": rows_of(results), "diverged, κ not measured": unseen}


def rows_of(results: Iterable[Result]) -> list[dict[str, Any]]:
    """Return a row for each run that measured log κ while it trained. Pre-trainings have no accuracy, and no row.

    Arms that differ only in the learning rate are one arm, under the name that comes first."""
    rows, names = list[dict[str, Any]](), dict[str, str]()
    for run in results:
        if _measured(run) and run["config"].get("task") != "mae":
            row = _row(run)
            rows.append(row | {"arm": names.setdefault(_trained_as(row["set"], run["config"]), row["arm"])})
    return rows


def _trained_as(set_: str, config: Mapping[str, Any]) -> str:
    """Return all that a training depends on but its rate and its seed."""
    settings = {**Config().as_json(), **config}  # a setting added later had its default
    return json.dumps([set_, {name: settings[name] for name in sorted(settings.keys() - ELSEWHERE - {"lr", "seed"})}])


def _measured(run: Result) -> bool:
    return bool(run["measured"].get("log_kappa", {}).get("+sa") and run["losses"])


def diverges(row: Mapping[str, Any]) -> bool:
    """Whether a run was given up, or its loss ended above its start."""
    first, last = row["losses"]
    return row["status"] == "diverged" or not last < first * (1 + NEAR_START)


def _row(run: Result) -> dict[str, Any]:
    config, losses = run["config"], run["losses"]
    set_, recipe, arm, name = run["name"].split("/")
    tenth = losses[-max(1, len(losses) // 10) :]
    return {
        "set": set_,
        "recipe": recipe,
        "arm": arm,
        "run": name,
        "lr": config["lr"],
        "seed": config["seed"],
        "skips": " and ".join(config["remove_skips"] or ()) or "none",
        "budget": f"{config['steps']:,} steps" if config.get("steps") else f"{config['epochs']} epochs",
        "mixed": bool(config["mixup"] or config["cutmix"]),
        "held out": bool(config["holdout"]),
        "status": run["status"],
        "losses": [losses[0][1], fmean(loss for _, loss in tenth)],
        "top1": round(100 * run["metrics"]["top1"], 3) if "top1" in (run["metrics"] or {}) else None,
        **{mark: _at(run, number) for number, mark in enumerate(MARKS)},
        **({"start": dict.fromkeys(QUANTITIES)} if run.get("start") else {}),  # it does not start at random
    }


def _at(run: Result, mark: int) -> dict[str, float | None]:
    """Return every quantity at a mark, None where it was not measured or is not finite."""
    measured = run["measured"]
    if mark >= len(measured["steps"]):
        return dict.fromkeys(QUANTITIES)
    found: dict[str, float | None] = {"gradient_norm": _value(measured.get("gradient_norm", []), mark)}
    for name, (of, site) in _SITES.items():
        blocks = measured.get(of or name, {}).get(site, [])
        values = [value for value in (blocks[mark] if mark < len(blocks) else []) if _finite(value)]
        found[name] = (max if name == "largest_logit" else fmean)(values) if values else None
    found["loss"] = None
    if run["steps"]:  # older results do not have it of runs that were given up
        epoch = run["losses"][-1][0] * (measured["steps"][mark] + 1) / run["steps"]
        _, found["loss"] = min(run["losses"], key=lambda logged: abs(logged[0] - epoch))
    return {name: None if (value := found[name]) is None else round(value, 5) for name in QUANTITIES}


def _value(values: Sequence[Any], mark: int) -> float | None:
    return values[mark] if mark < len(values) and _finite(values[mark]) else None


def _finite(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def arms_of(rows: Iterable[Mapping[str, Any]], mark: str) -> dict[Group, list[ArmAtRate]]:
    """Return the arms that can be compared, by group, each at each of its rates; only runs that did not diverge."""
    runs = dict[Group, dict[tuple[str, float], list[Mapping[str, Any]]]]()
    for row in rows:
        if row["top1"] is None or row[mark]["log_kappa"] is None:
            continue
        group = Group(
            row["set"], row["recipe"], row["skips"], row["budget"], mixed=row["mixed"], held_out=row["held out"]
        )
        runs.setdefault(group, {}).setdefault((row["arm"], row["lr"]), []).append(row)
    return {
        group: [_mean_of(seeds, arm=arm, lr=lr, mark=mark) for (arm, lr), seeds in arms.items()]
        for group, arms in runs.items()
    }


def _mean_of(seeds: Sequence[Mapping[str, Any]], *, arm: str, lr: float, mark: str) -> ArmAtRate:
    log_kappa, loss = (fmean(row[mark][name] for row in seeds) for name in ("log_kappa", "loss"))
    top1 = fmean(row["top1"] for row in seeds)
    return ArmAtRate(arm=arm, lr=lr, seeds=len(seeds), log_kappa=log_kappa, loss=loss, top1=top1)
