"""`wellcond bench …`: one command for each benchmark."""

from pathlib import Path
from typing import Annotated

import typer

from wellcond.cli.options import with_plugins

__all__ = ["bench"]

bench: typer.Typer = typer.Typer(
    help="Benchmark against plain implementations; print ratios and write JSON.", no_args_is_help=True
)


def _device_that_is_there(name: str | None) -> str | None:
    """Reject a device that does not exist before anything is measured, with our own error message."""
    if name is None:
        return None
    import torch

    try:
        device = torch.device(name)
    except RuntimeError:
        raise typer.BadParameter(f"{name!r} is not a device; use cpu, cuda or cuda:1") from None
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device.type == "cuda" and (device.index or 0) >= gpus:
        seen = f"{gpus} of them" if gpus else "none"
        raise typer.BadParameter(f"{name} is a GPU, and torch sees {seen} here; use --device cpu, or leave it out")
    return name


Device = Annotated[
    str | None,
    typer.Option(help="cpu, cuda or cuda:1; by default the GPU if there is one.", callback=_device_that_is_there),
]
BenchOutput = Annotated[
    Path | None, typer.Option("--output", help="JSON file to write; by default one in benchmarks/.", dir_okay=False)
]
BatchSize = Annotated[int | None, typer.Option(min=1, help="Images per batch; the default depends on the device.")]
Quick = Annotated[
    bool, typer.Option("--quick", help="Small sizes and few repeats: about ten seconds, to check that it runs.")
]


@bench.command("graying")
def bench_graying(
    output: BenchOutput = None, device: Device = None, batch_size: BatchSize = None, quick: Quick = False
) -> None:
    """Token Graying against torch's SVD and eigh, an FFT DCT, and a ViT-B/16 training step."""
    from wellcond.bench import graying

    graying.run(output=output, device=device, batch_size=batch_size, quick=quick)


@bench.command("kappa")
def bench_kappa(
    output: BenchOutput = None, device: Device = None, batch_size: BatchSize = None, quick: Quick = False
) -> None:
    """Condition numbers against torch.linalg.cond: speed and error."""
    from wellcond.bench import kappa

    kappa.run(output=output, device=device, batch_size=batch_size, quick=quick)


@bench.command("probe")
def bench_probe(
    output: BenchOutput = None, device: Device = None, batch_size: BatchSize = None, quick: Quick = False
) -> None:
    """The cost of a probe relative to training a ViT-B/16."""
    from wellcond.bench import probe

    probe.run(output=output, device=device, batch_size=batch_size, quick=quick)


@bench.command("attention")
@with_plugins
def bench_attention(output: BenchOutput = None, device: Device = None, quick: Quick = False) -> None:
    """Every attention by length: time and memory, against torch's own and the published order of operations."""
    from wellcond.bench import attention

    attention.run(output=output, device=device, quick=quick)


@bench.command("train")
def bench_train(
    output: BenchOutput = None,
    device: Device = None,
    batch_size: BatchSize = None,
    quick: Quick = False,
    data_dir: Annotated[
        Path | None, typer.Option(help="Folder with train/ and val/ to train on.", exists=True, file_okay=False)
    ] = None,
    timm_train: Annotated[
        Path | None, typer.Option(help="timm's train.py, to time for comparison.", exists=True, dir_okay=False)
    ] = None,
) -> None:
    """The training loop against the model alone, and against timm's train.py."""
    from wellcond.bench import training

    training.run(
        output=output, device=device, batch_size=batch_size, quick=quick, data_dir=data_dir, timm_train=timm_train
    )


@bench.command("lra")
def bench_lra(
    output: BenchOutput = None,
    device: Device = None,
    quick: Quick = False,
    task: Annotated[list[str] | None, typer.Option(help="listops, text, …; repeatable; by default all.")] = None,
) -> None:
    """A Long Range Arena training step: our loop, a whole step as one CUDA graph, and the published order."""
    from wellcond.bench import lra

    try:
        lra.run(output=output, device=device, quick=quick, tasks=task or ())
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
