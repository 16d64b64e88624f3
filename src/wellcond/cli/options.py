"""Options that several commands share, and what the shell completes them with.

`wellcond --install-completion` teaches a shell to complete commands, options, recipes, claims and models. A key press
should not wait for torch: recipes and claims load without it, and timm's model names are read from its source.
"""

import re
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

__all__ = [
    "Device",
    "More",
    "Scale",
    "Settings",
    "complete_claims",
    "complete_models",
    "complete_recipes",
    "complete_statements",
    "starting",
]


def starting(names: list[str], incomplete: str) -> list[str]:
    """Those of the names that a half-typed word may become."""
    return [name for name in names if name.startswith(incomplete)]


def complete_recipes(incomplete: str) -> list[str]:
    from wellcond.train.recipes import RECIPES

    return starting(list(RECIPES), incomplete)


def complete_claims(incomplete: str) -> list[str]:
    return _ids_in("claims/catalogue.py", incomplete)


def complete_statements(incomplete: str) -> list[str]:
    return _ids_in("theory/registry.py", incomplete)


def _ids_in(file: str, incomplete: str) -> list[str]:
    """Ids of claims, read from a file of ours: to import it would import torch."""
    text = (Path(__file__).parents[1] / file).read_text(encoding="utf-8")
    ids = re.findall(r'"((?:asa|sky|new|cut|spec|cond|pre)-[a-zA-Z0-9-]+)"', text)
    return starting(list(dict.fromkeys(ids)), incomplete)


def complete_scales(incomplete: str) -> list[str]:
    from wellcond.train.recipes import SCALES

    return starting(list(SCALES), incomplete)


def complete_models(incomplete: str) -> list[str]:
    """timm's names. They are read from its files: to import timm takes seconds."""
    found = find_spec("timm")
    folders = [Path(folder) / "models" for folder in (found.submodule_search_locations if found else None) or ()]
    files = [file.read_text(encoding="utf-8") for folder in folders for file in sorted(folder.glob("*.py"))]
    names = {name for text in files for name in re.findall(r"^@register_model\s+def (\w+)\(", text, re.MULTILINE)}
    return starting(sorted(names), incomplete)


Device = Annotated[str | None, typer.Option(help="cpu, cuda or cuda:1; by default the GPU where there is one.")]
Scale = Annotated[
    str,
    typer.Option(help="smoke (a CPU, seconds), lab (a GPU, real data) or paper.", autocompletion=complete_scales),
]
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", help="Any fields of a training: key=value …", metavar="KEY=VALUE …"),
]
More = Annotated[list[str] | None, typer.Argument(hidden=True, metavar="KEY=VALUE")]
"""Settings after the first of --set: typer's options take one value each."""
