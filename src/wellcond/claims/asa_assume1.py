"""asa-assume1: the network's Jacobian is as ill-conditioned as that of its worst block.

    wellcond reproduce asa-assume1 --scale smoke                                   # the digits, on a CPU
    wellcond reproduce asa-assume1 --scale lab --data-dir cifar10=data/cifar10     # three minutes, mostly of a CPU

The paper's first assumption. For ten small ViTs × seeds × three states of a short training (small_vits.py), log κ of
the Jacobian of all blocks together, from the first one's input tokens to the last one's output, is compared with the
largest log κ among their attentions and MLPs, by input and by parameters. By input, only models with all their skips
count: without one, a norm makes the block and the network singular, which proves nothing. The interval comes from
resampling the trainings.
"""

from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import Any

from wellcond.claims.claim import Line, MeasuredOn, Options, Record, TableRow
from wellcond.claims.figures import altair, titled
from wellcond.claims.measurements import at_ceiling
from wellcond.claims.sets import GivenData
from wellcond.claims.small_vits import MODELS, SKIPLESS, measure_models
from wellcond.verdicts import CONFIDENCE, Interval, Part, listed, rank_correlation, reaches, written

__all__ = ["CLAIM", "pairs"]

BOUND = 0.7
BY = {"skip": "by input", "params": "by parameters"}


def measure(options: Options, data: GivenData) -> Mapping[str, Any]:
    rows = measure_models(options, data, list(MODELS))
    return {"rows": [{**row, "states": [_of_state(state) for state in row["states"]]} for row in rows]}


def _of_state(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the claim compares, by kind of Jacobian: the network's log κ, and the worst half's with its place."""
    found: dict[str, Any] = {"step": state["step"]}
    for kind, network in state["network"].items():
        worst = max(range(len(state["halves"])), key=lambda at, kind=kind: state["halves"][at][kind])
        half = state["halves"][worst]
        found[kind] = {"network": network, "worst": half[kind], "site": half["site"], "block": worst // 2}
    return found


def pairs(record: Record, kind: str) -> list[list[tuple[float, float]]]:
    """Return pairs (the worst half's log κ, the network's) for each training, state by state."""
    return [
        [(state[kind]["worst"], state[kind]["network"]) for state in row["states"] if kind in state]
        for row in record["rows"]
    ]


def correlation(record: Record, kind: str) -> Interval:
    return rank_correlation(pairs(record, kind), confidence=record.get("confidence", CONFIDENCE))


def judge(records: Mapping[str, Record]) -> Iterable[Part]:
    for record in records.values():
        for kind, title in BY.items():
            name = f"{title}: rank correlation of the network's log κ with its worst block's ≥ {BOUND:g}"
            yield reaches(name, correlation(record, kind), BOUND)


def says(records: Mapping[str, Record]) -> str:
    (record,) = records.values()
    ranks = {title: correlation(record, kind) for kind, title in BY.items()}
    said = listed(f"{written(found.mean, '.2f')} {title}" for title, found in ranks.items())
    follows = "follows" if all(found.low >= BOUND for found in ranks.values()) else "does not always follow"
    above = listed(written(_above(record, kind), "+z.1f") for kind in BY)
    return (
        f"Across small ViTs, log κ of the network's Jacobian {follows} that of its worst block in rank (correlation "
        f"{said}); the median difference in size is {above}."
    )


def _above(record: Record, kind: str) -> float:
    """Return by how much the network's log κ exceeds its worst block's: the median over states."""
    return median(network - worst for training in pairs(record, kind) for worst, network in training)


def summary(record: Record) -> Iterable[Line]:
    for kind, title in BY.items():
        states = [state[kind] for row in record["rows"] for state in row["states"] if kind in state]
        found = correlation(record, kind)
        attention = sum(state["site"] == "sa" for state in states)
        larger = sum(state["network"] > state["worst"] for state in states)
        cells = {
            "rank correlation": f"{found}",
            "states": f"{len(states)} of {found.count} trainings",
            "the worst block is an attention": f"in {attention}",
            "the network's κ is above it": f"in {larger}",
        }
        yield TableRow(f", {title}", cells)
    full = sum(at_ceiling(worst) for training in pairs(record, "params") for worst, _ in training)
    if full:
        yield f", by parameters: {full} of the worst blocks are beyond float64, and counted as its ceiling"
    whole = {**record, "rows": [row for row in record["rows"] if row["model"] not in SKIPLESS]}
    cells = {"rank correlation": f"{correlation(whole, 'params')}"}
    yield TableRow(", by parameters, models with all their skips", cells)
    lost = [f"{row['model']} (seed {row['seed']})" for row in record["rows"] if row["status"] == "diverged"]
    if lost:
        yield f": diverged, and not measured: {', '.join(lost)}"


def figure(records: Sequence[Record]) -> Any:
    """Plot the network's log κ over its worst block's, a point for each state. The paper has no such figure."""
    alt, record = altair(), records[0]
    panels = []
    for kind, title in BY.items():
        rows = [
            {"worst": state[kind]["worst"], "network": state[kind]["network"], "model": row["model"],
             "state": f"step {state['step']}"}
            for row in record["rows"] for state in row["states"] if kind in state
        ]  # fmt: skip
        points = alt.Chart(alt.Data(values=rows)).mark_point(filled=True, size=60, opacity=0.8).encode(
            x=alt.X("worst:Q", title="log κ of its worst block"), y=alt.Y("network:Q", title="log κ of the network"),
            color=alt.Color("model:N", sort=list(MODELS), title=None, scale=alt.Scale(scheme="tableau10")),
            shape=alt.Shape("state:N", title=None, sort=None),
        )  # fmt: skip
        named = points.properties(width=330, height=280, title=f"{title}: rank correlation {correlation(record, kind)}")
        panels.append(named)
    caption = (
        f"Small ViTs at their random start, after a quarter and at the end of a short training, at {record['scale']} "
        "scale. The paper assumes it, and shows nothing."
    )
    return titled(alt.hconcat(*panels), "The network's Jacobian and its worst block's", caption)


CLAIM = MeasuredOn(
    id="asa-assume1",
    claim="the network's Jacobian is as ill-conditioned as its worst block's",
    test="ten small ViTs, three seeds, at three states of a short training on CIFAR-10; by input and by parameters",
    holds_if="rank correlation ≥ .7 over models and checkpoints",
    sets=("cifar10",),
    seconds=240.0,
    second_look=lambda record: True,
    paper_scale="the Jacobian of a whole ViT-Tiny at 224 pixels has 37,824 rows, which is why the paper assumes "
    "this; it is out of reach as a matrix",
    measure=measure,
    judge=judge,
    says=says,
    summary=summary,
    figure=figure,
)
