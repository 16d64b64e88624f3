"""asa-fig1b: in a trained ViT-Tiny the attention's output is far worse conditioned than the other three sites.

    wellcond reproduce asa-fig1b --scale smoke                                     # the digits, on a CPU
    wellcond reproduce asa-fig1b --scale lab --data-dir cifar10=data/cifar10       # reads the runs of asa-fig1c

It trains nothing itself: it reads the runs of asa-fig1c with both skips. Every seed is measured at its random start and
after training, on every tenth test image, in float32 without TF32, checked in float64. If the other arms have been
trained, their condition numbers are shown too.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from statistics import fmean
from typing import Any

from wellcond.claims.arms import TrainedArms
from wellcond.claims.asa_table3 import PAPER as TABLE3
from wellcond.claims.claim import THE_PAPER, Line, TableRow
from wellcond.claims.comparison import CEILING, SKIPS, Comparison, ends_of
from wellcond.claims.figures import WHEN, by_block, by_set, paper_lines, site_color, titled
from wellcond.verdicts import Interval, Part, in_most, listed, out_of, written
from wellcond.words import BRANCH_SITES
from wellcond.words import DEFAULT_SITES as SITES

__all__ = ["CLAIM", "gaps"]

GAP, SHARE = 1.5, 10 / 12  # log κ(sa) − the largest of the others, in this share of the blocks
PAPER = {"sa": 6.0, "+sa": 3.0, "mlp": 3.0, "+mlp": 3.0}  # log κ, "near", in every layer
NEAR = 0.05  # how much log κ in float32 may differ from float64


def judge(found: Comparison) -> Iterable[Part]:
    """Judge the gap in each block, by its interval over seeds."""
    yield in_most(CLAIM.asks, gaps(found, "trained"), GAP, share=SHARE, unit="log κ")


def rules(found: Comparison) -> Iterable[str]:
    ends = found.measurements("both")
    off = max(value or 0.0 for run in ends for value in run["largest distance from float64"].values())
    if off > NEAR:
        yield f"float32 and float64 differ by {off:.2g} in log κ"


def gaps(found: Comparison, when: str) -> list[Interval]:
    """Return log κ(sa) − the largest of the other sites with both skips: for each block, an interval over seeds."""
    sa = found.log_kappa("both", "sa", when)
    others = [found.log_kappa("both", site, when) for site in SITES if site != "sa"]
    return [
        found.interval([run[block] - max(other[seed][block] for other in others) for seed, run in enumerate(sa)])
        for block in range(len(sa[0]))
    ]


def says(sets: Mapping[str, Comparison]) -> str:
    gaps_of, far = [], []
    for found in sets.values():
        means = [gap.mean for gap in gaps(found, "trained")]
        gaps_of.append(f"{written(min(means))} to {written(max(means))} on {found.title}")
        far.append((sum(mean >= GAP for mean in means), len(means), found.title))
    where = listed(f"{out_of(some, blocks)} blocks on {title}" for some, blocks, title in far)
    where = "every block" if all(some == blocks for some, blocks, _ in far) else where
    return (
        f"In {where} of a trained ViT-Tiny, log κ of attention's output is far ({GAP:g} or more) above that of the "
        f"other sites; the gap is {listed(gaps_of)}."
    )


def summary(found: Comparison) -> Iterable[Line]:
    """Yield log κ by arm, and how training changed the gap."""
    for arm in found.trained:
        runs = found.measurements(arm)
        for when in ("trained", "untrained") if runs else ():
            means = {site: fmean(map(fmean, found.log_kappa(arm, site, when))) for site in SITES}
            capped = sum(run["capped"][when] for run in runs)
            cells = {site: f"{value:.2f}" for site, value in means.items()}
            cells |= {CEILING: f"{capped:,} matrices" if capped else ""}
            if (arm, when) == ("both", "trained"):
                cells[THE_PAPER] = f"near {PAPER['sa']:g} (sa) and {PAPER['mlp']:g} (the others)"
            what, table = f", {found.arms[arm].title}, {when}: log κ", "" if arm == "both" else "The other arms"
            yield TableRow(what, cells, table)
            if capped and (doubles := found.conditioned(arm, SITES, when)):
                yield TableRow(f"{what}, in float64 on 64 images", doubles, table)
    unseen = {site for run in found.measurements("both") for site, off in
              run["largest distance from float64"].items() if off is None}  # fmt: skip
    if unseen:
        yield (
            f": {' and '.join(sorted(unseen))} could not be compared with float64, since in every block one of the "
            "images that are compared is beyond float32; what is capped makes the gap smaller, not larger"
        )
    tenfold = f"{PAPER['sa'] * math.log(10):.1f} and {PAPER['mlp'] * math.log(10):.1f}"
    yield (
        f": the paper's {PAPER['sa']:g} (sa) and {PAPER['mlp']:g} (the others) are natural logarithms if its text, "
        f"which writes e⁶ and e³, means that; were they powers of ten (1e6 and 1e3), they would be {tenfold} here. "
        f"Its own Table 3, in log scale, has {TABLE3['both'][2]} at +sa of a ViT-Base"
    )
    sa, mlp = (fmean(map(fmean, found.log_kappa("both", site))) for site in BRANCH_SITES)
    there = f"{PAPER['sa'] / PAPER['mlp']:g} times that of the others in the paper"
    yield f": in any base, log κ at sa is {there}, and {sa / mlp:.1f} times that at mlp here"
    before, after = (fmean(gap.mean for gap in gaps(found, when)) for when in ("untrained", "trained"))
    start, end = (sum(run["capped"][when] for run in found.measurements("both")) for when in ("untrained", "trained"))
    least = " at least" if after < before and start > end else ""
    yield (
        f": the gap between sa and the worst of the others is {after:.2f} after training, {before:.2f} at the random "
        f"start: training {'widened' if after > before else 'narrowed'} it by{least} {abs(after - before):.2f}"
    )


def figure(sets: Sequence[Comparison]) -> Any:
    """Plot log κ at the four sites, layer by layer, as in the paper; the random start dashed, the paper dotted."""
    rows = []
    for found in sets:
        for site in SITES:
            for when, name in WHEN.items():
                means = map(fmean, zip(*found.log_kappa("both", site, when), strict=True))
                rows += [
                    {"set": found.title, "site": site, "when": name, "block": block, "value": value}
                    for block, value in enumerate(means)
                ]
        for site, name in (("sa", "the paper, sa"), ("mlp", "the paper, the other three")):
            rows.append({"set": found.title, "paper": PAPER[site], "label": f"{name}: near {PAPER[site]:g}"})
    chart = by_set([by_block(site_color()), *paper_lines()], rows, sets, width=420, height=280)
    seeds, images = sets[0].record["seeds"], sets[0].measurements("both")[0]["images"]
    caption = (
        f"Means over {seeds} seeds and {images} images, at {sets[0].record['scale']} scale. Dotted: what the "
        "paper says of every layer."
    )
    return titled(chart, "log κ at four sites of a ViT-Tiny with both skips", caption)


CLAIM = TrainedArms(
    id="asa-fig1b",
    claim="attention's output (`sa`) is far worse conditioned than the other three sites in a trained ViT-Tiny",
    test="CIFAR-10 and Tiny-ImageNet models of asa-fig1c; κ on 10 % of validation",
    holds_if="mean log κ(`sa`) − max of the others ≥ 1.5 in ≥ 10 of 12 blocks, trained; and say what training changed",
    arms=SKIPS,
    trains=("both",),
    same_runs_as="asa-fig1c",
    sets=("cifar10", "tiny-imagenet"),
    asks=f"log κ(sa) − max of the others ≥ {GAP:g} in 10 of 12 blocks, trained",
    paper=dict.fromkeys(("cifar10", "tiny-imagenet"), PAPER),
    reads={"kappa": partial(ends_of, sites=SITES)},
    judge=judge,
    rules=rules,
    says=says,
    summary=summary,
    figure=figure,
)
