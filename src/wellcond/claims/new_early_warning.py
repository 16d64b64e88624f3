"""new-early-warning: whether κ after 5 % of a training tells that it will diverge.

    wellcond reproduce new-early-warning --scale lab         # reads the runs of all other claims: no data, no training

Every run of every claim counts that measured κ. It diverged if it was given up, or if its loss ended above its start.
Each quantity that was measured after 5 % of the steps is a warning; how good a warning is the area under its curve
(AUC): the chance that a run that diverged has a higher value than one that did not, 0.5 for a coin. Runs are compared
with those of the same data set and model, mixed or not: losses and κ of different sets differ, whatever comes of them.
A low value warns of divergence where that is what the quantity is said to do (attention entropy). Runs of one arm are
alike, so arms are resampled whole.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from wellcond.claims.claim import Line, Measured, Record, TableRow
from wellcond.claims.early import QUANTITIES, diverges, measure
from wellcond.claims.figures import INK, altair, titled
from wellcond.claims.sets import SETS
from wellcond.verdicts import Interval, Part, reaches, resampled, undecided

__all__ = ["CLAIM", "area"]

LEAST_DIVERGED = 15
BOUND = 0.7
LEARNT = 1.0  # points of top-1 above guessing
LOW_WARNS = {"attention_entropy"}
ENDS = ["did not diverge", "diverged"]
ASKS = "log κ(+sa) after 5 % of training warns of divergence: AUC ≥ 0.7"
BETTER = "it warns better than the loss at the same step: AUC's difference ≥ 0"


def judge(record: Record) -> Iterable[Part]:
    for name, parts, bound in ((ASKS, ("log_kappa",), BOUND), (BETTER, ("log_kappa", "loss"), 0.0)):
        found, diverged = area(record, *parts), sum(map(diverges, _compared(record, parts)))
        few = (
            f"of {len(record['rows'])} runs {diverged} diverged and can be compared with others, and {LEAST_DIVERGED} "
            "are asked for"
        )
        if found is None:
            yield Part(name=name, outcome="undecided", why=few)
        else:
            part = reaches(name, found, bound)
            yield undecided(part, few) if diverged < LEAST_DIVERGED else part


def area(record: Record, quantity: str, less: str = "") -> Interval | None:
    """Return the area under the curve of a quantity, minus that of another if one is given; None if in no group of
    comparable runs some diverged and some did not."""
    names = [name for name in (quantity, less) if name]
    arms, numbers = dict[str, list[tuple[float, ...]]](), dict[Any, int]()
    for row in _compared(record, names):
        values = [-row["early"][name] if name in LOW_WARNS else row["early"][name] for name in names]
        group = numbers.setdefault(_group(row), len(numbers))
        arms.setdefault(f"{row['set']}/{row['arm']}", []).append((float(diverges(row)), group, *values))

    def statistic(rows: Any) -> float:
        first, *others = (_area(rows[:, 0] > 0, rows[:, 1], rows[:, at]) for at in range(2, rows.shape[1]))
        return first - sum(others)

    found = resampled(list(arms.values()), statistic)
    return found if math.isfinite(found.mean) else None


def _compared(record: Record, names: Sequence[str]) -> list[Mapping[str, Any]]:
    """Return the runs with all of these quantities in whose group some diverged and some did not."""
    rows = [row for row in record["rows"] if None not in [row["early"][name] for name in names]]
    ends = {end: {_group(row) for row in rows if diverges(row) is end} for end in (True, False)}
    return [row for row in rows if _group(row) in ends[True] & ends[False]]


def _group(row: Mapping[str, Any]) -> tuple[Any, ...]:
    return row["set"], row["recipe"], row["mixed"]


def _area(diverged: Any, groups: Any, values: Any) -> float:
    """Return the chance that, of two runs of a group, the one that diverged has the larger value; ties count half. nan
    if there are no such two."""
    pairs = groups[diverged][:, None] == groups[~diverged][None, :]
    bad, good = values[diverged][:, None], values[~diverged][None, :]
    return float(((bad > good) + 0.5 * (bad == good))[pairs].mean()) if pairs.any() else float("nan")


def says(record: Record) -> str:
    rows = record["rows"]
    diverged = sum(map(diverges, rows))
    found = area(record, "log_kappa")
    guess = sum(_guesses(row) and not diverges(row) for row in rows)
    counted = f"{len(rows)} runs that measured κ"
    if found is None:
        learnt = f" ({guess} end near guessing on what is new, which does not count)" if guess else ""
        return f"{diverged or 'None'} of {counted} diverged{learnt}: nothing to warn of." if rows else ""
    return f"Of {counted} {diverged} diverged; log κ after 5 % of training warns of it with an AUC of {found}."


def summary(record: Record) -> Iterable[Line]:
    for quantity, title in QUANTITIES.items():
        if found := area(record, quantity):
            low = " (a low value warns)" if quantity in LOW_WARNS else ""
            yield TableRow(f"{title} after 5 % of training{low}", {"AUC": f"{found}"})
    for what, rows in (
        ("diverged", [row for row in record["rows"] if diverges(row)]),
        (
            f"ended within {LEARNT:g} point of guessing, which does not count as diverged",
            [row for row in record["rows"] if _guesses(row) and not diverges(row)],
        ),
    ):
        if rows:
            yield f"{what}: {', '.join('{set}/{arm}/{run}'.format(**row) for row in rows)}"
    if unseen := record.get("diverged, κ not measured"):
        yield f"diverged, but did not measure κ, and do not count: {', '.join(unseen)}"


def _guesses(row: Mapping[str, Any]) -> bool:
    return row["top1"] is not None and row["top1"] < 100 / SETS[row["set"]].classes + LEARNT


def figure(record: Record) -> Any:
    """Plot how each run ended over its log κ after 5 % of training. The papers have no such figure."""
    alt = altair()
    rows = [
        {"kappa": row["early"]["log_kappa"], "end": row["losses"][1] / row["losses"][0], "set": SETS[row["set"]].title,
         "how": ENDS[diverges(row)]}
        for row in record["rows"]
    ]  # fmt: skip
    base = alt.Chart(alt.Data(values=rows)).mark_point(filled=True, size=60, opacity=0.8)
    points = base.encode(
        x=alt.X("kappa:Q", title="log κ(+sa) after 5 % of training", scale=alt.Scale(zero=False, padding=12)),
        y=alt.Y("end:Q", title="loss at the end, over that at the start"),
        color=alt.Color("set:N", sort=None, title=None, scale=alt.Scale(scheme="tableau10")),
        shape=alt.Shape("how:N", title=None, scale=alt.Scale(domain=ENDS, range=["circle", "cross"])),
    )
    line = alt.Chart().mark_rule(color=INK, strokeDash=[4, 3]).encode(y=alt.datum(1))
    caption = "Each point is a run of one of the other claims. Above the dashed line it ends worse than it began."
    return titled(alt.layer(line, points).properties(width=460, height=280), "log κ early, and how runs end", caption)


CLAIM = Measured(
    id="new-early-warning",
    claim="κ early in training predicts which runs will diverge",
    test="every run whose result was kept (of the first ones, on CIFAR-10, only summaries were), κ and the other "
    "quantities at 5 % of training, against runs of the same set and model; diverged: given up, or a loss that ends "
    "above its start",
    holds_if="AUC's interval above .7, and above that of the loss at the same step; at least 15 diverged, otherwise "
    "undecided",
    paper_scale="the runs of the other claims at that scale, and nothing else",
    of_runs=True,
    measure=measure,
    judge=judge,
    says=says,
    summary=summary,
    figure=figure,
)
