"""docs/theory.md and its plots, from what `wellcond theory` wrote: no number on the page is typed in by hand.

write_page([Path("evidence/theory/asa-prop41.json"), …], Path("docs/theory.md"))
"""

import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from wellcond.records import read_json, write_text
from wellcond.report import Axis, Series, line_chart

__all__ = ["write_page"]

PARTS = {
    "claim": "Inside the claim",
    "beyond": "Beyond the claim, where it is carried further",
    "instead": "What is true instead",
}
SEVERAL = 12  # cases that are shown of a part, worst first; the file has them all

LEAD = """\
# Theory, computed

Every proposition, lemma and theorem of the two papers, checked with explicit constants over many random draws and over
the weights of a trained model. This page is written by

```sh
wellcond theory --page docs/theory.md
```

from the files in [evidence/theory]({evidence}). A check can refute a statement for good, since one counter-example is
enough. It cannot prove one: "holds" means that nothing in the cases listed contradicts it. What is true in its place is
marked: a *theorem* comes with its proof, and with the number of draws that checked it; what is *observed* rests on the
cases alone. *Margin* is bound over measured value in the worst draw; below 1 the statement is violated. Of a failure
rate, the bound is δ, and the margin is δ over the upper end of the rate's 95 % interval.

"""
USE = """\
## For your own inputs

How many landmarks does Skyformer need for this input? About twice the statistical dimension, where the spectrum
decays smoothly; several times more where tokens lie in separate clusters:

```python
import torch, wellcond

q, k = 0.3 * torch.randn(2, 4, 128, 32), 0.3 * torch.randn(2, 4, 128, 32)    # batch, heads, tokens, width
wellcond.statistical_dimension(q, k, epsilon=0.1)      # (2, 4): of 256 queries and keys, how many directions matter
wellcond.leverage_scores(q, k, epsilon=0.1)            # (2, 4, 256): how much each query, then each key, matters
```

`epsilon` is the error that is allowed, in parts of the norm of the attention matrix. A statistical dimension near the
number of queries and keys says that no small number of landmarks will do.

"""


def write_page(files: Sequence[Path], page: Path) -> Path:
    """Write the page, and its plots into `images` beside it; returns the page's path."""
    findings = [read_json(path) for path in files]
    if not findings:
        raise ValueError("there is nothing to write a page from; run the statements first")
    folder = page.parent / "images"
    evidence = Path(os.path.relpath(files[0].parent, page.parent)).as_posix()
    parts = [LEAD.format(evidence=evidence), _overview(findings)]
    for finding, file in zip(findings, files, strict=True):
        picture = folder / f"theory-{finding['statement']}.svg"
        write_text(picture, draw(finding["chart"]))
        parts.append(_section(finding, f"images/{picture.name}", f"{evidence}/{file.name}"))
    parts.append(USE)
    parts.append(_made(findings))
    write_text(page, "\n".join(part.strip("\n") + "\n" for part in parts))
    return page


def draw(chart: Mapping[str, Any]) -> str:
    """A chart of a finding as an SVG file."""
    series = [
        Series(line["name"], line["x"], line["y"], marks=len(line["x"]) <= SEVERAL, dashed=line["dashed"])
        for line in chart["lines"]
    ]
    x, y = Axis(chart["x"], log=chart["log_x"]), Axis(chart["y"], log=chart["log_y"])
    return line_chart(series, title=chart["title"], x=x, y=y, caption=chart["caption"]).svg


def _overview(findings: Sequence[Mapping[str, Any]]) -> str:
    lines = [
        "| statement | bound | measured | margin | verdict | worst case inside the claim |",
        "|---|--:|--:|--:|---|---|",
    ]
    for finding in findings:
        worst = finding["headline"]
        anchor = finding["statement"].lower()
        numbers = " | ".join(_number(worst[key]) for key in ("bound", "measured", "margin"))
        lines.append(
            f"| [{finding['statement']}](#{anchor}) | {numbers} | **{finding['verdict']}** | {_cell(worst['name'])} |"
        )
    return "\n".join(lines) + "\n"


def _section(finding: Mapping[str, Any], picture: str, file: str) -> str:
    chart = finding["chart"]
    lines = [
        f"## {finding['statement']}",
        "",
        f"**{finding['title']}.** {finding['claim']}",
        "",
        f"Verdict: **{finding['verdict']}**. {finding['plain']}",
        "",
        *(f"- {sentence}" for sentence in finding["findings"]),
        "",
        "What is true:",
        "",
        *(_fact(fact, finding["cases"]) for fact in finding["instead"]),
        "",
        f"![{chart['title']}: {chart['y']} against {chart['x']}]({picture})",
        "",
        f"*{chart['caption']}*",
        "",
    ]
    for example in finding["examples"]:
        lines += [f"**{example['title']}.** {example['text']}", ""]
        lines += [*_matrices(example["matrices"]), ""]
        lines += [f"Bound {_number(example['bound'])}, computed {_number(example['measured'])}.", ""]
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
    return text.replace("|", "\\|").replace("‖", "‖")


def _number(value: float) -> str:
    if math.isinf(value):
        return "beyond float64" if value > 0 else "−∞"
    return f"{value:.3g}"


def _made(findings: Sequence[Mapping[str, Any]]) -> str:
    where = findings[0]["environment"]
    versions = ", ".join(
        f"{name} {where['versions'][name]}" for name in ("python", "torch") if name in where["versions"]
    )
    return f"Written with {versions}, commit {where['commit'] or 'unknown'}.\n"
