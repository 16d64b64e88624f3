"""A part of the demo: train four small transformers on scikit-learn's digits, and measure them alike.

    arms = train_arms(Path("demo/runs"), console=console)        # or read those that are already trained
    arms[0].title, arms[0].result["metrics"]["top1"]             # "both skips", 0.82
    arms[0].run.probe                                            # what the probe measured while it trained

All four get the same steps, the same learning rate and one seed. That is enough to see condition numbers but too little
to rank accuracies, as page.py says.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.console import Console
from rich.table import Table

from wellcond.claims.runs import Planned, Result, Runs
from wellcond.records import Run
from wellcond.train.config import Config
from wellcond.train.recipes import recipe
from wellcond.words import DEFAULT_SITES as SITES

__all__ = ["ARMS", "TrainedArm", "as_record", "configure", "mean_log_kappa", "terminal_table", "train_arms"]

ARMS: dict[str, tuple[str, dict[str, Any]]] = {
    "both": ("both skips", {}),
    "no-sa": ("no attention skip", {"remove_skips": ["sa"]}),
    "no-mlp": ("no MLP skip", {"remove_skips": ["mlp"]}),
    "dct": ("both, DCT-grayed", {"gray": "dct", "epsilon": 0.95}),
}
# Mean pooling instead of a class token, and initial weights that depend on the layers' width: with timm's defaults,
# made for wider models and longer training, the first epochs would show nothing.
MODEL: dict[str, Any] = {
    "img_size": 8, "patch_size": 2, "depth": 4, "embed_dim": 64, "num_heads": 4, "class_token": False,
    "global_pool": "avg", "weight_init": "jax",
}  # fmt: skip
SETTINGS: dict[str, Any] = {
    "model_kwargs": MODEL, "epochs": 14, "lr": 3e-3, "clip_grad": 1.0, "padding": 0, "probe_every": 44, "keep": 1,
    "save_every": 100,
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class TrainedArm:
    name: str
    title: str
    config: Config
    result: Result
    run: Run
    """Its folder: losses, accuracies on digits not trained on, and the probe's measurements."""


def configure(arm: str, settings: Sequence[str] = ()) -> Config:
    return recipe("digits", scale="smoke", **SETTINGS).as_defaults().changed(ARMS[arm][1]).changed(list(settings))


def train_arms(root: Path, *, console: Console, settings: Sequence[str] = ()) -> list[TrainedArm]:
    """Train the four models, resume, or read finished ones. Raises Interrupted after a signal, with the state saved."""
    runs = Runs(root, console=console, device="cpu")
    runs.expected = len(ARMS)
    found = []
    for arm, (title, _) in ARMS.items():
        config = configure(arm, settings)
        name = f"{arm}-{_digest(config)}"  # each configuration has its own folder: an old demo is not in the way
        result = runs.run(Planned(name=name, config=config, measure=("log_kappa",)))
        found.append(TrainedArm(name=arm, title=title, config=config, result=result, run=Run.open(root / name)))
    return found


def _digest(config: Config) -> str:
    return hashlib.sha256(json.dumps(config.as_json(), sort_keys=True).encode()).hexdigest()[:8]


def mean_log_kappa(arm: TrainedArm, when: str) -> dict[str, float]:
    """Return site → mean over blocks, at the random start (`untrained`) or the end (`trained`); {} if diverged."""
    found = arm.result["log_kappa"]
    return {site: fmean(found[when][site]) for site in SITES} if found else {}


def as_record(arms: Sequence[TrainedArm]) -> dict[str, Any]:
    """Return every arm's result, for a JSON file."""
    return {
        "what": "four small ViTs on scikit-learn's digits, one seed, one learning rate",
        "arms": {
            arm.title: {key: value for key, value in arm.result.items() if key not in ("name", "environment", "seed")}
            for arm in arms
        },
    }


def terminal_table(arms: Sequence[TrainedArm]) -> Table:
    table = Table(title="Four transformers on the digits: log κ by site", title_justify="left", pad_edge=False)
    table.add_column("model", no_wrap=True)
    for name in ("top-1", *SITES, "sa at start", "+sa at start"):
        table.add_column(name, justify="right")
    for arm in arms:
        metrics, after, before = arm.result["metrics"], mean_log_kappa(arm, "trained"), mean_log_kappa(arm, "untrained")
        values = [*after.values(), before["sa"], before["+sa"]] if after else []
        numbers = [f"{value:.1f}" for value in values] or ["–"] * 6
        table.add_row(arm.title, f"{metrics['top1']:.1%}" if metrics else "diverged", *numbers)
    return table
