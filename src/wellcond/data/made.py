"""Sequences that were generated or read once, kept on disk in pieces: what was made before a kill is not made again.

    made = Made(cache_dir, "listops", {"seed": 0}, make)       # make(i) gives the Rows of piece i
    made.piece(3)                                              # from its file; made and written if that is not there

A piece is a compressed .npz file, whose checksums tell a damaged one, which is made anew. The folder's name has a hash
of the settings. Of several processes one makes a piece, and the others wait for it.
"""

import contextlib
import errno
import json
import os
import secrets
import subprocess
import sys
import time
import zipfile
import zlib
from collections.abc import Callable, Iterable, Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np

from wellcond.data.files import stat_line
from wellcond.data.sequences import Rows
from wellcond.records import write_json

__all__ = ["Made", "stat_key"]

FORMAT = 1
DAMAGED = (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile, zlib.error, NotImplementedError)


class Made:
    """Pieces of a set, by number."""

    def __init__(self, cache_dir: Path, name: str, key: Mapping[str, Any], make: Callable[[int], Rows]) -> None:
        about = {"format": FORMAT, "name": name, **key}
        digest = sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()[:12]
        self.folder, self.make, self.about = cache_dir / f"{name}-{digest}", make, about
        self.was_made = False
        """Whether any piece was not found on disk."""

    def path(self, number: int) -> Path:
        return self.folder / f"{number:05d}.npz"

    def piece(self, number: int) -> Rows:
        found = self.read(number)
        if found is not None:
            return found
        from filelock import FileLock

        self.was_made = True
        with _saying_full(self.folder):
            self._begin()
            with FileLock(self.folder / ".lock"):  # the system lets go of it when its holder dies
                found = self.read(number)
                if found is None:
                    found = self.make(number)
                    self.write(number, found)
        return found

    def read(self, number: int) -> Rows | None:
        """None where it is missing or damaged."""
        try:
            with np.load(self.path(number), allow_pickle=False) as file:
                rows = Rows(file["tokens"], file["lengths"], file["labels"])
        except DAMAGED:
            return None
        fits = len(rows.lengths) == len(rows.labels) and int(rows.lengths.sum()) == len(rows.tokens)
        return rows if fits else None

    def write(self, number: int, rows: Rows) -> None:
        aside = self.folder / f".{number:05d}.{secrets.token_hex(4)}.tmp"
        try:
            with open(aside, "wb") as file:
                np.savez_compressed(file, **rows._asdict())
            os.replace(aside, self.path(number))
        finally:
            aside.unlink(missing_ok=True)

    def _begin(self) -> None:
        if not (self.folder / "about.json").exists():
            self.folder.mkdir(parents=True, exist_ok=True)
            write_json(self.folder / "about.json", self.about)


@contextlib.contextmanager
def _saying_full(folder: Path) -> Any:
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise ValueError(f"the disk of {folder} is full; free some space, or name another cache_dir") from error


def stat_key(folder: Path, names: Iterable[str]) -> dict[str, str]:
    """What changes when these files do."""
    return {"where": str(folder.resolve()), **{name: stat_line(folder / name) for name in names}}
