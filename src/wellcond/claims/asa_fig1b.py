"""asa-fig1b: in a trained ViT-Tiny the attention's output is far worse conditioned than the other three sites.

    wellcond reproduce asa-fig1b --scale smoke                                     # the digits, on a CPU
    wellcond reproduce asa-fig1b --scale lab --data-dir cifar10=data/cifar10       # reads the runs of asa-fig1c

It trains nothing of its own: these are the runs of asa-fig1c with both skips, every seed measured at its random start
and after training, on every tenth test image, in float32 without TF32, checked in float64. Where the other arms have
been trained, their condition numbers stand beside.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from statistics import fmean
from typing import Any

from wellcond.claims import asa_fig1c
from wellcond.claims.ends import SITES
from wellcond.claims.image_sets import IMAGE_SETS, GivenData
from wellcond.claims.options import Options, evidence_path
from wellcond.claims.runs import Runs, made_by
from wellcond.records import read_json, write_record, write_text
from wellcond.report.colors import SITES as COLORS
from wellcond.report.figures import Axis, Chart, Series, line_chart
from wellcond.verdicts import Interval, Part, Whole, combine, interval, not_run, undecided

__all__ = ["PAPER", "figure", "gaps", "judge", "plan_paper", "reproduce", "summary"]

SETS = ("cifar10", "tiny-imagenet")
GAP, SHARE = 1.5, 10 / 12  # log κ(sa) − the largest of the others, in so many of the blocks
PAPER = {"sa": 6.0, "+sa": 3.0, "mlp": 3.0, "+mlp": 3.0}
"""log κ, "near", in every layer."""
NEAR = 0.05  # log κ in float32 may differ so much from float64


def reproduce(options: Options) -> list[str]:
    """Train what asa-fig1c has not yet, with both skips; write what was measured; say what came out."""
    root = options.output / "asa-fig1c" / options.scale
    runs = Runs(root, console=options.console, device=options.device, jobs=options.jobs)
    return list(chain(*runs.together([partial(_reproduce_on, options, data, runs) for data in options.data])))


def _reproduce_on(options: Options, data: GivenData, runs: Runs) -> list[str]:
    chosen = asa_fig1c.train_arms(options, data, runs, arms=["both"])["both"]["lr"]
    folder = runs.root / data.set.name
    record = {
        "claim": "asa-fig1b",
        "scale": options.scale,
        "data": data.set.name,
        "epochs": asa_fig1c.configure(options, data, "both").epochs,
        "seeds": options.seeds,
        "arms": {
            arm: _measured(folder / arm, options.seeds, chosen if arm == "both" else None) for arm in asa_fig1c.ARMS
        },
        "paper": PAPER,
    }
    record["verdict on this set"] = judge([record], sets=[data.set.name]).as_json()
    path = evidence_path(options, "asa-fig1b", data.set.name)
    write_record(path, record, seed=0)
    write_text(path.with_suffix(".svg"), figure([record]).svg)
    options.console.print(f"wrote {path}", highlight=False)
    return summary(record)


def _measured(folder: Path, seeds: int, lr: float | None) -> list[dict[str, Any]]:
    """What was measured in the finished runs of an arm, seed by seed; empty where it was not trained.

    A folder may hold runs at a rate that a longer grid has replaced: of rates that are not known, the fullest counts.
    """
    found = [read_json(path) for path in sorted(folder.glob("seed-*/result.json"))]
    runs = [
        {
            "seed": run["config"]["seed"],
            "lr": run["config"]["lr"],
            "top1": run["metrics"]["top1"],
            **run["log_kappa"],
            **made_by(run),
        }
        for run in found
        if run["log_kappa"] and run["config"]["seed"] < seeds
    ]
    if runs and lr is None:
        lr = Counter(run["lr"] for run in runs).most_common(1)[0][0]
    return [run for run in runs if run["lr"] == lr]


def judge(records: Sequence[Mapping[str, Any]], sets: Sequence[str] = SETS) -> Whole:
    """By block and over seeds: is log κ(sa) at least 1.5 above the largest of the other three, in 10 of 12 blocks?"""
    by_set = {record["data"]: record for record in records}
    return combine([_part(name, by_set.get(name)) for name in sets])


def _part(name: str, record: Mapping[str, Any] | None) -> Part:
    title = f"{IMAGE_SETS[name].title}: log κ(sa) − max of the others ≥ {GAP:g} in {SHARE:.0%} of the blocks, trained"
    if record is None or not record["arms"]["both"]:
        return not_run(title)
    blocks = gaps(record, "trained")
    need = SHARE * len(blocks) - 1e-9
    surely = sum(block.low >= GAP for block in blocks)
    perhaps = sum(block.high >= GAP for block in blocks)
    lowest = min(blocks, key=lambda block: block.mean)
    why = f"in {surely} of {len(blocks)} blocks, by the interval of each; the smallest gap is {lowest}"
    outcome = "holds" if surely >= need else "undecided" if perhaps >= need else "does not hold"
    if outcome == "undecided":
        why += f"; in {perhaps} the interval reaches {GAP:g}"
    part = Part(name=title, outcome=outcome, why=why, found=lowest)
    for problem in _broken_rules(record):
        part = undecided(part, problem)
    return part


def _broken_rules(record: Mapping[str, Any]) -> list[str]:
    runs, found = record["arms"]["both"], []
    if record["scale"] == "smoke":
        found.append("a smoke run shows that it runs, and nothing else")
    if len(runs) < asa_fig1c.LEAST_SEEDS:
        found.append(f"{len(runs)} seeds are fewer than {asa_fig1c.LEAST_SEEDS}")
    if record["epochs"] < IMAGE_SETS[record["data"]].epochs:
        found.append(f"{record['epochs']} epochs are fewer than {IMAGE_SETS[record['data']].epochs}")
    plain, needed = fmean(run["top1"] for run in runs), IMAGE_SETS[record["data"]].respectable
    if plain < needed:
        found.append(f"the models reach {plain:.1%}, below the {needed:.0%} asked")
    off = max(value or 0.0 for run in runs for value in run["largest distance from float64"].values())
    if off > NEAR:
        found.append(f"float32 and float64 differ by {off:.2g} in log κ")
    return found


def gaps(record: Mapping[str, Any], when: str) -> list[Interval]:
    """For each block, over the seeds with both skips: log κ(sa) − the largest of the other sites."""
    runs = [run[when] for run in record["arms"]["both"]]
    others = [site for site in SITES if site != "sa"]
    return [
        interval([run["sa"][block] - max(run[site][block] for site in others) for run in runs])
        for block in range(len(runs[0]["sa"]))
    ]


def figure(records: Sequence[Mapping[str, Any]]) -> Chart:
    """log κ at the four sites, layer by layer, as in the paper: trained, and dashed the random start."""
    record = records[0]
    runs = record["arms"]["both"]
    blocks = range(len(runs[0]["trained"]["sa"]))
    lines = [
        Series(
            f"{site}{', untrained' if when == 'untrained' else ''}", list(blocks),
            [fmean(run[when][site][block] for run in runs) for block in blocks], COLORS[site],
            marks=when == "trained", dashed=when == "untrained",
        )
        for when in ("trained", "untrained")
        for site in SITES
    ]  # fmt: skip
    ends = [blocks[0], blocks[-1]]
    lines.append(Series("paper, sa", ends, [PAPER["sa"]] * 2, "ink"))
    lines.append(Series("paper, the others", ends, [PAPER["mlp"]] * 2, "muted"))
    title = f"log κ at four sites, ViT-Tiny on {IMAGE_SETS[record['data']].title}"
    caption = (
        f"Means over {len(runs)} seeds and {runs[0]['images']} images, at {record['scale']} scale; dashed: the random "
        "start. The paper's numbers are near 6 and near 3."
    )
    return line_chart(lines, title=title, x=Axis("block", whole=True), y="log κ", caption=caption, names_below=True)


def summary(record: Mapping[str, Any]) -> list[str]:
    """What came out on one set, in lines, with what training changed."""
    title, lines = IMAGE_SETS[record["data"]].title, []
    for arm, runs in record["arms"].items():
        for when in ("trained", "untrained") if runs else ():
            means = {site: fmean(fmean(run[when][site]) for run in runs) for site in SITES}
            said = ", ".join(f"{site} {value:.2f}" for site, value in means.items())
            capped = sum(run["capped"][when] for run in runs)
            beyond = f"; {capped} matrices beyond float32, counted as its ceiling" if capped else ""
            lines.append(f"{title}, {asa_fig1c.WORDS[arm]}, {when}: mean log κ {said}{beyond}")
    lines.append(
        f"{title}: the paper's {PAPER['sa']:g} (sa) and {PAPER['mlp']:g} (the others) are natural logarithms too: its "
        "text writes e⁶ and e³"
    )
    before, after = (fmean(gap.mean for gap in gaps(record, when)) for when in ("untrained", "trained"))
    lines.append(
        f"{title}: the gap between sa and the worst of the others is {after:.2f} after training, {before:.2f} at the "
        f"random start: training {'widened' if after > before else 'narrowed'} it by {abs(after - before):.2f}"
    )
    return lines


def plan_paper(options: Options) -> list[str]:
    return ["asa-fig1b needs the models of asa-fig1c, and nothing else.", *asa_fig1c.plan_paper(options)]
