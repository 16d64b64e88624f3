"""The trainings on ImageNet-1K behind Tables 1, 3, 4 and 5 and Figure 5: how to launch each, and what it takes.

    for line in plan("asa-table4", options): print(line)      # `wellcond reproduce asa-table4 --scale paper`

Nothing is trained here. Every training is rehearsed (train/dry_run.py) with a few pictures in place of ImageNet: its
loader, model, surgery, optimiser and schedule are built. GPU hours come from measured speeds: of the same model in
benchmarks/ or, failing that, in its runs at 224 pixels in evidence/runs; otherwise of a step of ViT-B or Swin-S in
benchmarks/, scaled by the number of operations.
"""

import os
import shlex
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

from wellcond.claims.claim import Options
from wellcond.claims.grayed import EPSILONS
from wellcond.data import DataSet, open_data
from wellcond.records import read_json
from wellcond.train.config import Config
from wellcond.train.dry_run import DryRun, dry_run
from wellcond.train.recipes import recipe

__all__ = ["IMAGES", "TABLES", "Launch", "gpu_hours", "plan"]

IMAGES, CLASSES = 1_281_167, 1000
GPUS = 8
BENCHMARK = "graying-h200.json"


@dataclass(frozen=True, kw_only=True)
class Launch:
    """One training on ImageNet-1K."""

    recipe: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    after: "Launch | None" = None
    """The training whose weights it starts from."""

    @property
    def name(self) -> str:
        return "-".join([self.recipe, *map(str, self.settings.values())])

    @property
    def gray(self) -> str:
        return self.settings.get("gray", "")

    @property
    def config(self) -> Config:
        weights = {"checkpoint": os.devnull} if self.after else {}  # a placeholder: the weights do not exist yet
        return recipe(self.recipe, scale="paper", **self.settings, **weights)

    def command(self) -> str:
        settings = dict(self.settings)
        if self.after:
            steps = _rehearsed(self.after.recipe, self.after.gray).steps
            settings["checkpoint"] = f"runs/paper/{self.after.name}/checkpoints/step-{steps:08d}/model.safetensors"
        words = ["torchrun", "--nproc-per-node", str(GPUS), "-m", "wellcond", "train", self.recipe, "--scale", "paper"]
        words += ["--data-dir", "folder:imagenet", "--output", f"runs/paper/{self.name}"]
        return shlex.join([*words, *(word for pair in settings.items() for word in ("--set", "{}={}".format(*pair)))])


def _grayed(name: str, method: str, epsilon: float) -> Launch:
    return Launch(recipe=name, settings={"gray": method, "epsilon": epsilon})


def _both(name: str) -> tuple[Launch, ...]:
    return Launch(recipe=name), _grayed(name, "dct", 0.95)


def _finetuned(start: Launch) -> tuple[Launch, ...]:
    return start, Launch(recipe="mae_base_finetune", settings=start.settings, after=start)


TABLES: dict[str, tuple[Launch, ...]] = {
    "asa-table1": (*_both("vit_base"), _grayed("vit_base", "svd", 0.95)),
    "asa-table3": (
        Launch(recipe="vit_base"),
        *(_grayed("vit_base", method, epsilon) for method, some in EPSILONS.items() for epsilon in some),
    ),
    "asa-table4": tuple(
        one for name in ("vit_small", "vit_base", "swin_small", "cait_s24", "pvt_v2_b3") for one in _both(name)
    ),
    "asa-table5": tuple(one for start in _both("mae_base") for one in _finetuned(start)),
    "asa-fig5": _both("vit_base"),
}
"""The trainings of each claim; trainings with the same name are the same."""


def plan(id_: str, options: Options) -> list[str]:
    """Return what a claim would take, line by line; empty for a claim that has no trainings on ImageNet."""
    if id_ not in TABLES:
        return []
    lines, total = [f"{id_} at paper scale: {len(TABLES[id_])} trainings on ImageNet-1K, for each seed:"], 0.0
    for launch in TABLES[id_]:
        launch.config.check(world=GPUS)
        found = _rehearsed(launch.recipe, launch.gray)
        speed, how = _speed(launch, options)
        hours = gpu_hours(launch.recipe, speed)
        total += hours
        lines += [f"{launch.name}: {'; '.join(found.lines()[:2])}", f"    {launch.command()}"]
        if speed:
            lines.append(f"    {hours:,.0f} GPU hours, at {speed:,.0f} images per second and GPU ({how})")
    if total:
        lines.append(f"Together {total:,.0f} GPU hours for one seed, where pictures are decoded as fast as that.")
    else:
        lines.append("GPU hours need measured speeds: --evidence names a clone's evidence, beside which these stand.")
    return [*lines, "Other seeds: --set seed=1. Every loader, model and schedule was built; nothing was trained."]


def gpu_hours(name: str, images_per_second: float) -> float:
    """Return the GPU hours of a recipe's training at the paper's scale; 0 if no speed is known."""
    epochs = recipe(name, scale="paper").epochs
    return epochs * IMAGES / images_per_second / 3600 if images_per_second else 0.0


def _speed(launch: Launch, options: Options) -> tuple[float, str]:
    """Return images per second on one GPU, and the source; 0 if nothing was measured.

    Benchmarks had the GPU to themselves. Trainings may have shared it: they are used only for models not timed."""
    timed, how, own = _timed(launch, options)
    runs = (options.evidence / "runs" / "lab" / "imagenette" / launch.recipe).glob("*/seed-*/result.json")
    speeds = [read_json(path)["images_per_second"] or 0.0 for path in runs]
    if own or not any(speeds):
        return timed, how
    return max(speeds), "its trainings on Imagenette, which may have shared a GPU"


def _timed(launch: Launch, options: Options) -> tuple[float, str, bool]:
    """Return images per second by the benchmark, the source, and whether this very model was timed."""
    benchmark = options.evidence.absolute().parent / "benchmarks" / BENCHMARK
    if not benchmark.exists():
        return 0.0, "", False
    record = read_json(benchmark)
    like = "vit_base" if launch.config.model.startswith("vit") else "swin_small"  # the two that are timed
    wanted, epsilon = (recipe(like, scale="paper").model, launch.gray or "plain"), launch.config.epsilon
    steps = [row for row in record["rows"] if row["kind"] == "step" and (row["model"], row["path"]) == wanted]
    ms = min(steps, key=lambda row: abs((row["epsilon"] or epsilon) - epsilon))["ms"]
    share = _rehearsed(launch.recipe, "").operations / _rehearsed(like, "").operations
    how = f"benchmarks/{BENCHMARK}" + ("" if share == 1 else f", a step of {like}, by the number of operations")
    return 1e3 * record["batch_size"] / ms / share, how, share == 1


@cache
def _rehearsed(name: str, gray: str) -> DryRun:
    with _pictures() as data:
        return dry_run(Launch(recipe=name, settings={"gray": gray}).config, data, samples=IMAGES, world=GPUS)


@contextmanager
def _pictures() -> Iterator[DataSet]:
    """Provide a few pictures in files, streamed like ImageNet's, as a data set with as many classes."""
    from PIL import Image

    with tempfile.TemporaryDirectory() as folder:
        for number, place in enumerate(("train/a", "train/b", "val/a", "val/b")):
            Path(folder, place).mkdir(parents=True)
            Image.radial_gradient("L").convert("RGB").rotate(90 * number).save(Path(folder, place, "1.jpg"))
        data = open_data(f"folder:{folder}", image_size=224, cache_limit=0)
        yield replace(data, name="imagenet", classes=[str(number) for number in range(CLASSES)])
