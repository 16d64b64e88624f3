"""`wellcond report`: a page on what was measured in runs."""

from pathlib import Path
from typing import Annotated

import typer

__all__ = ["report"]


def report(
    runs: Annotated[list[Path], typer.Argument(help="Run folders with a probe.jsonl, or .jsonl files of a probe.")],
    output: Annotated[
        Path | None, typer.Option(help="The page, or a folder for it; by default beside a single run's rows.")
    ] = None,
) -> None:
    """Write a page on what the probes of runs measured; several are compared. A run without a probe has its losses."""
    from wellcond.report import report_runs

    typer.echo(f"wrote {report_runs(runs, output)}")
