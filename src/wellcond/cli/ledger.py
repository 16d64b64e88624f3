"""`wellcond ledger`: every claim with its verdict, from the evidence."""

from pathlib import Path
from typing import Annotated

import typer

__all__ = ["ledger"]

EVIDENCE, README, PACKAGED = Path("evidence"), Path("README.md"), Path("src/wellcond/report/reference.json")


def ledger(
    check: Annotated[bool, typer.Option("--check", help="Write nothing; exit 1 if page and evidence differ.")] = False,
    evidence: Annotated[Path, typer.Option(help="Folder of the evidence.", file_okay=False, exists=True)] = EVIDENCE,
    page: Annotated[Path, typer.Option(help="The page to write or check.", dir_okay=False)] = Path("docs/claims.md"),
    reference: Annotated[
        Path | None,
        typer.Option(help=f"File with what pages use from the evidence; in a clone, {PACKAGED}.", dir_okay=False),
    ] = None,
) -> None:
    """Write docs/claims.md, every claim with its verdict, from evidence/ alone; in a clone, also the README's table."""
    from wellcond.claims import ledger as book

    ours = evidence == EVIDENCE and PACKAGED.parent.is_dir()  # in a clone, with its own evidence
    more = (reference or (PACKAGED if ours else None), README if ours else None)
    if not check:
        typer.echo(f"wrote {book.run(evidence, page, *more)}")
        return
    problem = book.check(evidence, page, *more)
    if problem:
        raise ValueError(problem)
    typer.echo(f"{page} is what {evidence} says")
