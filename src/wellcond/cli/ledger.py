"""`wellcond ledger`: every claim with its verdict, from the evidence."""

from pathlib import Path
from typing import Annotated

import typer

__all__ = ["ledger"]


def ledger(
    check: Annotated[
        bool, typer.Option("--check", help="Write nothing; exit 1 where page and evidence differ.")
    ] = False,
    evidence: Annotated[Path, typer.Option(help="Folder of the evidence.", file_okay=False)] = Path("evidence"),
    page: Annotated[Path, typer.Option(help="The page.", dir_okay=False)] = Path("docs/claims.md"),
) -> None:
    """Write docs/claims.md, every claim with its verdict, from evidence/ alone."""
    from wellcond.claims import ledger as book

    if not check:
        typer.echo(f"wrote {book.run(evidence, page)}")
        return
    problem = book.check(evidence, page)
    if problem:
        raise ValueError(problem)
    typer.echo(f"{page} is what {evidence} says")
