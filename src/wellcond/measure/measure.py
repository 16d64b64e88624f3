"""Measure once which blocks of a model are ill-conditioned, and give a table, the rows and a page.

    measure("vit_tiny_patch16_224", checkpoint="last.pth.tar", data_dir="photos", untrained=True)
    # measure-vit_tiny_patch16_224/: config.json, probe.jsonl, untrained.jsonl, report.html

Without data it measures crops of scikit-learn's two photographs. Without a checkpoint it uses the pretrained weights of
that name if they can be had within seconds; otherwise random ones, and says so above everything else. `untrained` also
measures the same architecture with random weights: much of what looks like a result of training is there before. Sites
at the ceiling of float32 are measured again in float64. For comparison, the table and the page show the models in our
evidence whose token matrices have the nearest shape (report/reference.py).
"""

import contextlib
import os
import re
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.text import Text
from torch import nn

from wellcond import records
from wellcond.data import ImageSample, read_images, sample_images
from wellcond.measure.table import kappa_tables, legend
from wellcond.models import gray as gray_model
from wellcond.models import graying_of
from wellcond.models.build import BuiltModel, build_model
from wellcond.models.huggingface import HUGGINGFACE, folder_of
from wellcond.models.pretrained import FOLDER, HUB, find_pretrained
from wellcond.models.weights import read_weights, write_weights
from wellcond.probe import Probe
from wellcond.probe.table import lower_bounds
from wellcond.report.charts import can_draw
from wellcond.report.measured import CONFIG, MARK, PAGE, ROWS, UNTRAINED, UNTRAINED_ROWS, Measured, measured_config
from wellcond.train.checkpoint import export, saved_steps, state_path
from wellcond.train.config import IMAGE_TASKS, TASK_KINDS
from wellcond.train.shards import is_sharded
from wellcond.usage import wrong_usage
from wellcond.words import SITES, meant

__all__ = ["EXACT", "Measurement", "images_for", "measure"]

EXACT = ("auto", "float32", "float64")
SAMPLES = {"cpu": 16}
"""Default number of images; 64 on other devices. log κ differs little from image to image."""
FITTING = {"img_size", "patch_size", "num_classes", "in_chans", "global_pool", "dynamic_img_size", "strict_img_size"}
"""Model settings that pretrained weights can fit; with any other setting they are not tried."""
PLAIN = (
    bool,
    int,
    float,
    str,
    list,
    tuple,
    type(None),
)  # what JSON can hold; anything else, say a class, is written as its repr
EPSILON = 0.95


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """The results of `measure`, and where the page is."""

    rows: list[records.Row]
    untrained: list[records.Row] | None
    """The rows of the same architecture with random weights, if requested."""
    notes: list[str]
    """What a reader must know, one sentence each, as on the page."""
    page: Path | None
    """None if Altair, which draws it, is not installed, or if there is no κ to draw."""


def measure(
    model_name: str,
    *,
    checkpoint: str | os.PathLike[str] | None = None,
    pretrained: bool | None = None,
    ema: bool = False,
    strict: bool = True,
    model_kwargs: Mapping[str, Any] | None = None,
    data_dir: str | os.PathLike[str] | None = None,
    output: str | os.PathLike[str] | None = None,
    sites: str | Iterable[str] | None = None,
    blocks: str | int | Iterable[str | int] = "*",
    samples: int | None = None,
    exact: str = "auto",
    gray: str | None = None,
    epsilon: float | None = None,
    spectrum: bool = False,
    attention: bool = True,
    untrained: bool = False,
    device: str | None = None,
    seed: int = 0,
    console: Console | None = None,
) -> Measurement:
    """Build the model, measure it on images, print the table, and write rows and page.

    Args:
        model_name, model_kwargs, checkpoint, ema, strict: see `build_model`. The name may be a run's folder: then these
            are the run's model, its settings and its last weights, unless they are given.
        pretrained: True uses the pretrained weights of that name, False random ones. None (without a checkpoint) uses
            the pretrained ones if they are cached or the hub answers within seconds, else random ones.
        data_dir: a folder or a .tar of images; by default crops of two photographs.
        output: a folder, by default `measure-` and the model's name. A folder that holds something else is refused.
        sites: as for `wellcond.Probe`; by default those of `sa`, `+sa`, `mlp` and `+mlp` that the model has.
        blocks, spectrum, attention: as for `wellcond.Probe`.
        samples: how many images are read and measured; by default 16 on a CPU, else 64.
        exact: the precision of the measured pass; "auto" is float32, and float64 for the sites where some κ is beyond
            what float32 can resolve.
        gray, epsilon: apply Token Graying to the model for this measurement, by default with an epsilon of 0.95.
        untrained: also measure the same architecture with random weights.
        seed: for the choice of images and for random weights.

    Raises WrongUsage, a ValueError, for whatever cannot be built, read or written, before anything is measured.
    """
    console = console or Console()
    with wrong_usage(), contextlib.ExitStack() as stack:
        where = _device(device)
        run = _run_of(model_name)
        name = _plain_name(model_name) if run is None else Path(model_name).resolve().name
        folder = Path(output) if output is not None else Path(f"measure-{name}")
        settings, step = dict(model_kwargs or {}), None
        if run is not None:
            _check_kind(run)
            model_name, settings = run.config["model"], {**run.config["model_kwargs"], **settings}
            if checkpoint is None:
                (checkpoint, step), ema = stack.enter_context(_last_weights(run, ema=ema)), False
        _check_folder(folder)
        if epsilon is not None and gray is None:
            raise ValueError(
                "epsilon is the exponent of graying, and nothing is grayed: also name a method, svd or dct"
            )
        if exact not in EXACT:
            raise ValueError(f"exact must be one of {', '.join(EXACT)}, not {exact!r}{meant(exact, EXACT)}")
        weights: dict[str, Any] = {"checkpoint": checkpoint, "ema": ema, "strict": strict}
        built, why_random = _build_with_weights(model_name, seed, settings, pretrained, weights, console)
        if run is not None and "img_size" not in settings:  # as of a ConvMixer, which takes images of any size
            channels, side = built.data_config["input_size"][0], run.config["image_size"]
            built.data_config["input_size"] = (channels, side, side)
        if untrained and not built.trained:
            raise ValueError(
                f"{name} already has random weights ({why_random}): drop untrained, or give a checkpoint or pretrained"
            )
        notes = [f"{name}: {', '.join(built.notes)}."]
        notes += [] if step is None else [f"The weights are those after step {step}, of the run's newest state."]
        notes += _gray(built, gray, EPSILON if epsilon is None else epsilon)
        samples = SAMPLES.get(where.type, 64) if samples is None else samples
        probed: dict[str, Any] = {"sites": sites, "blocks": blocks, "max_samples": samples}
        probed |= {"spectrum": spectrum, "attention": attention}
        Probe(built.model, **probed)  # before reading images, since it may reject its settings
        sample = images_for(built, data_dir, samples, seed)

    if not built.trained:
        notes += _settle_norms(built.model, sample, where)
    rows, said, shape = _measure(built.model, name, probed, sample, where, exact, console)
    start = None
    if untrained:
        _forget_training(built, model_name, seed)
        _settle_norms(built.model, sample, where)
        start, _, _ = _measure(built.model, UNTRAINED, probed, sample, where, exact, console)
        notes.append(f"{UNTRAINED}: the same model with random weights, seed {seed}.")
    notes += [*said, *_about_images(sample, data_dir), _about_values([*rows, *(start or ())], where)]
    drawable = any(row["name"] == "log_kappa" and row["status"] != "single" for row in rows)
    if not drawable:
        notes.append("No page: these blocks work on a single token, whose κ says nothing. Measure other blocks.")
    measured = Measured(
        model=name, trained=built.trained, why_random=why_random, shape=shape, rows=rows, untrained=start, notes=notes
    )

    def say(line: Any) -> None:
        console.print(line, highlight=False, markup=False, soft_wrap=True)

    if measured.warning:
        console.print(Text(measured.warning, style="bold yellow"), soft_wrap=True)
    say(f"log κ (natural) of {measured.title}")  # before anything is written: the disk may be full
    for table in kappa_tables(console, rows, start, measured.reference):
        console.print(table)
    for line in (*legend(console, rows, start), *measured.about_reference, *notes):
        say(line)
    written = {key: value if isinstance(value, PLAIN) else repr(value) for key, value in settings.items()}
    page = _write(folder, measured, {"model_kwargs": written, "images": sample.names}, seed, page=drawable)
    if drawable:
        no_page = f"No page: Altair is not installed. `wellcond report {folder}` draws it where Altair is installed."
        say(f"The page: {page}" if page else no_page)
    return Measurement(rows=rows, untrained=start, notes=notes, page=page)


def _device(wanted: str | None) -> torch.device:
    try:
        device = torch.device(wanted or ("cuda" if torch.cuda.is_available() else "cpu"))
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:  # torch without CUDA asserts
        why = str(error).splitlines()[0]
        raise ValueError(f"there is no device {wanted!r} here ({why}); wellcond info lists the devices") from error
    return device


def _plain_name(model_name: str) -> str:
    """Return a name for people and files: the last part of a folder or Hub path, since paths mean nothing elsewhere."""
    last = re.split(r"[/\\]", model_name.partition(":")[2].rstrip("/\\"))[-1] if ":" in model_name else model_name
    return re.sub(r"[^\w.+-]+", "-", last) or "model"


def _run_of(name: str) -> records.Run | None:
    """Return the run whose folder this is; None for the name of a model."""
    file = Path(name) / CONFIG
    of_run = file.is_file() and records.read_json(file).get("what") == "wellcond train"
    return records.Run.open(name) if of_run else None


def _check_kind(run: records.Run) -> None:
    if TASK_KINDS.get(run.config.get("task", "classify")) not in IMAGE_TASKS:
        raise ValueError(
            f"{run.path} is a run whose model reads no pictures, and this command measures those that do. `wellcond "
            f"report {run.path}` shows what was measured while it trained; wellcond.Probe measures any model"
        )


@contextlib.contextmanager
def _last_weights(run: records.Run, *, ema: bool) -> Iterator[tuple[Path, int]]:
    """Yield a file with the weights of a run's newest state, which timm's model takes, and the step of that state."""
    steps = saved_steps(run.path / "checkpoints")
    if not steps:
        raise ValueError(f"{run.path} is a run without saved weights: let it go on until it has some")
    state = state_path(run.path / "checkpoints", steps[-1])
    file = state / ("ema.safetensors" if ema else "model.safetensors")
    with tempfile.TemporaryDirectory() as scratch:
        if is_sharded(state) and not file.exists():
            try:
                export(state, Path(scratch) / "model.safetensors")
            except Exception as error:  # a damaged state can fail in many ways
                raise ValueError(f"{state} cannot be read ({error}); give a checkpoint") from error
            file = Path(scratch) / ("ema-model.safetensors" if ema else "model.safetensors")
        if not file.exists():
            why = "keeps no average of its weights (ema_decay): leave ema out" if ema else f"has no {file.name}"
            raise ValueError(f"the state {state} {why}")
        if TASK_KINDS[run.config.get("task", "classify")] == "linear_probe":  # its head has a batch norm, timm's none
            weights, metadata = read_weights(file)
            file = Path(scratch) / f"features-{file.name}"
            write_weights(file, {n: one for n, one in weights.items() if not n.startswith("head.")}, metadata)
        yield file, steps[-1]


def _check_folder(folder: Path) -> None:
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder} is a file; choose another output")
    files = [folder / name for name in (CONFIG, ROWS, UNTRAINED_ROWS, PAGE)]
    found = [file.name for file in files if file.exists()]
    if found and measured_config(folder) is None:
        raise ValueError(
            f"{folder} holds {', '.join(found)} of something else, which would be overwritten; choose another output"
        )
    records.check_writable(*files)


def _build_with_weights(
    model_name: str, seed: int, settings: dict[str, Any], pretrained: bool | None, weights: Mapping[str, Any],
    console: Console,
) -> tuple[BuiltModel, str]:  # fmt: skip
    """Return the model, and why its weights are random; "" if they are not."""
    if weights["checkpoint"] is not None or weights["ema"] or pretrained:
        return _build(model_name, seed, model_kwargs=settings, pretrained=bool(pretrained), **weights), ""
    why = "as requested" if pretrained is False else ""
    odd = [key for key in settings if key not in FITTING]
    if not why and odd:
        why = f"pretrained ones fit only the unchanged model, and you gave {', '.join(odd)}"
    if not why:
        found = find_pretrained(model_name)
        why = "" if found.there else found.why
        if why and model_name.startswith((HUB, HUGGINGFACE)) and not folder_of(model_name):
            # Without an answer not even the architecture is known.
            raise ValueError(f"{model_name} is not available: {why}")
        if found.there and not model_name.startswith(FOLDER):
            said = f"Using the pretrained weights of {model_name}, {found.why} (--no-pretrained uses random ones)."
            console.print(said, highlight=False, markup=False, soft_wrap=True)
    if not why:
        try:
            return _build(model_name, seed, model_kwargs=settings, pretrained=True, **weights), ""
        except ValueError as error:
            if ":" in model_name:  # such a name asks for these very weights
                raise
            why = str(error)
    return _build(model_name, seed, model_kwargs=settings, **weights), why


def _build(model_name: str, seed: int, **how: Any) -> BuiltModel:
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return build_model(model_name, **how)
    except OSError as error:  # our own have a message, the system's an errno
        raise ValueError(
            f"{how['checkpoint']} cannot be read ({error.strerror})" if error.errno else str(error)
        ) from None


def _gray(built: BuiltModel, method: str | None, epsilon: float) -> list[str]:
    if method is None:
        return []
    before = graying_of(built.model)
    gray_model(built.model, method, epsilon=epsilon)
    now = graying_of(built.model)
    if not built.trained or now == before:
        return [f"Its tokens are grayed: {method}, epsilon {epsilon:g}."]
    trained = f"with {before.method}, epsilon {before.epsilon:g}" if before else "without"
    return [f"Its tokens are grayed for this measurement: {method}, epsilon {epsilon:g}; it was trained {trained}."]


def images_for(built: BuiltModel, data_dir: str | os.PathLike[str] | None, samples: int, seed: int) -> ImageSample:
    """Return the images that `measure` measures this model on."""
    transform = built.transform()
    if data_dir is None:
        return sample_images(transform, limit=samples, seed=seed)
    return read_images(data_dir, transform, limit=samples, seed=seed)


def _measure(
    model: nn.Module, run: str, probed: Mapping[str, Any], sample: ImageSample, device: torch.device, exact: str,
    console: Console,
) -> tuple[list[records.Row], list[str], tuple[int, int] | None]:  # fmt: skip
    """Return the rows, the probe's notes, and (tokens, width) of its matrices if all have the same."""
    probe = Probe(model, run=run, exact="float64" if exact == "float64" else True, **probed)
    _run(probe, sample, device, console)
    rows, notes = probe.rows(), list(probe.notes)
    beyond = {site for *_, site in lower_bounds(rows)} if exact == "auto" else set()
    if not beyond:
        return rows, notes, probe.shape
    sites = [site for site in SITES if site in beyond]
    if device.type == "mps":  # it has no float64
        return rows, [*notes, f"κ at {', '.join(sites)} is beyond float32; device=cpu can measure it."], probe.shape
    finer = Probe(model, run=run, exact="float64", **{**probed, "sites": sites})
    try:
        _run(finer, sample, device, console, f"{', '.join(sites)} again, in float64")
    except ValueError as error:  # no memory for it
        return rows, [*notes, f"κ at {', '.join(sites)} is beyond float32; in float64, {error}"], probe.shape
    seen = {_key(row): row for row in finer.rows()}
    notes.append(f"{', '.join(sites)}: in float64, because κ of some samples is beyond what float32 can resolve.")
    return [seen.get(_key(row), row) for row in rows], notes, probe.shape


@torch.no_grad()
def _settle_norms(model: nn.Module, sample: ImageSample, device: torch.device) -> list[str]:
    """Give batch norms the statistics of these images: a signal dies in batch norms that have never seen data."""
    norms = [module for module in model.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]
    if not norms:
        return []
    usual = [norm.momentum for norm in norms]
    for norm in norms:
        norm.reset_running_stats()
        norm.momentum = None  # a cumulative mean, here over one batch
        norm.train()
    model.to(device)(sample.images.to(device))
    for norm, momentum in zip(norms, usual, strict=True):
        norm.momentum = momentum
    model.eval()
    return ["Its batch norms use the statistics of these images, because random weights come without any."]


def _key(row: records.Row) -> tuple[Any, ...]:
    return row["block"], row["site"], row["name"]


def _run(probe: Probe, sample: ImageSample, device: torch.device, console: Console, what: str = "") -> None:
    doing = f"Measuring {what or probe.run} on {len(sample.names)} images …"
    if not console.is_terminal:
        console.print(doing, highlight=False, markup=False)
    model = probe.model.to(device).eval()
    try:
        with console.status(doing), torch.no_grad(), probe:
            model(sample.images.to(device))
    except torch.OutOfMemoryError as error:
        raise ValueError(
            f"{len(sample.names)} images do not fit into the memory of {device}: use fewer samples, or fewer blocks "
            "or sites at a time"
        ) from error


def _forget_training(built: BuiltModel, model_name: str, seed: int) -> None:
    """Give the model random weights but keep its surgery, which does not rename any weights."""
    fresh = _build(model_name, seed, model_kwargs=built.model_kwargs)
    built.model.load_state_dict(fresh.model.state_dict())


def _write(folder: Path, measured: Measured, more: Mapping[str, Any], seed: int, *, page: bool) -> Path | None:
    """Write the files that `wellcond.report.measured` reads and, if `page` and Altair is there, the page; return its
    path."""
    config = {"what": MARK, "model": measured.model, "trained": measured.trained, "why_random": measured.why_random}
    config |= {"shape": measured.shape, "notes": measured.notes, **more}
    try:
        records.write_record(folder / CONFIG, config, seed=seed)
        _write_rows(folder / ROWS, measured.rows)
        _write_rows(folder / UNTRAINED_ROWS, measured.untrained)
        if page and can_draw():
            return measured.page().write(folder / PAGE)
        (folder / PAGE).unlink(missing_ok=True)  # that of an earlier measurement
        return None
    except OSError as error:  # it was writable before
        raise ValueError(
            f"{folder} can no longer be written to ({error.strerror}); the table above is all you get"
        ) from None


def _write_rows(path: Path, rows: Iterable[Mapping[str, Any]] | None) -> None:
    """Write the rows in place of those of an earlier measurement; None removes the file."""
    if rows is None:
        path.unlink(missing_ok=True)
        return
    records.replace_rows(path, rows)


def _about_images(sample: ImageSample, data_dir: str | os.PathLike[str] | None) -> list[str]:
    size = " × ".join(map(str, sample.images.shape[2:]))
    of = "" if data_dir is None else f" of {sample.found:,} in"
    notes = [f"{len(sample.names)} images of {size} pixels:{of} {sample.source}."]
    if sample.skipped:
        named = "; ".join(f"{name} ({why})" for name, why in sample.skipped[:5])
        more = f"; and {len(sample.skipped) - 5} more" if len(sample.skipped) > 5 else ""
        notes.append(f"{len(sample.skipped)} files could not be read and were left out: {named}{more}.")
    return notes


def _about_values(rows: Iterable[records.Row], device: torch.device) -> str:
    kappas = [row for row in rows if row["name"] == "log_kappa"]
    statuses = Counter(row["status"] for row in kappas)
    dtypes = ", ".join(sorted({row["dtype"] for row in kappas}))
    counted = ", ".join(f"{count} {status}" for status, count in statuses.most_common())
    return f"Measured in {dtypes} on {device.type}, without autocast; statuses of log κ: {counted}."
