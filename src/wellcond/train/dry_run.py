"""Build and try a training's parts without training, to find what would make a long run fail in its first minute.

    found = dry_run(config)                                    # on its data; ValueError for what cannot be trained
    found = dry_run(config, a_few_images, samples=1_281_167)   # if the data are elsewhere
    found.steps, found.parameters, found.lines()

The model, its surgery, optimiser and schedule are those of the training, but on torch's meta device, which has shapes
and no memory: a ViT-B takes a second. The loader reads and augments two samples, which go through the model. A
checkpoint to start from must exist, but is not read.
"""

from dataclasses import dataclass

import torch
from torch.utils.flop_counter import FlopCounterMode

from wellcond.data import DataSet, train_batches
from wellcond.numerics.trust import trusted_input
from wellcond.train.config import Config
from wellcond.train.loop import augmentation_of
from wellcond.train.processes import Processes
from wellcond.train.setup import build, data_of
from wellcond.train.tasks import make_task

__all__ = ["DryRun", "dry_run"]

SAMPLES = 2  # mixup needs pairs


@dataclass(frozen=True, kw_only=True)
class DryRun:
    """What a dry run found."""

    config: Config
    parameters: int
    """The number of parameters, including those of a masked autoencoder's decoder."""
    inputs: list[tuple[int, ...]]
    """The shapes of the inputs of one sample."""
    steps: int
    rates: tuple[float, float, float]
    """The learning rate at the start, at its peak, and at the end."""
    operations: float
    """Floating-point operations per sample in a step: products only, forward and backward."""

    def lines(self) -> list[str]:
        config, (first, most, last) = self.config, self.rates
        total = self.operations * config.batch_size * self.steps
        length = f"{config.epochs} epochs, " if not config.steps else ""
        shapes = ", ".join(" × ".join(map(str, shape)) for shape in self.inputs)
        return [
            f"{config.model}, {config.task}: {self.parameters / 1e6:.1f} M parameters, samples of {shapes}",
            f"{length}{self.steps:,} steps of {config.batch_size} samples, lr {first:.3g} → {most:.3g} → {last:.3g}",
            f"{self.operations / 1e9:.3g} GFLOP for a sample's part of a step, {total / 1e15:.3g} PFLOP in all",
        ]


def dry_run(config: Config, data: DataSet | None = None, *, samples: int | None = None, world: int = 1) -> DryRun:
    """Build the training of `config` by `world` processes, and run two samples through its model.

    If given, `data` replaces the configuration's data, and `samples` the number of its training samples.
    """
    config.check(world=world)
    data = data_of(config) if data is None else data
    per_epoch = (samples or len(data.train)) // config.batch_size
    if per_epoch < 1:
        raise ValueError(f"batch_size={config.batch_size} is more than the training samples of {data.name}; lower it")
    steps = config.steps or config.epochs * per_epoch
    batches = train_batches(
        data.train, batch_size=SAMPLES, seed=config.seed, augmentation=augmentation_of(config),
        num_classes=len(data.classes), workers=0,
    )  # fmt: skip
    batch = next(iter(batches.epoch(0)))
    nowhere = Processes(rank=0, world=1, device=torch.device("meta"))
    plain = config.changed({"checkpoint": "", "pretrained": False, "compile": False, "shard": False})
    with torch.device("meta"), trusted_input():
        task = make_task(plain, data)
        parts = build(plain, task, nowhere, total=steps, steps_per_epoch=per_epoch)
        with FlopCounterMode(display=False) as counter:  # backward, it counts grouped convolutions as full ones
            task.loss(parts.model.train(), batch.holding([tensor.to("meta") for tensor in batch.tensors]))
    passes = 1 if config.kind == "linear_probe" else 3  # a backward pass costs two forward passes
    rates = []
    highest = {min(steps, config.warmup_steps), min(steps, config.warmup_epochs * per_epoch)}  # where warm-up ends
    for step in {0, *range(0, steps, max(1, per_epoch // 4)), *highest, steps}:
        parts.schedule.step_update(step)
        rates.append((step, max(group["lr"] for group in parts.optimizer.param_groups)))
    rates = [rate for _, rate in sorted(rates)]
    return DryRun(
        config=config,
        parameters=sum(parameter.numel() for parameter in parts.parameters),
        inputs=[tuple(tensor.shape[1:]) for tensor in batch.inputs],
        steps=steps,
        rates=(rates[0], max(rates), rates[-1]),
        operations=passes * counter.get_total_flops() / SAMPLES,
    )
