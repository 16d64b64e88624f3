"""`wellcond bench train`: does the training loop keep up with the model?

The model is a ViT-Tiny in bfloat16, compiled on a GPU. First comes the model alone on one constant batch, with kernels
launched one by one and, on a GPU, also replayed as a CUDA graph. Then `wellcond.train` on a folder of photographs that
are decoded once: with crops and flips, with mixed images and soft labels, without graphs (on a GPU), and with the
probe; at other sizes only some of these, as compiling takes most of the time. Then timm's own train.py on the same
folder, if given. A loop's images per second are those of its steady part, between two synchronisations with the device;
the ratio is to the faster of the two rates of the model alone.
"""

import gc
import math
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from wellcond.bench.photographs import write_photographs
from wellcond.bench.tables import destination, show, write
from wellcond.bench.timing import chosen_device, median_ms
from wellcond.data import Batch
from wellcond.models.build import create_model
from wellcond.progress import Steps, steps
from wellcond.records import Run, TrainRow
from wellcond.train.computing import mend_read_back
from wellcond.train.config import Config
from wellcond.train.loop import train
from wellcond.train.replay import Replayed
from wellcond.train.stopping import Interrupted

__all__ = ["read_rate", "run", "steady_rate", "timm_rate"]

SEED = 0
MODEL = "vit_tiny_patch16_224"
IMAGES = 20_000  # in the folder: fewer than in real data sets, so epochs start more often than with those
WARM = 50  # first steps, not counted, including compilation; also the steps between two synchronisations
STEADY_IMAGES = 102_400
PROBE_EVERY = 1000
QUICK = {"depth": 1, "embed_dim": 32, "num_heads": 2}
MIXED = {"mixup": 0.8, "cutmix": 1.0, "label_smoothing": 0.1}
TIMM_LINE = re.compile(r"Train: (\d+) \[ *(\d+)/\d+ .*\(([\d.]+)s, +([\d.]+)/s\)")
TIMM_TIMEOUT = 120.0
EVERYTHING = ("plain", "mixed", "one by one", "probed")


class Setting(NamedTuple):
    size: int
    patch: int
    classes: int
    batch: int
    ours: tuple[str, ...] = EVERYTHING
    """Which trainings by `wellcond.train` are timed."""

    @property
    def model_kwargs(self) -> dict[str, Any]:
        return {"img_size": self.size, "patch_size": self.patch}


def run(
    *,
    output: Path | None = None,
    device: str | None = None,
    batch_size: int | None = None,
    quick: bool = False,
    data_dir: Path | None = None,
    timm_train: Path | None = None,
) -> Path:
    """Time training on `device`, write JSON to `output` after each setting, and return its path.

    `data_dir` is a folder with train/CLASS/FILE and val/CLASS/FILE to train on instead of one made of photographs;
    `timm_train` is timm's train.py.
    """
    if timm_train is not None and not timm_train.is_file():
        raise ValueError(f"there is no file {timm_train}; --timm-train is the path of timm's train.py")
    where = chosen_device(device)
    path = destination(output, f"train-{where.type}.json")
    rows: list[dict[str, Any]] = []
    settings = list(_settings(where, batch_size, quick, data_dir))
    trainings = sum(1 + len(setting.ours) for setting in settings) + (timm_train is not None)
    with tempfile.TemporaryDirectory() as scratch, steps(trainings) as begin:
        for index, setting in enumerate(settings):
            bench = _Bench(setting, where, Path(scratch), data_dir, quick)
            rows += bench.rows(timm_train if index == 0 else None, begin)
            payload = {"benchmark": "train", "model": MODEL, "images": bench.images, "warm": WARM, "quick": quick}
            write(path, {**payload, "rows": rows}, seed=SEED)
    columns = ("training", "image size", "patch", "classes", "batch", "images per second", "ratio", "note")
    show("images per second, and the ratio to the model alone", rows, columns)
    return path


def _settings(where: torch.device, batch_size: int | None, quick: bool, data_dir: Path | None) -> Iterator[Setting]:
    small = quick or where.type != "cuda"
    batch = batch_size or (8 if small else 256)
    if quick:
        settings = [Setting(32, 4, 4, batch)]
    else:
        settings = [Setting(64, 8, 200, batch), Setting(32, 4, 10, batch, ("plain", "mixed"))]
        if not small and batch_size is None:
            settings.insert(1, Setting(64, 8, 200, 1024, ("plain",)))
    for setting in settings:
        if data_dir is not None:
            setting = setting._replace(classes=sum(folder.is_dir() for folder in (data_dir / "train").glob("*")))
        if where.type != "cuda":  # there are no graphs to do without
            setting = setting._replace(ours=tuple(name for name in setting.ours if name != "one by one"))
        yield setting


class _Bench:
    """The benchmark of one setting."""

    def __init__(self, setting: Setting, where: torch.device, scratch: Path, data_dir: Path | None, quick: bool):
        self.setting, self.where, self.scratch, self.quick = setting, where, scratch, quick
        self.compiled = where.type == "cuda"
        self.kwargs = {**setting.model_kwargs, **(QUICK if quick else {})}
        self.data = data_dir or scratch / f"photographs-{setting.size}"
        if not self.data.exists():
            each = 8 if quick else max(1, IMAGES // setting.classes)
            write_photographs(self.data, size=setting.size, classes=setting.classes, each=each, seed=SEED)
        self.images = sum(1 for _ in (self.data / "train").glob("*/**/*.*"))
        self.warm, self.every = (2, 3) if quick else (WARM, PROBE_EVERY)
        windows = STEADY_IMAGES // setting.batch // self.warm if where.type == "cuda" else 0
        self.steady = 2 if quick else self.warm * max(2, windows)

    def rows(self, timm_train: Path | None, begin: Steps) -> list[dict[str, Any]]:
        size, patch, _, batch, _ = self.setting
        at = f"{size} pixels, patch {patch}, batch {batch}"
        begin(f"{at}: the model alone")
        rows = self._alone()
        best = max(row["images per second"] for row in rows)
        trainings: dict[str, tuple[str, dict[str, Any], int]] = {
            "plain": ("ours", {}, self.steady),
            "mixed": ("ours, mixed images", MIXED, self.steady),
            "one by one": ("ours, without graphs", {"step_graph": False}, self.steady),
            "probed": (f"ours, a probe every {self.every} steps", {"probe_every": self.every}, self.every),
        }
        for name in self.setting.ours:
            title, changes, steady = trainings[name]
            begin(f"{at}: {title}")
            rows.append(self._row(title, *self._tried(name, changes, steady)))
        if timm_train is not None:
            begin(f"{at}: timm's train.py")
            rows.append(self._timm(timm_train))
        return [{**row, "ratio": row["images per second"] / best} for row in rows]

    def _row(self, name: str, rate: float, note: str = "") -> dict[str, Any]:
        size, patch, classes, batch, _ = self.setting
        return {
            "training": name, "image size": size, "patch": patch, "classes": classes, "batch": batch,
            "images per second": rate, "step ms": 1e3 * batch / rate, "note": note,
        }  # fmt: skip

    def _alone(self) -> list[dict[str, Any]]:
        size, _, classes, batch, _ = self.setting
        torch.manual_seed(SEED)
        model = create_model(MODEL, {"num_classes": classes, **self.kwargs}).to(self.where).train()
        if self.compiled:
            mend_read_back()  # as the loop does
        called = cast(nn.Module, torch.compile(model)) if self.compiled else model
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=self.where.type == "cuda")
        images = torch.randn(batch, 3, size, size, device=self.where)
        labels = torch.randint(classes, (batch,), device=self.where)
        steps = 1 if self.quick else max(10, 10_240 // batch)

        given = Batch(inputs=(images,), targets=labels, count=batch)

        def one_pass(batch: Batch) -> Tensor:
            with torch.autocast(self.where.type, dtype=torch.bfloat16):
                loss = nn.functional.cross_entropy(called(*batch.inputs), batch.targets)
            loss.backward()
            return loss.detach()

        def rate(passes: Callable[[Batch], Tensor]) -> float:
            def train_on() -> None:
                for _ in range(steps):
                    passes(given)
                    optimizer.step()
                    optimizer.zero_grad()

            ms = median_ms(train_on, self.where, repeats=2 if self.quick else 9, warmup=1 if self.quick else 2)
            return 1e3 * steps * batch / ms

        rows = [self._row("model alone", rate(one_pass))]
        if self.where.type == "cuda":
            replayed = Replayed(one_pass, list(model.parameters()), self.where)
            rows.append(self._row("model alone, replayed", rate(replayed), replayed.refused))
        _forget_compiled()
        return rows

    def _tried(self, name: str, changes: dict[str, Any], steady: int) -> tuple[float, str]:
        """Return a training's rate and a note; one that fails leaves the other rows intact."""
        try:
            return self._ours(name, changes, steady), ""
        except Interrupted as stopped:  # a signal ends the benchmark, not just this row
            raise KeyboardInterrupt from stopped
        except Exception as error:
            return math.nan, f"failed: {type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
        finally:
            _forget_compiled()

    def _ours(self, name: str, changes: dict[str, Any], steady: int) -> float:
        size, batch = self.setting.size, self.setting.batch
        folder = self.scratch / f"{name}-{size}-{batch}"
        config = Config(
            model=MODEL,
            model_kwargs=self.kwargs,
            data=f"folder:{self.data}",
            cache_dir=str(self.scratch / "cache"),
            image_size=size,
            padding=size // 8,
            flip=0.5,
            epochs=math.ceil((self.warm + steady) / max(1, self.images // batch)),
            batch_size=batch,
            lr=1e-4,
            amp_dtype="bfloat16",
            compile=self.compiled,
            step_graph=True,
            log_every=1 if self.quick else self.warm,
            eval_every=10**6,
            save_every=10**9,
        ).changed(changes)
        train(config, folder, device=str(self.where), quiet=True)
        return steady_rate(Run.open(folder).train, batch=batch, first=self.warm, last=self.warm + steady)

    def _timm(self, script: Path) -> dict[str, Any]:
        options = {
            "data-dir": self.data, "model": MODEL, "num-classes": self.setting.classes,
            "input-size": (3, self.setting.size, self.setting.size),
            "model-kwargs": [f"{name}={value}" for name, value in self.kwargs.items()],
            "batch-size": self.setting.batch, "opt": "adamw", "lr": 1e-4, "weight-decay": 0.05, "warmup-epochs": 0,
            "amp": (), "amp-dtype": "bfloat16", "device": self.where, "epochs": 2, "seed": SEED,
            "workers": 1 if self.quick else os.cpu_count() or 1, "pin-mem": (), "smoothing": 0, "color-jitter": 0,
            "scale": (1, 1), "ratio": (1, 1), "hflip": 0.5, "output": self.scratch / "timm",
            "log-interval": 1 if self.quick else 5, "val-split": "",
        }  # fmt: skip
        if self.compiled:
            options["torchcompile"] = ()
        rate, note = timm_rate(sys.executable, script, options, batch=self.setting.batch)
        return self._row("timm's train.py", rate, note)


def steady_rate(rows: list[TrainRow], *, batch: int, first: int, last: int) -> float:
    """Return the images per second from step `first` to step `last` of a run's rows.

    Each row's rate covers the steps since the row before, and is taken after synchronising with the device.
    """
    done = [row for row in rows if row.step <= last]
    seconds = images = 0.0
    for before, row in pairwise(done):
        if before.step >= first:
            images += (row.step - before.step) * batch
            seconds += (row.step - before.step) * batch / row.images_per_second
    if not images:
        raise ValueError(f"the metrics have no two rows of training between steps {first} and {last}")
    return images / seconds


def _forget_compiled() -> None:
    """Make torch compile each model afresh: after a few, it would give up, or make the batch size dynamic."""
    torch.compiler.reset()
    gc.collect()


def timm_rate(python: str, script: Path, options: Mapping[str, Any], *, batch: int) -> tuple[float, str]:
    """Run timm's train.py; return images per second in its last epoch's steady part, NaN if it fails, and a note."""
    command = [python, str(script.resolve())]
    for name, value in options.items():
        values = value if isinstance(value, list | tuple) else [value]
        command += [f"--{name}", *map(str, values)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMM_TIMEOUT)
    except subprocess.TimeoutExpired:
        return math.nan, f"stopped after {TIMM_TIMEOUT:g} s"
    said = done.stdout + done.stderr
    if done.returncode:
        return math.nan, f"failed: {(said.strip().splitlines() or ['no output'])[-1][:200]}"
    return read_rate(said, batch=batch), ""


def read_rate(said: str, *, batch: int) -> float:
    """Return images per second from the first to the last line of the last epoch that timm's train.py printed.

    The numbers in brackets are means over the epoch so far, so the time of a line is its number of steps times the
    mean.
    """
    lines = [(int(epoch), int(step), float(rate)) for epoch, step, _, rate in TIMM_LINE.findall(said)]
    times = [((step + 1) * batch, (step + 1) * batch / rate) for epoch, step, rate in lines if epoch == lines[-1][0]]
    if len(times) < 2:
        raise ValueError("timm's train.py printed too few lines of progress; a lower --log-interval gives more")
    (first, begin), (last, end) = times[0], times[-1]
    return (last - first) / (end - begin)
