"""How far a command with several steps is: a bar in a terminal, a plain line for each step elsewhere.

with steps(len(names), console) as begin:
    for name in names:
        begin(name)                     # the step before it is done
        begin.detail("third case")      # in a terminal, replaces the name

The bar disappears at the end. Nothing else may have a bar on the same console meanwhile; lines are printed above it.
"""

import contextlib
from collections.abc import Iterator

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

__all__ = ["Steps", "steps"]


class Steps:
    """Called with the name of each step as it begins."""

    def __init__(self, bar: Progress, total: int, *, lines: bool):
        self._bar, self._lines = bar, lines
        self._task = bar.add_task("", total=total)
        self._begun = False

    def __call__(self, name: str) -> None:
        if self._begun:
            self._bar.advance(self._task)
        self._begun = True
        self.detail(name)
        if self._lines:
            self._bar.console.print(name, highlight=False, markup=False, soft_wrap=True)

    def detail(self, text: str) -> None:
        self._bar.update(self._task, description=text)


@contextlib.contextmanager
def steps(total: int, console: Console | None = None, *, lines: bool = True) -> Iterator[Steps]:
    """Show the progress of `total` steps on `console`; `lines`: whether to print their names if it is no terminal."""
    console = console or Console()
    columns = (
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}", markup=False),
    )
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        yield Steps(bar, total, lines=lines and not console.is_terminal)
