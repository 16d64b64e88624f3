"""The commands, each a few lines: read the options, call one function, print what it says.

    wellcond info              # versions, device, which fast paths are taken and why
    wellcond demo              # a report page in demo/
    wellcond measure vit_tiny_patch16_224 --checkpoint last.pth.tar --data-dir photos --untrained
    wellcond train digits --output runs/a --set gray=dct --set probe_every=50
    wellcond report runs/a runs/b
    wellcond reproduce asa-fig1c --scale smoke
    wellcond ledger --check    # is docs/claims.md what evidence/ says?
    wellcond theory asa-prop41 # bound, measured value, margin and verdict of a paper's statement
    wellcond bench graying     # ratios, and a JSON file with its environment

Exit codes: 0 done, 1 failed, 2 wrong usage, 3 training diverged, 130 interrupted. A failure is one line; with
WELLCOND_DEBUG=1, a traceback.
Everything heavy is imported inside its command, so that `--help` and a typing mistake are answered at once.
"""

import ast
import json
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

app = typer.Typer(
    name="wellcond",
    help="Measure and improve the conditioning of transformer training.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
bench = typer.Typer(help="Measure speed against the plain way; print ratios and write JSON.", no_args_is_help=True)
app.add_typer(bench, name="bench")

BenchOutput = Annotated[
    Path | None, typer.Option("--output", help="JSON file to write; by default one under benchmarks/.", dir_okay=False)
]
Device = Annotated[str | None, typer.Option(help="cpu, cuda or cuda:1; by default the GPU where there is one.")]
BatchSize = Annotated[int | None, typer.Option(min=1, help="Images in a batch; by default what suits the device.")]
Quick = Annotated[bool, typer.Option("--quick", help="Small sizes and few repeats: seconds, to see that it runs.")]


def main() -> None:
    """Run the command line; whatever goes wrong ends as one line and an exit code."""
    try:
        app(prog_name="wellcond")
    except Exception as error:
        if os.environ.get("WELLCOND_DEBUG", "0") not in ("", "0"):
            raise
        Console(stderr=True).print(Text(f"error: {_one_line(error)}", style="red"), soft_wrap=True)
        sys.exit(1)


def _one_line(error: Exception) -> str:
    """A ValueError is our own and speaks for itself; anything else also gets its kind, and the way to see more."""
    message = " ".join(str(error).split())
    if isinstance(error, ValueError):
        return message
    return f"{type(error).__name__}: {message} (WELLCOND_DEBUG=1 shows where)"


def _print_version(wanted: bool) -> None:
    if wanted:
        from wellcond.records import own_version

        typer.echo(f"wellcond {own_version()}")
        raise typer.Exit


@app.callback()
def options(
    show_version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Measure and improve the conditioning of transformer training."""


@app.command()
def info(as_json: Annotated[bool, typer.Option("--json", help="JSON instead of tables.")] = False) -> None:
    """Show versions, devices, and which fast paths are available, which will be taken, and why."""
    from wellcond.numerics.fastpaths import fast_paths
    from wellcond.records import environment

    facts = environment()
    paths = [{"name": p.name, "available": p.available, "taken": p.taken, "why": p.why} for p in fast_paths()]
    if as_json:
        typer.echo(json.dumps({**facts, "fast_paths": paths}, indent=2, ensure_ascii=False))
    else:
        Console().print(_facts_table(facts), _paths_table(paths))


def _facts_table(facts: dict[str, Any]) -> Table:
    cpu = f"{facts['cpu']['name']}, {facts['cpu']['cores']} cores, {facts.get('threads', '?')} threads used"
    commit = f"{facts['commit']}{', with changes' if facts['dirty'] else ''}" if facts["commit"] else None
    rows = facts["versions"] | {"torch's CUDA": facts.get("cuda"), "platform": facts["platform"], "CPU": cpu}
    rows |= {"device": ", ".join(facts["devices"]) or "CPU only", "commit": commit}
    table = Table(show_header=False, box=None, pad_edge=False)
    for name, value in rows.items():
        if value is not None:
            table.add_row(name, Text(str(value)))
    return table


def _paths_table(paths: list[dict[str, Any]]) -> Table:
    table = Table("fast path", "available", "taken", "why", title="Fast paths", title_justify="left", pad_edge=False)
    for path in paths:
        marks = [Text("yes", style="green") if path[key] else Text("no") for key in ("available", "taken")]
        table.add_row(Text(path["name"]), *marks, Text(path["why"]))
    return table


@app.command()
def demo(
    output: Annotated[Path, typer.Option(help="Folder for the report page.", file_okay=False)] = Path("demo"),
) -> None:
    """Run the demonstration on the embedded data, on a CPU, and write a report page."""
    from wellcond.experiments import demo as demonstration

    demonstration.run(output)


@app.command()
def report(
    runs: Annotated[list[Path], typer.Argument(help="Run folders with a probe.jsonl, or .jsonl files of a probe.")],
    output: Annotated[
        Path | None, typer.Option(help="The page, or a folder for it; by default beside a single run's rows.")
    ] = None,
) -> None:
    """Write a page on what the probes of runs measured; several runs are compared."""
    from wellcond.report import report_runs

    typer.echo(f"wrote {report_runs(runs, output)}")


@app.command()
def measure(
    model: Annotated[str, typer.Argument(help="A name that timm knows, hf-hub: and local-dir: too.", metavar="MODEL")],
    more: Annotated[list[str] | None, typer.Argument(hidden=True, metavar="KEY=VALUE")] = None,
    model_kwargs: Annotated[
        list[str] | None,
        typer.Option(help="Settings of the model, as timm has them: img_size=64 depth=6.", metavar="KEY=VALUE …"),
    ] = None,
    checkpoint: Annotated[Path | None, typer.Option(help="Its weights, safetensors or torch's.")] = None,
    ema: Annotated[bool, typer.Option("--ema", help="The averaged weights of the checkpoint.")] = False,
    pretrained: Annotated[bool, typer.Option("--pretrained", help="The weights that belong to the name.")] = False,
    data_dir: Annotated[
        Path | None, typer.Option(help="A folder or .tar of images; by default crops of two photographs.")
    ] = None,
    sites: Annotated[
        str | None,
        typer.Option(help="Where to measure: in, tokens, embed, and by default sa,+sa,mlp,+mlp (those there are)."),
    ] = None,
    blocks: Annotated[str, typer.Option(help="Which blocks: numbers, names or patterns, e.g. 0,5,blocks.1?.")] = "*",
    samples: Annotated[int, typer.Option(min=1, help="How many images.")] = 64,
    gray: Annotated[str | None, typer.Option(help="Gray the tokens first: svd or dct.")] = None,
    epsilon: Annotated[float, typer.Option(help="The exponent of graying, in (0, 1].")] = 0.95,
    spectrum: Annotated[bool, typer.Option("--spectrum", help="Also the singular values.")] = False,
    untrained: Annotated[
        bool, typer.Option("--untrained", help="Also the same model with random weights, beside it.")
    ] = False,
    device: Device = None,
    seed: Annotated[int, typer.Option(help="Which images are chosen, and how random weights begin.")] = 0,
    output: Annotated[Path | None, typer.Option(help="Folder for rows and page; by default measure-MODEL.")] = None,
) -> None:
    """Measure which blocks of a model are ill-conditioned: a table, and a page."""
    settings = _key_values([*(model_kwargs or []), *(more or [])])  # timm's --model-kwargs takes several, typer's one
    from wellcond.experiments import measure as measurement

    measurement.measure(
        model,
        checkpoint=checkpoint,
        ema=ema,
        pretrained=pretrained,
        model_kwargs=settings,
        data_dir=data_dir,
        sites=None if sites is None else _listed(sites),
        blocks=[int(name) if name.isdecimal() else name for name in _listed(blocks)],
        samples=samples,
        gray=gray,
        epsilon=epsilon,
        spectrum=spectrum,
        untrained=untrained,
        device=device,
        seed=seed,
        output=output,
    )


@app.command()
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
    from wellcond.experiments import theory_run

    wanted = list(dict.fromkeys(ids or STATEMENTS))
    theory_run.run(wanted, draws=draws or DRAWS, seed=seed, trained=trained, output=output, page=page)


def _listed(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _key_values(pairs: list[str]) -> dict[str, Any]:
    """img_size=64 depths=(2,2) pool=avg: numbers, tuples and the like as Python writes them, anything else as text."""
    found: dict[str, Any] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals or not key.isidentifier():
            raise typer.BadParameter(f"{pair!r} is not KEY=VALUE", param_hint="--model-kwargs")
        try:
            found[key] = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            found[key] = value
    return found


@app.command()
def train(
    recipe: Annotated[str, typer.Argument(help="A recipe: digits, vit_tiny, swin_small, mae_base, …")],
    output: Annotated[
        Path | None, typer.Option(help="The run's folder; by default runs/RECIPE.", file_okay=False)
    ] = None,
    scale: Annotated[str, typer.Option(help="smoke (a CPU, seconds), lab (a GPU, minutes) or paper.")] = "lab",
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="Any field of the recipe, as key=value; may be repeated.")
    ] = None,
    epochs: Annotated[int | None, typer.Option(min=1)] = None,
    batch_size: Annotated[int | None, typer.Option(min=1, help="Images in a step, over all processes.")] = None,
    lr: Annotated[float | None, typer.Option()] = None,
    model: Annotated[str | None, typer.Option(help="Another model, by timm's name.")] = None,
    checkpoint: Annotated[str | None, typer.Option(help="Weights to start from.")] = None,
    data_dir: Annotated[str | None, typer.Option(help="The data: a folder, or wds:…, hf:…, cifar10:FOLDER.")] = None,
    amp_dtype: Annotated[str | None, typer.Option(help="float32, bfloat16 or float16.")] = None,
    device: Device = None,
) -> None:
    """Train a recipe, or go on with it where it stopped; under torchrun on many processes."""
    from wellcond.experiments import training

    options = {"epochs": epochs, "batch_size": batch_size, "lr": lr, "model": model, "checkpoint": checkpoint}
    options |= {"data": data_dir, "amp_dtype": amp_dtype}
    try:
        config = training.configure(recipe, scale=scale, options=options, settings=settings or [])
        config.check(world=int(os.environ.get("WORLD_SIZE", "1")))
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    raise typer.Exit(training.run(config, output or Path("runs") / recipe, device=device))


@app.command()
def reproduce(
    claim: Annotated[
        str, typer.Argument(help="The id of a claim: asa-fig1c; docs/claims.md lists them.", metavar="ID")
    ],
    scale: Annotated[str, typer.Option(help="smoke (a CPU, seconds), lab (a GPU, real data) or paper.")] = "lab",
    seeds: Annotated[int | None, typer.Option(min=1, help="Paired seeds.  [default: 3; 2 at smoke scale]")] = None,
    data_dir: Annotated[
        list[str] | None,
        typer.Option(help="Where an image set lies: cifar10=FOLDER; once for each set.", metavar="NAME=PATH"),
    ] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="A field of every training, as key=value; may be repeated.")
    ] = None,
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
        settings=settings or [],
        grid_epochs=grid_epochs,
        jobs=jobs,
        device=device,
    )
    raise typer.Exit(code)


@app.command()
def ledger(
    check: Annotated[
        bool, typer.Option("--check", help="Write nothing; exit 1 where page and evidence differ.")
    ] = False,
    evidence: Annotated[Path, typer.Option(help="Folder of the evidence.", file_okay=False)] = Path("evidence"),
    page: Annotated[Path, typer.Option(help="The page.", dir_okay=False)] = Path("docs/claims.md"),
) -> None:
    """Write docs/claims.md, every claim with its verdict, from evidence/ alone."""
    from wellcond.experiments import ledger as book

    if not check:
        typer.echo(f"wrote {book.run(evidence, page)}")
        return
    problem = book.check(evidence, page)
    if problem:
        raise ValueError(problem)
    typer.echo(f"{page} is what {evidence} says")


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
    """What a probe costs beside the training of a ViT-B/16."""
    from wellcond.bench import probe

    probe.run(output=output, device=device, batch_size=batch_size, quick=quick)


@bench.command("attention")
def bench_attention(output: BenchOutput = None, device: Device = None, quick: Quick = False) -> None:
    """Every attention over the length: time and memory, against torch's own and the published order of operations."""
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
        Path | None, typer.Option(help="timm's train.py, to be timed beside ours.", exists=True, dir_okay=False)
    ] = None,
) -> None:
    """The training loop against the model alone, and against timm's train.py."""
    from wellcond.bench import training

    training.run(
        output=output, device=device, batch_size=batch_size, quick=quick, data_dir=data_dir, timm_train=timm_train
    )
