"""`wellcond train`: train a recipe."""

import os
from pathlib import Path
from typing import Annotated

import typer

from wellcond.cli.options import (
    Device,
    More,
    Scale,
    Settings,
    complete_data,
    complete_models,
    complete_recipes,
    completing,
    print_settings,
)

__all__ = ["train"]


def train(
    recipe: Annotated[
        str,
        typer.Argument(
            help="A recipe: digits, vit_tiny, swin_small, mae_base, …",
            metavar="RECIPE",
            autocompletion=complete_recipes,
        ),
    ],
    more: More = None,
    output: Annotated[
        Path | None,  # not checked to be readable: another process may be trying whether it can be written
        typer.Option(help="Run folder; by default runs/RECIPE.", file_okay=False, readable=False),
    ] = None,
    scale: Scale = "lab",
    settings: Settings = None,
    epochs: Annotated[
        int | None, typer.Option(min=1, help="Number of passes over the data; by default the recipe's.")
    ] = None,
    batch_size: Annotated[int | None, typer.Option(min=1, help="Batch size, summed over all processes.")] = None,
    lr: Annotated[float | None, typer.Option(help="Peak learning rate; by default the recipe's.")] = None,
    model: Annotated[
        str | None, typer.Option(help="Another model, by its timm name.", autocompletion=complete_models)
    ] = None,
    model_kwargs: Annotated[
        list[str] | None,
        typer.Option(help="Model settings, in place of the recipe's: img_size=32,depth=6.", metavar="KEY=VALUE,…"),
    ] = None,
    pretrained: Annotated[
        bool | None, typer.Option("--pretrained", help="Start from the pretrained weights of the model name.")
    ] = None,
    checkpoint: Annotated[str | None, typer.Option(help="Weights to start from.")] = None,
    data_dir: Annotated[
        str | None,
        typer.Option(
            help="Data: a folder, or wds:…, hf:…, cifar10:FOLDER, … (docs/data.md).", autocompletion=complete_data
        ),
    ] = None,
    amp_dtype: Annotated[
        str | None,
        typer.Option(
            help="Precision of forward and backward pass: float32, tf32, bfloat16 or float16.",
            autocompletion=completing("float32", "tf32", "bfloat16", "float16"),
        ),
    ] = None,
    on_divergence: Annotated[
        str | None,
        typer.Option(
            help="stop, or rollback to a good state with half the learning rate.",
            autocompletion=completing("stop", "rollback"),
        ),
    ] = None,
    time_limit: Annotated[
        str | None,
        typer.Option(help="Save and stop within this time: 90s, 9m, 1h30m; the same command resumes."),
    ] = None,
    tracker: Annotated[
        str | None,
        typer.Option(
            help="tensorboard, wandb or trackio, in addition to the rows that are always written.",
            autocompletion=completing("tensorboard", "wandb", "trackio"),
        ),
    ] = None,
    device: Device = None,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Build model, loader and schedule, try them on two samples, and train nothing."),
    ] = False,
    show_settings: Annotated[
        bool,
        typer.Option(
            "--settings",
            help="List all settings for --set, by group, and exit.",
            callback=print_settings,
            is_eager=True,
        ),
    ] = False,
) -> None:
    """Train a recipe, or resume it where it stopped; with torchrun, on several processes."""
    from wellcond.cli import training
    from wellcond.records import check_writable
    from wellcond.train.processes import check_device

    options = {"epochs": epochs, "batch_size": batch_size, "lr": lr, "model": model, "checkpoint": checkpoint}
    options |= {"data": data_dir, "amp_dtype": amp_dtype, "on_divergence": on_divergence, "tracker": tracker}
    options |= {"time_limit": time_limit, "pretrained": pretrained}
    options |= {"model_kwargs": ",".join(model_kwargs) if model_kwargs else None}
    folder, world = output or Path("runs") / recipe, int(os.environ.get("WORLD_SIZE", "1"))
    try:
        check_device(device)
        if not dry_run and os.environ.get("RANK", "0") == "0":
            check_writable(folder / "file")
        everything = [*(settings or []), *(more or [])]
        config = training.configure(
            recipe, scale=scale, options=options, settings=everything, device=device, output=folder, world=world
        )
        config.check(world=world)
        if dry_run:
            training.rehearse(config)
            return
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    raise typer.Exit(training.run(config, folder, device=device))
