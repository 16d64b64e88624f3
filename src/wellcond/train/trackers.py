"""Trackers by name, beside the JSON lines that are always written: TensorBoard, Weights & Biases, trackio.

tracker = make_tracker(config, folder)      # one that does nothing where none is asked for
tracker.log({"train/loss": 1.9}, step=20)
"""

from typing import Any

from wellcond.train.config import Config
from wellcond.train.folder import RunFolder

__all__ = ["Tracker", "make_tracker"]


class Tracker:
    """Takes numbers, and does nothing with them."""

    def log(self, values: dict[str, float], *, step: int) -> None:
        pass

    def close(self) -> None:
        pass


class _TensorBoard(Tracker):
    def __init__(self, folder: RunFolder):
        from torch.utils.tensorboard import SummaryWriter

        self.writer: Any = SummaryWriter(str(folder.path / "tensorboard"))

    def log(self, values: dict[str, float], *, step: int) -> None:
        for name, value in values.items():
            self.writer.add_scalar(name, value, step)

    def close(self) -> None:
        self.writer.close()


class _WithInit(Tracker):
    """Weights & Biases, and trackio, which has the same words."""

    def __init__(self, module: Any, config: Config, folder: RunFolder):
        self.module = module
        module.init(project="wellcond", name=folder.name, config=config.as_json())

    def log(self, values: dict[str, float], *, step: int) -> None:
        self.module.log(values, step=step)

    def close(self) -> None:
        self.module.finish()


def make_tracker(config: Config, folder: RunFolder) -> Tracker:
    """ValueError where the tracker's package is not installed."""
    if not config.tracker:
        return Tracker()
    try:
        if config.tracker == "tensorboard":
            return _TensorBoard(folder)
        import importlib

        return _WithInit(importlib.import_module(config.tracker), config, folder)
    except ImportError as error:
        raise ValueError(
            f"the tracker {config.tracker!r} needs a package that is not installed ({error}); "
            f"pip install {config.tracker}"
        ) from None
