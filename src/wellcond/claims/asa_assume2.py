"""asa-assume2: how ill-conditioned a block's output is predicts how ill-conditioned its Jacobian is.

    wellcond reproduce asa-assume2 --scale smoke                                   # the digits, on a CPU
    wellcond reproduce asa-assume2 --scale lab --data-dir cifar10=data/cifar10     # a minute, after asa-assume1

The paper's second assumption. For attentions and MLPs of small ViTs that differ in the ε of their SVD graying, at three
states of a short training (small_vits.py; the trainings are those of asa-assume1), log κ of the output tokens is
compared with log κ of the Jacobian, with the skip (`+sa`, `+mlp`) and without it (`sa`, `mlp`; by parameters the skip
makes no difference). The interval comes from resampling the trainings.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from wellcond.claims.claim import Line, MeasuredOn, Options, Record, TableRow
from wellcond.claims.figures import altair, arm_color, titled
from wellcond.claims.jacobians import KINDS, SHORT
from wellcond.claims.sets import GivenData
from wellcond.claims.small_vits import measure_models
from wellcond.verdicts import CONFIDENCE, Interval, Part, listed, rank_correlation, reaches, written

__all__ = ["CLAIM", "pairs"]

BOUND = 0.7
EPSILONS = {"plain": "1", "svd-0.9": "0.9", "svd-0.7": "0.7", "svd-0.5": "0.5"}
OUTPUT = {"skip": "plus", "bare": "out", "params": "out"}
TITLES = {"sa": "attention", "mlp": "MLP"}


def measure(options: Options, data: GivenData) -> Mapping[str, Any]:
    rows = measure_models(options, data, list(EPSILONS))
    return {"rows": [{**row, "states": [_without_network(state) for state in row["states"]]} for row in rows]}


def _without_network(state: Mapping[str, Any]) -> dict[str, Any]:
    return {"step": state["step"], "halves": state["halves"]}


def pairs(record: Record, site: str, kind: str) -> list[list[tuple[float, float]]]:
    """Return pairs (log κ of the output, log κ of the Jacobian) for each training, by state and block."""
    return [
        [
            (half[OUTPUT[kind]], half[kind])
            for state in row["states"]
            for half in state["halves"]
            if half["site"] == site
        ]
        for row in record["rows"]
    ]


def correlations(record: Record) -> Iterator[tuple[str, str, str, Interval]]:
    """Yield (site, kind of Jacobian, both in words, Spearman's correlation)."""
    for site, title in TITLES.items():
        for kind, by in KINDS.items():
            words = f"{title} {by} ({'+' if OUTPUT[kind] == 'plus' else ''}{site})"
            found = rank_correlation(pairs(record, site, kind), confidence=record.get("confidence", CONFIDENCE))
            yield site, kind, words, found


def judge(records: Mapping[str, Record]) -> Iterable[Part]:
    for record in records.values():
        for _, _, words, found in correlations(record):
            yield reaches(f"{words}: rank correlation ≥ {BOUND:g}", found, BOUND)


def says(records: Mapping[str, Record]) -> str:
    (record,) = records.values()
    found: dict[str, dict[str, Interval]] = {}
    for site, kind, _, one in correlations(record):
        found.setdefault(kind, {})[TITLES[site]] = one
    told, untold = [], []
    for kind, sites in found.items():
        means = listed(written(one.mean, ".2f") for one in sites.values())
        tells = all(one.low >= BOUND for one in sites.values())
        (told if tells else untold).append(f"{SHORT[kind]} ({means})")
    yes = f"predicts κ of its Jacobian {listed(told)}" if told else "does not reliably predict κ of its Jacobian"
    no = f"{', but not reliably' if told else ''} {' or '.join(untold)}" if untold else ""
    return f"κ of a block's output {yes}{no}: rank correlations of {listed(TITLES.values())}."


def summary(record: Record) -> Iterable[Line]:
    for site, kind, words, found in correlations(record):
        points = [pair for group in pairs(record, site, kind) for pair in group]
        ends = " to ".join(f"{end(pair[1] for pair in points):.1f}" for end in (min, max))
        cells = {"rank correlation": f"{found}", "blocks": f"{len(points)}", "log κ of their Jacobians": ends}
        yield TableRow(f", {words}", cells)


def figure(records: Sequence[Record]) -> Any:
    """Plot log κ of the Jacobian over that of the output: a point per block and state. Not a figure of the paper."""
    alt, record = altair(), records[0]
    found = {(site, kind): correlation for site, kind, _, correlation in correlations(record)}
    lines = []
    for site, title in TITLES.items():
        panels = []
        for kind, by in KINDS.items():
            rows = [
                {"output": output, "jacobian": jacobian, "ε": EPSILONS[row["model"]]}
                for row, group in zip(record["rows"], pairs(record, site, kind), strict=True)
                for output, jacobian in group
            ]
            plus = "+" if OUTPUT[kind] == "plus" else ""
            points = alt.Chart(alt.Data(values=rows)).mark_point(filled=True, size=30, opacity=0.7).encode(
                x=alt.X("output:Q", title=f"log κ at {plus}{site}", scale=alt.Scale(zero=False)),
                y=alt.Y("jacobian:Q", title="log κ of the Jacobian", scale=alt.Scale(zero=False)),
                color=arm_color(list(EPSILONS.values()), field="ε", title="ε"),
            )  # fmt: skip
            heading = [f"{title} {by}", f"rank correlation {found[site, kind]}"]
            panels.append(points.properties(width=230, height=190, title=alt.Title(text=heading, fontSize=11)))
        lines.append(alt.hconcat(*panels))
    caption = (
        f"Blocks of small ViTs in three states of a short training, at {record['scale']} scale. The paper assumes it, "
        "and shows nothing."
    )
    return titled(alt.vconcat(*lines), "Condition of a block's output and of its Jacobian", caption)


CLAIM = MeasuredOn(
    id="asa-assume2",
    claim="κ of a block's output predicts κ of its Jacobian",
    test="attention and MLP of each block × ε × three states of a short training on CIFAR-10; by input with and "
    "without the skip, and by parameters",
    holds_if="rank correlation ≥ .7",
    sets=("cifar10",),
    seconds=120.0,
    second_look=lambda record: True,
    paper_scale="the Jacobian of one attention of a ViT-Tiny at 224 pixels has 37,824 rows, which is why the paper "
    "assumes this; asa-fig7 has its extreme values",
    measure=measure,
    judge=judge,
    says=says,
    summary=summary,
    figure=figure,
)
