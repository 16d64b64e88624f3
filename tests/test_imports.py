"""The layout is the architecture: every import inside the package is an arrow that the table below allows.

The imports are read from the source, not observed at run time, so those inside functions, under `if TYPE_CHECKING` and
written as `import_module("…")` count too. An `eager` import is one that runs when its module is loaded.
"""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

SOURCE = Path(__file__).parent.parent / "src" / "wellcond"

# What each part may import of ours, beside what everybody may. "" is wellcond/__init__.py: it hands out public names.
EVERYBODY_MAY_IMPORT = {"words", "usage"}
MAY_IMPORT = {
    "words": set(),
    "usage": set(),
    "plugins": set(),
    "progress": set(),
    "numerics": set(),
    "environment": set(),
    "records": {"environment"},
    "graying": {"numerics"},
    "attention": {"numerics"},
    "models": {"attention", "graying", "numerics"},
    "probe": {"models", "numerics", "records"},
    "stability": {"models", "numerics", "records"},
    "data": {"records"},
    "train": {"data", "models", "probe", "stability", "records", "environment", "numerics"},
    "verdicts": {"records"},
    "theory": {"numerics", "attention", "records", "verdicts"},
    "report": {"records", "environment"},
    "bench": {"numerics", "graying", "attention", "models", "probe", "data", "train", "report", "records", "progress"},
}
# claims: train, theory, report, bench, verdicts, and what those import; demo and measure: all of that, and claims
MAY_IMPORT["claims"] = set(MAY_IMPORT)
MAY_IMPORT["demo"] = MAY_IMPORT["measure"] = set(MAY_IMPORT)
MAY_IMPORT["cli"] = {*MAY_IMPORT, ""}
MAY_IMPORT[""] = set(MAY_IMPORT) - {"cli"}
MAY_IMPORT["__main__"] = {*MAY_IMPORT}

NUMERICS_MAY_IMPORT = {"torch", "triton", "numpy"} | sys.stdlib_module_names  # numpy: fits on the host, untraced
WITHOUT_TORCH = {"words", "usage", "plugins", "environment", "records", "report"}
TORCH = {"torch", "torchvision", "timm", "triton"}
KERNELS = "wellcond.numerics.triton"


class Import(NamedTuple):
    target: str  # dotted and absolute: "wellcond.numerics.dct", "torch.nn"
    eager: bool
    line: int


def imports_of(source: str, module: str, *, is_package: bool, modules: set[str]) -> Iterator[Import]:
    """Every import in `source`. `modules` tells `from wellcond import records` from `from wellcond import gray`."""

    def visit(node: ast.AST, eager: bool) -> Iterator[Import]:
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(alias.name, eager, node.lineno)
        elif isinstance(node, ast.ImportFrom):
            base = resolve(node.module or "", node.level)
            for alias in node.names:
                name = f"{base}.{alias.name}"
                yield Import(name if name in modules else base, eager, node.lineno)
        elif isinstance(node, ast.Call) and called_name(node) in ("import_module", "__import__"):
            for argument in node.args[:1]:
                if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
                    name = argument.value
                    level = len(name) - len(name.lstrip("."))
                    yield Import(resolve(name.lstrip("."), level), eager, node.lineno)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            eager = False
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            for child in node.body:
                yield from visit(child, False)
            for child in node.orelse:
                yield from visit(child, eager)
            return
        for child in ast.iter_child_nodes(node):
            yield from visit(child, eager)

    def resolve(name: str, level: int) -> str:
        if level == 0:
            return name
        parts = module.split(".")
        parts = parts[: len(parts) - level + is_package]
        return ".".join([*parts, name] if name else parts)

    def called_name(node: ast.Call) -> str:
        return ast.unparse(node.func).rpartition(".")[2]

    yield from visit(ast.parse(source), True)


def part_of(module: str) -> str:
    """wellcond.numerics.dct → numerics; wellcond → ""."""
    return module.split(".")[1] if "." in module else ""


def violations(source: str, module: str, *, is_package: bool = False, modules: set[str] = frozenset()) -> list[str]:
    """What is wrong with the imports of one module, one sentence each."""
    part = part_of(module)
    if part not in MAY_IMPORT:
        return [f"{module}: {part!r} is not in the table of the design; give it a place and its arrows there first"]
    in_kernels = module == KERNELS or module.startswith(KERNELS + ".")
    found = []
    for target, eager, line in imports_of(source, module, is_package=is_package, modules=modules):
        where = f"{module}, line {line}: imports {target}"
        package = target.partition(".")[0]
        if package == "wellcond":
            to = part_of(target)
            if to != part and to not in MAY_IMPORT[part] | EVERYBODY_MAY_IMPORT:
                allowed = ", ".join(sorted(filter(None, MAY_IMPORT[part]))) or "nothing"
                found.append(f"{where}, but {part or 'wellcond'} may import {allowed} of ours")
            if eager and (target == KERNELS or target.startswith(KERNELS + ".")) and not in_kernels:
                found.append(f"{where} when it is loaded; kernels are imported inside the function that launches them")
            continue
        if part == "numerics" and package not in NUMERICS_MAY_IMPORT:
            found.append(f"{where}, but numerics stands on torch alone")
        if part == "numerics" and package == "triton" and eager and not in_kernels:
            found.append(f"{where} when it is loaded; only files of kernels do that, for triton may be missing")
        if part in WITHOUT_TORCH and package in TORCH and eager:
            found.append(f"{where} when it is loaded, but {part} has to work where torch is not installed")
    return found


def sources() -> dict[str, Path]:
    """Dotted module name → file, for the whole package."""
    found = {}
    for path in sorted(SOURCE.rglob("*.py")):
        parts = path.relative_to(SOURCE.parent).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


MODULES = sources()


@pytest.mark.parametrize("module", MODULES)
def test_every_import_is_an_allowed_arrow(module):
    path = MODULES[module]
    package = path.name == "__init__.py"
    found = violations(path.read_text(encoding="utf-8"), module, is_package=package, modules=set(MODULES))
    assert not found, "\n".join(found)


def test_the_walk_sees_the_package():
    assert {"wellcond", "wellcond.cli", "wellcond.records", "wellcond.numerics.dct"} <= MODULES.keys()


def test_the_table_has_no_circle():
    """Without one, every part can be understood, and loaded, from the bottom up."""
    below, left = set(), dict(MAY_IMPORT)
    while left:
        ready = {part for part, targets in left.items() if targets <= below}
        assert ready, f"a circle among {sorted(left)}"
        below |= ready
        left = {part: targets for part, targets in left.items() if part not in ready}


KNOWN = {"wellcond", "wellcond.models", "wellcond.models.surgery", "wellcond.probe", "wellcond.numerics.triton.dct"}
FORBIDDEN = [
    ("wellcond.numerics.dct", "import wellcond.probe", "imports wellcond.probe, but numerics may import nothing"),
    ("wellcond.numerics.dct", "import wellcond.probe as p", "imports wellcond.probe"),
    ("wellcond.numerics.dct", "from wellcond import probe", "imports wellcond.probe"),
    ("wellcond.numerics.dct", "from wellcond.models.surgery import gray", "imports wellcond.models.surgery"),
    ("wellcond.numerics.dct", "from ..models import surgery", "imports wellcond.models.surgery"),
    ("wellcond.numerics.dct", "from .. import probe", "imports wellcond.probe"),
    ("wellcond.numerics", "from ..probe import Probe", "imports wellcond.probe"),
    ("wellcond.graying", "from .models.surgery import gray", "but graying may import numerics of ours"),
    (
        "wellcond.graying",
        "def f():\n    from wellcond.models import surgery",
        "line 2: imports wellcond.models.surgery",
    ),
    ("wellcond.graying", "class A:\n    async def f(self):\n        import wellcond.models", "line 3"),
    ("wellcond.graying", "if TYPE_CHECKING:\n    from wellcond.probe import Probe", "imports wellcond.probe"),
    ("wellcond.graying", "import_module('wellcond.probe')", "imports wellcond.probe"),
    ("wellcond.graying", "importlib.import_module('.probe', 'wellcond')", "imports wellcond.probe"),
    ("wellcond.graying", "from wellcond import gray", "imports wellcond, but graying may import numerics"),
    ("wellcond.report.page", "from wellcond.probe import Probe", "but report may import environment, records of ours"),
    ("wellcond.stability", "from wellcond.probe import Probe", "but stability may import"),
    ("wellcond.claims.ledger", "import wellcond.demo.page", "but claims may import"),
    ("wellcond", "from wellcond.cli import main", "imports wellcond.cli"),
    ("wellcond.bench.kappa", "import wellcond.cli", "imports wellcond.cli"),
    ("wellcond.utils", "", "'utils' is not in the table of the design"),
    ("wellcond.numerics.dct", "import timm", "imports timm, but numerics stands on torch alone"),
    ("wellcond.numerics.dct", "def f():\n    from scipy import fft", "imports scipy, but numerics"),
    ("wellcond.numerics.dct", "import triton", "imports triton when it is loaded"),
    ("wellcond.numerics.dct", "try:\n    import triton.language as tl\nexcept ImportError:\n    tl = None", "line 2"),
    ("wellcond.numerics.dct", "from .triton import dct", "kernels are imported inside the function"),
    ("wellcond.numerics.dct", "from wellcond.numerics.triton.dct import launch", "kernels are imported inside"),
    ("wellcond.graying", "from wellcond.numerics.triton import dct", "kernels are imported inside"),
    ("wellcond.words", "import wellcond.records", "but words may import nothing of ours"),
    ("wellcond.records", "import torch", "but records has to work where torch is not installed"),
    ("wellcond.report.page", "from torchvision.utils import make_grid", "but report has to work where torch"),
]
ALLOWED = [
    ("wellcond.graying", "from wellcond.numerics.dct import dct2"),
    ("wellcond.graying", "from .numerics import dct"),
    ("wellcond.numerics.dct", "import math, torch\nfrom torch import Tensor\nfrom .singular import singular_values"),
    ("wellcond.numerics.dct", "def f():\n    import triton\n    from wellcond.numerics.triton.dct import launch"),
    ("wellcond.numerics.dct", "if TYPE_CHECKING:\n    import triton"),
    ("wellcond.numerics.triton.dct", "import triton\nimport triton.language as tl\nfrom . import tiles"),
    ("wellcond.records", "def f():\n    import torch"),
    ("wellcond.numerics.dct", "from wellcond.words import STATUSES"),
    ("wellcond.models.surgery", "import timm\nfrom wellcond.graying import TokenGraying"),
    ("wellcond.demo.demo", "import wellcond.graying\nfrom wellcond.report import page"),
    ("wellcond.cli", "import wellcond\nfrom wellcond.bench import kappa"),
    ("wellcond.__main__", "from wellcond.cli import main"),
    ("wellcond", "from wellcond.graying import gray_tokens\nfrom .models.surgery import gray"),
]


@pytest.mark.parametrize(("module", "source", "message"), FORBIDDEN)
def test_the_checker_catches(module, source, message):
    is_package = module in ("wellcond", "wellcond.numerics")
    found = violations(source, module, is_package=is_package, modules=KNOWN)
    assert len(found) == 1
    assert message in found[0]


@pytest.mark.parametrize(("module", "source"), ALLOWED)
def test_the_checker_lets_pass(module, source):
    assert violations(source, module, is_package=module == "wellcond", modules=KNOWN) == []
