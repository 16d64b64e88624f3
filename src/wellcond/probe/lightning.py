"""A Lightning callback that measures the model while it trains.

    from wellcond.probe.lightning import ProbeCallback
    trainer = lightning.Trainer(callbacks=[ProbeCallback(every=100)])
    trainer.fit(module)                 # probe.jsonl in the trainer's log folder, log κ in its loggers

A step is an optimiser step (`trainer.global_step`); with gradient accumulation the first of its batches is measured.
"""

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from torch import nn

from wellcond.models.sites import find_blocks
from wellcond.probe.steps import StepProbe, check_settings, summary
from wellcond.records import PROBE

if TYPE_CHECKING:
    from lightning.pytorch import Callback, LightningModule, Trainer
else:
    try:
        from lightning.pytorch import Callback, LightningModule, Trainer
    except ImportError:
        try:  # the same package under its older name
            from pytorch_lightning import Callback, LightningModule, Trainer
        except ImportError:
            raise ImportError(
                "wellcond.probe.lightning needs Lightning, which is not installed: pip install 'wellcond[lightning]'"
            ) from None

__all__ = ["ProbeCallback", "called_module"]


class ProbeCallback(Callback):
    """Measure every `every`-th optimiser step of `trainer.fit`; validation and test passes are left alone.

    Args:
        every: measure at steps 0, every, 2·every, … and at the last one; "auto" measures as often as 1 % of the
            training time allows.
        path: the JSON Lines file for the rows; by default `probe.jsonl` in the trainer's log folder.
        module: the module that `training_step` calls, as a path inside the LightningModule ("model"); by default the
            outermost one inside the LightningModule that holds all blocks.
        settings: further arguments of `wellcond.Probe`: sites, blocks, max_samples, exact, samples, spectrum, …

    `callback.probe` holds the last measurement (`callback.probe.table()`); `callback.path` is the file of all rows.
    """

    def __init__(
        self,
        every: int | Literal["auto"] = 100,
        path: str | Path | None = None,
        *,
        module: str | None = None,
        **settings: Any,
    ):
        super().__init__()
        check_settings(settings, every)
        self.every: int | Literal["auto"] = every
        self.module: str | None = module
        self.settings: dict[str, Any] = settings
        self.path = None if path is None else Path(path)
        self.probe: StepProbe | None = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if getattr(pl_module, "_compiler_ctx", None) is not None:
            raise ValueError(
                "the whole LightningModule was compiled, training_step included, and compiled code skips hooks. "
                "Compile the model inside it (self.model = torch.compile(model)) to measure it while it trains"
            )
        folder = trainer.log_dir or trainer.default_root_dir  # on every process, since log_dir broadcasts
        if self.path is None:
            self.path = Path(folder) / PROBE
        if self.module is None:
            model = called_module(pl_module)
        else:
            model = _named(pl_module, self.module)
        self.probe = StepProbe(model, every=self.every, **{"last": _last_step(trainer), **self.settings})
        if trainer.is_global_zero:
            self.probe.to(self.path)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        assert self.probe is not None
        self.probe.begin(trainer.global_step)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        assert self.probe is not None
        try:
            measured = self.probe.end()
        except RuntimeError as error:
            names = ", ".join(repr(name) for name in _holders(pl_module))
            raise RuntimeError(
                f'{error}. Name the one that training_step calls, ProbeCallback(module="…"), of those with blocks '
                f"inside: {names}"
            ) from None
        if measured:
            for logger in trainer.loggers:
                logger.log_metrics(summary(self.probe.rows()), step=self.probe.step)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._detach()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._detach()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._detach()

    def _detach(self) -> None:
        if self.probe is not None:
            self.probe.detach()


def _last_step(trainer: Trainer) -> int | None:
    """Return the last step; None if unknown: endless training, data without a length, accumulation that changes."""
    try:
        steps = trainer.estimated_stepping_batches
    except Exception:  # Lightning raises for the last of these; a probe must not make training fail
        return None
    return int(steps) - 1 if 0 < steps < math.inf else None


def called_module(module: nn.Module) -> nn.Module:
    """Return the outermost callable module inside `module` that holds all its blocks; `module` itself if there is none.

    A LightningModule is not called in training, but its parts are. The outermost one sees everything: the raw patches,
    the padding mask, torch.compile's wrapper around it.
    """
    blocks = {id(block.module) for block in find_blocks(module)}
    inside = module
    while True:
        inside = next((child for child in inside.children() if blocks <= set(map(id, child.modules()))), None)
        if inside is None or id(inside) in blocks:
            return module
        if not isinstance(inside, nn.ModuleList | nn.ModuleDict):  # containers are never called
            return inside


def _named(module: nn.Module, path: str) -> nn.Module:
    try:
        return module.get_submodule(path)
    except AttributeError:
        names = ", ".join(repr(name) for name in _holders(module))
        raise ValueError(
            f"{type(module).__name__} has no module {path!r}; those with blocks inside are {names}"
        ) from None


def _holders(module: nn.Module) -> list[str]:
    """Return the paths of the modules that hold blocks but are not blocks themselves."""
    blocks = {id(block.module) for block in find_blocks(module)}
    return [
        path
        for path, part in module.named_modules()
        if path
        and not isinstance(part, nn.ModuleList | nn.ModuleDict)
        and id(part) not in blocks
        and not blocks.isdisjoint(map(id, part.modules()))
    ]
