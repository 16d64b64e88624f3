"""Options that several commands share, their shell completion, and the plug-ins that commands with names import first.

`wellcond --install-completion` sets up a shell to complete commands, options, recipes, claims, models, attentions and
sources. A key press should not wait for torch: recipes load without it, other names are parsed from source files.
"""

import contextlib
import functools
import os
import re
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, ParamSpec, TypeVar

import typer
from rich.console import Console
from rich.text import Text

from wellcond.usage import WrongUsage
from wellcond.words import SITES

__all__ = [
    "Device",
    "More",
    "Scale",
    "Settings",
    "complete_attentions",
    "complete_claims",
    "complete_data",
    "complete_models",
    "complete_recipes",
    "complete_settings",
    "complete_sites",
    "complete_statements",
    "completing",
    "print_settings",
    "starting",
    "usage_errors",
    "with_plugins",
]

P = ParamSpec("P")
R = TypeVar("R")


@contextlib.contextmanager
def usage_errors() -> Iterator[None]:
    """Show WrongUsage as typer shows its own errors about options, and exit with 2."""
    try:
        yield
    except WrongUsage as error:
        raise typer.BadParameter(str(error)) from None


def with_plugins(command: Callable[P, R]) -> Callable[P, R]:
    """Wrap a command so that plug-ins are imported before it runs; a warning names each one that fails."""

    @functools.wraps(command)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        from wellcond.plugins import load_plugins

        for problem in load_plugins():
            Console(stderr=True).print(Text(f"warning: {problem}", style="yellow"), soft_wrap=True)
        return command(*args, **kwargs)

    return run


def starting(names: list[str], incomplete: str) -> list[str]:
    """Return the names that start with a half-typed word."""
    return [name for name in names if name.startswith(incomplete)]


def completing(*words: str) -> Callable[[str], list[str]]:
    """Return a completer for these words."""

    def complete(incomplete: str) -> list[str]:
        return starting(list(words), incomplete)

    return complete


def complete_recipes(incomplete: str) -> list[str]:
    from wellcond.train.recipes import RECIPES

    return starting(list(RECIPES), incomplete)


def complete_settings(incomplete: str) -> list[str]:
    """Complete `l` to `lr=`, `gray=` to the values of the setting, `attention=` to attentions, `model=` to models."""
    from wellcond.train.config import Config
    from wellcond.train.settings import fields_of

    before, mark = _broken_off()
    if mark == ":":  # of --data-dir cifar10:FOLDER: the shell completes folders
        return []
    incomplete = f"{before}{mark}{incomplete}"
    words = {field.name: field.choices for field in fields_of(Config)}
    name, equals, value = incomplete.partition("=")
    named = {"attention": complete_attentions, "model": complete_models, "data": complete_data}
    if equals:
        found = named[name](value) if name in named else words.get(name, ())
        whole = starting([f"{name}={word}" for word in found], incomplete)
        return [one.removeprefix(f"{before}{mark}") for one in whole]
    return starting([f"{name}=" for name in words], incomplete)


def _broken_off() -> tuple[str, str]:
    """Return (gray, =) while bash completes gray=d: it ends words at = and :, and expects only what follows."""
    words, at = os.environ.get("COMP_WORDS", "").split("\n"), int(os.environ.get("COMP_CWORD") or 0)
    for mark in (at, at - 1):  # nothing follows yet, or something does
        if 0 < mark < len(words) and words[mark] in ("=", ":"):
            return words[mark - 1], words[mark]
    return "", ""


def print_settings(wanted: bool) -> None:
    """Print every training setting by group: its name, default, description, and its range if that is a surprise."""
    if not wanted:
        return
    from rich.table import Table

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


IDS = r'"((?:asa|sky|new|cut|spec|cond|pre)-[a-zA-Z0-9-]+)"'


def complete_claims(incomplete: str) -> list[str]:
    return _names_in("claims/catalogue.py", IDS, incomplete)


def complete_statements(incomplete: str) -> list[str]:
    return _names_in("theory/registry.py", IDS, incomplete)


def complete_attentions(incomplete: str) -> list[str]:
    return _names_in("attention/*.py", r'^@register_attention\("(\w+)"', incomplete)


def complete_data(incomplete: str) -> list[str]:
    """Complete sources, with a colon if something has to follow; the shell completes folders."""
    found = _names_in("data/*.py", r'^@register_source\(("\w+"(?:, takes="[^"]*")?)', "")
    words = [re.findall(r'"([^"]*)"', one) for one in found]
    alone = {word for word, *takes in words if takes and (not takes[0] or takes[0].startswith("["))}
    return starting([word if word in alone else f"{word}:" for word, *_ in words], incomplete)


def complete_sites(incomplete: str) -> list[str]:
    """Complete the last of several sites: `sa,+s` may become `sa,+sa`."""
    before, comma, last = incomplete.rpartition(",")
    return [f"{before}{comma}{site}" for site in starting(list(SITES), last)]


def _names_in(files: str, pattern: str, incomplete: str) -> list[str]:
    """Complete names found in our source files: importing those would import torch."""
    texts = [file.read_text(encoding="utf-8") for file in sorted(Path(__file__).parents[1].glob(files))]
    found = [name for text in texts for name in re.findall(pattern, text, re.MULTILINE)]
    return starting(list(dict.fromkeys(found)), incomplete)


def complete_scales(incomplete: str) -> list[str]:
    from wellcond.train.recipes import SCALES

    return starting(list(SCALES), incomplete)


def complete_models(incomplete: str) -> list[str]:
    """Complete timm's names, parsed from its source files: importing timm takes seconds."""
    found = find_spec("timm")
    folders = [Path(folder) / "models" for folder in (found.submodule_search_locations if found else None) or ()]
    files = [file.read_text(encoding="utf-8") for folder in folders for file in sorted(folder.glob("*.py"))]
    names = {name for text in files for name in re.findall(r"^@register_model\s+def (\w+)\(", text, re.MULTILINE)}
    return starting(sorted(names), incomplete)


Device = Annotated[
    str | None,
    typer.Option(
        help="cpu, cuda or cuda:1; by default the GPU if there is one.", autocompletion=completing("cpu", "cuda")
    ),
]
Scale = Annotated[
    str,
    typer.Option(help="smoke (CPU, seconds), lab (GPU, real data) or paper.", autocompletion=complete_scales),
]
Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        help="Training settings, key=value … (`wellcond train --settings` lists them).",
        metavar="KEY=VALUE …",
        autocompletion=complete_settings,
    ),
]
More = Annotated[list[str] | None, typer.Argument(hidden=True, metavar="KEY=VALUE", autocompletion=complete_settings)]
"""The settings after the first one of --set: typer's options take one value each."""
