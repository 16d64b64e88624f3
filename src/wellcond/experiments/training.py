"""`wellcond train`: a recipe, its changes, the run, and the page about it, whatever way it ends."""

import os
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from wellcond.report import report_runs
from wellcond.train.config import Config
from wellcond.train.interrupt import Interrupted
from wellcond.train.loop import Diverged, train
from wellcond.train.recipes import recipe

__all__ = ["configure", "run"]


def configure(name: str, *, scale: str, options: dict[str, Any], settings: list[str]) -> Config:
    """A recipe with the options that were given, then with each `key=value`."""
    given = {key: value for key, value in options.items() if value is not None}
    return recipe(name, scale=scale).changed(given).changed(settings)


def run(config: Config, output: Path, *, device: str | None = None) -> int:
    """Trains, writes the page, and returns the exit code: 0 done, 3 diverged, 130 interrupted after saving."""
    console = Console(stderr=True)
    main = os.environ.get("RANK", "0") == "0"
    try:
        outcome = train(config, output, device=device, quiet=not main)
    except Interrupted as stopped:
        if main:
            console.print(str(stopped), highlight=False, soft_wrap=True)
        return 130
    except Diverged as lost:
        if main:
            _page(output, console)
            console.print(Text(str(lost), style="red"), soft_wrap=True)
        return 3
    if main:
        _page(output, console)
        words = ", ".join(f"{key} {value:.4g}" for key, value in outcome.metrics.items())
        console.print(f"{outcome.steps} steps; {words}", highlight=False, soft_wrap=True)
    return 0


def _page(output: Path, console: Console) -> None:
    if (output / "probe.jsonl").exists():
        console.print(f"wrote {report_runs([output])}", highlight=False, markup=False, soft_wrap=True)
