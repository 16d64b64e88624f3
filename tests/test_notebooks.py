"""The notebooks run from top to bottom, show what is stored in them, and what their sentences say is true."""

import re
import runpy
from pathlib import Path

import nbformat
import pytest

ROOT = Path(__file__).parent.parent
SCRIPT = runpy.run_path(str(ROOT / "scripts" / "notebooks.py"))
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of Jupyter's own


def kinds(notebook) -> list[list[str]]:
    """For each cell of code, what it shows."""
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    return [[kind for output in cell.outputs for kind in output.get("data", {"text": ""})] for cell in cells]


def text(notebook) -> str:
    return "".join(output.get("text", "") for cell in notebook.cells for output in cell.get("outputs", ()))


@pytest.mark.parametrize("name", ["attention", "training"])
def test_a_notebook_runs_and_shows_what_is_stored(name):
    path = ROOT / "docs" / "notebooks" / f"{name}.ipynb"
    stored, notebook = nbformat.read(path, as_version=4), SCRIPT["run"](path)
    assert kinds(notebook) == kinds(stored)
    for one in (stored, notebook):
        SAYS[name](text(one))


def _attention(shown: str) -> None:
    plain, skipless = re.findall(r"^mean(.*)$", shown, flags=re.MULTILINE)
    sa, *others = (float(value.strip("≥")) for value in plain.split())
    assert sa > max(others) + 6  # "a factor of more than a thousand" is 6.9, and sa a lower bound
    assert float(skipless.split()[0].strip("≥")) > 25
    grayed = [
        [float(value) for value in row.split()] for row in re.findall(r"^ +[01]\.\d .*$", shown, flags=re.MULTILINE)
    ]
    assert len(grayed) == 4
    for epsilon, tokens, *_ in grayed:
        assert tokens == pytest.approx(epsilon * grayed[0][1], abs=0.02)
    assert all(after < before for before, after in zip(grayed[0][1:], grayed[-1][1:], strict=True))


def _training(shown: str) -> None:
    plain, without = (float(value) for value in re.findall(r"steps: ([\d.]+)%", shown))
    assert plain > without + 20


SAYS = {"attention": _attention, "training": _training}
