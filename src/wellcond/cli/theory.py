"""`wellcond theory`: the statements of both papers, checked."""

from pathlib import Path
from typing import Annotated

import typer

from wellcond.cli.options import complete_statements
from wellcond.words import meant

__all__ = ["theory"]


def theory(
    ids: Annotated[
        list[str] | None,
        typer.Argument(
            help="Statements to check, e.g. asa-prop41 sky-lemma3; by default all.",
            metavar="ID",
            autocompletion=complete_statements,
        ),
    ] = None,
    draws: Annotated[
        int | None, typer.Option(min=40, help="Draws per case; by default 400. More draws find rarer violations.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Random seed.")] = 0,
    trained: Annotated[
        list[Path] | None,
        typer.Option(
            help="File of matrices of trained blocks; repeatable; by default those in evidence/trained, if present.",
            exists=True,
            dir_okay=False,
        ),
    ] = None,
    output: Annotated[Path, typer.Option(help="Folder for the JSON files.", file_okay=False)] = Path("evidence/theory"),
    page: Annotated[Path | None, typer.Option(help="Also write this page, with its plots.", dir_okay=False)] = None,
) -> None:
    """Check the propositions, lemmas and theorems of both papers; "does not hold" is a result, not a failure."""
    from wellcond.theory.registry import DRAWS, STATEMENTS

    unknown = [name for name in ids or () if name not in STATEMENTS]
    if unknown:
        near = meant(unknown[0], STATEMENTS)
        raise typer.BadParameter(
            f"unknown statement {unknown[0]!r}{near} (there are {', '.join(STATEMENTS)})", param_hint="ID"
        )
    from wellcond.claims.theory import run

    wanted = list(dict.fromkeys(ids or STATEMENTS))
    run(wanted, draws=draws or DRAWS, seed=seed, trained=trained, output=output, page=page)
