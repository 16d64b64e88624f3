"""Check the papers' statements: a table, a JSON file for each, and on request the page with its plots.

run(["asa-prop41"], draws=400, seed=0, output=Path("evidence/theory"))
run(list(STATEMENTS), page=Path("docs/theory.md"))      # docs/theory.md and docs/images/theory-*.svg beside it
"""

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from wellcond.claims.theory_page import write_page
from wellcond.records import write_record
from wellcond.theory import STATEMENTS, Finding, check, statement
from wellcond.theory.registry import DRAWS

__all__ = ["OUTPUT", "TRAINED", "run"]

OUTPUT = Path("evidence/theory")
TRAINED = tuple(Path("evidence/trained") / f"digits-vit-{part}.safetensors" for part in ("blocks", "mlps"))
COLOURS = {"holds": "green", "holds in part": "yellow", "does not hold": "red", "undecided": "magenta"}


def run(
    names: Sequence[str],
    *,
    draws: int = DRAWS,
    seed: int = 0,
    trained: Sequence[Path] | None = None,
    output: Path = OUTPUT,
    page: Path | None = None,
    console: Console | None = None,
) -> list[Finding]:
    """Check `names`, print what was found, write `output`/NAME.json for each, and the page from all files there.

    Args:
        trained: matrices of trained blocks; by default those of our own evidence, where this folder has them.

    Raises ValueError for an unknown statement, before anything is computed.
    """
    console = console or Console()
    for name in names:
        statement(name)
    if trained is None:
        trained = TRAINED if all(path.exists() for path in TRAINED) else ()
    output.mkdir(parents=True, exist_ok=True)
    findings = []
    with _progress(console) as bar:
        task = bar.add_task("", total=len(names))
        for name in names:
            bar.update(task, description=name)
            if not console.is_terminal:
                console.print(f"checking {name}", highlight=False)
            finding = check(
                name, draws=draws, seed=seed, trained=trained,
                on_case=lambda case: bar.update(task, description=f"{case.name[:60]}"),
            )  # fmt: skip
            write_record(output / f"{name}.json", {**statement(name).as_dict(), **finding.as_dict()}, seed=seed)
            findings.append(finding)
            bar.advance(task)
    console.print(_table(findings))
    for finding in findings:
        console.print(Text(f"\n{finding.statement}: {statement(finding.statement).title}", style="bold"))
        for sentence in finding.findings:
            console.print(Text(f"  {sentence}"), soft_wrap=True)
    console.print(f"\nwrote {len(findings)} files to {output}", highlight=False)
    if page is not None:
        found = [name for name in STATEMENTS if (output / f"{name}.json").exists()]
        console.print(f"wrote {write_page([output / f'{name}.json' for name in found], page)}", highlight=False)
    return findings


def _progress(console: Console) -> Progress:
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)


def _table(findings: Sequence[Finding]) -> Table:
    """Bound, measured value and margin of the case that comes closest to the bound, or breaks it most."""
    table = Table(
        title="The papers' statements: the worst case inside each claim", title_justify="left", pad_edge=False
    )
    for column in ("statement", "bound", "measured", "margin"):
        table.add_column(column, justify="left" if column == "statement" else "right")
    table.add_column("verdict")
    table.add_column("worst case")
    for finding in findings:
        worst = finding.headline
        numbers = [f"{value:.3g}" for value in (worst.bound, worst.measured, worst.margin)]
        verdict = Text(finding.verdict, style=COLOURS[finding.verdict])
        table.add_row(finding.statement, *numbers, verdict, Text(worst.name))
    return table
