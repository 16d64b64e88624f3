"""asa-fig6: a ConvMixer does not need its skip.

    wellcond reproduce asa-fig6 --scale smoke                                         # the digits, on a CPU
    wellcond reproduce asa-fig6 --scale lab --data-dir cifar10=data/cifar10           # one GPU, half an hour

Two arms: a ConvMixer 256 wide and 8 deep, kernel 5, with and without the skip around its depthwise convolution. It has
256 tokens on every set (patch 2; on Tiny-ImageNet 4). The paper's "ConvMixer-Tiny" is not specified, and its bars have
no numbers; its text says that the two differ by less than .2 points.
"""

from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean
from typing import Any

from wellcond.claims.arms import GRID, TrainedArms
from wellcond.claims.claim import THE_PAPER, Line, TableRow
from wellcond.claims.comparison import Arm, Comparison
from wellcond.claims.figures import accuracies, accuracy_row, by_set, seeds_in_words, titled
from wellcond.verdicts import Part, listed, within, written
from wellcond.words import BLOCK_SITES

__all__ = ["CLAIM"]

MARGIN, PAPER = 1.0, 0.2  # points
SIZE = {"dim": 256, "depth": 8, "kernel_size": 5}
SITES = ["embed", *(site for site in BLOCK_SITES if site != "+mlp")]  # a ConvMixer has no skip there
SKIP, NO_SKIP = "skip", "no-skip"
RATES = (3e-3, 1e-2, 3e-2)
"""Around the rate of its own recipe: such a model trains best at rates some thirty times those of a ViT."""
ARMS = {
    SKIP: Arm(title="with its skip"),
    NO_SKIP: Arm(title="without its skip", settings={"remove_skips": ["sa"]}),
}


def judge(found: Comparison) -> Iterable[Part]:
    yield within(CLAIM.asks, _drops(found), MARGIN, unit=" points", confidence=found.confidence)


def _drops(found: Comparison) -> list[float]:
    """Return, for seeds that both arms have, what is lost without the skip, in points."""
    return list(found.paired(SKIP, of=NO_SKIP).values())


def says(sets: Mapping[str, Comparison]) -> str:
    drops = [f"{written(fmean(lost))} on {found.title}" for found in sets.values() if (lost := _drops(found))]
    return f"Without its skip a ConvMixer loses, in points of top-1, {listed(drops)}." if drops else ""


def summary(found: Comparison) -> Iterable[Line]:
    for arm in found.trained:
        yield TableRow(f", {ARMS[arm].title}", found.reached(arm))
    if _drops(found):
        yield TableRow(", drop without its skip", {**found.gained(SKIP, of=NO_SKIP), THE_PAPER: f"within ± {PAPER:g}"})


def figure(sets: Sequence[Comparison]) -> Any:
    """Plot top-1 of both on each set, as in the paper; its mark without the skip lies at our value with the skip."""
    rows = [
        accuracy_row(found, arm, found.mean(SKIP) if arm == NO_SKIP else None)
        for found in sets
        for arm in found.trained
    ]
    mark = f"the paper: as with its skip, ± {PAPER:g}"
    layers = accuracies([arm.title for arm in ARMS.values()], mark=mark, bars=True)
    chart = by_set(layers, rows, sets, width=120, height=240).resolve_scale(shape="shared")
    return titled(chart, "Accuracy of a ConvMixer without its skip", seeds_in_words(sets))


CLAIM = TrainedArms(
    id="asa-fig6",
    claim="a ConvMixer does not need its skip",
    test="ConvMixer 256/8 on CIFAR-10, CIFAR-100 and Tiny-ImageNet; its grid begins with the rates "
    f"{', '.join(f'{rate:g}' for rate in RATES)}, higher than those of a ViT",
    holds_if="the interval of the drop inside ± 1 point on each",
    arms=ARMS,
    plain=SKIP,
    in_part=True,
    sets=("cifar10", "cifar100", "tiny-imagenet"),
    asks=f"the drop without its skip inside ± {MARGIN:g} point",
    recipe="convmixer",
    grid={**GRID, "lab": RATES, "paper": RATES},
    settings={
        "smoke": {"model_kwargs": {"dim": 16, "depth": 2, "kernel_size": 3, "patch_size": 2}},
        "lab": {"model_kwargs": {**SIZE, "patch_size": 2}, "probe_sites": SITES},
        "tiny-imagenet": {"model_kwargs": {**SIZE, "patch_size": 4}},
    },
    judge=judge,
    says=says,
    summary=summary,
    figure=figure,
    multiplications=1.5e8,
)
