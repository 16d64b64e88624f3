"""Measure a model once: which of its blocks are ill-conditioned? A table, the rows, and a page.

    measure("vit_tiny_patch16_224", checkpoint="last.pth.tar", data_dir="photos", untrained=True)
    # measure-vit_tiny_patch16_224/: config.json, probe.jsonl, untrained.jsonl, report.html

Without data it measures crops of two embedded photographs; without weights, random ones, and says so. `untrained`
also measures the same architecture with random weights: much of what looks like a result of training is there before.
"""

import os
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from wellcond import records
from wellcond.data import ImageSample, read_images, sample_images
from wellcond.measure.table import kappa_tables, legend
from wellcond.models import gray as gray_model
from wellcond.models import graying_of
from wellcond.models.build import BuiltModel, build_model
from wellcond.models.sites import find_blocks
from wellcond.probe import Probe
from wellcond.report.charts import can_draw
from wellcond.report.measured import CONFIG, MARK, PAGE, ROWS, UNTRAINED, UNTRAINED_ROWS, Measured, measured_config
from wellcond.words import DEFAULT_SITES

__all__ = ["Measurement", "measure"]

PLAIN = (
    bool,
    int,
    float,
    str,
    list,
    tuple,
    type(None),
)  # what JSON can hold; a class, say, is written by name
EPSILON = 0.95


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """What was measured, and where it lies."""

    rows: list[records.Row]
    untrained: list[records.Row] | None
    """The same architecture with random weights, where that was asked for."""
    notes: list[str]
    """What a reader must know, one sentence each, as the page has them."""
    page: Path | None
    """None where there is no Altair to draw it with."""


def measure(
    model_name: str,
    *,
    checkpoint: str | os.PathLike[str] | None = None,
    pretrained: bool = False,
    ema: bool = False,
    strict: bool = True,
    model_kwargs: Mapping[str, Any] | None = None,
    data_dir: str | os.PathLike[str] | None = None,
    output: str | os.PathLike[str] | None = None,
    sites: str | Iterable[str] | None = None,
    blocks: str | int | Iterable[str | int] = "*",
    samples: int = 64,
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
        model_name, model_kwargs, pretrained, checkpoint, ema, strict: see `build_model`.
        data_dir: a folder of images, or a .tar of them; by default crops of two photographs.
        output: a folder, by default `measure-` and the model's name. A folder that holds something else is refused.
        sites: as for `wellcond.Probe`; by default those of `sa`, `+sa`, `mlp` and `+mlp` that the model has.
        blocks, samples, spectrum, attention: as for `wellcond.Probe`; `samples` is also how many images are read.
        gray, epsilon: put Token Graying before the model for this measurement, by default with an epsilon of 0.95.
        untrained: measure the same architecture with random weights, too.
        seed: which images are chosen, and how random weights begin.

    Raises ValueError for whatever cannot be built, read or written, before anything is measured.
    """
    console = console or Console()
    where = _device(device)
    name = _plain_name(model_name)
    folder = Path(output) if output is not None else Path(f"measure-{name}")
    _check_folder(folder)
    if epsilon is not None and gray is None:
        raise ValueError("epsilon is the exponent of graying, and nothing is grayed: name the method, svd or dct, too")
    settings = dict(model_kwargs or {})
    built = _build(
        model_name, seed, model_kwargs=settings, pretrained=pretrained, checkpoint=checkpoint, ema=ema, strict=strict
    )
    if untrained and not built.trained:
        raise ValueError(f"{name} has random weights already: drop untrained, or give it a checkpoint or pretrained")
    notes = [f"{name}: {', '.join(built.notes)}."]
    notes += _gray(built, gray, EPSILON if epsilon is None else epsilon)
    sites = _sites_of(built) if sites is None else sites
    probed: dict[str, Any] = {"sites": sites, "blocks": blocks, "max_samples": samples, "exact": True}
    probed |= {"spectrum": spectrum, "attention": attention}
    probe = Probe(built.model, run=name, **probed)  # before images are read, since it may refuse its settings
    sample = _read(built, data_dir, samples, seed)

    _run(probe, sample, where, console)
    rows, start = probe.rows(), None
    if untrained:
        _forget_training(built, model_name, settings, seed)
        twin = Probe(built.model, run=UNTRAINED, **probed)
        _run(twin, sample, where, console)
        start = twin.rows()
        notes.append(f"{UNTRAINED}: the same model with random weights, of seed {seed}.")
    notes += [*probe.notes, *_about_images(sample, data_dir), _about_values([*rows, *(start or ())], where)]
    measured = Measured(model=name, trained=built.trained, rows=rows, untrained=start, notes=notes)

    def say(line: Any) -> None:
        console.print(line, highlight=False, markup=False, soft_wrap=True)

    say(f"log κ of {measured.title}")  # before anything is written: the disk may be full
    for table in kappa_tables(console, rows, start):
        console.print(table)
    for line in (*legend(console, rows, start), *notes):
        say(line)
    written = {key: value if isinstance(value, PLAIN) else repr(value) for key, value in settings.items()}
    page = _write(folder, measured, {"model_kwargs": written, "images": sample.names}, seed)
    say(f"The page: {page}" if page else f"No page, without Altair; `wellcond report {folder}` draws it where it is.")
    return Measurement(rows=rows, untrained=start, notes=notes, page=page)


def _device(wanted: str | None) -> torch.device:
    try:
        device = torch.device(wanted or ("cuda" if torch.cuda.is_available() else "cpu"))
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:  # torch without CUDA asserts
        why = str(error).splitlines()[0]
        raise ValueError(f"there is no device {wanted!r} here ({why}); wellcond info lists what there is") from error
    return device


def _plain_name(model_name: str) -> str:
    """The name for people and files: of a folder or the Hub only the last part, since paths mean nothing elsewhere."""
    last = re.split(r"[/\\]", model_name.partition(":")[2].rstrip("/\\"))[-1] if ":" in model_name else model_name
    return re.sub(r"[^\w.+-]+", "-", last) or "model"


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


def _build(model_name: str, seed: int, **how: Any) -> BuiltModel:
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return build_model(model_name, **how)
    except OSError as error:  # ours have a message; the system's have errno
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


def _sites_of(built: BuiltModel) -> list[str]:
    """The usual sites without those that no block has: a ConvMixer has no `+mlp`, parallel blocks have no `+sa`."""
    blocks = find_blocks(built.model)
    return [site for site in DEFAULT_SITES if any(site in block.taps for block in blocks)]


def _read(built: BuiltModel, data_dir: str | os.PathLike[str] | None, samples: int, seed: int) -> ImageSample:
    transform = built.transform()
    if data_dir is None:
        return sample_images(transform, limit=samples, seed=seed)
    return read_images(data_dir, transform, limit=samples, seed=seed)


def _run(probe: Probe, sample: ImageSample, device: torch.device, console: Console) -> None:
    doing = f"Measuring {probe.run} on {len(sample.names)} images …"
    if not console.is_terminal:
        console.print(doing, highlight=False, markup=False)
    model = probe.model.to(device).eval()
    try:
        with console.status(doing), torch.no_grad(), probe:
            model(sample.images.to(device))
    except torch.OutOfMemoryError as error:
        raise ValueError(
            f"{len(sample.names)} images are too many for the memory of {device}: take fewer samples, or fewer blocks "
            "or sites at a time"
        ) from error


def _forget_training(built: BuiltModel, model_name: str, settings: Mapping[str, Any], seed: int) -> None:
    """Give the model random weights and keep its surgery, which changes no name of a weight."""
    classes = getattr(built.model, "num_classes", None)
    if classes is not None:  # the checkpoint may have decided it
        settings = {**settings, "num_classes": classes}
    fresh = _build(model_name, seed, model_kwargs=settings)
    built.model.load_state_dict(fresh.model.state_dict())


def _write(folder: Path, measured: Measured, more: Mapping[str, Any], seed: int) -> Path | None:
    """What can be read again by `wellcond.report.measured`, and the page where it can be drawn."""
    config = {"what": MARK, "model": measured.model, "trained": measured.trained, "notes": measured.notes, **more}
    try:
        records.write_record(folder / CONFIG, config, seed=seed)
        _write_rows(folder / ROWS, measured.rows)
        _write_rows(folder / UNTRAINED_ROWS, measured.untrained)
        return measured.page().write(folder / PAGE) if can_draw() else None
    except OSError as error:  # it was writable before
        raise ValueError(
            f"{folder} can no longer be written to ({error.strerror}); the table is all there is"
        ) from None


def _write_rows(path: Path, rows: Iterable[Mapping[str, Any]] | None) -> None:
    """The rows instead of those of an earlier measurement; None leaves none of them."""
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
