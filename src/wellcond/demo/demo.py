"""The demonstration: small transformers trained with and without their skips, photographs grayed, all on one page.

    wellcond demo                  # demo/index.html, in about two minutes on two cores; the numbers beside it as JSON
    run(Path("demo"))              # the same

Nothing is downloaded: the digits and the photographs come with scikit-learn. Interrupted, the same command goes on;
models that are trained already are not trained again.
"""

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from rich.console import Console

from wellcond.demo import graying as demo_graying
from wellcond.demo import page as demo_page
from wellcond.demo import training as demo_training
from wellcond.records import write_record
from wellcond.report.charts import altair
from wellcond.train.stopping import Interrupted

__all__ = ["run"]

GRAYING, TRAINING, PAGE = "graying.json", "training.json", "index.html"


def run(output: Path, *, settings: Sequence[str] = (), evidence: Path | None = None) -> Path:
    """Train, gray, measure; write the page, and the numbers behind it; returns the page's path.

    Args:
        settings: fields of the four trainings, `key=value`, e.g. `epochs=1` to see that it runs.
        evidence: what the page shows of larger experiments; by default the folder of this project, where it is at hand.
    """
    altair()  # without which there would be no page, after minutes of training
    console = Console()
    with _one_thread():
        try:
            arms = demo_training.train_arms(output / "runs", settings=settings, console=console)
        except Interrupted as stopped:
            raise KeyboardInterrupt(str(stopped)) from stopped  # the state is saved; the command ends with 130
        photographs = demo_graying.load_photographs()
        grayed = demo_graying.gray_photographs(photographs, console)
    found = evidence if evidence is not None else _evidence()
    page = demo_page.build(arms, photographs, grayed, paths=demo_graying.explain_paths(), folder=output, evidence=found)
    path = page.write(output / PAGE)
    write_record(output / GRAYING, demo_graying.as_record(grayed), seed=None)
    write_record(output / TRAINING, demo_training.as_record(arms), seed=0)
    console.print(demo_training.terminal_table(arms), demo_graying.terminal_table(grayed))
    console.print(f"The page, with charts and pictures: {path}", highlight=False, soft_wrap=True)
    return path


def _evidence() -> Path | None:
    """evidence/ of the tree this file lies in; an installed copy has none."""
    folder = Path(__file__).parents[3] / "evidence"
    return folder if folder.is_dir() else None


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """Matrices this small gain nothing from more threads, and lose seconds waiting for them on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
