"""`wellcond theory`: check the papers' statements and write a JSON file for each; on request also the page and plots.

    run(["asa-prop41"], draws=400, seed=0, output=Path("evidence/theory"))
    run(list(STATEMENTS), page=Path("docs/theory.md"))      # also docs/theory/ID.md and docs/images/theory-ID.svg
    write_page([Path("evidence/theory/asa-prop41.json"), …], Path("docs/theory.md"))

The pages are written from these files; no number on them is typed in by hand.
"""

import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from wellcond.progress import steps
from wellcond.records import read_json, write_record, write_text
from wellcond.report.charts import Axis, Look, looks_of, plain_lines, svg, titled
from wellcond.theory import STATEMENTS, Finding, check, statement
from wellcond.theory.registry import DRAWS

__all__ = ["OUTPUT", "TRAINED", "run", "write_page"]

OUTPUT = Path("evidence/theory")
TRAINED = tuple(Path("evidence/trained") / f"digits-vit-{part}.safetensors" for part in ("blocks", "mlps"))
COLOURS = {"holds": "green", "holds in part": "yellow", "does not hold": "red", "undecided": "magenta"}
PARTS = {
    "claim": "Inside the claim",
    "beyond": "Beyond the claim, where it is carried further",
    "instead": "What is true instead",
}
SEVERAL = 12  # cases shown of each part, worst first; the file has them all

LEAD = """\
# Theory, computed

Every proposition, lemma and theorem of the two papers, checked with explicit constants over many random draws and over
the weights of a trained model. Each statement has its own page: what was found, what is true instead (with a proof),
counter-examples, and the cases. All pages are written from the files in [evidence/theory]({evidence}) by

```sh
wellcond theory --page docs/theory.md
```

- A check can refute a statement for good, since one counter-example is enough. It cannot prove one: "holds" means that
  nothing in the listed cases contradicts it.
- What is true instead is marked. A *theorem* comes with its proof and the number of draws that checked it; what is
  *observed* rests on the cases alone.
- *Bound* and *measured* are medians over the draws of a case. *Margin* is the bound over the measured value in the
  worst draw; below 1 the statement is violated. For a failure rate, the bound is δ, and the margin is δ over the upper
  end of the rate's 95 % interval.

"""
USE = """\
## For your own inputs

How many landmarks does Skyformer need for this input? About twice the statistical dimension if the spectrum decays
smoothly, and several times more if the tokens form separate clusters:

```python
import torch, wellcond

q, k = 0.3 * torch.randn(2, 4, 128, 32), 0.3 * torch.randn(2, 4, 128, 32)    # batch, heads, tokens, width
wellcond.statistical_dimension(q, k, epsilon=0.1)      # (2, 4): of 256 queries and keys, how many directions matter
wellcond.leverage_scores(q, k, epsilon=0.1)            # (2, 4, 256): how much each query, then each key, matters
```

`epsilon` is the allowed error, relative to the norm of the attention matrix. A statistical dimension near the number of
queries and keys means that no small number of landmarks will suffice.

"""


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
    """Check `names`, print the findings, write `output`/NAME.json for each, and if asked the page from all files there.

    Args:
        trained: files of trained blocks' matrices; by default our own evidence's, if the current folder has them.

    Raises ValueError for an unknown statement, before anything is computed.
    """
    console = console or Console()
    for name in names:
        statement(name)
    if trained is None:
        trained = TRAINED if all(path.exists() for path in TRAINED) else ()
    output.mkdir(parents=True, exist_ok=True)
    findings = []
    with steps(len(names), console) as begin:
        for name in names:
            begin(f"checking {name}")
            finding = check(
                name, draws=draws, seed=seed, trained=trained, on_case=lambda case: begin.detail(case.name[:60])
            )
            write_record(output / f"{name}.json", {**statement(name).as_dict(), **finding.as_dict()}, seed=seed)
            findings.append(finding)
    console.print(_verdict_table(findings))
    for finding in findings:
        console.print(Text(f"\n{finding.statement}: {statement(finding.statement).title}", style="bold"))
        for sentence in finding.findings:
            console.print(Text(f"  {sentence}"), soft_wrap=True)
    console.print(f"\nwrote {len(findings)} file{'s' * (len(findings) > 1)} to {output}", highlight=False)
    if page is not None:
        found = [name for name in STATEMENTS if (output / f"{name}.json").exists()]
        console.print(f"wrote {write_page([output / f'{name}.json' for name in found], page)}", highlight=False)
    return findings


def _verdict_table(findings: Sequence[Finding]) -> Table:
    """Return bound, measured value and margin of the case that comes closest to its bound, or violates it most."""
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


# ---- the page


def write_page(files: Sequence[Path], page: Path) -> Path:
    """Write the page, one page per statement in a folder of the same name, and their plots into `images` beside it.

    Returns the page's path.
    """
    findings = [read_json(path) for path in files]
    if not findings:
        raise ValueError("there is nothing to write a page from; run the statements first")
    folder = page.with_suffix("")
    for finding, file in zip(findings, files, strict=True):
        picture = page.parent / "images" / f"theory-{finding['statement']}.svg"
        write_text(picture, draw(finding["chart"]))
        text = _statement_page(finding, _from(folder, picture), _from(folder, file))
        write_text(folder / f"{finding['statement']}.md", text)
    lead = LEAD.format(evidence=_from(page.parent, files[0].parent))
    parts = [lead, _overview(findings, folder.name), USE, _made(findings)]
    write_text(page, "\n".join(part.strip("\n") + "\n" for part in parts))
    return page


def _from(folder: Path, path: Path) -> str:
    return Path(os.path.relpath(path, folder)).as_posix()


def draw(chart: Mapping[str, Any]) -> str:
    """Return the chart of a finding as the text of an SVG file."""
    rows = [
        {"line": line["name"], "x": x, "y": y}
        for line in chart["lines"]
        for x, y in zip(line["x"], line["y"], strict=True)
    ]
    plain = looks_of([line["name"] for line in chart["lines"]])
    looks = {line["name"]: Look(plain[line["name"]].color, line["dashed"]) for line in chart["lines"]}
    x, y = Axis("x", chart["x"], log=chart["log_x"]), Axis("y", chart["y"], log=chart["log_y"])
    drawing = plain_lines(rows, x=x, y=y, by="line", looks=looks, width=480, height=260)
    return svg(titled(drawing, chart["title"])) + "\n"


def _overview(findings: Sequence[Mapping[str, Any]], folder: str) -> str:
    lines = [
        "| statement | verdict | bound | measured | margin | worst case inside the claim |",
        "|---|---|--:|--:|--:|---|",
    ]
    for finding in findings:
        worst = finding["headline"]
        name = finding["statement"]
        numbers = " | ".join(_number(worst[key]) for key in ("bound", "measured", "margin"))
        lines.append(
            f"| [{name}]({folder}/{name}.md): {_cell(finding['title'])} | **{finding['verdict']}** | {numbers} | "
            f"{_cell(worst['name'])} |"
        )
    return "\n".join(lines) + "\n"


def _statement_page(finding: Mapping[str, Any], picture: str, file: str) -> str:
    chart = finding["chart"]
    lines = [
        f"# {finding['title']}",
        "",
        f"`{finding['statement']}`. {finding['claim']}",
        "",
        f"Verdict: **{finding['verdict']}**. {finding['plain']}",
        "",
        *(f"- {sentence}" for sentence in finding["findings"]),
        "",
        "## What is true",
        "",
        *(_fact(fact, finding["cases"]) for fact in finding["instead"]),
        "",
        f"![{chart['title']}: {chart['y']} against {chart['x']}]({picture})",
        "",
        f"*{chart['caption']}*",
        "",
    ]
    lines += ["## Examples", ""] if finding["examples"] else []
    for example in finding["examples"]:
        lines += [f"**{example['title']}.** {example['text']}", ""]
        lines += [*_matrices(example["matrices"]), ""]
        lines += [f"Bound {_number(example['bound'])}, computed {_number(example['measured'])}.", ""]
    lines += ["## The cases", ""]
    for part, title in PARTS.items():
        lines += _cases(title, [case for case in finding["cases"] if case["part"] == part])
    lines += [
        f"Tested: {finding['tested']} Trained matrices: {finding['trained']}. {finding['draws']} draws, seed "
        f"{finding['seed']}.",
        f"Not tested: {finding['not_tested']} All cases: [{Path(file).name}]({file}).",
        "",
    ]
    return "\n".join(lines)


def _fact(fact: Mapping[str, str], cases: Sequence[Mapping[str, Any]]) -> str:
    if fact["mark"] == "observed":
        return f"- *Observed.* {fact['says']}"
    of_it = [case for case in cases if case["settings"].get("fact") == fact["key"]]
    draws, failed = (sum(case[key] for case in of_it) for key in ("draws", "failures"))
    rates = any(case["failures"] > 0 and case["outcome"] == "holds" for case in of_it)
    checked = f"{draws} draws, {'failures below δ' if rates else f'{failed} violations'}"
    return f"- *Theorem.* {fact['says']} *Proof.* {fact['proof']} (Checked: {checked}.)"


def _matrices(matrices: Mapping[str, Any]) -> list[str]:
    rows = [f"{name} = " + _matrix(value) for name, value in matrices.items()]
    return ["```text", *rows, "```"]


def _matrix(value: Sequence[Sequence[float]]) -> str:
    return "[" + ", ".join("[" + ", ".join(f"{entry:.4g}" for entry in row) + "]" for row in value) + "]"


def _cases(title: str, cases: Sequence[Mapping[str, Any]]) -> list[str]:
    if not cases:
        return []
    worst = sorted(cases, key=lambda case: case["margin"])
    shown = worst[:SEVERAL]
    more = f", the {len(shown)} with the least margin of {len(cases)} cases" if len(cases) > len(shown) else ""
    lines = [
        f"<details><summary>{title}{more}</summary>",
        "",
        "| case | draws | failures | bound | measured | margin | |",
        "|---|--:|--:|--:|--:|--:|---|",
    ]
    for case in shown:
        numbers = " | ".join(_number(case[key]) for key in ("bound", "measured", "margin"))
        lines.append(
            f"| {_cell(case['name'])} | {case['draws']} | {case['failures']} | {numbers} | {case['outcome']} |"
        )
    return [*lines, "", "</details>", ""]


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _number(value: float) -> str:
    if math.isinf(value):
        return "beyond float64" if value > 0 else "−∞"
    return f"{value:.3g}"


def _made(findings: Sequence[Mapping[str, Any]]) -> str:
    """Return the versions and commits behind the files, which may differ if some were computed later."""
    made = dict[str, None]()
    for where in (finding["environment"] for finding in findings):
        versions = [f"{name} {where['versions'][name]}" for name in ("python", "torch") if name in where["versions"]]
        made[", ".join([*versions, f"commit {where['commit'] or 'unknown'}"])] = None
    return f"Written with {'; '.join(made)}.\n"
