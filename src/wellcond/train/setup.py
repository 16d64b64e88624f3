"""The parts of a training, put together from a configuration: model, optimiser, schedule, scaler, average.

parts = build(config, data, here)
parts.called(images)                    # compiled and wrapped, as it is called
state = parts.saved(step, counters)     # everything between two steps; a collective call where parameters are sharded
parts.restore(state)
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn

from wellcond.models.weights import surgery_metadata
from wellcond.train.checkpoint import SavedState
from wellcond.train.computing import mend_read_back
from wellcond.train.config import Config
from wellcond.train.processes import Processes
from wellcond.train.schedules import Schedule, make_schedule
from wellcond.train.tasks import Task

__all__ = ["Parts", "build"]

FUSED = ("adam", "adamw")  # torch's own classes, which know the word; timm's do not


@dataclass
class Parts:
    """What is trained, and what trains it."""

    model: nn.Module
    """The plain model: its state dict has timm's names."""
    called: nn.Module
    optimizer: torch.optim.Optimizer
    schedule: Schedule
    """Asked by the number of steps done."""
    scaler: torch.amp.GradScaler
    ema: Any
    """timm's ModelEmaV3, or None."""
    sharded: bool
    metadata: dict[str, str]
    notes: list[str] = field(default_factory=list)
    """What a user must know of the model as it was built."""

    def __post_init__(self) -> None:
        self.parameters = list(self.model.parameters())
        """Listed once: it is a walk over all modules."""

    def forget_gradients(self) -> None:
        """As the optimiser's zero_grad, without a look at each gradient and a mark for the profiler, at every step."""
        for parameter in self.parameters:
            parameter.grad = None

    def saved(self, step: int, counters: Mapping[str, Any], config: Mapping[str, Any] | None = None) -> SavedState:
        if self.sharded:
            from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

            whole = StateDictOptions(full_state_dict=True, cpu_offload=True)
            model, optimizer = get_state_dict(self.model, self.optimizer, options=whole)
            for group in cast(list[dict[str, Any]], optimizer.get("param_groups", [])):  # none but on the main process
                # After a resume torch gives betas as a list: one state, two files.
                group |= {k: tuple(v) for k, v in group.items() if k != "params" and isinstance(v, list)}
        else:
            model, optimizer = self.model.state_dict(), self.optimizer.state_dict()
        return SavedState(
            step=step,
            model=cast(dict[str, Tensor], model),
            optimizer=optimizer,
            ema=self._average() if self.ema is not None else None,
            scaler=self.scaler.state_dict() if self.scaler.is_enabled() else None,
            counters=counters,
            config=config or {},
            metadata=self.metadata,
        )

    def misfit(self, state: SavedState) -> str | None:
        """Why the state is not of this model, if it is not: nothing may be half loaded when that is noticed."""
        for mine, theirs in ((self.model.state_dict(), state.model), (self._average(), state.ema or {})):
            for name in sorted(mine.keys() | theirs.keys()):
                there, here = (tuple(side[name].shape) if name in side else "missing" for side in (theirs, mine))
                if there != here:
                    return f"its weights do not fit the model ({name}: {there} there, {here} here)"
        return None

    def _average(self) -> Mapping[str, Tensor]:
        return self.ema.module.state_dict() if self.ema is not None else {}

    def restore(self, state: SavedState) -> None:
        if self.sharded:
            from torch.distributed.checkpoint.state_dict import StateDictOptions, set_state_dict

            set_state_dict(
                self.model,
                self.optimizer,
                model_state_dict=dict(state.model),
                optim_state_dict=cast(dict[str, Any], state.optimizer),
                options=StateDictOptions(full_state_dict=True),
            )
        else:
            self.model.load_state_dict(dict(state.model))
            self.optimizer.load_state_dict(dict(state.optimizer))
        if self.ema is not None and state.ema is not None:
            self.ema.module.load_state_dict(dict(state.ema))
        if state.scaler is not None:
            self.scaler.load_state_dict(dict(state.scaler))


def build(config: Config, task: Task, here: Processes, *, total: int, steps_per_epoch: int) -> Parts:
    from timm.optim import create_optimizer_v2  # pyright: ignore[reportPrivateImportUsage]

    model = task.build().to(here.device)
    metadata = {"format": "pt", **surgery_metadata(_timm_part(model))}
    if config.shard:
        _shard(model)
    ema = None
    if config.ema_decay is not None:
        from timm.utils import ModelEmaV3  # pyright: ignore[reportPrivateImportUsage]

        ema = ModelEmaV3(model, decay=config.ema_decay)
    more: dict[str, Any] = {"betas": config.opt_betas} if config.opt_betas else {}
    if config.opt.lower() in FUSED and here.device.type == "cuda" and not config.shard:
        more["fused"] = True  # one kernel for many parameters; saved states say which form they are of
    optimizer = create_optimizer_v2(
        model,
        opt=config.opt,
        lr=config.lr,
        weight_decay=config.weight_decay,
        layer_decay=config.layer_decay,
        **more,
    )
    schedule = make_schedule(config, optimizer, total=total, steps_per_epoch=steps_per_epoch)
    called = model
    if here.world > 1 and not config.shard:
        ids = [here.device.index] if here.device.type == "cuda" else None
        called = nn.parallel.DistributedDataParallel(called, device_ids=ids)
    if config.compile:
        if here.device.type == "cuda":
            mend_read_back()
        called = cast(nn.Module, torch.compile(called, mode=config.compile_mode or None))
    scaler = torch.amp.GradScaler(here.device.type, enabled=config.amp_dtype == "float16")
    return Parts(model, called, optimizer, schedule, scaler, ema, config.shard, metadata, list(task.notes))


def _timm_part(model: nn.Module) -> nn.Module:
    """Where the surgery was done: the model, or a MaskedAutoencoder's encoder."""
    return getattr(model, "encoder", model)


def _shard(model: nn.Module) -> None:
    """Every block by itself, then the rest: parameters are gathered block by block."""
    from torch.distributed.fsdp import fully_shard

    from wellcond.models.sites import find_blocks

    for block in find_blocks(model):
        fully_shard(block.module)
    fully_shard(model)
