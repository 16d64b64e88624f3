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
    "complete_settings",
    "complete_statements",
    "print_settings",
    "starting",
]


def starting(names: list[str], incomplete: str) -> list[str]:
    """Those of the names that a half-typed word may become."""
    return [name for name in names if name.startswith(incomplete)]


def complete_recipes(incomplete: str) -> list[str]:
    from wellcond.train.recipes import RECIPES

    return starting(list(RECIPES), incomplete)


def complete_settings(incomplete: str) -> list[str]:
    """`lr=` of `l`; the words that a setting can be of `gray=`."""
    from wellcond.train.config import Config
    from wellcond.train.settings import fields_of

    words = {field.name: field.choices for field in fields_of(Config)}
    name, equals, _ = incomplete.partition("=")
    if equals:
        return starting([f"{name}={word}" for word in words.get(name, ())], incomplete)
    return starting([f"{name}=" for name in words], incomplete)


def print_settings(wanted: bool) -> None:
    """Every field of a training by group: its name, its default, what it does, and its range if that is a surprise."""
    if not wanted:
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from wellcond.train.config import Config
    from wellcond.train.settings import about, fields_of, groups, own_fields, title

    fields, console = {field.name: field for field in fields_of(Config)}, Console()
    width = max(map(len, fields))
    for group in groups(Config):
        table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
        table.add_column(no_wrap=True, min_width=width)
        table.add_column(no_wrap=True, max_width=20, min_width=20)
        table.add_column(overflow="fold")
        lines = about(group)
        for field in map(fields.__getitem__, own_fields(group)):
            words = [lines.get(field.name, ""), f"({field.in_words()})" if field.range.keys() - {"at_least"} else ""]
            table.add_row(field.name, Text(field.as_text()), Text(" ".join(filter(None, words))))
        console.print(Text(title(group), style="bold"), table, Text())
    raise typer.Exit


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
    typer.Option(
        "--set",
        help="Any fields of a training: key=value … (`wellcond train --settings` lists them).",
        metavar="KEY=VALUE …",
        autocompletion=complete_settings,
    ),
]
More = Annotated[list[str] | None, typer.Argument(hidden=True, metavar="KEY=VALUE")]
"""Settings after the first of --set: typer's options take one value each."""
