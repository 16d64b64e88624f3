"""The folder that a run trains in: for one configuration, one data set, and one training at a time.

with RunFolder.opened("runs/a", config) as folder:     # new, or the same run resumed; no other process can train here
    folder.compare(data_facts(data), world=2)          # ValueError for other data than the run began with
    folder.log(Event(step=3, event="…"))               # this and the rest of records.RunWriter writes the files
"""

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from wellcond import records
from wellcond.data import DataSet
from wellcond.data.sources import same_kind
from wellcond.environment import environment
from wellcond.train.checkpoint import saved_steps
from wellcond.train.config import Config

__all__ = ["MAY_CHANGE", "RunFolder", "data_facts", "fixed_settings"]

MAY_CHANGE = {
    "keep", "log_every", "workers", "tracker", "cache_dir", "on_divergence", "save_every", "step_graph", "time_limit",
    "resume", "keep_best", "skip_limit", "save_format", "shard",
}  # fmt: skip
"""Settings that do not affect what is trained: a run may be resumed with other values."""
VERSIONS = ("wellcond", "torch", "timm")  # what a run computes depends on them, if only by rounding


def fixed_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in config.items() if name not in MAY_CHANGE}


def data_facts(data: DataSet) -> dict[str, Any]:
    """Return counts and checksums that change with the data, but not when it is moved; cheap even for many samples."""
    facts: dict[str, Any] = {"classes": len(data.classes), "class_names": _digest("\n".join(data.classes).encode())}
    for split, part in (("train", data.train), ("val", data.val)):
        parts = [part.labels.cpu().numpy().tobytes(), *part.content()]
        facts |= {f"{split}_images": len(part), f"{split}_content": _digest(b"\0".join(parts))}
    return facts


def _digest(content: bytes) -> str:
    return sha256(content).hexdigest()[:16]


@dataclass(frozen=True, kw_only=True)
class RunFolder(records.RunWriter):
    """A run's files, protected from other runs and other processes."""

    @classmethod
    def open(cls, path: str | Path, config: Config) -> "RunFolder":
        """Open the folder for a run of `config`: create it, or resume the run in it.

        Raises ValueError if it holds a run of another configuration (naming the difference) or something else, or if
        it would have to be changed while another process trains in it.
        """
        folder = cls(path=Path(path))
        if not folder._holds(config):
            with cls.opened(path, config):
                pass
        return folder

    @classmethod
    @contextlib.contextmanager
    def opened(cls, path: str | Path, config: Config) -> Iterator["RunFolder"]:
        """Open the folder as `open` does, and hold it. Nothing changes if another process trains in it."""
        folder = cls(path=Path(path))
        folder._holds(config)  # a folder of something else gets no lock either
        folder.path.mkdir(parents=True, exist_ok=True)
        with folder.held():
            if not folder._holds(config):
                folder.begin(config.as_json())  # in place of one with which nothing was trained yet
            folder.checkpoints.mkdir(exist_ok=True)
            yield folder

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """While held, no other process can train in this folder. The system releases the lock however this one dies."""
        try:
            import fcntl
        except ImportError:  # Windows
            yield
            return
        with open(self.path / ".lock", "a") as file:
            try:
                # This lock belongs to this process alone: forked workers, which may outlive it, do not inherit it.
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except (BlockingIOError, PermissionError):
                raise ValueError(
                    f"another process is training in {self.path}; wait for its end, or give --output a new folder"
                ) from None
            except OSError:  # a file system without locks
                pass
            yield

    def compare(
        self, data: Mapping[str, Any], *, world: int, force: bool = False, place: str | None = None
    ) -> list[str]:
        """Return notes on what has changed since the run began: number of processes, versions, with `force` the data.

        Raises ValueError for other data without `force`. For a new run, writes these facts to config.json, for a run
        whose data have been moved their `place`, the setting `data`.
        """
        known = self.read().about
        if not self._has_begun():
            self.describe(data=dict(data), processes=world)
            return []
        notes, before = [], known.get("data", {})
        differ = [name for name in data if name in before and before[name] != data[name]]
        if differ:
            shown = ", ".join(f"{name}: {before[name]} there, {data[name]} now" for name in differ)
            if not force:
                raise ValueError(
                    f"{self.path} holds a run on other data ({shown}). Put the data back as they were, give --output a "
                    "new folder, or go on with these by --set resume=force"
                )
            notes.append(f"the data are others than before ({shown}): resume=force")
        if known.get("processes", world) != world:
            notes.append(
                f"the run began with {known['processes']} process{'es' * (known['processes'] > 1)} and goes on with "
                f"{world}: the same samples in each step, other random numbers of the model, and other rounding"
            )
        then, now = (facts.get("versions", {}) for facts in (known.get("environment", {}), environment()))
        changed = [f"{name} {then[name]}" for name in VERSIONS if name in then and then[name] != now.get(name)]
        if changed:
            present = ", ".join(f"{name} {now.get(name)}" for name in VERSIONS if f"{name} {then.get(name)}" in changed)
            notes.append(f"the run began with {', '.join(changed)} and goes on with {present}: its bits may differ")
        if differ or "data" not in known:
            self.describe(data=dict(data), processes=known.get("processes", world))
        if place is not None and place != known["config"]["data"]:
            notes.append(f"the data are now {place}, and were {known['config']['data']}")
            self.describe(config=known["config"] | {"data": place})
        return notes

    def put_aside(self, *others: Path) -> list[Path]:
        """Rename the files of rows and of rollbacks, so that the run can start over and nothing is lost."""
        return super().put_aside(self._rollbacks, *others)

    def rollbacks(self) -> list[dict[str, Any]]:
        """Return a record of each time the run went back to a saved state, and why."""
        return records.read_json(self._rollbacks) if self._rollbacks.exists() else []

    def rolled_back(self, what: Mapping[str, Any]) -> None:
        if self.writes:
            records.write_json(self._rollbacks, [*self.rollbacks(), dict(what)])

    @property
    def _rollbacks(self) -> Path:
        return self.checkpoints / "rollbacks.json"  # beside the states, to be deleted with them

    def _holds(self, config: Config) -> bool:
        """Whether config.json is that of this run; ValueError if the folder is another run's, or something else."""
        if self.path.exists() and not self.path.is_dir():
            raise ValueError(f"{self.path} is a file; give --output the name of a folder")
        if self.config_file.exists():
            return self._is_same(config)
        if self._strangers():
            kind = "saved states but no config.json" if saved_steps(self.checkpoints) else "other files"
            raise ValueError(
                f"{self.path} holds {kind}: it cannot be told which run that is. Put the config.json back, or give "
                "--output a new folder"
            )
        return False

    def _has_begun(self) -> bool:
        return bool(saved_steps(self.checkpoints)) or self.metrics_file.exists()

    def _strangers(self) -> bool:
        """Whether the folder holds more than a run leaves if it is killed before it has written its configuration."""
        if not self.path.exists():
            return False
        names = {path.name for path in self.path.iterdir() if not path.name.startswith(".")}
        return bool(names - {"checkpoints"} or saved_steps(self.checkpoints))

    def _is_same(self, config: Config) -> bool:
        """Whether the folder holds this run; False for another one of which nothing has been saved yet."""
        differ: dict[str, Any] = {}
        try:
            about = self.read().about
            known = Config.from_json(about["config"])
            differ = {k: v for k, v in config.differences(known).items() if k not in MAY_CHANGE}
            if "train_content" in about.get("data", {}) and self._has_begun() and same_kind(config.data, known.data):
                differ.pop("data", None)  # `compare` will tell whether it is the same content
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(
                f"{self.config_file} cannot be read as a run of wellcond ({error}). Put the right one back, "
                "or give --output a new folder"
            ) from None
        if differ and self._has_begun():
            shown = ", ".join(f"{name}: {theirs!r} there, {mine!r} now" for name, (mine, theirs) in differ.items())
            raise ValueError(
                f"{self.path} holds a run with another configuration ({shown}). Give the same settings to go on with "
                "it, or --output a new folder"
            )
        return not differ
