"""asa-fig5: DCT graying lowers the condition number in almost every layer of a ViT-Base.

    wellcond reproduce asa-fig5 --scale smoke                                      # the digits, on a CPU
    wellcond reproduce asa-fig5 --scale lab --data-dir imagenette=data/imagenette        # the ViT-B runs of asa-table4

Trained at 224 pixels with one seed, plain and grayed with ε = 0.95, from the same start. Log κ at `+sa` is judged block
by block, each by its interval over ten groups of validation images, which are the same for both. The paper's figure has
curves without numbers; its Table 3 has the means over the layers.
"""

from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean
from typing import Any

from wellcond.claims.arms import TrainedArms
from wellcond.claims.claim import THE_PAPER, Line, TableRow
from wellcond.claims.comparison import CEILING, Comparison
from wellcond.claims.figures import WHEN, arm_color, by_block, by_set, paper_lines, titled
from wellcond.claims.five_models import ARMS, PAPER_KAPPA, SETTINGS, SIDES, lowered
from wellcond.verdicts import Part, in_most, interval, out_of
from wellcond.words import DEFAULT_SITES as SITES

__all__ = ["CLAIM"]

MODEL = "vit_base"
SHARE = 10 / 12


def judge(found: Comparison) -> Iterable[Part]:
    blocks = [interval(values) for values in zip(*lowered(found, MODEL), strict=True)]
    yield in_most(CLAIM.asks, blocks, 0.0, share=SHARE)


def says(sets: Mapping[str, Comparison]) -> str:
    (found,) = sets.values()
    falls = [fmean(values) for values in zip(*lowered(found, MODEL), strict=True)]
    if not falls:
        return ""
    lower = sum(fall > 0 for fall in falls)
    grayed, plain = (fmean(found.log_kappa(f"{MODEL}{side}", "+sa")[0]) for side in reversed(SIDES))
    return (
        f"With DCT graying, log κ after attention is lower in {out_of(lower, len(falls))} layers of one trained "
        f"ViT-B, on average {grayed:.2f} instead of {plain:.2f}."
    )


def summary(found: Comparison) -> Iterable[Line]:
    for arm in found.trained:
        for when in ("trained", "untrained") if found.measurements(arm) else ():
            cells = {site: f"{fmean(found.log_kappa(arm, site, when)[0]):.2f}" for site in SITES}
            capped = found.measurements(arm)[0]["capped"][when]
            cells |= {CEILING: f"{capped:,} matrices" if capped else ""}
            cells |= {THE_PAPER: f"+sa {PAPER_KAPPA[arm]}" if when == "trained" else ""}
            yield TableRow(f", {ARMS[arm].title}, {when}: log κ", cells)
    if groups := lowered(found, MODEL):
        blocks = enumerate(zip(*groups, strict=True))
        higher = [f"block {block}" for block, values in blocks if fmean(values) < 0]
        yield f": log κ of +sa is higher with graying in {', '.join(higher) or 'no block'}"
    yield ": whether details that the paper leaves open change how far κ falls is tested in new-graying-details"


def figure(sets: Sequence[Comparison]) -> Any:
    """Plot log κ of `+sa`, layer by layer, plain and grayed; the random start dashed, the paper's means dotted."""
    images = [one["images"] for found in sets for arm in found.trained for one in found.measurements(arm)]
    rows = []
    for found in sets:
        for side, (words, _) in SIDES.items():
            arm = f"{MODEL}{side}"
            for when, name in WHEN.items():
                for values in found.log_kappa(arm, "+sa", when):
                    rows += [
                        {"set": found.title, "side": words, "when": name, "block": block, "value": value}
                        for block, value in enumerate(values)
                    ]
            label = f"the paper's mean, {words}: {PAPER_KAPPA[arm]}"
            rows.append({"set": found.title, "paper": PAPER_KAPPA[arm], "label": label})
    color = arm_color([words for words, _ in SIDES.values()], field="side")
    lines = by_block(color, y="log κ after attention (+sa)", zero=False)
    chart = by_set([lines, *paper_lines()], rows, sets, width=460, height=300)
    caption = (
        f"One seed at {sets[0].record['scale']} scale{f', means over {images[0]} images' if images else ''}. "
        "The paper's model is trained on ImageNet-1K; its means over the layers are those of its Table 3."
    )
    return titled(chart, "log κ after attention in a ViT-Base, without and with DCT graying", caption)


CLAIM = TrainedArms(
    id="asa-fig5",
    claim="DCT graying lowers κ in almost every layer",
    test="ViT-Base on Imagenette at 224: one seed, the learning rate of asa-table4 (3e-4), no grid; intervals over ten "
    "groups of validation images",
    holds_if="lower in ≥ 10 of 12",
    arms={arm: ARMS[arm] for arm in (MODEL, f"{MODEL}-dct")},
    plain=MODEL,
    same_runs_as="asa-table4",
    sets=("imagenette",),
    seeds=1,
    asks="log κ after attention lower with graying, plain − grayed ≥ 0, in 10 of 12 blocks",
    settings=SETTINGS,
    grid={},
    measures=("log_kappa", "log_kappa_groups"),
    judge=judge,
    says=says,
    summary=summary,
    figure=figure,
)
