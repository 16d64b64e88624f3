"""What is public is typed and documented, to the last name."""

import dataclasses
import importlib
import inspect
import json
import os
import pkgutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import griffe
import pytest

import wellcond

ROOT = Path(__file__).parent.parent
INTERNAL = {"cli", "bench", "demo", "measure", "progress"}
DEEPER = ("models.sequence", "models.mae", "probe.lightning", "probe.transformers", "train.loop", "train.checkpoint")
MODULES = [one.name for one in pkgutil.iter_modules(wellcond.__path__) if one.name not in INTERNAL | {"__main__"}]


@pytest.fixture(scope="module")
def package():
    return griffe.load("wellcond", search_paths=[str(ROOT / "src")])


def _undocumented(cls: type) -> Iterator[str]:
    """Methods and properties without a docstring, of their own or of what they override."""
    fields = {field.name for field in dataclasses.fields(cls)} if dataclasses.is_dataclass(cls) else set()
    for name, member in vars(cls).items():
        member = getattr(member, "func", member)  # cached properties
        if name.startswith("_") or name in fields:
            continue
        if inspect.isroutine(member) or isinstance(member, property | classmethod | staticmethod):
            above: list[Any] = [getattr(base, name, None) for base in cls.__mro__]
            if not any(inspect.getdoc(one) for one in above if one is not None):
                yield f"{cls.__module__}.{cls.__name__}.{name}"


@pytest.mark.parametrize("name", [*MODULES, *DEEPER])
def test_every_public_name_has_a_docstring(name, package):
    module = importlib.import_module(f"wellcond.{name}")
    assert inspect.getdoc(module)
    missing = []
    for public in module.__all__:
        value = getattr(module, public)
        if inspect.isclass(value) or inspect.isroutine(value):
            missing += [] if inspect.getdoc(value) else [public]
            missing += (
                _undocumented(value) if inspect.isclass(value) and value.__module__.startswith("wellcond") else []
            )
        else:  # of a constant or a type, the string below it
            missing += [] if package[f"{name}.{public}"].docstring else [public]
    assert missing == []


def test_the_top_names_are_those_that_type_checkers_see(package):
    assert {name for name in package.members if name in wellcond.__all__} == set(wellcond.__all__)


def test_every_public_name_has_a_known_type(tmp_path):
    """What `pyright --verifytypes` says of the package as its users have it installed."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    command = [sys.executable, "-m", "pyright", "--verifytypes", "wellcond", "--ignoreexternal", "--outputjson"]
    environment = {**os.environ, "PATH": path, "VIRTUAL_ENV": sys.prefix}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    found = json.loads(done.stdout)["typeCompleteness"]
    unknown = [one["name"] for one in found["symbols"] if one["isExported"] and not one["isTypeKnown"]]
    assert (found["completenessScore"], unknown) == (1, [])
