"""new-kappa-predicts: whether log κ, at the random start or after 5 % of training, tells which arm ends better.

    wellcond reproduce new-kappa-predicts --scale lab        # reads the runs of all other claims: no data, no training

Compared are arms of equal set, recipe, skips and budget, each at each of its learning rates: that is, also those of the
short trainings that choose the rates, which are most of what there is. Within a group of at least 15, log κ of the
tokens after attention (+sa, the mean over blocks) is correlated by rank with the final accuracy, while the loss at the
same step is held constant. The interval comes from resampling arms, because the rates of one arm are alike.
"""

from collections.abc import Iterable, Sequence
from typing import Any

from wellcond.claims.claim import Measured, Record
from wellcond.claims.early import MARKS, ArmAtRate, Group, arms_of, measure
from wellcond.claims.figures import altair, titled
from wellcond.claims.sets import SETS
from wellcond.verdicts import Interval, Part, rank_correlation, stays_below

__all__ = ["CLAIM"]

LEAST_ARMS = 15
Arms = Sequence[ArmAtRate]


def judge(record: Record) -> Iterable[Part]:
    for mark, when in MARKS.items():
        large = _large(record, mark)
        for group, arms in large.items():
            name = f"{_title(group)}: {when}, log κ falls as accuracy rises, the loss held constant"
            found = correlation(arms)
            alike = Part(name=name, outcome="undecided", why="all arms have one log κ, or the loss tells it")
            yield stays_below(name, found, 0.0) if found else alike
        if not large:
            most = max(map(len, arms_of(record["rows"], mark).values()), default=0)
            few = f"the largest group has {most} of the {LEAST_ARMS} arms asked for"
            name = f"{when}, log κ falls as accuracy rises, the loss held constant"
            yield Part(name=name, outcome="undecided", why=few)


def _large(record: Record, mark: str) -> dict[Group, Arms]:
    """Return the groups that have enough arms, the largest first."""
    groups = sorted(arms_of(record["rows"], mark).items(), key=lambda item: -len(item[1]))
    return {group: arms for group, arms in groups if len(arms) >= LEAST_ARMS}


def correlation(arms: Arms, *columns: str) -> Interval | None:
    """Return the rank correlation of two columns of the arms, the third held constant; by default of log κ and top-1,
    with the loss held constant. None if it cannot be computed."""
    groups = dict[str, list[tuple[float, ...]]]()
    for one in arms:
        row = tuple(getattr(one, name) for name in columns or ("log_kappa", "top1", "loss"))
        groups.setdefault(one.arm, []).append(row)
    try:
        return rank_correlation(list(groups.values()))
    except ValueError:
        return None


def _title(group: Group) -> str:
    skips = "all skips" if group.skips == "none" else f"without {group.skips}"
    part = ", a part held out" if group.held_out else ""
    mixed = ", mixed images" if group.mixed else ""
    return f"{SETS[group.set].title}, {group.recipe}, {skips}, {group.budget}{mixed}{part}"


def says(record: Record) -> str:
    first = {when: next(iter(_large(record, mark).values()), ()) for mark, when in MARKS.items()}
    said = [f"{found} {when}" for when, arms in first.items() if (found := correlation(arms))]
    what = "Rank correlation of log κ after attention with the final accuracy, the loss held constant"
    return f"{what}, over {_counted(record)}: {', '.join(said)}." if said else ""


def _counted(record: Record) -> str:
    group, arms = next(iter(_large(record, "early").items()))
    return f"{len(arms)} trainings of {len({one.arm for one in arms})} arms on {SETS[group.set].title}"


def summary(record: Record) -> Iterable[str]:
    for mark, when in MARKS.items():
        for group, arms in _large(record, mark).items():
            kappa, loss = (correlation(arms, name, "top1") for name in ("log_kappa", "loss"))
            yield f"{_title(group)}, {when}: rank correlation with the accuracy, of log κ {kappa}, of the loss {loss}"
    small = [
        f"{_title(group)} ({len(arms)})"
        for group, arms in arms_of(record["rows"], "early").items()
        if 1 < len(arms) < LEAST_ARMS
    ]
    if small:
        yield f"groups with fewer than {LEAST_ARMS} arms, not judged: {'; '.join(small)}"


def figure(record: Record) -> Any:
    """Plot the final accuracy over log κ, a point for each arm and rate of the largest group. The papers have none."""
    alt, panels, caption = altair(), [], ""
    for mark, when in MARKS.items():
        group, arms = max(arms_of(record["rows"], mark).items(), key=lambda item: len(item[1]))
        rows = [{"arm": one.arm, "rate": f"lr {one.lr:g}", "kappa": one.log_kappa, "top1": one.top1} for one in arms]
        points = alt.Chart(alt.Data(values=rows)).mark_point(filled=True, size=80, opacity=0.85).encode(
            x=alt.X("kappa:Q", title=f"log κ(+sa) {when}", scale=alt.Scale(zero=False, padding=12)),
            y=alt.Y("top1:Q", title="top-1 at the end, %", scale=alt.Scale(zero=False, padding=12)),
            color=alt.Color("arm:N", sort=None, title=None, scale=alt.Scale(scheme="tableau10")),
            shape=alt.Shape("rate:N", sort=None, title=None),
        )  # fmt: skip
        panels.append(points.properties(width=330, height=280))
        caption = f"{_title(group)}. Each point is an arm at one learning rate."
    return titled(alt.hconcat(*panels), "Condition number early, and accuracy in the end", caption)


CLAIM = Measured(
    id="new-kappa-predicts",
    claim="κ at the start, or after 5 % of training, tells which arm ends better",
    test="arms of equal skips, set and budget, at each of their learning rates, over all claims",
    holds_if="log κ tells more than the loss at the same step does: partial rank correlation with final accuracy, "
    "interval below 0; at least 15 arms a group, otherwise undecided",
    paper_scale="the runs of the other claims at that scale, and nothing else",
    of_runs=True,
    measure=measure,
    judge=judge,
    says=says,
    summary=summary,
    figure=figure,
)
