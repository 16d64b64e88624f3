"""The commands that run something: demonstration, training, experiments, theory; and the ledger of claims."""

import os
from pathlib import Path
from typing import Annotated

import typer

from wellcond.cli.options import Device, More

__all__ = ["demo", "ledger", "reproduce", "theory", "train"]


def demo(
    output: Annotated[Path, typer.Option(help="Folder for the report page.", file_okay=False)] = Path("demo"),
) -> None:
    """Run the demonstration on the embedded data, on a CPU, and write a report page."""
    from wellcond.demo import demo as demonstration

    demonstration.run(output)


def theory(
    ids: Annotated[
        list[str] | None,
        typer.Argument(help="Which statements, e.g. asa-prop41 sky-lemma3; by default all.", metavar="ID"),
    ] = None,
    draws: Annotated[
        int | None, typer.Option(min=40, help="Draws for each case, by default 400; more go deeper.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Where the random numbers begin.")] = 0,
    trained: Annotated[
        list[Path] | None,
        typer.Option(
            help="Matrices of trained blocks, one file or several; by default evidence/trained's, if here.",
            exists=True,
            dir_okay=False,
        ),
    ] = None,
    output: Annotated[Path, typer.Option(help="Folder for the JSON files.", file_okay=False)] = Path("evidence/theory"),
    page: Annotated[Path | None, typer.Option(help="Also write this page, and its plots.", dir_okay=False)] = None,
) -> None:
    """Check the propositions, lemmas and theorems of both papers; "does not hold" is a result, not a failure."""
    from wellcond.theory.registry import DRAWS, STATEMENTS

    unknown = [name for name in ids or () if name not in STATEMENTS]
    if unknown:
        raise typer.BadParameter(
            f"unknown statement {unknown[0]!r}; there are {', '.join(STATEMENTS)}", param_hint="ID"
        )
    from wellcond.claims import theory_run

    wanted = list(dict.fromkeys(ids or STATEMENTS))
    theory_run.run(wanted, draws=draws or DRAWS, seed=seed, trained=trained, output=output, page=page)


def train(
    recipe: Annotated[str, typer.Argument(help="A recipe: digits, vit_tiny, swin_small, mae_base, …")],
    more: More = None,
    output: Annotated[
        Path | None, typer.Option(help="The run's folder; by default runs/RECIPE.", file_okay=False)
    ] = None,
    scale: Annotated[str, typer.Option(help="smoke (a CPU, seconds), lab (a GPU, minutes) or paper.")] = "lab",
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="Any fields of the recipe: key=value …", metavar="KEY=VALUE …")
    ] = None,
    epochs: Annotated[int | None, typer.Option(min=1)] = None,
    batch_size: Annotated[int | None, typer.Option(min=1, help="Images in a step, over all processes.")] = None,
    lr: Annotated[float | None, typer.Option()] = None,
    model: Annotated[str | None, typer.Option(help="Another model, by timm's name.")] = None,
    model_kwargs: Annotated[
        list[str] | None,
        typer.Option(help="Its settings, in place of the recipe's: img_size=32,depth=6.", metavar="KEY=VALUE,…"),
    ] = None,
    pretrained: Annotated[
        bool | None, typer.Option("--pretrained", help="Start from the weights that belong to the name.")
    ] = None,
    checkpoint: Annotated[str | None, typer.Option(help="Weights to start from.")] = None,
    data_dir: Annotated[str | None, typer.Option(help="The data: a folder, or wds:…, hf:…, cifar10:FOLDER.")] = None,
    amp_dtype: Annotated[str | None, typer.Option(help="float32, bfloat16 or float16.")] = None,
    on_divergence: Annotated[
        str | None, typer.Option(help="stop, or rollback: to a good state, with half the learning rate.")
    ] = None,
    time_limit: Annotated[
        str | None,
        typer.Option(help="Save and end before this time is over: 90s, 9m, 1h30m; the same command goes on."),
    ] = None,
    tracker: Annotated[
        str | None, typer.Option(help="tensorboard, wandb or trackio, beside the rows that are always written.")
    ] = None,
    device: Device = None,
) -> None:
    """Train a recipe, or go on with it where it stopped; under torchrun on many processes."""
    from wellcond.cli import training
    from wellcond.train.processes import check_device

    options = {"epochs": epochs, "batch_size": batch_size, "lr": lr, "model": model, "checkpoint": checkpoint}
    options |= {"data": data_dir, "amp_dtype": amp_dtype, "on_divergence": on_divergence, "tracker": tracker}
    options |= {"time_limit": time_limit, "pretrained": pretrained}
    options |= {"model_kwargs": ",".join(model_kwargs) if model_kwargs else None}
    try:
        check_device(device)
        config = training.configure(recipe, scale=scale, options=options, settings=[*(settings or []), *(more or [])])
        config.check(world=int(os.environ.get("WORLD_SIZE", "1")))
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    raise typer.Exit(training.run(config, output or Path("runs") / recipe, device=device))


def reproduce(
    ids: Annotated[
        list[str] | None,
        typer.Argument(help="Ids of claims: asa-fig1c asa-fig2 …; docs/claims.md lists them.", metavar="ID…"),
    ] = None,
    whole_queue: Annotated[
        bool, typer.Option("--all", help="All claims that are built, those that matter most first.")
    ] = False,
    scale: Annotated[str, typer.Option(help="smoke (a CPU, seconds), lab (a GPU, real data) or paper.")] = "lab",
    seeds: Annotated[
        int | None,
        typer.Option(
            min=1, help="Paired seeds; by default 3, and 2 more where these leave it open (2 at smoke scale)."
        ),
    ] = None,
    data_dir: Annotated[
        list[str] | None,
        typer.Option(help="Where an image set lies: cifar10=FOLDER; once for each set.", metavar="NAME=PATH"),
    ] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="Fields of every training: key=value …", metavar="KEY=VALUE …")
    ] = None,
    grid_epochs: Annotated[
        int | None, typer.Option(min=1, help="Epochs of the trainings that choose each arm's learning rate.")
    ] = None,
    time_limit: Annotated[
        str | None,
        typer.Option(help="Start no run that will not be done by then, save, and say what is left: 90s, 9m, 1h30m."),
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
    """Run claims, or go on with them where they stopped, and write their evidence and verdicts."""
    from wellcond.claims.reproduce import reproduce

    # Settings after the first of --set come as arguments: typer's options take one value each.
    more = [one for one in ids or [] if "=" in one]
    if not ids and not whole_queue:
        raise typer.BadParameter("name claims, or take all that are built with --all", param_hint="ID")
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
        jobs=jobs,
        device=device,
    )
    raise typer.Exit(code)


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
