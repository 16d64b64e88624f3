"""`wellcond demo`: the demonstration on embedded data."""

from pathlib import Path
from typing import Annotated

import typer

__all__ = ["demo"]


def demo(
    output: Annotated[Path, typer.Option(help="Folder for the report page.", file_okay=False)] = Path("demo"),
) -> None:
    """Train four small transformers on embedded data, about a minute on a CPU, and write a page about them."""
    from wellcond.demo import demo as demonstration

    demonstration.run(output)
