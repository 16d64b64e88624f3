"""Validation: every sample exactly once over all processes, the last partial batch included.

validation = Validation(config, task, data.val, here)
metrics = validation.of(model)          # {"loss": …, "top1": …, "top5": …}
"""

import torch
from torch import Tensor, nn

from wellcond.data import Batch, Images, eval_batches
from wellcond.data.files import ImageFiles
from wellcond.train.computing import autocast, seed_by
from wellcond.train.config import Config
from wellcond.train.processes import Processes
from wellcond.train.tasks import Task

__all__ = ["Validation"]


class Validation:
    def __init__(self, config: Config, task: Task, images: Images | ImageFiles, here: Processes):
        self.config, self.task, self.here = config, task, here
        # Moved once, and not at every validation.
        self.images = images.to(here.device) if isinstance(images, Images) else images
        self.skipped: list[tuple[str, str]] = []
        """Streamed images of this process that could not be read in the last validation, and why."""

    def samples(self, count: int) -> tuple[Tensor, ...]:
        """Inputs of this process's share of `count` samples, spread evenly: a set sorted by class gives all classes."""
        chosen = torch.linspace(0, len(self.images) - 1, min(count, len(self.images))).round().long()
        mine = chosen[self.here.rank :: self.here.world]
        part = self.images.part((mine if len(mine) else chosen[:1]).to(self.images.device))
        batches = eval_batches(part, batch_size=count, device=self.here.device, workers=self.config.workers)
        return tuple(map(torch.cat, zip(*(batch.inputs for batch in batches if batch.count), strict=True)))

    @torch.no_grad()
    def of(self, model: nn.Module) -> dict[str, float]:
        here = self.here
        flags = [module for module in model.modules() if module.training]
        model.eval()
        sums: dict[str, Tensor] = {}
        size = max(1, self.config.batch_size // here.world)
        batches = eval_batches(
            self.images, batch_size=size, rank=here.rank, world=here.world, device=here.device,
            workers=self.config.workers,
        )  # fmt: skip
        for batch in batches:
            for name, value in self._count(model, batch).items():
                zero = torch.zeros_like(value)
                sums[name] = sums.get(name, zero) + (value if batch.count else zero)
        self.skipped = getattr(batches, "skipped", [])
        for module in flags:
            module.training = True
        names = sorted(sums)
        values = here.total(torch.stack([sums[name] for name in names])).tolist()
        found = dict(zip(names, values, strict=True))
        count = found.pop("count")
        if not count:
            raise ValueError(f"none of the {len(self.images)} validation images can be read")
        return {name: value / count for name, value in found.items()}

    def _count(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        seed_by(self.here.device, self.config.seed, 0, self.here.rank)
        with autocast(self.config, self.here.device):
            return self.task.count(model, batch)
