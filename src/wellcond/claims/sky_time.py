"""sky-time: Skyformer trains faster than softmax, and in less memory.

    wellcond reproduce sky-time --scale lab --data-dir lra_text=data/imdb …        # reads the runs of sky-lra

Both in our loop, softmax by torch's scaled_dot_product_attention: 50,000 steps at the median speed of a run, without
its validations; memory is the most that steps of training take beyond the data set, not compiled. The paper compared
with a softmax that keeps all weights and computes them twice (checkpointed): steps in that order are timed beside.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from wellcond.claims.arms import Comparison
from wellcond.claims.claim import Beside, Line
from wellcond.claims.figures import INK, altair, by_set, paper_marks, titled
from wellcond.claims.lra import ARMS, ArenaArms, attention_color, column, seconds, shown, titles
from wellcond.verdicts import Interval, Part, in_most, not_run

__all__ = ["CLAIM", "savings"]

SHARE = 4 / 5  # of the tasks
_HOURS = {
    "lra_text": (4.30, 3.91, 0.71, 1.02), "lra_listops": (2.24, 1.99, 0.71, 1.29),
    "imdb_pairs": (8.33, 7.46, 1.29, 1.86),
    "lra_pathfinder": (2.57, 2.42, 1.49, 2.03), "lra_image": (4.22, 4.05, 2.70, 3.40),
}  # fmt: skip
_GIGABYTES = {
    "lra_text": (10.37, 5.73, 1.21, 1.59), "lra_listops": (5.37, 5.94, 1.37, 1.75),
    "imdb_pairs": (10.77, 10.46, 2.39, 3.15), "lra_pathfinder": (5.74, 6.38, 3.35, 4.13),
    "lra_image": (11.47, 6.38, 6.71, 8.26),
}  # fmt: skip
_COLUMNS = ("softmax", "kernelized", "nystrom", "skyformer")
PAPER = {
    task: {"time": dict(zip(_COLUMNS, _HOURS[task], strict=True)),
           "memory": dict(zip(_COLUMNS, _GIGABYTES[task], strict=True))}
    for task in _HOURS
}  # fmt: skip
"""Table 2: hours for 50,000 steps and their validations on a V100, and gigabytes."""
KINDS = {"time": "time for 50,000 steps", "memory": "peak memory"}


def judge(tasks: Mapping[str, Comparison]) -> Iterable[Part]:
    for kind, title in KINDS.items():
        name = f"Skyformer's {title} is below that of softmax by SDPA on at least four tasks, that is 1 − ratio ≥ 0"
        found = [one for one in (savings(task, kind) for task in tasks.values()) if one is not None]
        yield in_most(name, found, 0.0, share=SHARE, of="tasks") if found else not_run(name)


def values(found: Comparison, arm: str, kind: str) -> dict[int, float]:
    """Seed → seconds, or MiB; empty where nothing was measured, as on a CPU."""
    if kind == "time":
        return seconds(found, arm)
    memory = {run["seed"]: (run.get("training_memory") or {}).get("mib") for run in found.runs(arm)}
    return {seed: mib for seed, mib in memory.items() if mib}


def savings(found: Comparison, kind: str, arm: str = "skyformer") -> Interval | None:
    """1 − an arm's over softmax's, over paired seeds."""
    mine, theirs = values(found, arm, kind), values(found, "softmax", kind)
    shares = [1 - mine[seed] / theirs[seed] for seed in sorted(mine.keys() & theirs.keys())]
    return found.interval(shares) if shares else None


def published_ms(found: Comparison) -> dict[str, float] | None:
    """ms of a step in the published order of operations: the median run."""
    steps = sorted((run["published_steps"] for run in found.runs("softmax") if run.get("published_steps")),
                   key=lambda one: one["softmax"]["ms"])  # fmt: skip
    return {name: one["ms"] for name, one in steps[len(steps) // 2].items()} if steps else None


def says(tasks: Mapping[str, Comparison]) -> str:
    said = []
    for kind, title in KINDS.items():
        ratios = {one.title: 1 - saved.mean for one in tasks.values() if (saved := savings(one, kind)) is not None}
        said.append(f"{title} {', '.join(f'{ratio:.2f} ({task})' for task, ratio in ratios.items())}" if ratios else "")
    return f"Skyformer's over softmax's by SDPA: {'; '.join(filter(None, said))}." if any(said) else ""


def summary(found: Comparison) -> Iterable[Line]:
    for arm in found.trained:
        time, memory = values(found, arm, "time"), values(found, arm, "memory")
        if not time:
            continue
        minutes = found.interval(time.values()).mean / 60
        said = f", {ARMS[arm].title}: {minutes:.1f} minutes for {found.record['steps']:,} steps"
        said += f", {found.interval(memory.values()).mean / 1024:.2f} GiB" if memory else ""
        paper = found.paper.get("time", {}).get(arm)
        what, _, ours = said.partition(": ")
        yield Beside(what, ours, f"{paper:g} h, {found.paper['memory'][arm]:g} GB on a V100") if paper else said
    for kind, title in KINDS.items():
        if (saved := savings(found, kind)) is not None:
            ratio = found.paper.get(kind, {})
            what, ours = f", {title}, Skyformer's over that of SDPA", f"{1 - saved.mean:.2f}"
            yield Beside(what, ours, f"{ratio['skyformer'] / ratio['softmax']:.2f}") if ratio else f"{what}: {ours}"
    if (steps := published_ms(found)) is not None:
        yield (
            f", in the published order of operations: {steps['skyformer']:.1f} ms a step of Skyformer, "
            f"{steps['softmax']:.1f} of checkpointed softmax, {steps['skyformer'] / steps['softmax']:.2f} ×"
        )


def figure(sets: Sequence[Comparison]) -> Any:
    """Time and memory over softmax's, by task; diamonds for the paper, whose softmax is checkpointed."""
    alt = altair()
    rows, arms = [], ("kernelized", "nystrom", "skyformer")
    for found, arm in shown(sets, arms):
        for kind, title in KINDS.items():
            saved, paper = savings(found, kind, arm), found.paper.get(kind, {})
            published = paper[arm] / paper["softmax"] if paper else None
            ratio = None if saved is None else 1 - saved.mean
            row = {"set": column(found), "arm": ARMS[arm].title, "kind": title, "ratio": ratio, "paper": published}
            rows.append(row)
    base = alt.Chart().encode(
        x=alt.X("arm:N", sort=titles(arms), title=None, axis=alt.Axis(labels=False, ticks=False)),
    )
    scale = alt.Scale(type="log", nice=False, padding=12)
    points = base.mark_point(filled=True, size=110, opacity=1).encode(
        y=alt.Y("ratio:Q", title="× softmax by SDPA", scale=scale), color=attention_color(arms)
    )
    one = alt.Chart().mark_rule(color=INK, strokeDash=[4, 3]).encode(y=alt.datum(1))
    marks = paper_marks(base, "the paper, × its softmax")
    panels = [
        by_set([one, points, marks], [row for row in rows if row["kind"] == title], sets, title=column, width=130,
               height=180).properties(title=title)
        for title in KINDS.values()
    ]  # fmt: skip
    caption = (
        f"50,000 steps of our loop at {sets[0].record['scale']} scale, over softmax by SDPA (below the line: faster, "
        "smaller). The paper's softmax keeps all its weights and computes them twice, on a V100."
    )
    chart = alt.vconcat(*panels).resolve_scale(shape="shared", color="shared")
    return titled(chart, "Time and memory on the Long Range Arena", caption)


CLAIM = ArenaArms(
    id="sky-time",
    claim="Skyformer trains faster and smaller",
    test="the runs of sky-lra, and against SDPA (the paper compared with a checkpointed softmax); Retrieval by its "
    "stand-in, of the same shape",
    holds_if="below 1 × SDPA's time on at least four tasks, and below its memory; beside it the paper's comparison",
    same_runs_as="sky-lra",
    across=judge,
    shows=("memory_mib", "published_steps"),
    paper=PAPER,
    says=says,
    summary=summary,
    figure=figure,
)
