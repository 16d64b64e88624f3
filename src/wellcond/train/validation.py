"""Validation: every sample exactly once over all processes, the last partial batch included.

validation = Validation(config, task, data.val, here)
metrics = validation.of(model)          # {"loss": …, "top1": …, "top5": …}
"""

import torch
from torch import Tensor, nn

from wellcond.data import Images, eval_batches
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
        for images, labels in batches:
            seed_by(here.device, self.config.seed, 0, here.rank)
            with autocast(self.config, here.device):
                counted = self.task.count(model, images, labels)
            sums = {name: sums.get(name, 0) + value for name, value in counted.items()}
        self.skipped = getattr(batches, "skipped", [])
        for module in flags:
            module.training = True
        names = sorted(sums)
        values = here.total(torch.stack([sums[name] for name in names])).tolist()
        found = dict(zip(names, values, strict=True))
        count = found.pop("count")
        return {name: value / count for name, value in found.items()}
