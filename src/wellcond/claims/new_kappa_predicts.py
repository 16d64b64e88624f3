"""new-kappa-predicts: whether log κ, at the random start or after 5 % of training, tells which arm ends better.

    wellcond reproduce new-kappa-predicts --scale lab        # reads the runs of all other claims: no data, no training

Compared are arms of equal set, recipe, skips and budget, each at each of its learning rates: that is, also those of the
short trainings that choose the rates, which are most of what there is. Within a group, log κ of the tokens after
attention (+sa, the mean over blocks) is correlated by rank with the final accuracy, while the loss at the same step is
held constant. The rates of one arm are alike (at the start, they are one model): the interval comes from resampling
arms, and a group of fewer than 15 arms decides nothing, however many rates they have.
"""

from collections.abc import Iterable, Sequence
from typing import Any

from wellcond.claims.claim import Line, Measured, Record, TableRow
from wellcond.claims.early import MARKS, ArmAtRate, Group, arms_of, measure
from wellcond.claims.figures import altair, titled
from wellcond.claims.grayed import PLAIN
from wellcond.claims.sets import SETS
from wellcond.verdicts import Interval, Part, judgement, listed, rank_correlation, stays_below, undecided, written

__all__ = ["CLAIM"]

LEAST_ARMS = 15
Arms = Sequence[ArmAtRate]


def judge(record: Record) -> Iterable[Part]:
    for mark, when in MARKS.items():
        name = f"lower log κ {when}, higher accuracy at equal loss"
        groups = _largest(record, mark)
        if not groups:
            yield Part(name=name, outcome="undecided", why="no arms can be compared yet")
        for group, arms in groups.items():
            named, found, number = f"{_title(group)}: {name}", correlation(arms), _number(arms)
            alike = Part(name=named, outcome="undecided", why="all arms have one log κ, or the loss tells it")
            part = stays_below(named, found, 0.0) if found else alike
            yield part if number >= LEAST_ARMS else undecided(part, f"{number} of the {LEAST_ARMS} arms asked for")


def _largest(record: Record, mark: str) -> dict[Group, Arms]:
    """Return the groups that have enough arms, the largest first; if there is none, the largest one."""
    groups = sorted(arms_of(record["rows"], mark).items(), key=lambda item: (-_number(item[1]), -len(item[1])))
    enough = sum(_number(arms) >= LEAST_ARMS for _, arms in groups)
    return dict(groups[: enough or 1])


def _number(arms: Arms) -> int:
    return len({one.arm for one in arms})


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
    skips = "" if group.skips == "none" else f", without {group.skips}"
    part = ", a part held out" if group.held_out else ""
    mixed = ", mixed" if group.mixed else ""
    return f"{SETS[group.set].title}, {group.recipe}{skips}, {group.budget}{mixed}{part}"


def says(record: Record) -> str:
    lead = {
        "holds": "At equal loss, lower κ early goes with higher final accuracy",
        "does not hold": "At equal loss, lower κ early does not go with higher final accuracy",
        "holds in part": "At equal loss, lower κ early goes in part with higher final accuracy",
        "undecided": "It is undecided whether, at equal loss, lower κ early goes with higher final accuracy",
    }[judgement({part.outcome for part in judge(record)})]
    first = {when: next(iter(_largest(record, mark).values()), ()) for mark, when in MARKS.items()}
    said = [f"{written(found.mean, '.2f')} {when}" for when, arms in first.items() if (found := correlation(arms))]
    return f"{lead}: rank correlation {listed(said)} ({_counted(record)})." if said else ""


def _counted(record: Record) -> str:
    group, arms = next(iter((_largest(record, "early") or _largest(record, "start")).items()))
    asked = "" if _number(arms) >= LEAST_ARMS else f", not the {LEAST_ARMS} asked for"
    told = f"{len(arms)} points of {group.budget}{', on held-out images' if group.held_out else ''}"
    return f"{_number(arms)} arms on {SETS[group.set].title}{asked}; at several learning rates, {told}"


def summary(record: Record) -> Iterable[Line]:
    for mark, when in MARKS.items():
        for group, arms in _shown(record, mark).items():
            kappa, loss, alone = (correlation(arms, *of) for of in (("log_kappa", "top1"), ("loss", "top1"), ()))
            cells = {"rank correlation of log κ": f"{kappa or ''}", "at equal loss": f"{alone or ''}"}
            rate = correlation(arms, "loss", "lr")
            cells |= {"of the loss": f"{loss or ''}", "of the loss with the rate": f"{rate or ''}"}
            cells |= {"arms": f"{_number(arms)}", "points": f"{len(arms)}"}
            unjudged = "" if group in _largest(record, mark) else ", not judged"
            yield TableRow(f"{_title(group)}, {when}{unjudged}", cells)
    groups, shown = arms_of(record["rows"], "early"), _shown(record, "early")
    small = {_title(group): _number(arms) for group, arms in groups.items() if group not in shown}
    if small:
        said = "; ".join(f"{title} ({number})" for title, number in small.items() if number > 1)
        yield f"groups with fewer arms: {said}"
    yield "where the loss follows the learning rate, arms of equal loss are nearly those of equal rate"


def _shown(record: Record, mark: str) -> dict[Group, Arms]:
    """Return the groups that have as many arms as those that are judged, or more."""
    least = min(map(_number, _largest(record, mark).values()), default=0)
    return {group: arms for group, arms in arms_of(record["rows"], mark).items() if _number(arms) >= least}


def figure(record: Record) -> Any:
    """Plot the final accuracy over log κ, a point for each arm and rate of the largest group. The papers have none."""
    alt, panels, caption = altair(), [], ""
    for mark, when in MARKS.items():
        if not (largest := _largest(record, mark)):
            continue
        group, arms = next(iter(largest.items()))
        rows = [
            {
                "arm": "plain" if one.arm == PLAIN else one.arm,
                "rate": f"lr {one.lr:g}",
                "kappa": one.log_kappa,
                "top1": one.top1,
            }
            for one in arms
        ]
        points = alt.Chart(alt.Data(values=rows)).mark_point(filled=True, size=80, opacity=0.85).encode(
            x=alt.X("kappa:Q", title=f"log κ(+sa) {when}", scale=alt.Scale(zero=False, padding=12)),
            y=alt.Y("top1:Q", title="top-1 at the end, %", scale=alt.Scale(zero=False, padding=12)),
            color=alt.Color("arm:N", sort=None, title=None, scale=alt.Scale(scheme="tableau10")),
            shape=alt.Shape("rate:N", sort=None, title=None),
        )  # fmt: skip
        panels.append(points.properties(width=330, height=280))
        caption = f"{_title(group)}. Each point is an arm at one learning rate."
    return titled(alt.hconcat(*panels), "Condition number early, and accuracy in the end", caption) if panels else None


CLAIM = Measured(
    id="new-kappa-predicts",
    claim="κ at the random start, or after 5 % of training, tells which arm ends better",
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
