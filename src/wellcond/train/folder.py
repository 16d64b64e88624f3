"""A run's folder: its configuration, its rows, its saved states and its page.

folder = RunFolder.open("runs/a", config)          # new, or the same run going on; another configuration is refused
folder.log({"step": 20, "loss": 1.9})              # metrics.jsonl; on a full disk rows wait for the next time
folder.forget_after(step)                          # rows of steps that will be run again
folder.put_aside()                                 # all rows, where there is no state to go on from
folder.compare(data_facts(data), world=2)          # other data than the run began with are refused

config.json  metrics.jsonl  probe.jsonl  checkpoints/  report.html
"""

import contextlib
import itertools
import os
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

from wellcond import records
from wellcond.data import DataSet, ImageFiles
from wellcond.environment import environment
from wellcond.train.checkpoint import saved_steps
from wellcond.train.config import Config

__all__ = ["MAY_CHANGE", "RunFolder", "data_facts", "fixed_settings"]

MAY_CHANGE = {
    "keep", "log_every", "workers", "tracker", "cache_dir", "on_divergence", "save_every", "step_graph", "time_limit",
    "resume", "keep_best",
}  # fmt: skip
"""Settings that do not change what is trained: the run may go on with others."""
VERSIONS = ("wellcond", "torch", "timm")  # what a run computes depends on them, if only by rounding


def fixed_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in config.items() if name not in MAY_CHANGE}


def data_facts(data: DataSet) -> dict[str, Any]:
    """Numbers and checksums that change when the data does, and not when it is moved; cheap, also of many images."""
    facts: dict[str, Any] = {"classes": len(data.classes), "class_names": _digest("\n".join(data.classes).encode())}
    for split, images in (("train", data.train), ("val", data.val)):
        parts = [images.labels.cpu().numpy().tobytes()]
        if isinstance(images, ImageFiles):  # not decoded yet: their names have to do
            parts += ["\n".join(images.source.name(row) for row in images.rows.tolist()).encode()]
        else:
            own = images.measured()  # exact sums over all pixels
            parts += [own.mean.numpy().tobytes(), own.std.numpy().tobytes()]
        facts |= {f"{split}_images": len(images), f"{split}_content": _digest(b"\0".join(parts))}
    return facts


def _digest(content: bytes) -> str:
    return sha256(content).hexdigest()[:16]


@dataclass(frozen=True, kw_only=True)
class RunFolder:
    path: Path
    writes: bool = True
    """Whether this process is the one that writes."""
    unwritten: dict[Path, list[Mapping[str, Any]]] = field(default_factory=dict)
    """Rows that found no room yet."""

    @classmethod
    def open(cls, path: str | Path, config: Config) -> "RunFolder":
        """The folder for a run of `config`: made, or taken up where it stopped.

        ValueError where it holds the run of another configuration, with the difference, or something that is no run.
        """
        path = Path(path)
        folder = cls(path=path)
        if path.exists() and not path.is_dir():
            raise ValueError(f"{path} is a file; give --output the name of a folder")
        known = path / "config.json"
        if known.exists() and not folder._is_same(config):
            known.unlink()  # nothing was trained with it: a mistake was mended, and may be
        elif not known.exists() and folder._strangers():
            kind = "saved states but no config.json" if saved_steps(folder.checkpoints) else "other files"
            raise ValueError(
                f"{path} holds {kind}: it cannot be told which run that is. Put the config.json back, or give --output "
                "a new folder"
            )
        if not known.exists():
            payload = {"what": "wellcond train", "config": config.as_json(), "environment": environment()}
            records.write_json(known, payload)
        folder.checkpoints.mkdir(exist_ok=True)
        return folder

    @property
    def name(self) -> str:
        return self.path.resolve().name

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def probe(self) -> Path:
        return self.path / "probe.jsonl"

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Within it no other process may train here. The system lets go of it when this one dies, however it dies."""
        try:
            import fcntl
        except ImportError:  # Windows
            yield
            return
        with open(self.path / ".lock", "a") as file:
            try:
                # A lock of this process alone: its forked workers, which may outlive it, do not inherit it.
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except (BlockingIOError, PermissionError):
                raise ValueError(
                    f"another process is training in {self.path}; wait for its end, or give --output a new folder"
                ) from None
            except OSError:  # a file system without locks
                pass
            yield

    def log(self, row: Mapping[str, Any]) -> None:
        self._append(self.metrics, [row])

    def measured(self, rows: Iterable[Mapping[str, Any]]) -> None:
        self._append(self.probe, rows)

    def compare(self, data: Mapping[str, Any], *, world: int, force: bool = False) -> list[str]:
        """What is other than when the run began, in words: the number of processes, versions, with `force` the data.

        ValueError for other data without `force`. What a new run begins with is written to config.json.
        """
        path = self.path / "config.json"
        known = records.read_json(path)
        facts = {"data": dict(data), "processes": world}
        if not self._has_begun():
            records.write_json(path, known | facts)
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
                f"{world}: the same images in each step, other random numbers of the model, and other rounding"
            )
        then, now = (facts.get("versions", {}) for facts in (known.get("environment", {}), environment()))
        changed = [f"{name} {then[name]}" for name in VERSIONS if name in then and then[name] != now.get(name)]
        if changed:
            present = ", ".join(f"{name} {now.get(name)}" for name in VERSIONS if f"{name} {then.get(name)}" in changed)
            notes.append(f"the run began with {', '.join(changed)} and goes on with {present}: its bits may differ")
        if differ or "data" not in known:
            records.write_json(path, facts | known | {"data": dict(data)})
        return notes

    def flush(self, *, sync: bool = False) -> None:
        """Write the rows that found no room before; OSError where there still is none.

        With `sync` all rows are on the disk afterwards, also if the machine loses power.
        """
        failed = None
        for file, rows in list(self.unwritten.items()):
            size = file.stat().st_size if file.exists() else 0
            try:
                records.append_rows(file, rows)
            except OSError as error:
                if file.exists() and file.stat().st_size > size:
                    os.truncate(file, size)  # some of the rows may have been written: they will be again
                failed = error  # there may be room for the other file's rows
            else:
                del self.unwritten[file]
        if failed is not None:
            raise failed
        for file in (self.metrics, self.probe, self.path) if sync else ():
            if file.exists():
                records.fsync(file)

    def forget_after(self, step: int) -> None:
        """Drop the rows of what will be done again: they are of a process that died before it saved its next state.

        A metric stands under the number of steps done, a measurement under that of the steps done before it: the
        state after 20 steps has the metrics of 20, and measures 20 again. An event (the training was lost) happened,
        whatever is done again after it.
        """
        for file, last in ((self.metrics, step), (self.probe, step - 1)) if self.writes else ():
            if file.exists():
                rows = records.read_rows(file)
                kept = [row for row in rows if row.get("step", 0) <= last or row.get("split") == "event"]
                if len(kept) < len(rows) or not rows:
                    aside = file.with_name(f".{file.name}.tmp")
                    aside.unlink(missing_ok=True)
                    records.append_rows(aside, kept)
                    records.fsync(aside)
                    aside.replace(file)

    def put_aside(self) -> list[Path]:
        """Rename all rows and the notes on rollbacks, so that the run begins anew and nothing is lost."""
        files = (self.metrics, self.probe, self._rollbacks) if self.writes else ()
        there = [file for file in files if file.exists() and file.stat().st_size]

        def aside(file: Path, number: int) -> Path:
            return file.with_name(f"{file.stem}.before-{number}{file.suffix}")

        number = next(n for n in itertools.count(1) if not any(aside(file, n).exists() for file in files))
        return [file.rename(aside(file, number)) for file in there]

    def rollbacks(self) -> list[dict[str, Any]]:
        """Each time the run went back to a saved state, and why."""
        return records.read_json(self._rollbacks) if self._rollbacks.exists() else []

    def rolled_back(self, what: Mapping[str, Any]) -> None:
        if self.writes:
            records.write_json(self._rollbacks, [*self.rollbacks(), dict(what)])

    @property
    def _rollbacks(self) -> Path:
        return self.checkpoints / "rollbacks.json"  # with the states, with which they go

    def _append(self, file: Path, rows: Iterable[Mapping[str, Any]]) -> None:
        if not self.writes:
            return
        warned = file in self.unwritten
        self.unwritten.setdefault(file, []).extend(rows)
        try:
            self.flush()
        except OSError as error:
            if file in self.unwritten and not warned:
                warnings.warn(f"{file} cannot be written ({error}); its rows wait in memory", stacklevel=3)

    def _has_begun(self) -> bool:
        return bool(saved_steps(self.checkpoints)) or self.metrics.exists()

    def _strangers(self) -> bool:
        """Whether there is more than a run leaves that is killed before its configuration was written."""
        if not self.path.exists():
            return False
        names = {path.name for path in self.path.iterdir() if not path.name.startswith(".")}
        return bool(names - {"checkpoints"} or saved_steps(self.checkpoints))

    def _is_same(self, config: Config) -> bool:
        """Whether the run there is this one; False if it is another that nothing was saved of yet."""
        differ: dict[str, Any] = {}
        try:
            known = Config.from_json(records.read_json(self.path / "config.json")["config"])
            differ = {k: v for k, v in config.differences(known).items() if k not in MAY_CHANGE}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(
                f"{self.path / 'config.json'} cannot be read as a run of wellcond ({error}). Put the right one back, "
                "or give --output a new folder"
            ) from None
        if differ and self._has_begun():
            shown = ", ".join(f"{name}: {theirs!r} there, {mine!r} now" for name, (mine, theirs) in differ.items())
            raise ValueError(
                f"{self.path} holds a run with another configuration ({shown}). Give the same settings to go on with "
                "it, or --output a new folder"
            )
        return not differ
