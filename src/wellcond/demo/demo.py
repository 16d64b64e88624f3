"""The demo: train small transformers with and without their skips, gray photographs, and show it all on one page.

    wellcond demo                  # demo/index.html, in about a minute on a CPU, and the numbers as JSON
    run(Path("demo"))              # the same

Nothing is downloaded: the digits and the photographs come with scikit-learn. After an interruption the same command
resumes; models that are already trained are not trained again.
"""

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from wellcond.demo import graying as demo_graying
from wellcond.demo import page as demo_page
from wellcond.demo import training as demo_training
from wellcond.records import write_record
from wellcond.report.charts import altair
from wellcond.train.computing import one_thread
from wellcond.train.stopping import Interrupted

__all__ = ["run"]

GRAYING, TRAINING, PAGE = "graying.json", "training.json", "index.html"


def run(output: Path, *, settings: Sequence[str] = (), evidence: Path | None = None) -> Path:
    """Train, gray and measure; write the page and the numbers behind it; return the page's path.

    Args:
        settings: overrides for the four trainings, `key=value`, e.g. `epochs=1` to see that it runs.
        evidence: the folder of larger experiments that the page shows; by default this project's, if there is one.
    """
    altair()  # fails now if it is missing, not after minutes of training
    console = Console()
    with one_thread():  # more gain nothing with matrices this small, and wait for each other on a busy machine
        try:
            arms = demo_training.train_arms(output / "runs", settings=settings, console=console)
        except Interrupted as stopped:
            raise KeyboardInterrupt(str(stopped)) from stopped  # the state is saved; the command exits with 130
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
    """Return evidence/ of the source tree that this file is in; None for an installed copy."""
    folder = Path(__file__).parents[3] / "evidence"
    return folder if folder.is_dir() else None
