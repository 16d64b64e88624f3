"""asa-lowprec: the paper fears that the DCT of Token Graying suffers in low precision. Does it, and does ours?

    wellcond reproduce asa-lowprec --scale smoke                                      # the digits, on a CPU
    wellcond reproduce asa-lowprec --scale lab --data-dir cifar10=data/cifar10        # one GPU, forty minutes

A ViT-Tiny with DCT graying (ε .95) on CIFAR-10, the cheapest of the sets, is trained in bfloat16 with our DCT
(half-precision products with float32 sums); in bfloat16 with a DCT that is also computed in bfloat16, as a plain
implementation is under autocast; and entirely in float32, without TF32, including the DCT. The first two differ only in
the DCT. For exploration, with one seed each: the same pair in float16, and everything in TF32. The error of the grayed
tokens in each precision is reported beside the accuracies. The paper has no numbers.
"""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from wellcond.bench.graying import dct_errors
from wellcond.bench.timing import chosen_device
from wellcond.claims.arms import TrainedArms
from wellcond.claims.claim import Line, TableRow, rounded
from wellcond.claims.comparison import Arm, Comparison
from wellcond.claims.figures import accuracies, accuracy_row, by_set, seeds_in_words, titled
from wellcond.claims.grayed import QUICK_GRID
from wellcond.claims.measurements import register_measurement, some_images
from wellcond.train.config import Config
from wellcond.verdicts import Part, at_least, listed, within, written

__all__ = ["CLAIM"]

EPSILON, MARGIN = 0.95, 0.5  # points


def _arm(dtype: str, title: str, *, naive: bool = False, **more: Any) -> Arm:
    """Return an arm with our DCT (half-precision products in any training), or with a `naive` DCT in `dtype`."""
    settings = {"gray": "dct", "epsilon": EPSILON, "gray_autocast": naive, "amp_dtype": dtype}
    return Arm(title=title, settings=settings, **more)


WHOLE, OURS, NAIVE = "dct-float32", "dct-bfloat16", "dct-bfloat16-naive"
ARMS = {
    OURS: _arm("bfloat16", "bfloat16, our DCT", measures=("dct_errors",)),
    NAIVE: _arm("bfloat16", "bfloat16, the DCT too", naive=True),
    WHOLE: _arm("float32", "float32, the DCT too", naive=True),
    "dct-float16": _arm("float16", "float16, our DCT", seeds=1),
    "dct-float16-naive": _arm("float16", "float16, the DCT too", naive=True, seeds=1),
    "dct-tf32": _arm("tf32", "TF32, the DCT too", naive=True, seeds=1),
}


@register_measurement("dct_errors")
def measure_errors(config: Config, folder: Path, device: str | None = None) -> dict[str, float]:
    """Return the largest relative error of the grayed tokens over every tenth validation image, by precision."""
    images = some_images(config, folder).to(chosen_device(device))
    found = dct_errors(images, config.model_kwargs["patch_size"], config.epsilon)
    return {path: rounded(error, 3) for path, error in found.items()}


def judge(found: Comparison) -> Iterable[Part]:
    lost, kept = found.paired(OURS, of=NAIVE), found.paired(OURS, of=WHOLE)
    settings = {"unit": " points", "confidence": found.confidence}
    name = f"a DCT computed in bfloat16 loses more than {MARGIN:g} point against ours in the same training"
    yield at_least(name, lost.values(), MARGIN, about=(OURS, NAIVE), **settings)
    name = f"our DCT in bfloat16 training inside ± {MARGIN:g} point of all in float32"
    yield within(name, kept.values(), MARGIN, about=(OURS, WHOLE), **settings)


def says(sets: Mapping[str, Comparison]) -> str:
    (found,) = sets.values()
    others = {NAIVE: "one with a DCT computed in bfloat16", WHOLE: "one trained in float32"}
    gains = {words: fmean(there.values()) for arm, words in others.items() if (there := found.paired(OURS, of=arm))}
    said = [f"{written(gain, '+z.1f')} points of top-1 over {words}" for words, gain in gains.items()]
    return f"Trained in bfloat16 with our DCT, a grayed ViT-Tiny has {listed(said)}." if said else ""


def summary(found: Comparison) -> Iterable[Line]:
    for arm in found.trained:
        over = found.told(found.paired(arm, of=WHOLE), " points") if arm != WHOLE else ""
        yield TableRow(f", {ARMS[arm].title}", {**found.reached(arm), "over float32": over})
    for ours, naive in ((OURS, NAIVE), ("dct-float16", "dct-float16-naive")):
        if found.paired(ours, of=naive):
            yield TableRow(f", gain of our DCT over {ARMS[naive].title}", found.gained(ours, of=naive))
    if errors := found.measurements(OURS, "dct_errors"):
        said = ", ".join(f"{path} {error:.1e}" for path, error in errors[0].items())
        yield f", largest error of the grayed tokens of an image, relative to float64: {said}"


def figure(sets: Sequence[Comparison]) -> Any:
    rows = [accuracy_row(found, arm) for found in sets for arm in found.trained]
    shown = [arm.title for name, arm in ARMS.items() if any(name in found.trained for found in sets)]
    layers = accuracies(shown, mark="the paper")[:-1]  # without the last layer: the paper has no numbers
    chart = by_set(layers, rows, sets, width=340, height=240)
    explored = any(ARMS[arm].seeds for found in sets for arm in found.trained)
    more = " Float16 and TF32: one seed, exploration." if explored else ""
    caption = f"{seeds_in_words(sets)}{more} The paper has no numbers."
    return titled(chart, "DCT graying of a ViT-Tiny, trained in several precisions", caption)


CLAIM = TrainedArms(
    id="asa-lowprec",
    claim="the DCT suffers in low precision",
    test="ViT-Tiny with DCT graying (ε .95) on CIFAR-10: float32, bfloat16 with our DCT, bfloat16 with a DCT in "
    "bfloat16; the same pair in float16 and all in TF32, one seed; the error of the tokens in each precision",
    holds_if="a training whose DCT runs in bf16 loses more than .5 point (interval); ours in bf16 training inside ± .5",
    paper_scale="the paper names no experiment: low precision is a limitation that it mentions",
    arms=ARMS,
    plain=OURS,
    in_part=True,
    second_look=False,  # a run in float32 takes minutes
    sets=("cifar10",),
    asks="a DCT in bfloat16 loses more than .5 point, ours does not",
    grid=QUICK_GRID,
    shows=("dct_errors",),
    judge=judge,
    says=says,
    summary=summary,
    figure=figure,
)
