"""Sequences that are generated or parsed once and kept on disk in pieces, so that an interruption loses few of them.

    made = Made(cache_dir, "listops", {"seed": 0}, make)       # make(i) gives the Rows of piece i
    made.piece(3)                                              # from its file, or made and written if there is none
    made.fill(200, "wellcond.data.pathfinder:make_piece", …)   # all of them, in one process per core

A piece is a compressed .npz file; if its checksums show damage, it is made again. The folder's name contains a hash of
the settings. If several processes need a piece, one makes it and the others wait.
"""

import importlib
import json
import os
import secrets
import zipfile
import zlib
from collections.abc import Callable, Iterable, Mapping
from hashlib import sha256
from lzma import LZMAError
from pathlib import Path
from typing import Any

import numpy as np

from wellcond.data.cache import Progress
from wellcond.data.files import saying_full, stat_line
from wellcond.data.sequences import Rows
from wellcond.data.workers import cores, in_interpreters
from wellcond.records import write_json

__all__ = ["Made", "stat_key"]

FORMAT = 1
DAMAGED = (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile, zlib.error, LZMAError, NotImplementedError)


class Made:
    """The pieces of a set, by number."""

    def __init__(
        self, cache_dir: Path, name: str, key: Mapping[str, Any], make: Callable[[int], Rows], *,
        compression: int = zipfile.ZIP_DEFLATED,
    ) -> None:  # fmt: skip
        """`key` is all that `make` depends on, in JSON types. Another compression may be slower but smaller."""
        about = {"format": FORMAT, "name": name, **key}
        digest = sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()[:12]
        self.folder: Path = cache_dir / f"{name}-{digest}"
        self.make: Callable[[int], Rows] = make
        self.about: dict[str, Any] = about
        self.compression = compression
        self.was_made: bool = False
        """Whether `piece` has had to make one that was not on disk."""

    def path(self, number: int) -> Path:
        return self.folder / f"{number:05d}.npz"

    def piece(self, number: int) -> Rows:
        found = self.read(number)
        if found is not None:
            return found
        from filelock import FileLock

        self.was_made = True
        with saying_full(self.folder):
            self._begin()
            with FileLock(self.folder / ".lock"):  # the system releases it if its holder dies
                found = self.read(number)
                if found is None:
                    found = self.make(number)
                    self.write(number, found)
        return found

    def read(self, number: int) -> Rows | None:
        """Read a piece; None if it is missing or damaged."""
        try:
            with open(self.path(number), "rb") as opened, np.load(opened, allow_pickle=False) as file:
                rows = Rows(file["tokens"], file["lengths"], file["labels"])
        except DAMAGED:
            return None
        fits = len(rows.lengths) == len(rows.labels) and int(rows.lengths.sum()) == len(rows.tokens)
        return rows if fits else None

    def write(self, number: int, rows: Rows) -> None:
        for left in self.folder.glob(f".{number:05d}.*.tmp"):  # left by a process that was killed
            left.unlink(missing_ok=True)
        aside = self.folder / f".{number:05d}.{secrets.token_hex(4)}.tmp"
        try:
            with zipfile.ZipFile(aside, "w", self.compression) as file:
                for name, column in rows._asdict().items():
                    with file.open(f"{name}.npy", "w") as member:
                        np.save(member, column)
            os.replace(aside, self.path(number))
        finally:
            aside.unlink(missing_ok=True)

    def fill(
        self, count: int, maker: str, settings: Mapping[str, Any], *, unit: int, progress: Progress | None = None,
        workers: int | None = None,
    ) -> None:  # fmt: skip
        """Make the first `count` pieces in processes that call `maker` ("module:function") with number, settings."""
        missing = [number for number in range(count) if not self.path(number).exists()]
        if workers is None:
            workers = cores()
            if min(workers, len(missing)) < 2:
                return  # `piece` will make them
        workers = min(workers, len(missing))
        from filelock import FileLock

        with saying_full(self.folder):
            self._begin()
            with FileLock(self.folder / ".filling"):
                self._fill(count, maker, settings, unit, progress, workers)

    def _fill(
        self, count: int, maker: str, settings: Mapping[str, Any], unit: int, progress: Progress | None, workers: int
    ) -> None:
        def missing() -> list[int]:
            return [number for number in range(count) if not self.path(number).exists()]

        left = missing()
        if not left:
            return
        jobs = [
            {
                "cache_dir": self.folder.parent, "about": self.about, "compression": self.compression,
                "maker": maker, "settings": dict(settings), "numbers": left[first::workers],
            }
            for first in range(workers)
        ]  # fmt: skip

        def tell() -> None:
            if progress is not None:
                progress(f"generating {self.about['name']}", (count - len(missing())) * unit, count * unit)

        in_interpreters("wellcond.data.made:make_pieces", jobs, meanwhile=tell)  # what one leaves, `piece` will make

    def _begin(self) -> None:
        if not (self.folder / "about.json").exists():
            self.folder.mkdir(parents=True, exist_ok=True)
            write_json(self.folder / "about.json", self.about)


def make_pieces(job: Mapping[str, Any], alive: Callable[[], bool]) -> None:
    """Make the pieces of a job of `Made.fill`, for as long as its process lives."""
    module, _, function = job["maker"].partition(":")
    make = getattr(importlib.import_module(module), function)
    about = {name: value for name, value in job["about"].items() if name not in ("format", "name")}
    made = Made(
        job["cache_dir"], job["about"]["name"], about, lambda number: make(number, **job["settings"]),
        compression=job["compression"],
    )  # fmt: skip
    for number in job["numbers"]:
        if not alive():
            return
        if made.read(number) is None:
            made.write(number, made.make(number))


def stat_key(folder: Path, names: Iterable[str]) -> dict[str, str]:
    """Return a key that changes when these files do."""
    return {"where": str(folder.resolve()), **{name: stat_line(folder / name) for name in names}}
