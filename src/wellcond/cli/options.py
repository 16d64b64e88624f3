"""Options that several commands have."""

from typing import Annotated

import typer

__all__ = ["Device", "More"]

Device = Annotated[str | None, typer.Option(help="cpu, cuda or cuda:1; by default the GPU where there is one.")]
More = Annotated[list[str] | None, typer.Argument(hidden=True, metavar="KEY=VALUE")]
"""Settings after the first of --set: typer's options take one value each."""
