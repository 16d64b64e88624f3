"""`wellcond measure`: which blocks of a model are ill-conditioned."""

import ast
import re
from pathlib import Path
from typing import Annotated, Any

import typer

from wellcond.cli.options import Device, complete_models, complete_sites, completing, usage_errors

__all__ = ["measure"]


def measure(
    model: Annotated[
        str,
        typer.Argument(
            help="A timm model name, also hf-hub:… or local-dir:…; hf:… for transformers.",
            metavar="MODEL",
            autocompletion=complete_models,
        ),
    ],
    more: Annotated[list[str] | None, typer.Argument(hidden=True, metavar="KEY=VALUE")] = None,
    model_kwargs: Annotated[
        list[str] | None,
        typer.Option(help="Model settings, as for timm: img_size=64,depth=6.", metavar="KEY=VALUE,…"),
    ] = None,
    checkpoint: Annotated[Path | None, typer.Option(help="File of weights to load: safetensors or PyTorch.")] = None,
    strict: Annotated[
        bool, typer.Option("--strict/--no-strict", help="Reject a checkpoint with missing or unexpected weights.")
    ] = True,
    ema: Annotated[bool, typer.Option("--ema", help="Use the averaged (EMA) weights of the checkpoint.")] = False,
    pretrained: Annotated[
        bool | None,
        typer.Option(
            "--pretrained/--no-pretrained",
            help="Use the pretrained weights of the name, or random ones; by default pretrained if available.",
        ),
    ] = None,
    data_dir: Annotated[
        Path | None, typer.Option(help="Folder or .tar of images; by default crops of two photographs.")
    ] = None,
    sites: Annotated[
        str | None,
        typer.Option(
            help="Sites to measure: tokens, embed, in, sa, +sa, mlp, +mlp; by default sa,+sa,mlp,+mlp, if present.",
            autocompletion=complete_sites,
        ),
    ] = None,
    blocks: Annotated[
        str, typer.Option(help="Blocks to measure: numbers, names or patterns, e.g. 0,5,blocks.1?; -1 is the last.")
    ] = "*",
    samples: Annotated[int | None, typer.Option(min=1, help="Number of images; by default 64, on a CPU 16.")] = None,
    exact: Annotated[
        str,
        typer.Option(
            help="float32, float64, or auto: float32, and float64 for sites where κ is beyond float32's ceiling.",
            autocompletion=completing("auto", "float32", "float64"),
        ),
    ] = "auto",
    gray: Annotated[
        str | None, typer.Option(help="Gray the tokens first: svd or dct.", autocompletion=completing("svd", "dct"))
    ] = None,
    epsilon: Annotated[
        float | None, typer.Option(help="Exponent of --gray, above 0 and up to 1; by default 0.95.")
    ] = None,
    spectrum: Annotated[bool, typer.Option("--spectrum", help="Also record the singular values.")] = False,
    untrained: Annotated[
        bool, typer.Option("--untrained", help="Also measure the model with random weights, for comparison.")
    ] = False,
    device: Device = None,
    seed: Annotated[int, typer.Option(help="Random seed of the choice of images and of random weights.")] = 0,
    output: Annotated[Path | None, typer.Option(help="Folder for rows and page; by default measure-MODEL.")] = None,
) -> None:
    """Measure which blocks of a model are ill-conditioned; print a table and write a page."""
    if epsilon is not None and gray is None:
        raise typer.BadParameter("nothing is grayed: add --gray svd or --gray dct", param_hint="--epsilon")
    settings = _key_values([*(model_kwargs or []), *(more or [])])  # timm's --model-kwargs takes several, typer's one
    from wellcond.measure import measure as measurement

    with usage_errors():
        measurement.measure(
            model,
            checkpoint=checkpoint,
            ema=ema,
            strict=strict,
            pretrained=pretrained,
            model_kwargs=settings,
            data_dir=data_dir,
            sites=None if sites is None else _listed(sites),
            blocks=[int(name) if name.removeprefix("-").isdecimal() else name for name in _listed(blocks)],
            samples=samples,
            exact=exact,
            gray=gray,
            epsilon=epsilon,
            spectrum=spectrum,
            untrained=untrained,
            device=device,
            seed=seed,
            output=output,
        )


def _listed(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _key_values(pairs: list[str]) -> dict[str, Any]:
    """Parse img_size=64,depths=(2,2) pool=avg: numbers, tuples and the like as Python literals, the rest as text."""
    found: dict[str, Any] = {}
    for pair in (part for text in pairs for part in re.split(r",(?=\s*[A-Za-z_]\w*=)", text)):
        key, equals, value = pair.strip().partition("=")
        if not equals or not key.isidentifier():
            raise typer.BadParameter(f"{pair!r} is not KEY=VALUE", param_hint="--model-kwargs")
        try:
            found[key] = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            found[key] = value
    return found
