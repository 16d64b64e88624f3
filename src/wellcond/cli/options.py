"""Options that several commands have."""

from typing import Annotated

import typer

__all__ = ["Device"]

Device = Annotated[str | None, typer.Option(help="cpu, cuda or cuda:1; by default the GPU where there is one.")]
