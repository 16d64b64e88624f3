"""`wellcond train`: a recipe and its changes, the run, and its page, written when the run finishes or diverges."""

import contextlib
import os
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.text import Text

from wellcond.records import CONFIG, Run
from wellcond.report import can_draw, report_runs
from wellcond.train.choices import choose
from wellcond.train.config import Config
from wellcond.train.loop import Diverged, train
from wellcond.train.recipes import recipe
from wellcond.train.stopping import Interrupted, OutOfTime

__all__ = ["configure", "rehearse", "run"]


def configure(
    name: str,
    *,
    scale: str,
    options: dict[str, Any],
    settings: list[str],
    device: str | None = None,
    output: Path | None = None,
    world: int = 1,
) -> Config:
    """Return a recipe with the given options, then each `key=value`, applied; the rest is chosen for data and device.

    The choices are printed, each with the way to change it. If `output` holds a run, its choices are kept.
    """
    given = {key: value for key, value in options.items() if value is not None}
    config = recipe(name, scale=scale).changed(given).changed(settings)
    where = device or ("cuda" if torch.cuda.is_available() else "cpu")
    before = None
    if output is not None and (output / CONFIG).is_file():
        with contextlib.suppress(ValueError, OSError):  # the training loop reports what is wrong
            before = Run.open(output).config
    config, said = choose(config, device=where.partition(":")[0], scale=scale, world=world, before=before)
    if _is_main():
        console = Console(stderr=True)
        for line in said:
            console.print(line, highlight=False, markup=False, soft_wrap=True)
    return config


def rehearse(config: Config) -> None:
    """Build everything that training needs, and print what that is."""
    from wellcond.train.dry_run import dry_run

    for line in [*dry_run(config).lines(), "Nothing was trained."]:
        Console().print(line, highlight=False, soft_wrap=True)


def run(config: Config, output: Path, *, device: str | None = None) -> int:
    """Train, write the page, and return the exit code: 0 done, 3 diverged, 130 interrupted after saving.

    Reaching the time limit also returns 0, since it was requested.
    """
    console = Console(stderr=True)
    main = _is_main()
    try:
        outcome = train(config, output, device=device, quiet=not main)
    except Interrupted as stopped:
        if main:
            console.print(str(stopped), highlight=False, soft_wrap=True)
        return 0 if isinstance(stopped, OutOfTime) else 130
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


def _is_main() -> bool:
    return os.environ.get("RANK", "0") == "0"


def _page(output: Path, console: Console) -> None:
    if can_draw():
        said = f"wrote {report_runs([output])}"
    else:
        said = f"no page: there is no Altair here; `wellcond report {output}` draws it where Altair is installed"
    console.print(said, highlight=False, markup=False, soft_wrap=True)
