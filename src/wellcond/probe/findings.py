"""What a probe has measured: sums, of which rows are made when somebody asks for them.

findings = Findings(run="a")
findings.add(sums, step=100)        # costs nothing: right after a pass, a GPU would have nothing to do meanwhile
findings.rows()                     # all of them, oldest first
findings.write_to("probe.jsonl")    # those there are, and from now on each as it is added
"""

from pathlib import Path

from wellcond import records
from wellcond.probe.statistics import Sums

__all__ = ["Findings"]


class Findings:
    """The measurements of one run."""

    def __init__(self, run: str):
        self.run = run
        self._rows: list[records.Row] = []
        self._sums: list[tuple[Sums, int]] = []  # and their steps: no rows were made of these yet
        self._file: Path | None = None

    def __bool__(self) -> bool:
        return bool(self._rows or self._sums)

    def add(self, sums: Sums, step: int, *, write: bool = True) -> None:
        """One measurement; `write=False` where another process writes the file."""
        if self._file is None or not write:
            self._sums.append((sums, step))
            return
        before = len(self.rows())
        self._sums.append((sums, step))
        records.append_rows(self._file, self.rows()[before:])

    def rows(self) -> list[records.Row]:
        for sums, step in self._sums:
            self._rows += sums.rows(run=self.run, step=step)
        self._sums.clear()
        return self._rows

    def write_to(self, path: Path, *, write: bool = True) -> None:
        """ValueError where there can be no such file."""
        if path == self._file:
            return
        if write:
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                with path.open("ab"):
                    pass
                records.append_rows(path, self.rows())
            except OSError as error:
                raise ValueError(f"rows cannot be written to {path}: {error.strerror or error}") from None
        self._file = path

    def keep(self, step: int) -> bool:
        """Forget all but those of this step, if there are any; whether there are."""
        of_step = [row for row in self.rows() if row["step"] == step]
        self._rows = of_step or self._rows
        return bool(of_step)

    def clear(self) -> None:
        """Forget the rows, not the file."""
        self._rows.clear()
        self._sums.clear()
