"""Commands that take the names of attentions, families, sources or claims: they import plug-ins before they run."""

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from rich.console import Console
from rich.text import Text

__all__ = ["with_plugins"]

P = ParamSpec("P")
R = TypeVar("R")


def with_plugins(command: Callable[P, R]) -> Callable[P, R]:
    """The command, with the plug-ins imported before it runs; one that fails is named in a warning."""

    @functools.wraps(command)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        from wellcond.plugins import load_plugins

        for problem in load_plugins():
            Console(stderr=True).print(Text(f"warning: {problem}", style="yellow"), soft_wrap=True)
        return command(*args, **kwargs)

    return run
