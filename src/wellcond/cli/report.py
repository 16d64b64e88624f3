"""`wellcond report`: a page about runs."""

from pathlib import Path
from typing import Annotated

import typer

from wellcond.cli.options import usage_errors

__all__ = ["report"]


def report(
    runs: Annotated[list[Path], typer.Argument(help="Run folders, or a probe's .jsonl files.", metavar="RUN")],
    output: Annotated[
        Path | None,
        typer.Option(help="File or folder for the page; by default report.html in a single run's folder, or here."),
    ] = None,
) -> None:
    """Write a page on how runs trained and what their probes measured; several runs are compared."""
    from wellcond.report import report_runs

    with usage_errors():
        typer.echo(f"wrote {report_runs(runs, output)}")
