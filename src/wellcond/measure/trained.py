"""Measure two public trained models, each next to its own random start, in float32 and in float64.

    python -m wellcond.measure.trained FOLDER      # evidence/trained/*.json, docs/trained/cifar10-vit.html
    measure_trained(CIFAR10_VIT, Path("FOLDER"))       # one of them, as a record

FOLDER holds the files named in `trained_models.FILES`; they are not ours to redistribute, so they are not in this
repository. First the accuracy of the CIFAR-10 ViT is checked: weights loaded under wrong names would otherwise be
measured without complaint.
"""

import argparse
import copy
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from rich.console import Console
from safetensors.torch import save_file
from torch import Tensor, nn

from wellcond.data import ImageSample, read_images
from wellcond.measure.measure import UNTRAINED, Measurement, images_for, measure
from wellcond.measure.trained_models import galileo_weights
from wellcond.models.build import BuiltModel, build_model
from wellcond.numerics import condition_number
from wellcond.probe import Probe
from wellcond.records import Row, write_record

__all__ = [
    "CIFAR10_VIT",
    "GALILEO_NANO",
    "MODELS",
    "Trained",
    "accuracy",
    "by_site",
    "condition_of_weights",
    "float64_rows",
    "measure_trained",
    "run",
]


@dataclass(frozen=True, kw_only=True)
class Trained:
    """One trained model, and what to measure it on."""

    name: str
    """Its name in timm, see trained_models.py."""
    about: str
    source: str
    weights: Callable[[Path, Path], Path]
    """(folder with the files, folder to write into) → path of a checkpoint that fits the model."""
    data: str | None
    """Images, as a path inside the folder with the files; None for crops of two photographs."""
    accuracy: float | None
    """The accuracy that its authors report on these images."""


def _as_it_is(folder: Path, _: Path) -> Path:
    return folder / "vit_cifar10.pth"


def _renamed(folder: Path, scratch: Path) -> Path:
    path = scratch / "galileo_nano.safetensors"
    save_file(galileo_weights(folder / "encoder.pt"), path)
    return path


CIFAR10_VIT = Trained(
    name="cifar10_vit",
    about="a post-norm ViT, 128 wide, 6 deep, 8 heads, 65 tokens, trained on CIFAR-10",
    source="public repository smmk47/CIFAR10-Classification, vit_cifar10.pth",
    weights=_as_it_is,
    data="cifar10/val.tar",
    accuracy=0.7372,
)
GALILEO_NANO = Trained(
    name="galileo_nano",
    about="Galileo-Nano's encoder, pre-norm, 128 wide, 4 deep, 8 heads, trained on satellite data; here 144 tokens of "
    "photographs in place of its blue, green and red bands: plausible input, not what it was trained on",
    source="public repository nasaharvest/galileo (MIT), data/models/nano/encoder.pt",
    weights=_renamed,
    data=None,
    accuracy=None,
)
MODELS = {"cifar10-vit": CIFAR10_VIT, "galileo-nano": GALILEO_NANO}


def measure_trained(
    trained: Trained,
    folder: Path,
    *,
    page: Path | None = None,
    samples: int = 64,
    seed: int = 0,
) -> dict[str, Any]:
    """Return a record of one model: log κ by site, trained and untrained, all rows, and float32's distance to float64.

    Writes the page if `page` is given. ValueError if the accuracy differs from the authors' by more than 0.1 points.
    """
    with tempfile.TemporaryDirectory() as scratch:
        checkpoint = trained.weights(folder, Path(scratch))
        data = None if trained.data is None else folder / trained.data
        built = build_model(trained.name, checkpoint=checkpoint)
        reached = None
        if data is not None and trained.accuracy is not None:
            reached = accuracy(built, data)
            if abs(reached - trained.accuracy) > 1e-3:
                raise ValueError(
                    f"{trained.name} reaches {reached:.2%} of {data.name}, but its authors report "
                    f"{trained.accuracy:.2%}: wrong weights, wrong images, or weights in the wrong places"
                )
        done = measure(
            trained.name,
            checkpoint=checkpoint,
            data_dir=data,
            output=Path(scratch) / "measured",
            samples=samples,
            exact="float32",
            spectrum=True,
            untrained=True,
            device="cpu",
            seed=seed,
            console=Console(quiet=True),  # it would name a page that is about to move
        )
        if page is not None and done.page is not None:
            page.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(done.page, page)
    sample = images_for(built, data, samples, seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        start = build_model(trained.name)
    doubles = {"trained": float64_rows(built, sample), UNTRAINED: float64_rows(start, sample)}
    return {
        "what": f"log kappa at four sites of {trained.about}; beside its random start",
        "source": trained.source,
        "accuracy": reached,
        "accuracy its authors give": trained.accuracy,
        "notes": done.notes,
        **_summary(done, doubles),
        "condition of the attention's weights": condition_of_weights(built.model),
        "rows": _without_spectra(done.rows),
        "rows of the untrained model": _without_spectra(done.untrained or []),
        "rows of a float64 copy": doubles["trained"],
        "rows of a float64 copy of the untrained model": doubles[UNTRAINED],
    }


@torch.no_grad()
def accuracy(built: BuiltModel, data: Path) -> float:
    """Return the share of images that the model classifies correctly; they lie in folders named after their classes."""
    sample = read_images(data, built.transform(), limit=10_000)
    folders = [name.split("/")[-2] for name in sample.names]
    classes = sorted(set(folders))
    found: list[int] = []
    for images in sample.images.split(500):
        logits: Tensor = built.model(images)
        found += logits.argmax(-1).tolist()
    return fmean(classes[answer] == folder for answer, folder in zip(found, folders, strict=True))


@torch.no_grad()
def float64_rows(built: BuiltModel, sample: ImageSample) -> list[Row]:
    """Return log κ of the same model and images, all in float64, which resolves condition numbers up to 4.5e15."""
    model = copy.deepcopy(built.model).double()
    with Probe(model, max_samples=len(sample.names), attention=False, run="float64") as probe:
        model(sample.images.double())
    return [row for row in probe.rows() if row["name"] == "log_kappa"]


def condition_of_weights(model: nn.Module) -> dict[str, float]:
    """Return κ of every block's W_Q, W_K, W_V (all heads together) and W_O, by name, computed in float64."""
    found: dict[str, Tensor] = {}
    for name, weight in model.named_parameters():
        if name.endswith((".attn.qkv.weight", ".self_attn.in_proj_weight")):  # timm's and torch's names
            block = name.partition(".attn.")[0].partition(".self_attn.")[0]
            found |= {f"{block}.{part}": third for part, third in zip("qkv", weight.chunk(3), strict=True)}
        elif name.endswith((".attn.proj.weight", ".self_attn.out_proj.weight")):
            found[name.rsplit(".", 3)[0] + ".o"] = weight
    return {name: float(condition_number(weight.detach().double())) for name, weight in found.items()}


def _summary(done: Measurement, doubles: dict[str, list[Row]]) -> dict[str, Any]:
    """Return the means over blocks by site, and the largest distance from float64 of values that float32 resolves."""
    singles = {"trained": done.rows, UNTRAINED: done.untrained or []}
    apart = [
        abs(row["value"] - truth[row["block"], row["site"]])
        for which, rows in singles.items()
        for truth in [{(double["block"], double["site"]): double["value"] for double in doubles[which]}]
        for row in rows
        if row["name"] == "log_kappa" and row["status"] == "ok"
    ]
    return {
        "mean log_kappa": {which: by_site(rows) for which, rows in singles.items()},
        "mean log_kappa in float64": {which: by_site(rows) for which, rows in doubles.items()},
        "mean attention_entropy": {
            which: by_site(rows, "attention_entropy").get("sa") for which, rows in singles.items()
        },
        "largest distance of log_kappa from float64": max(apart, default=None),
        "compared with float64": len(apart),
    }


def by_site(rows: list[Row], name: str = "log_kappa") -> dict[str, float]:
    """Return the mean over the blocks at each site."""
    sites = dict.fromkeys(row["site"] for row in rows if row["name"] == name)
    return {site: fmean(row["value"] for row in rows if (row["name"], row["site"]) == (name, site)) for site in sites}


def _without_spectra(rows: list[Row]) -> list[Row]:
    return [row for row in rows if not row["name"].startswith("sigma.")]


def run(
    folder: Path,
    *,
    evidence: Path = Path("evidence/trained"),
    pages: Path = Path("docs/trained"),
    seed: int = 0,
    console: Console | None = None,
) -> None:
    """Measure both models; write a record of each, and the page of the first."""
    console = console or Console()
    for name, trained in MODELS.items():
        console.print(f"Measuring {trained.name}, {trained.about} …", highlight=False)
        page = pages / f"{name}.html" if trained is CIFAR10_VIT else None
        record = measure_trained(trained, folder, page=page, seed=seed)
        write_record(evidence / f"{name}.json", record, seed=seed)
        for which, means in record["mean log_kappa"].items():
            found = ", ".join(f"{site} {value:.2f}" for site, value in means.items())
            console.print(f"mean log κ, {which}: {found}", highlight=False)
        console.print(f"{evidence / f'{name}.json'}{f', {page}' if page else ''}", highlight=False)


if __name__ == "__main__":
    _parser = argparse.ArgumentParser(description="Measure two trained models, each beside its random start.")
    _parser.add_argument("folder", type=Path, help="folder with their weights and images; see trained_models.py")
    run(_parser.parse_args().folder)
