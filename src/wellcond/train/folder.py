"""A run's folder: its configuration, its rows, its saved states and its page.

folder = RunFolder.open("runs/a", config)          # new, or the same run going on; another configuration is refused
folder.log({"step": 20, "loss": 1.9})              # metrics.jsonl
folder.forget_after(step)                          # rows of steps that will be run again

config.json  metrics.jsonl  probe.jsonl  checkpoints/  report.html
"""

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wellcond import records
from wellcond.train.config import Config

__all__ = ["RunFolder"]

MAY_CHANGE = {"keep", "log_every", "workers", "tracker", "cache_dir", "on_divergence", "save_every"}
"""Settings that do not change what is trained: the run may go on with others."""


@dataclass(frozen=True, kw_only=True)
class RunFolder:
    path: Path
    writes: bool = True
    """Whether this process is the one that writes."""

    @classmethod
    def open(cls, path: str | Path, config: Config, *, writes: bool = True) -> "RunFolder":
        """The folder for a run of `config`: made, or taken up where it stopped.

        ValueError where it holds the run of another configuration, with the difference, or something that is no run.
        """
        path = Path(path)
        folder = cls(path=path, writes=writes)
        if path.exists() and not path.is_dir():
            raise ValueError(f"{path} is a file; give --output the name of a folder")
        known = path / "config.json"
        if known.exists():
            folder._check_same(config)
        elif path.exists() and any(path.iterdir()):
            kind = "saved states but no config.json" if (path / "checkpoints").exists() else "other files"
            raise ValueError(
                f"{path} holds {kind}: it cannot be told which run that is. Put the config.json back, or give --output "
                "a new folder"
            )
        elif writes:
            folder.checkpoints.mkdir(parents=True, exist_ok=True)
            records.write_json(
                known, {"what": "wellcond train", "config": config.as_json(), "environment": records.environment()}
            )
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

    def log(self, row: Mapping[str, Any]) -> None:
        if self.writes:
            records.append_rows(self.metrics, [row])

    def forget_after(self, step: int) -> None:
        """Drop the rows of steps after `step`: they were written by a process that died before its state was saved."""
        for file in (self.metrics, self.probe) if self.writes else ():
            if file.exists():
                rows = records.read_rows(file)
                kept = [row for row in rows if row.get("step", 0) <= step]
                if len(kept) < len(rows) or rows == []:
                    aside = file.with_suffix(".tmp")
                    aside.unlink(missing_ok=True)
                    records.append_rows(aside, kept)
                    aside.replace(file)

    def space(self) -> int:
        return shutil.disk_usage(self.path).free

    def _check_same(self, config: Config) -> None:
        try:
            known = Config.from_json(records.read_json(self.path / "config.json")["config"])
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{self.path / 'config.json'} cannot be read as a run of wellcond: {error}") from None
        differ = {k: v for k, v in config.differences(known).items() if k not in MAY_CHANGE}
        if differ:
            shown = ", ".join(f"{name}: {theirs!r} there, {mine!r} now" for name, (mine, theirs) in differ.items())
            raise ValueError(
                f"{self.path} holds a run with another configuration ({shown}). Give the same settings to go on with "
                "it, or --output a new folder"
            )
