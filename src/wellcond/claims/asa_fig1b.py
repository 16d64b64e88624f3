"""asa-fig1b: in a trained ViT-Tiny the attention's output is far worse conditioned than the other three sites.

    wellcond reproduce asa-fig1b --scale smoke                                     # the digits, on a CPU
    wellcond reproduce asa-fig1b --scale lab --data-dir cifar10=data/cifar10       # reads the runs of asa-fig1c

It trains nothing of its own: these are the runs of asa-fig1c with both skips, every seed measured at its random start
and after training, on every tenth test image, in float32 without TF32, checked in float64. Where the other arms have
been trained, their condition numbers stand beside.
"""

from collections.abc import Iterable, Sequence
from statistics import fmean
from typing import Any

from wellcond.claims.arms import SKIPS, Comparison, TrainedArms
from wellcond.claims.figures import INK, SITE_COLORS, altair, titled
from wellcond.verdicts import Interval, Part
from wellcond.words import DEFAULT_SITES as SITES
from wellcond.words import Decided

__all__ = ["CLAIM", "gaps"]

GAP, SHARE = 1.5, 10 / 12  # log κ(sa) − the largest of the others, in so many of the blocks
PAPER = {"sa": 6.0, "+sa": 3.0, "mlp": 3.0, "+mlp": 3.0}  # log κ, "near", in every layer
NEAR = 0.05  # log κ in float32 may differ so much from float64


def judge(found: Comparison) -> Iterable[Part]:
    """By block and over seeds: is log κ(sa) at least 1.5 above the largest of the other three, in 10 of 12 blocks?"""
    blocks = gaps(found, "trained")
    need = SHARE * len(blocks) - 1e-9
    surely = sum(block.low >= GAP for block in blocks)
    perhaps = sum(block.high >= GAP for block in blocks)
    lowest = min(blocks, key=lambda block: block.mean)
    why = f"in {surely} of {len(blocks)} blocks, by the interval of each; the smallest gap is {lowest}"
    outcome: Decided = "holds" if surely >= need else "undecided" if perhaps >= need else "does not hold"
    if outcome == "undecided":
        why += f"; in {perhaps} the interval reaches {GAP:g}"
    yield Part(name=CLAIM.asks, outcome=outcome, why=why, found=lowest)


def rules(found: Comparison) -> Iterable[str]:
    off = max(value or 0.0 for run in _ends(found) for value in run["largest distance from float64"].values())
    if off > NEAR:
        yield f"float32 and float64 differ by {off:.2g} in log κ"


def gaps(found: Comparison, when: str) -> list[Interval]:
    """For each block, over the seeds with both skips: log κ(sa) − the largest of the other sites."""
    runs = [run[when] for run in _ends(found)]
    others = [site for site in SITES if site != "sa"]
    return [
        found.interval([run["sa"][block] - max(run[site][block] for site in others) for run in runs])
        for block in range(len(runs[0]["sa"]))
    ]


def _ends(found: Comparison, arm: str = "both") -> list[dict[str, Any]]:
    """What was measured at both ends of the runs that finished."""
    return [run["log_kappa"] for run in found.runs(arm) if run["log_kappa"]]


def summary(found: Comparison) -> Iterable[str]:
    """log κ by arm, with what training changed."""
    for arm in found.trained:
        runs = _ends(found, arm)
        for when in ("trained", "untrained") if runs else ():
            means = {site: fmean(fmean(run[when][site]) for run in runs) for site in SITES}
            said = ", ".join(f"{site} {value:.2f}" for site, value in means.items())
            capped = sum(run["capped"][when] for run in runs)
            beyond = f"; {capped} matrices beyond float32, counted as its ceiling" if capped else ""
            yield f", {SKIPS[arm].title}, {when}: mean log κ {said}{beyond}"
    yield (
        f": the paper's {PAPER['sa']:g} (sa) and {PAPER['mlp']:g} (the others) are natural logarithms too: its text "
        "writes e⁶ and e³"
    )
    before, after = (fmean(gap.mean for gap in gaps(found, when)) for when in ("untrained", "trained"))
    yield (
        f": the gap between sa and the worst of the others is {after:.2f} after training, {before:.2f} at the random "
        f"start: training {'widened' if after > before else 'narrowed'} it by {abs(after - before):.2f}"
    )


def figure(sets: Sequence[Comparison]) -> Any:
    """log κ at the four sites, layer by layer, as in the paper; dashed the random start, dotted the paper."""
    alt = altair()
    rows = []
    for found in sets:
        runs = _ends(found)
        blocks = range(len(runs[0]["trained"]["sa"]))
        for site in SITES:
            for when, name in (("trained", "trained"), ("untrained", "random start")):
                values = [fmean(run[when][site][block] for run in runs) for block in blocks]
                rows += [
                    {"set": found.title, "site": site, "when": name, "block": b, "value": values[b]} for b in blocks
                ]
        for site, name in (("sa", "the paper, sa"), ("mlp", "the paper, the other three")):
            rows.append({"set": found.title, "paper": PAPER[site], "label": f"{name}: near {PAPER[site]:g}"})
    lines = alt.Chart().transform_filter("isValid(datum.block)").mark_line(strokeWidth=2).encode(
        x=alt.X("block:Q", title="block", axis=alt.Axis(tickMinStep=1, grid=False)),
        y=alt.Y("value:Q", title="log κ", scale=alt.Scale(zero=True)),
        color=alt.Color("site:N", scale=alt.Scale(domain=list(SITES), range=[SITE_COLORS[s] for s in SITES]),
                        legend=alt.Legend(symbolType="stroke", symbolStrokeWidth=3)),
        strokeDash=alt.StrokeDash("when:N", title=None, sort=None, legend=alt.Legend(symbolType="stroke"),
                                  scale=alt.Scale(domain=["trained", "random start"], range=[[1, 0], [6, 3]])),
    )  # fmt: skip
    base = alt.Chart().transform_filter("isValid(datum.paper)").encode(y="paper:Q")
    rules = base.mark_rule(color=INK, strokeDash=[1, 4], strokeWidth=2)
    names = base.mark_text(align="left", baseline="bottom", dx=4, dy=-2, color=INK, fontSize=11).encode(
        x=alt.value(0), text="label:N"
    )
    layers = alt.layer(lines, rules, names, data=alt.Data(values=rows))
    chart = layers.properties(width=420, height=280)
    chart = chart.facet(column=alt.Column("set:N", sort=[found.title for found in sets], title=None))
    seeds, images = sets[0].record["seeds"], _ends(sets[0])[0]["images"]
    caption = (
        f"Means over {seeds} seeds and {images} images, at {sets[0].record['scale']} scale. Dotted: what the "
        "paper says of every layer."
    )
    return titled(chart, "log κ at four sites of a ViT-Tiny with both skips", caption)


CLAIM = TrainedArms(
    id="asa-fig1b",
    claim="`sa` is far worse conditioned than the other three sites in a trained ViT-Tiny",
    test="CIFAR-10 and Tiny-ImageNet models of asa-fig1c; κ on 10 % of validation",
    holds_if="mean log κ(`sa`) − max of the others ≥ 1.5 in ≥ 10 of 12 blocks, trained; and say what training changed",
    arms=SKIPS,
    trains=("both",),
    same_runs_as="asa-fig1c",
    sets=("cifar10", "tiny-imagenet"),
    asks=f"log κ(sa) − max of the others ≥ {GAP:g} in {SHARE:.0%} of the blocks, trained",
    paper=dict.fromkeys(("cifar10", "tiny-imagenet"), PAPER),
    judge=judge,
    rules=rules,
    summary=summary,
    figure=figure,
)
