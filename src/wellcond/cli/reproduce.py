"""`wellcond reproduce`: run the experiment of a claim."""

from pathlib import Path
from typing import Annotated

import typer

from wellcond.cli.options import Device, More, Scale, Settings, complete_claims

__all__ = ["reproduce"]


def reproduce(
    claim: Annotated[
        str,
        typer.Argument(
            help="The id of a claim: asa-fig1c; docs/claims.md lists them.",
            metavar="ID",
            autocompletion=complete_claims,
        ),
    ],
    more: More = None,
    scale: Scale = "lab",
    seeds: Annotated[int | None, typer.Option(min=1, help="Paired seeds.  [default: 3; 2 at smoke scale]")] = None,
    data_dir: Annotated[
        list[str] | None,
        typer.Option(help="Where an image set lies: cifar10=FOLDER; once for each set.", metavar="NAME=PATH"),
    ] = None,
    settings: Settings = None,
    grid_epochs: Annotated[
        int | None, typer.Option(min=1, help="Epochs of the trainings that choose each arm's learning rate.")
    ] = None,
    jobs: Annotated[
        int,
        typer.Option(
            "--jobs",
            "-j",
            min=1,
            metavar="N",
            help="Runs trained at once, each in a process of its own: over all GPUs, or sharing the one.",
        ),
    ] = 1,
    device: Device = None,
    output: Annotated[Path, typer.Option(help="Folder for the runs.", file_okay=False)] = Path("runs"),
    evidence: Annotated[Path, typer.Option(help="Folder for what is kept.", file_okay=False)] = Path("evidence"),
) -> None:
    """Run a claim's experiment, or go on with it where it stopped, and write its evidence, figure and verdict."""
    from wellcond.experiments.reproduce import reproduce

    code = reproduce(
        claim,
        scale=scale,
        seeds=seeds,
        data_dirs=data_dir or [],
        output=output,
        evidence=evidence,
        settings=[*(settings or []), *(more or [])],
        grid_epochs=grid_epochs,
        jobs=jobs,
        device=device,
    )
    raise typer.Exit(code)
