"""Run the notebooks of docs/ from top to bottom and store what they show: `python scripts/notebooks.py [NAME.ipynb …]`.

A test runs them too, and compares the kinds of outputs with those stored: numbers differ from machine to machine.
"""

import sys
from pathlib import Path

import nbformat
from nbclient import NotebookClient

NOTEBOOKS = sorted((Path(__file__).parents[1] / "docs" / "notebooks").glob("*.ipynb"))


def run(path: Path) -> nbformat.NotebookNode:
    """The notebook with the outputs of a new run; nothing in it says when or where that was."""
    notebook = nbformat.read(path, as_version=4)
    NotebookClient(notebook, timeout=300, record_timing=False, coalesce_streams=True).execute()
    for cell in notebook.cells:
        if cell.cell_type == "code":  # warnings name files of the machine
            cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]
    notebook.metadata.language_info = {"name": "python"}
    return notebook


if __name__ == "__main__":
    for path in [Path(name) for name in sys.argv[1:]] or NOTEBOOKS:
        nbformat.write(run(path), path)
        print(f"wrote {path}")
