"""sky-time: Skyformer trains faster than softmax, and in less memory.

    wellcond reproduce sky-time --scale smoke                                      # on a CPU: it runs
    wellcond reproduce sky-time --scale lab --data-dir lra_text=data/imdb …        # one GPU, a minute a task

A few hundred steps of sky-lra's trainings are timed in our loop, on their data, each alone on the GPU: the runs of
sky-lra themselves may share it. Softmax is torch's scaled_dot_product_attention, which everyone has; ours, which skips
padding and drops weights by a cheaper rule, is shown beside it. Memory is the peak of uncompiled training steps, beyond
the data and the model. The paper compared with a softmax that keeps all weights and computes them twice
(checkpointed); steps in that order of operations are timed too.
"""

import contextlib
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch

from wellcond.bench.lra import SDPA, registered_attentions
from wellcond.bench.timing import chosen_device
from wellcond.claims.claim import THE_PAPER, Line, MeasuredOn, Options, Record, TableRow
from wellcond.claims.figures import INK, altair, by_set, paper_marks, titled
from wellcond.claims.lra import ARMS, MAIN, TASKS, attention_color, titles
from wellcond.claims.lra_measurements import open_task, published_steps, training_memory
from wellcond.claims.sets import SETS, TASK_SETS, GivenData
from wellcond.claims.sky_lra import CLAIM as ACCURACY
from wellcond.records import Run
from wellcond.train.config import Config
from wellcond.train.loop import Diverged, train
from wellcond.verdicts import Interval, Part, in_most, interval, listed, out_of, undecided

__all__ = ["CLAIM", "savings"]

SHARE = 4 / 5  # of the tasks
WINDOW, WINDOWS = 50, 6  # steps between two readings of the clock; the first and the last window do not count
TWICE = 2  # how often memory is measured
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
PAPER = {
    task: {"time": dict(zip(MAIN, _HOURS[task], strict=True)), "memory": dict(zip(MAIN, _GIGABYTES[task], strict=True))}
    for task in _HOURS
}
"""Table 2: hours for 50,000 steps with their validations on a V100, and gigabytes; its softmax is checkpointed."""
TITLES = {SDPA: "softmax by SDPA", **{arm: ARMS[arm].title for arm in MAIN}, "softmax": "softmax, ours"}
KINDS = {"time": "time of a step", "memory": "peak memory"}
ALONE: dict[str, Any] = {
    "eval_steps": 10**9, "eval_batches": 1, "save_every": 10**9, "warmup_steps": 1, "probe_marks": False,
    "keep_best": False,
}  # fmt: skip


def measure(options: Options, data: GivenData) -> Mapping[str, Any]:
    smoke = options.scale == "smoke"
    device = chosen_device(options.device)
    if device.type != "cuda" and not smoke:
        raise ValueError("sky-time at lab scale times steps on a GPU, and there is none here")
    window, windows = (1, 1) if smoke else (WINDOW, WINDOWS)
    steps = {"steps": window * (2 + windows), "log_every": window, **({"batch_size": 2} if smoke else {})}
    cache = {"cache_dir": str(options.output / options.scale / "cache")}
    ours = {**ALONE, **steps, **cache}
    configs = {arm: ACCURACY.configure(options, data, arm).as_defaults().changed(ours) for arm in MAIN}
    time, memory = dict[str, list[float]](), dict[str, list[float]]()
    with registered_attentions(), tempfile.TemporaryDirectory() as scratch:
        configs = {SDPA: configs["softmax"].changed({"attention": SDPA}), **configs}
        opened = open_task(configs["softmax"], Path(scratch))
        for arm, config in configs.items():
            time[arm] = _step_ms(config, Path(scratch) / arm, device)[:windows]
            found = [training_memory(config, opened, str(device)) for _ in range(TWICE)]
            memory[arm] = [mib for mib in found if mib is not None]
        published = published_steps(configs["softmax"], Path(scratch), str(device))
    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "batch": configs["softmax"].batch_size, "time": time, "memory": memory, "published": published,
        "paper": PAPER[data.set.name],
    }  # fmt: skip


def _step_ms(config: Config, folder: Path, device: torch.device) -> list[float]:
    """Return ms per step of each window after the first, in which everything is compiled and captured."""
    torch.compiler.reset()
    with contextlib.suppress(Diverged):  # so few steps may end above the first loss; then the last window is missing
        train(config, folder, device=str(device), quiet=True)
    rows = Run.open(folder).train[1:]
    return [round(1e3 * config.batch_size / row.images_per_second, 4) for row in rows]


def savings(record: Record, kind: str, arm: str = "skyformer") -> Interval | None:
    """Return 1 − an arm's time or memory over that of softmax by SDPA; None if not measured (CPU).

    Times are compared value by value. Of memory the smallest value counts: the same step always takes the same, and
    the first one in a process sometimes has a library's working space in addition."""
    mine, theirs = record[kind].get(arm, []), record[kind].get(SDPA, [])
    if kind == "memory" and mine and theirs:
        share = 1 - min(mine) / min(theirs)
        return Interval(mean=share, low=share, high=share, count=len(mine))
    shares = [1 - one / other for one, other in zip(mine, theirs, strict=True)]
    return interval(shares) if shares else None


def judge(records: Mapping[str, Record]) -> Iterable[Part]:
    for kind, title in KINDS.items():
        name = f"Skyformer's {title} is below that of softmax by SDPA on at least four tasks, that is 1 − ratio ≥ 0"
        found = [one for one in (savings(record, kind) for record in records.values()) if one is not None]
        part = in_most(name, found, 0.0, share=SHARE, of="tasks")
        missing = [SETS[task].title for task in TASKS if task not in records]
        yield undecided(part, f"not measured yet on {', '.join(missing)}") if found and missing else part


def says(records: Mapping[str, Record]) -> str:
    said = []
    for kind in KINDS:
        found = [1 - one.mean for record in records.values() if (one := savings(record, kind))]
        if found:
            ends = " to ".join(dict.fromkeys(f"{end:.2f}" for end in (min(found), max(found))))
            said.append(f"less {kind} on {out_of(sum(one < 1 for one in found), len(found))} tasks ({ends} times)")
    times = [one["time"] for one in records.values() if one["time"].get("softmax") and one["time"].get("skyformer")]
    slower = sum(median(one["skyformer"]) > median(one["softmax"]) for one in times)
    ours = f"; our own softmax is faster than Skyformer on {out_of(slower, len(times))}"
    return f"Against softmax by SDPA, a step of Skyformer takes {listed(said)}{ours}." if said else ""


def summary(record: Record) -> Iterable[Line]:
    paper, steps = record["paper"], TASK_SETS[record["data"]].steps
    for arm, times in record["time"].items():
        of = {"softmax": "", SDPA: "softmax"}.get(arm, arm)
        cells = {
            KINDS["time"]: f"{median(times):.3g} ms ({min(times):.3g} to {max(times):.3g})",
            f"{steps:,} steps": f"{median(times) * steps / 6e4:.1f} minutes",
            KINDS["memory"]: f"{min(record['memory'][arm]) / 1024:.2f} GiB" if record["memory"][arm] else "",
            THE_PAPER: f"{paper['time'][of]:g} h, {paper['memory'][of]:g} GB on a V100" if of else "",
        }
        yield TableRow(f", {TITLES[arm]}", cells)
    if saved := {kind: found for kind in KINDS if (found := savings(record, kind)) is not None}:
        ours = {KINDS[kind]: f"{1 - found.mean:.2f} ×" for kind, found in saved.items()}
        theirs = " and ".join(f"{paper[kind]['skyformer'] / paper[kind]['softmax']:.2f} ×" for kind in saved)
        yield TableRow(", Skyformer's over that of SDPA", {**ours, THE_PAPER: theirs})
    mine, theirs = (record["published"][name]["ms"] for name in ("skyformer", "softmax"))
    yield (
        f", in the published order of operations: {mine:.1f} ms a step of Skyformer, {theirs:.1f} of checkpointed "
        f"softmax, {mine / theirs:.2f} ×"
    )


def figure(records: Sequence[Record]) -> Any:
    """Plot time and memory over those of softmax by SDPA, by task; diamonds for the paper's checkpointed softmax."""
    alt, rows = altair(), []
    for record in records:
        for arm in MAIN:
            for kind, title in KINDS.items():
                saved, paper = savings(record, kind, arm), record["paper"][kind]
                published = paper[arm] / paper["softmax"] if arm != "softmax" else None
                ratio = None if saved is None else 1 - saved.mean
                name = SETS[record["data"]].title
                rows.append({"set": name, "arm": ARMS[arm].title, "kind": title, "ratio": ratio, "paper": published})
    base = alt.Chart().encode(
        x=alt.X("arm:N", sort=titles(MAIN), title=None, axis=alt.Axis(labels=False, ticks=False)),
    )
    scale = alt.Scale(type="log", nice=False, padding=12)
    points = base.mark_point(filled=True, size=110, opacity=1).encode(
        y=alt.Y("ratio:Q", title="× softmax by SDPA", scale=scale), color=attention_color(MAIN)
    )
    one = alt.Chart().mark_rule(color=INK, strokeDash=[4, 3]).encode(y=alt.datum(1))
    marks = paper_marks(base, "the paper, × its softmax")
    names = [SETS[record["data"]].title for record in records]
    panels = [
        by_set([one, points, marks], [row for row in rows if row["kind"] == title], names, title=str, width=130,
               height=180).properties(title=title)
        for title in KINDS.values()
    ]  # fmt: skip
    caption = (
        f"A step of our loop at {records[0]['scale']} scale on {records[0]['device']}, over softmax by torch's SDPA "
        "(below the line: faster, smaller). The paper's softmax keeps all its weights and computes them twice, on a "
        "V100."
    )
    chart = alt.vconcat(*panels).resolve_scale(shape="shared", color="shared")
    return titled(chart, "Time and memory on the Long Range Arena", caption)


CLAIM = MeasuredOn(
    id="sky-time",
    claim="Skyformer trains faster than softmax, and in less memory",
    test="steps of the trainings of sky-lra, each alone on the GPU, and against SDPA (the paper compared with a "
    "checkpointed softmax); Retrieval by its stand-in, of the same shape",
    holds_if="below 1 × SDPA's time on at least four tasks, and below its memory; beside it the paper's comparison",
    sets=TASKS,
    seconds=90.0,
    paper_scale="the steps of the paper's scale are those of the lab, but for Retrieval's texts",
    measure=measure,
    judge=judge,
    says=says,
    summary=summary,
    figure=figure,
)
