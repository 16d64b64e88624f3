"""Plug-ins: modules of other packages that the `wellcond` command imports before it reads names.

    # pyproject.toml of the other package
    [project.entry-points."wellcond.plugins"]
    NAME = "their_package.their_module"

    for problem in load_plugins():          # imports each once
        print(f"warning: {problem}")        # of one that failed, and is left out

What such a module registers when it is imported (an attention, a family, a source, a task, a claim) the command then
knows by name. In Python nothing is loaded for you: import the module yourself. This file imports nothing of ours.
"""

import importlib
from importlib.metadata import EntryPoint, entry_points

__all__ = ["GROUP", "find_plugins", "load_plugins"]

GROUP = "wellcond.plugins"
"""Under which entry points a package declares its plug-ins."""


def find_plugins() -> list[EntryPoint]:
    """Those that the installed packages declare, by name; nothing is imported."""
    return sorted(entry_points(group=GROUP), key=lambda point: point.name)


def load_plugins() -> list[str]:
    """Import every plug-in; what went wrong, in a sentence for each that could not be imported."""
    problems = []
    for point in find_plugins():
        try:
            importlib.import_module(point.module)
        except (Exception, SystemExit) as error:
            whose = f" of {point.dist.name}" if point.dist else ""
            why = " ".join(f"{type(error).__name__}: {error}".split())
            problems.append(f"the plug-in {point.name}{whose} ({point.module}) is left out, its import failed: {why}")
    return problems
