"""Trackers by name, beside the JSON lines that are always written: TensorBoard, Weights & Biases, trackio.

tracker = make_tracker(config, folder)      # one that does nothing where none is asked for
tracker.begin(step)                         # the run, or the same run going on from that step
tracker.log({"train/loss": 1.9}, step=20)
"""

import importlib
import math
import secrets
import warnings
from typing import Any

from wellcond import records
from wellcond.train.config import Config
from wellcond.train.folder import RunFolder

__all__ = ["Tracker", "make_tracker", "numbers_of"]


class Tracker:
    """Takes numbers, and does nothing with them."""

    def begin(self, step: int) -> None:
        """What was logged of later steps than `step` will be logged again."""

    def log(self, values: dict[str, float], *, step: int) -> None:
        pass

    def flush(self) -> None:
        """All that was logged is kept, whatever happens to this process."""

    def close(self) -> None:
        pass


def numbers_of(row: records.MetricRow) -> dict[str, float]:
    """The numbers of a row of metrics.jsonl, by the names that trackers show."""
    fields = row.as_json()
    return {f"{fields['split']}/{k}": v for k, v in fields.items() if isinstance(v, float) and math.isfinite(v)}


class _TensorBoard(Tracker):
    def __init__(self, folder: RunFolder):
        from torch.utils.tensorboard import SummaryWriter

        self.folder, self.make, self.writer = folder, SummaryWriter, None
        self.failed = False

    def begin(self, step: int) -> None:
        self.close()
        # A measurement stands under the steps done before it and is made again at `step`; the metrics of `step` are
        # not. TensorBoard forgets both, and gets the metrics once more.
        again = step or any((self.folder.path / "tensorboard").glob("events.*"))
        self.writer = self.make(str(self.folder.path / "tensorboard"), purge_step=step if again else None)
        for row in self.folder.read().metrics if again else ():
            if row.step == step:
                self.log(numbers_of(row), step=step)

    def log(self, values: dict[str, float], *, step: int) -> None:
        for name, value in values.items():
            self._try("add_scalar", name, value, step)

    def flush(self) -> None:
        self._try("flush")

    def close(self) -> None:
        self._try("close")
        self.writer = None

    def _try(self, call: str, *arguments: Any) -> None:
        """A full disk is no reason to stop training: the same numbers are in metrics.jsonl."""
        if self.writer is None or self.failed:
            return
        try:
            getattr(self.writer, call)(*arguments)
        except OSError as error:
            self.failed = True
            warnings.warn(
                f"{self.folder.path / 'tensorboard'} cannot be written ({error}) and gets no more numbers; "
                f"{self.folder.metrics_file.name} has them, and training goes on",
                stacklevel=2,
            )


class _WithInit(Tracker):
    """Weights & Biases, and trackio, which has the same words but knows a run by its name."""

    def __init__(self, module: Any, config: Config, folder: RunFolder):
        self.module, self.config, self.folder, self.begun = module, config, folder, False

    def begin(self, step: int) -> None:
        if self.begun:  # gone back in the same process: it stays the same run
            return
        self.begun = True
        key, name = self._key(), self.folder.name
        who = {"name": f"{name}-{key}"} if self.config.tracker == "trackio" else {"id": key, "name": name}
        self.module.init(project="wellcond", config=self.config.as_json(), resume="allow", **who)

    def _key(self) -> str:
        """What the tracker knows the run by, for as long as the folder is there."""
        file = self.folder.path / "tracker.json"
        known = records.read_json(file) if file.exists() else {}
        if self.config.tracker not in known:
            known[self.config.tracker] = secrets.token_hex(4)
            records.write_json(file, known)
        return known[self.config.tracker]

    def log(self, values: dict[str, float], *, step: int) -> None:
        self.module.log(values, step=step)

    def close(self) -> None:
        if self.begun:
            self.module.finish()
            self.begun = False


def make_tracker(config: Config, folder: RunFolder) -> Tracker:
    """ValueError where the tracker's package is not installed."""
    if not config.tracker:
        return Tracker()
    try:
        if config.tracker == "tensorboard":
            return _TensorBoard(folder)
        return _WithInit(importlib.import_module(config.tracker), config, folder)
    except ImportError as error:
        raise ValueError(
            f"the tracker {config.tracker!r} needs a package that is not installed ({error}); "
            f"pip install {config.tracker}"
        ) from None
