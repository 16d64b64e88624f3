"""asa-fig3: linear attention raises κ of its input to a power, the skip brings it back, and softmax does the same.

    wellcond reproduce asa-fig3 --scale smoke                                         # the digits, on a CPU
    wellcond reproduce asa-fig3 --scale lab --data-dir tiny-imagenet=data/tiny        # reads the runs of asa-table2

Two ViT-Tinys with both skips, with linear attention, QKᵀV/16, and with softmax: both are runs of asa-table2. log κ is
compared at `in` (the attention's normed input, the X of the paper's bound), `sa` and `+sa`, averaged over the blocks,
on the 64 validation images that every run is measured on in float64, at its random start and at its end. "Near the
input's" is taken as within ± 1: the paper's figure has a distance of 3 without the skip.
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from statistics import fmean
from typing import Any

from wellcond.claims.arms import TrainedArms
from wellcond.claims.claim import THE_PAPER, Line, TableRow
from wellcond.claims.comparison import Arm, Comparison, ends_of
from wellcond.claims.figures import WHEN, by_block, by_set, paper_lines, site_color, titled
from wellcond.claims.grayed import QUICK_GRID, WATCHED
from wellcond.verdicts import Part, at_least, not_run, within
from wellcond.words import BLOCK_SITES

__all__ = ["CLAIM"]

SITES = BLOCK_SITES[:3]  # around the attention
TIMES, CUBE, NEAR = 2.0, 3.0, 1.0
ARMS = {
    "both": Arm(title="softmax"),
    "linear": Arm(title="linear attention", settings={"attention": "linear"}),  # whose divisor is 16
}
PAPER = {"linear": {"in": 3.0, "sa": 6.0}}  # log κ, "from 3 to 6"


def judge(found: Comparison) -> Iterable[Part]:
    means = {arm: {site: found.mean_log_kappa(arm, site) for site in SITES} for arm in ARMS}
    if not all(sites["in"] for sites in means.values()):
        yield not_run(CLAIM.asks)
        return
    linear = means["linear"]
    excess = [sa - TIMES * before for sa, before in zip(linear["sa"], linear["in"], strict=True)]
    name = f"linear attention: log κ of its output − {TIMES:g} × that of its input ≥ 0"
    yield at_least(name, excess, 0.0, confidence=found.confidence)
    for arm, sites in means.items():
        apart = [after - before for after, before in zip(sites["+sa"], sites["in"], strict=True)]
        name = f"{ARMS[arm].title}: log κ after its skip − that of its input within ± {NEAR:g}"
        yield within(name, apart, NEAR, confidence=found.confidence)


def says(sets: Mapping[str, Comparison]) -> str:
    (found,) = sets.values()
    said = []
    for arm in reversed(found.trained):
        before, sa, after = (fmean(values) if values else 0.0 for values in (
            found.mean_log_kappa(arm, site) for site in SITES
        ))  # fmt: skip
        if before:
            there, back = (f"{'raises' if new > old else 'lowers'}" for old, new in ((before, sa), (sa, after)))
            times = f" ({sa / before:.1f} times; a cube would be {CUBE:g} times)" if arm == "linear" else ""
            said.append(
                f"{ARMS[arm].title} {there} log κ from {before:.1f} to {sa:.1f}{times}, and its skip {back} it to "
                f"{after:.1f}"
            )
    return f"In a ViT-Tiny trained on {found.title}, {'; '.join(said)}." if said else ""


def summary(found: Comparison) -> Iterable[Line]:
    for arm in found.trained:
        for when in ("trained", "untrained"):
            if not found.measurements(arm, "kappa"):
                continue
            cells = found.conditioned(arm, SITES, when)
            sa, before = (found.mean_log_kappa(arm, site, when) for site in ("sa", "in"))
            times = fmean(one / other for one, other in zip(sa, before, strict=True))
            paper = ", ".join(f"{site} {value:g}" for site, value in PAPER.get(arm, {}).items())
            cells |= {"sa ÷ in": f"{times:.2f}", THE_PAPER: f"{paper}; 2 × in" if paper and when == "trained" else ""}
            yield TableRow(f", {ARMS[arm].title}, {when}: log κ", cells)
    yield ": to cube κ is to multiply log κ by 3; asked is 2, which the paper's figure has"


def figure(sets: Sequence[Comparison]) -> Any:
    """Plot log κ by block, a panel for each attention, as in the paper; the random start dashed, the paper dotted."""
    rows, found = [], sets[0]
    for arm in found.trained:
        for site in SITES:
            for when, name in WHEN.items():
                runs = [run[when][site] for run in found.measurements(arm, "kappa")]
                rows += [
                    {"set": ARMS[arm].title, "site": site, "when": name, "block": block, "value": fmean(values)}
                    for block, values in enumerate(zip(*runs, strict=True))
                ]
        for site, value in PAPER.get(arm, {}).items():
            rows.append({"set": ARMS[arm].title, "paper": value, "label": f"the paper, {site}: near {value:g}"})
    panels = [ARMS[arm] for arm in found.trained]
    chart = by_set([by_block(site_color(SITES)), *paper_lines()], rows, panels, width=420, height=280)
    caption = (
        f"ViT-Tiny with both skips on {found.title}, means over {found.record['seeds']} seeds, at "
        f"{found.record['scale']} scale. Dotted: what the paper says of linear attention."
    )
    return titled(chart, "log κ before and after the attention, and after the skip", caption)


CLAIM = TrainedArms(
    id="asa-fig3",
    claim="linear attention raises κ to the third power, and the skip undoes it; softmax attention does the same",
    test="ViT-Tiny linear (k = 16) and softmax, trained on Tiny-ImageNet: the runs of asa-table2; κ on 64 validation "
    "images, in float64",
    holds_if="log κ(`sa`) ≥ 2 × log κ(`in`) for linear; `+sa` back near the input's, within ± 1, for both",
    arms=ARMS,
    same_runs_as="asa-table2",
    sets=("tiny-imagenet",),
    asks="log κ(sa) ≥ 2 × log κ(in) for linear attention; +sa near in for both",
    settings=WATCHED,
    grid=QUICK_GRID,
    reads={"kappa": partial(ends_of, sites=SITES)},
    paper={"tiny-imagenet": PAPER},
    judge=judge,
    says=says,
    summary=summary,
    figure=figure,
)
