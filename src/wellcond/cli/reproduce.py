"""`wellcond reproduce`: run some or all claims, as far as time allows."""

from pathlib import Path
from typing import Annotated

import typer

from wellcond.cli.options import Device, Scale, Settings, complete_claims, usage_errors

__all__ = ["reproduce"]


def reproduce(
    ids: Annotated[
        list[str] | None,
        typer.Argument(
            help="Claim ids, e.g. asa-fig1c asa-fig2; docs/claims.md lists them.",
            metavar="ID…",
            autocompletion=complete_claims,
        ),
    ] = None,
    whole_queue: Annotated[
        bool, typer.Option("--all", help="Run all implemented claims, the most important first.")
    ] = False,
    scale: Scale = "lab",
    seeds: Annotated[
        int | None,
        typer.Option(
            min=1, help="Number of paired seeds; by default 3, and 2 more if these are undecided (2 at smoke scale)."
        ),
    ] = None,
    data_dir: Annotated[
        list[str] | None,
        typer.Option(
            help="Data set to run and its folder: cifar10=FOLDER; repeatable. Generated sets need no =FOLDER.",
            metavar="NAME=PATH",
        ),
    ] = None,
    settings: Settings = None,
    grid_epochs: Annotated[
        int | None, typer.Option(min=1, help="Epochs of the runs that choose each arm's learning rate.")
    ] = None,
    time_limit: Annotated[
        str | None,
        typer.Option(help="Start no run that cannot finish in this time, save, and list what is left: 90s, 9m, 1h30m."),
    ] = None,
    no_training: Annotated[
        bool,
        typer.Option("--no-training", help="Train nothing: rewrite the evidence from existing results."),
    ] = False,
    jobs: Annotated[
        int,
        typer.Option(
            "--jobs",
            "-j",
            min=1,
            metavar="N",
            help="Runs trained at once, each in its own process: over all GPUs, or sharing a single one.",
        ),
    ] = 1,
    arm: Annotated[
        list[str] | None,
        typer.Option(help="Train only this arm, and read finished runs of the others; repeatable.", metavar="NAME"),
    ] = None,
    device: Device = None,
    output: Annotated[Path, typer.Option(help="Folder for the runs.", file_okay=False)] = Path("runs"),
    evidence: Annotated[Path, typer.Option(help="Folder for the evidence.", file_okay=False)] = Path("evidence"),
) -> None:
    """Run claims, or resume them where they stopped, and write their evidence and verdicts."""
    from wellcond.claims.reproduce import reproduce

    # Settings after the first one of --set arrive as arguments: typer's options take one value each.
    more = [one for one in ids or [] if "=" in one]
    if not ids and not whole_queue:
        raise typer.BadParameter(f"name claims, or --all ({', '.join(complete_claims(''))})", param_hint="ID")
    with usage_errors():
        code = reproduce(
            [one for one in ids or [] if "=" not in one],
            whole_queue=whole_queue,
            scale=scale,
            seeds=seeds,
            data_dirs=data_dir or [],
            output=output,
            evidence=evidence,
            settings=[*(settings or []), *more],
            grid_epochs=grid_epochs,
            time_limit=time_limit,
            training=not no_training,
            jobs=jobs,
            arms=arm or [],
            device=device,
        )
    raise typer.Exit(code)
