"""Measurements of a trained model before its run ends, by name, so that claims can ask for them.

    MEASUREMENTS["log_kappa"](config, Path("runs/a"), "cuda")       # what `Planned(measure=("log_kappa",))` does

    @register_measurement("mine")
    def mine(config: Config, folder: Path, device: str | None) -> dict[str, Any]: …

This module measures log κ by block and site, at the random start and after training:

    found = measure_ends(config, Path("runs/a"))         # the run must be finished
    found["trained"]["sa"], found["untrained"]["sa"]     # one number per block: the mean of log κ over the images
    found["largest distance from float64"]               # of the trained model, on the first images

It uses a forward pass of its own in float32, without autocast and TF32, over every tenth validation image, the same for
all runs. The random start is rebuilt from the seed, so it is the one that was trained.

`images_of(options, data, 64)` returns images for claims that measure something without training.
"""

import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from wellcond.bench.photographs import photographs
from wellcond.claims.claim import Options
from wellcond.claims.sets import GivenData, ImageSet
from wellcond.data import EvalBatches, Images, open_data
from wellcond.models.sites import sites
from wellcond.probe import Probe
from wellcond.records import Row
from wellcond.train.checkpoint import final_state
from wellcond.train.config import Config
from wellcond.train.setup import data_of
from wellcond.train.tasks import make_task
from wellcond.words import BLOCK_SITES

__all__ = [
    "FLOAT64_CEILING",
    "MEASUREMENTS",
    "Measurement",
    "at_ceiling",
    "by_site",
    "images_of",
    "log_kappa_rows",
    "measure_ends",
    "measure_groups",
    "register_measurement",
    "some_images",
]

FLOAT64_CEILING = -math.log(sys.float_info.epsilon)  # the largest log κ in float64
EVERY = 10  # every tenth validation image: 10 % of them
BATCH = 125
CHECKED = 32  # images whose κ is also computed in float64
GROUPS = 10  # groups of images, for an interval with a single seed

Measurement = Callable[[Config, Path, str | None], Any]
"""(configuration, run folder, device) → anything that JSON can hold."""
MEASUREMENTS: dict[str, Measurement] = {}


def register_measurement(name: str) -> Callable[[Measurement], Measurement]:
    """Register a measurement of trained models, so that claims can ask for it by `name`. ValueError if it is taken."""

    def register(function: Measurement) -> Measurement:
        if MEASUREMENTS.setdefault(name, function) is not function:
            raise ValueError(f"there is a measurement {name!r} already; they are {', '.join(MEASUREMENTS)}")
        return function

    return register


@register_measurement("log_kappa")
def measure_ends(config: Config, folder: Path, device: str | None = None) -> dict[str, Any]:
    """Return log κ at every site of the run in `folder`, before and after training. ValueError without a checkpoint."""
    model, weights, images, where = _opened(config, folder, device)
    untrained = log_kappa_rows(model, images, where)
    model.load_state_dict(weights)
    trained = log_kappa_rows(model, images, where)
    singles = log_kappa_rows(model, images[:CHECKED], where)
    doubles = log_kappa_rows(model.double(), images[:CHECKED].double(), where)
    return {
        "images": len(images),
        "blocks": len(next(iter(by_site(trained).values()))),
        "trained": by_site(trained),
        "untrained": by_site(untrained),
        "capped": {"trained": _capped(trained), "untrained": _capped(untrained)},
        "largest distance from float64": _distance(singles, doubles),
        "checked in float64": min(CHECKED, len(images)),
    }


@register_measurement("log_kappa_groups")
def measure_groups(config: Config, folder: Path, device: str | None = None) -> list[list[float]]:
    """Return log κ at `+sa` after training, by group and block, for ten groups of the images: arms with one seed are
    compared group by group. In float64 if float32 caps any κ. Raises ValueError without a checkpoint."""
    model, weights, images, where = _opened(config, folder, device)
    model.load_state_dict(weights)

    def groups() -> list[list[Row]]:
        rows = [log_kappa_rows(model, images[first::GROUPS], where) for first in range(min(GROUPS, len(images)))]
        return [[row for row in group if row["site"] == "+sa"] for group in rows]

    found = groups()
    if any(map(_capped, found)):
        model, images = model.double(), images.double()
        found = groups()
    return [by_site(group)["+sa"] for group in found]


def _opened(
    config: Config, folder: Path, device: str | None
) -> tuple[nn.Module, dict[str, Tensor], Tensor, torch.device]:
    """Return the model at its random start, the weights it ended with, the images to measure it on, and the device."""
    where = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    data = data_of(config, cache=folder / "cache")
    model = make_task(config, data).build().to(where).eval()
    return model, final_state(folder).weights, _tenth(data.val), where


def some_images(config: Config, folder: Path) -> Tensor:
    """Return every tenth validation image of a run, normalised."""
    return _tenth(data_of(config, cache=folder / "cache").val)


def _tenth(validation: Any) -> Tensor:
    """Return every tenth image, so that a set that is sorted by class gives some of each class."""
    return _normalised(validation, torch.arange(0, len(validation), EVERY))


def images_of(options: Options, data: GivenData, count: int) -> Tensor:
    """Return normalised images, (count, channels, size, size), spread evenly over a set's validation part; at most as
    many as that has. For the set `photographs`, return crops of photographs."""
    assert isinstance(data.set, ImageSet)
    size = data.set.image_size
    if data.set.name == "photographs":
        return photographs(count, size)
    cache = options.output / options.scale / "cache"  # shared with the trainings of this scale
    part = open_data(data.spec, image_size=size, cache_dir=cache).val
    return _normalised(part, torch.linspace(0, len(part) - 1, min(count, len(part))).round().long())


def _normalised(part: Any, rows: Tensor) -> Tensor:
    assert isinstance(part, Images), "an experiment's data sets are small enough to be cached"
    return torch.cat([images for images, _ in EvalBatches(part.part(rows), batch_size=BATCH)])


@torch.no_grad()
def log_kappa_rows(model: nn.Module, images: Tensor, device: torch.device, *only: str) -> list[Row]:
    """Return the rows `log_kappa` and `capped` of a probe at all sites of the model's blocks, or `only` at some, batch
    by batch."""
    rows: list[Row] = []
    there = only or {one.site for one in sites(model)}
    for batch in images.split(BATCH):
        with Probe(model, list(there), max_samples=BATCH, attention=False, rank_samples=1, exact=True) as probe:
            model(batch.to(device))
        rows += [row for row in probe.rows() if row["name"] in ("log_kappa", "capped")]
    return rows


def by_site(rows: Sequence[Row]) -> dict[str, list[float]]:
    """Return the mean log κ of each block over all samples that have one, by site."""
    sums: dict[tuple[str, int], list[float]] = {}
    for row in rows:
        if row["name"] == "log_kappa" and row["count"]:
            total = sums.setdefault((row["site"], row["index"]), [0.0, 0.0])
            total[0] += row["value"] * row["count"]
            total[1] += row["count"]
    found: dict[str, list[float]] = {}
    for (site, _), (total, count) in sorted(sums.items(), key=lambda item: (BLOCK_SITES.index(item[0][0]), item[0][1])):
        found.setdefault(site, []).append(round(total / count, 6))
    return found


def _capped(rows: Sequence[Row]) -> int:
    """Return how many matrices have a κ beyond the dtype's ceiling, so that the ceiling counts as theirs."""
    return int(sum(row["value"] for row in rows if row["name"] == "capped"))


def at_ceiling(log_kappa: float) -> bool:
    """Whether a log κ measured in float64 is only a lower bound."""
    return log_kappa > FLOAT64_CEILING - 0.01


def _distance(singles: Sequence[Row], doubles: Sequence[Row]) -> dict[str, float | None]:
    """Return, by site, the largest difference of a block's log κ from float64; None if float32 caps every block."""
    truth = {(row["site"], row["block"]): row["value"] for row in doubles if row["name"] == "log_kappa"}
    found: dict[str, float | None] = dict.fromkeys(site for site, _ in truth)
    for row in singles:
        if row["name"] == "log_kappa" and row["status"] == "ok":
            off = round(abs(row["value"] - truth[row["site"], row["block"]]), 6)
            found[row["site"]] = max(off, found[row["site"]] or 0.0)
    return found
