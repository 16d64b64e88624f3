"""`wellcond ledger`: every claim with its verdict, from the evidence."""

from pathlib import Path
from typing import Annotated

import typer

__all__ = ["ledger"]

EVIDENCE, PACKAGED = Path("evidence"), Path("src/wellcond/report/reference.json")


def ledger(
    check: Annotated[
        bool, typer.Option("--check", help="Write nothing; exit 1 where page and evidence differ.")
    ] = False,
    evidence: Annotated[Path, typer.Option(help="Folder of the evidence.", file_okay=False)] = EVIDENCE,
    page: Annotated[Path, typer.Option(help="The page.", dir_okay=False)] = Path("docs/claims.md"),
    reference: Annotated[
        Path | None,
        typer.Option(help=f"What pages know of the evidence; in a clone, {PACKAGED}.", dir_okay=False),
    ] = None,
) -> None:
    """Write docs/claims.md, every claim with its verdict, from evidence/ alone."""
    from wellcond.claims import ledger as book

    if reference is None and evidence == EVIDENCE and PACKAGED.parent.is_dir():
        reference = PACKAGED
    if not check:
        typer.echo(f"wrote {book.run(evidence, page, reference)}")
        return
    problem = book.check(evidence, page, reference)
    if problem:
        raise ValueError(problem)
    typer.echo(f"{page} is what {evidence} says")
