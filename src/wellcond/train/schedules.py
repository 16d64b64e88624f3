"""Learning-rate schedules by name: timm's, and torch's one-cycle policy with its momentum.

    schedule = make_schedule(config, optimizer, total=19_500, steps_per_epoch=195)
    schedule.step_update(step)          # before step `step`: sets the rate, and for onecycle the momentum

A schedule depends only on the step number, so that a run can resume from any step. Warm-up is given in epochs
(`warmup_epochs`) or in steps (`warmup_steps`), and is cut to the length of the training.
"""

from typing import Any, Protocol

import torch

from wellcond.train.config import Config

__all__ = ["OneCycle", "Schedule", "make_schedule"]

START, END = 25.0, 1e4  # one-cycle: the rate starts at max/25 and ends at that/10⁴
MOMENTUM = (0.95, 0.85)  # at both ends, and at the peak


class Schedule(Protocol):
    def step_update(self, num_updates: int) -> None: ...


def make_schedule(config: Config, optimizer: torch.optim.Optimizer, *, total: int, steps_per_epoch: int) -> Schedule:
    warmup = min(config.warmup_steps or config.warmup_epochs * steps_per_epoch, total)
    if config.sched == "onecycle":
        return OneCycle(optimizer, total=total, warmup=warmup)
    from timm.scheduler import create_scheduler_v2  # pyright: ignore[reportPrivateImportUsage]

    in_epochs = not config.steps and not config.warmup_steps
    schedule, _ = create_scheduler_v2(
        optimizer,
        sched=config.sched,
        num_epochs=config.epochs if in_epochs else total,
        min_lr=config.min_lr,
        warmup_lr=config.warmup_lr,
        warmup_epochs=min(config.warmup_epochs, config.epochs) if in_epochs else warmup,
        warmup_prefix=False,
        step_on_epochs=False,
        updates_per_epoch=steps_per_epoch if in_epochs else 1,
    )
    assert schedule is not None
    return schedule


class OneCycle:
    """torch.optim.lr_scheduler.OneCycleLR with linear annealing and its other defaults, as a function of the step.

    The rate rises from max/25 to max over the warm-up and falls to max/25/10⁴; the momentum (an Adam's first beta)
    falls from 0.95 to 0.85 and rises again.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, *, total: int, warmup: int):
        self.optimizer: torch.optim.Optimizer = optimizer
        self.last: float = max(1.0, total - 1.0)
        self.peak: float = min(max(0.0, warmup - 1.0), self.last)
        self.rates: list[Any] = [group["lr"] for group in optimizer.param_groups]

    def step_update(self, num_updates: int) -> None:
        up = num_updates <= self.peak
        share = num_updates / self.peak if up and self.peak else 1.0
        if not up:
            share = min(1.0, (num_updates - self.peak) / max(1e-9, self.last - self.peak))
        ends, middle = MOMENTUM
        momentum = ends + (middle - ends) * share if up else middle + (ends - middle) * share
        for group, most in zip(self.optimizer.param_groups, self.rates, strict=True):
            low = most / START
            rate = low + (most - low) * share if up else most + (low / END - most) * share
            group["lr"] = rate * group.get("lr_scale", 1.0)  # timm's factor for layer_decay
            _set_momentum(group, momentum)


def _set_momentum(group: dict[str, Any], momentum: float) -> None:
    if "betas" in group:
        group["betas"] = (momentum, *group["betas"][1:])
    elif "momentum" in group:
        group["momentum"] = momentum
