"""`wellcond bench probe`: what a probe adds to training, every 100 steps with 64 images.

A ViT-B/16 trains in bfloat16 on photographs, eagerly and, on a GPU, also compiled. The probe measures a pass of its
own, in float32 (its default) or float64, or the training pass itself. A run of steps with one measurement in the
middle, where the GPU has work queued as in training, takes turns with a run without a probe. The difference is the cost
of one measurement; its range is that over the turns.
"""

from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any, cast

import torch
from torch import Tensor, nn

from wellcond.bench.photographs import photographs
from wellcond.bench.tables import destination, show, write
from wellcond.bench.timing import chosen_device, interleaved_times, peak_mib
from wellcond.models.build import create_model
from wellcond.probe import Probe
from wellcond.progress import steps

__all__ = ["run"]

SEED = 0
MODEL = "vit_base_patch16_224"
EVERY = 100
STEPS = 8
REPEATS = 5


def run(
    *, output: Path | None = None, device: str | None = None, batch_size: int | None = None, quick: bool = False
) -> Path:
    """Time training with and without a probe on `device`, write JSON to `output` and return its path."""
    where = chosen_device(device)
    path = destination(output, f"probe-{where.type}.json")
    batch = batch_size or (256 if where.type == "cuda" and not quick else 4)
    images = photographs(batch, seed=SEED).to(where)
    torch.manual_seed(SEED)
    name = "vit_tiny_patch16_224" if quick else MODEL
    settings: dict[str, Any] = {"depth": 1} if quick else {}
    rows: list[dict[str, Any]] = []
    trainings = ("compiled", "eager") if where.type == "cuda" else ("eager",)
    with steps(len(trainings)) as begin:
        for how in trainings:
            begin(f"training {name}, {how}, with and without a probe")
            model = create_model(name, {"num_classes": 1000, **settings}).to(where).train()
            called = cast(nn.Module, torch.compile(model)) if how == "compiled" else model
            rows += _costs(model, called, images, how, quick)
    show(
        f"a probe every {EVERY} steps of {name}, batch {batch}",
        rows,
        ("training", "pass", "step ms", "measurement ms", "from", "to", "share of training", "extra memory MiB"),
    )
    write(
        path,
        {"benchmark": "probe", "model": name, "batch_size": batch, "every": EVERY, "quick": quick, "rows": rows},
        seed=SEED,
    )
    return path


def _costs(model: nn.Module, called: nn.Module, images: Tensor, how: str, quick: bool) -> list[dict[str, Any]]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    labels = torch.randint(1000, (len(images),), device=images.device)
    steps = 2 if quick else STEPS

    def train(probe: Probe | None = None) -> None:
        for _ in range(steps):
            if probe is not None:
                probe.step += 1  # starts at half of `steps`; multiples of `steps` are measured
            with torch.autocast(images.device.type, dtype=torch.bfloat16):
                loss = nn.functional.cross_entropy(called(images), labels)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    def probed(exact: Any) -> Callable[[], None]:
        probe = Probe(called, every=steps, exact=exact)
        probe.step = steps // 2

        def train_probed() -> None:
            with probe:
                train(probe)
            if not probe.rows():
                raise RuntimeError("the probe measured nothing: there is no cost to be seen")
            probe.clear()

        return train_probed

    passes = {"its own, float32": True, "its own, float64": "float64", "as trained": False}
    arms = [train, *map(probed, passes.values())]
    plain, *with_probe = interleaved_times(arms, images.device, repeats=2 if quick else REPEATS, warmup=1)
    memory = [peak_mib(arm, images.device) or 0.0 for arm in arms]
    step = median(plain) / steps
    rows = []
    for name, times, used in zip(passes, with_probe, memory[1:], strict=True):
        costs = [ms - beside for ms, beside in zip(times, plain, strict=True)]
        rows.append(
            {
                "training": how,
                "pass": name,
                "samples": min(64, len(images)),
                "step ms": step,
                "measurement ms": median(costs),
                "from": min(costs),
                "to": max(costs),
                "share of training": median(costs) / (EVERY * step),
                "extra memory MiB": used - memory[0],
            }
        )
    return rows
