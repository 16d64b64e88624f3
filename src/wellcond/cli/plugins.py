"""Import plug-ins before commands that take names of attentions, families, sources, tasks or claims."""

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from rich.console import Console
from rich.text import Text

__all__ = ["with_plugins"]

P = ParamSpec("P")
R = TypeVar("R")


def with_plugins(command: Callable[P, R]) -> Callable[P, R]:
    """Wrap a command so that plug-ins are imported before it runs; a warning names each one that fails."""

    @functools.wraps(command)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        from wellcond.plugins import load_plugins

        for problem in load_plugins():
            Console(stderr=True).print(Text(f"warning: {problem}", style="yellow"), soft_wrap=True)
        return command(*args, **kwargs)

    return run
