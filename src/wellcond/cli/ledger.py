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
    reference: Annotated[
        Path, typer.Option(help="What pages know of the evidence; written where its folder is.", dir_okay=False)
    ] = Path("src/wellcond/report/reference.json"),
) -> None:
    """Write docs/claims.md, every claim with its verdict, from evidence/ alone."""
    from wellcond.claims import ledger as book

    packaged = reference if reference.parent.is_dir() else None  # only a clone has it
    if not check:
        typer.echo(f"wrote {book.run(evidence, page, packaged)}")
        return
    problem = book.check(evidence, page, packaged)
    if problem:
        raise ValueError(problem)
    typer.echo(f"{page} is what {evidence} says")
