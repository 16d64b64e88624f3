"""The parts of a training, built from a configuration: data, model, optimiser, schedule, scaler, weight average.

data = data_of(config)
parts = build(config, data, here)
parts.called(images)                    # the model to call: wrapped and compiled
state = parts.saved(step, counters)     # everything between two steps; a collective call if parameters are sharded
parts.restore(state)
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from wellcond.data import DataSet, open_data
from wellcond.data.cache import Progress
from wellcond.data.sources import MissingSizeError
from wellcond.models.surgery import attention_of, graying_of, skips_of
from wellcond.models.weights import surgery_metadata
from wellcond.train.checkpoint import SavedState
from wellcond.train.computing import mend_read_back
from wellcond.train.config import IMAGE_TASKS, Config
from wellcond.train.processes import Processes
from wellcond.train.schedules import Schedule, make_schedule
from wellcond.train.shards import gathered, laid_out
from wellcond.train.tasks import Task

__all__ = ["Parts", "build", "data_of"]

FUSED = ("adam", "adamw")  # torch's own classes, which have this option; timm's do not


@dataclass
class Parts:
    """The model, and everything that trains it."""

    model: nn.Module
    """The plain model: its state dict has timm's names."""
    called: nn.Module
    optimizer: torch.optim.Optimizer
    schedule: Schedule
    """Updated by the number of steps done."""
    scaler: torch.amp.GradScaler
    ema: Any
    """timm's ModelEmaV3, or None."""
    sharded: bool
    metadata: dict[str, str]
    notes: list[str] = field(default_factory=list)
    """What the user should know about the model as it was built."""

    def __post_init__(self) -> None:
        self.parameters: list[nn.Parameter] = list(self.model.parameters())
        """Listed once, because it takes a walk over all modules."""

    def forget_gradients(self) -> None:
        """Do what the optimiser's zero_grad does, without its check of each gradient and its mark for the profiler."""
        for parameter in self.parameters:
            parameter.grad = None

    def release(self) -> None:
        """Free DDP's reducer, which must not outlive the process group: if it held the last reference, its destructor
        would end Gloo's threads while holding the GIL that they wait for (seen with torch 2.11)."""
        inner: Any = getattr(self.called, "_orig_mod", self.called)
        if isinstance(inner, nn.parallel.DistributedDataParallel):
            ddp: Any = inner
            ddp.logger = ddp.reducer = None

    def saved(
        self, step: int, counters: Mapping[str, Any], config: Mapping[str, Any] | None = None, *,
        take: Callable[[Tensor], Tensor] = gathered,
    ) -> SavedState:  # fmt: skip
        """Return the complete state. `take` is applied to each tensor; the default makes sharded ones whole."""
        optimizer = self.optimizer.state_dict()
        values = {
            index: {k: take(v) if isinstance(v, Tensor) else v for k, v in kept.items()}
            for index, kept in optimizer["state"].items()
        }
        return SavedState(
            step=step,
            model={name: take(tensor) for name, tensor in self.model.state_dict().items()},
            optimizer={**optimizer, "state": values},
            ema={name: take(tensor) for name, tensor in self._average().items()} if self.ema is not None else None,
            scaler=self.scaler.state_dict() if self.scaler.is_enabled() else None,
            counters=counters,
            config=config or {},
            metadata=self.metadata,
        )

    def misfit(self, state: SavedState) -> str | None:
        """Return why the state does not fit this model, or None. Checked first, so that no state is half loaded."""
        for mine, theirs in ((self.model.state_dict(), state.model), (self._average(), state.ema or {})):
            for name in sorted(mine.keys() | theirs.keys()):
                there, here = (tuple(side[name].shape) if name in side else "missing" for side in (theirs, mine))
                if there != here:
                    return f"its weights do not fit the model ({name}: {there} there, {here} here)"
        return None

    def _average(self) -> Mapping[str, Tensor]:
        return self.ema.module.state_dict() if self.ema is not None else {}

    def restore(self, state: SavedState) -> None:
        """Load a state, whole or sharded by any number of processes."""
        mine, groups = self.model.state_dict(), self.optimizer.param_groups
        state = state.filled(self._empty())
        self.model.load_state_dict({name: laid_out(tensor, mine[name]) for name, tensor in state.model.items()})
        ours = [parameter for group in groups for parameter in group["params"]]
        names = [name for group in state.optimizer["param_groups"] for name in group["params"]]
        values = {
            name: {k: laid_out(v, like) if _is_like(v, like) else v for k, v in state.optimizer["state"][name].items()}
            for name, like in zip(names, ours, strict=True)
            if name in state.optimizer["state"]
        }
        forms = [{form: group[form] for form in ("fused", "foreach") if form in group} for group in groups]
        self.optimizer.load_state_dict({**state.optimizer, "state": values})
        for group, form in zip(self.optimizer.param_groups, forms if self.sharded else (), strict=False):
            group |= form  # a state from one process may be fused; with sharded parameters ours may not
        if self.ema is not None and state.ema is not None:
            self.ema.module.load_state_dict(dict(state.ema))
        if state.scaler is not None:
            self.scaler.load_state_dict(dict(state.scaler))

    def _empty(self) -> Callable[[str, Tensor], Tensor]:
        """Return a function that creates tensors for those of a sharded state, by name, laid out as ours."""
        ours = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
        mine: dict[str, Mapping[Any, Tensor]] = {"model": self.model.state_dict(), "ema": self._average()}

        def make(key: str, like: Tensor) -> Tensor:
            kind, _, name = key.partition(".")
            if kind != "optimizer":
                return torch.empty_like(mine[kind][name])
            parameter = ours[int(name.partition(".")[0])]
            if _is_like(like, parameter):
                return torch.empty_like(parameter, dtype=like.dtype, requires_grad=False)
            return torch.empty_like(like, device="cpu")

        return make


def _is_like(value: Any, parameter: Tensor) -> bool:
    """Whether a value of an optimiser's state is laid out as its parameter; a step count is not."""
    return isinstance(value, Tensor) and value.ndim > 0 and value.shape == parameter.shape


def data_of(config: Config, *, cache: Path | None = None, progress: Progress | None = None) -> DataSet:
    """Open the data of a configuration. `cache` is where decoded images are kept if it names no folder for them."""
    try:
        return open_data(
            config.data, options=config.data_kwargs, cache_dir=config.cache_dir or cache,
            image_size=config.image_size if config.kind in IMAGE_TASKS else None, holdout=config.holdout,
            cache_limit=int(config.cache_limit), seed=config.seed, progress=progress,
        )  # fmt: skip
    except MissingSizeError:
        way_out = "set task=classify" if config.task == config.kind else "register it with like='classify'"
        raise ValueError(
            f"task={config.task} takes no image settings such as image_size, and {config.data} is made of images of "
            f"any size: {way_out}"
        ) from None


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
    more |= {"eps": config.opt_eps} if config.opt_eps is not None else {}
    if config.opt.lower() in FUSED and here.device.type == "cuda" and not config.shard:
        more["fused"] = True  # one kernel for many parameters; saved states record it
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
    notes = [*task.notes, *([] if config.kind else _left_out(config, model))]
    if config.amp_dtype == "tf32" and not _has_tf32(here.device):
        notes.append("amp_dtype=tf32 makes no difference here: products are rounded by NVIDIA GPUs from Ampere on")
    return Parts(model, called, optimizer, schedule, scaler, ema, config.shard, metadata, notes)


def _left_out(config: Config, model: nn.Module) -> Iterator[str]:
    """Say which changes of the model were asked for and are not there: a task's own build() has to make them."""
    there = {"gray": graying_of(model), "remove_skips": skips_of(model), "attention": attention_of(model)}
    for name, found in there.items():
        if getattr(config, name) and not found:
            yield (
                f"{name}={getattr(config, name)} has changed nothing: the build() of task={config.task} does not apply "
                "it (wellcond.train.tasks has `operate`, which does)"
            )


def _has_tf32(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)


def _timm_part(model: nn.Module) -> nn.Module:
    """Return the part that has the surgery: the model, or a MaskedAutoencoder's encoder."""
    return getattr(model, "encoder", model)


def _shard(model: nn.Module) -> None:
    """Shard every block by itself, then the rest, so that parameters are gathered block by block."""
    from torch.distributed.fsdp import fully_shard

    from wellcond.models.sites import find_blocks

    for block in find_blocks(model):
        fully_shard(block.module)
    fully_shard(model)
