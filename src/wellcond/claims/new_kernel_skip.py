"""new-kernel-skip: kernelized attention loses less than softmax when its skip goes.

    wellcond reproduce new-kernel-skip --scale smoke                                  # the digits, on a CPU
    wellcond reproduce new-kernel-skip --scale lab --data-dir cifar10=data/cifar10    # one GPU, 45 minutes

Four attentions, each with both skips and without the attention's: softmax, linear, kernelized and, with 32 landmarks,
Skyformer. The claim is about softmax and kernelized; only these are trained on Tiny-ImageNet. Nobody has published it:
Skyformer's authors keep the skips, and those of Always Skip Attention look at softmax and linear attention. One
that is less accurate with its skip has less to lose, so each is compared with softmax with the skip and without. log κ
is that of 64 validation images in float64, as every run measures it.
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from statistics import fmean
from typing import Any

from wellcond.claims.arms import TrainedArms
from wellcond.claims.claim import Line, TableRow
from wellcond.claims.comparison import SKIPS, Arm, Comparison, ends_of
from wellcond.claims.figures import accuracies, accuracy_row, by_set, seeds_in_words, titled
from wellcond.claims.grayed import QUICK_GRID
from wellcond.verdicts import Part, at_least, listed, written
from wellcond.words import BLOCK_SITES

__all__ = ["CLAIM"]

WITHOUT = "no-sa"
SITES = BLOCK_SITES[:3]  # around the attention
CIFAR_ALONE = ("tiny-imagenet",)
LANDMARKS = 32  # of 64 tokens


def _pair(name: str, title: str, *, not_on: tuple[str, ...] = (), **settings: Any) -> dict[str, Arm]:
    """Return the arms of an attention, with both skips and without the attention's."""
    settings = {"attention": name, **settings}
    return {
        name: Arm(title=title, settings=settings, not_on=not_on),
        f"{name}-{WITHOUT}": Arm(
            title=f"{title}, {SKIPS[WITHOUT].title}", settings={**settings, **SKIPS[WITHOUT].settings}, not_on=not_on
        ),
    }


ARMS = {
    "both": Arm(title="softmax"),
    WITHOUT: Arm(title=f"softmax, {SKIPS[WITHOUT].title}", settings=SKIPS[WITHOUT].settings),
    **_pair("kernelized", "kernelized"),
    **_pair("linear", "linear", not_on=CIFAR_ALONE),
    **_pair("skyformer", "Skyformer", not_on=CIFAR_ALONE, attention_kwargs={"num_landmarks": LANDMARKS}),
}
PAIRS = {
    "softmax": ("both", WITHOUT),
    **{name: (name, f"{name}-{WITHOUT}") for name in ("kernelized", "linear", "skyformer")},
}


def drops(found: Comparison, attention: str) -> dict[int, float]:
    """Return, by seed, how many points an attention loses without its skip; empty if one side has no runs yet."""
    with_skip, without = PAIRS[attention]
    return {seed: -gain for seed, gain in found.paired(without, of=with_skip).items()}


def judge(found: Comparison) -> Iterable[Part]:
    softmax, kernelized = drops(found, "softmax"), drops(found, "kernelized")
    less = [softmax[seed] - kernelized[seed] for seed in sorted(softmax.keys() & kernelized.keys())]
    arms = (*PAIRS["softmax"], *PAIRS["kernelized"])
    yield at_least(CLAIM.asks, less, 0.0, unit=" points", confidence=found.confidence, about=arms)


def says(sets: Mapping[str, Comparison]) -> str:
    said = []
    for found in sets.values():
        lost = {ARMS[pair[0]].title: list(drops(found, name).values()) for name, pair in PAIRS.items()}
        each = [f"{written(fmean(drop))} with {title}" for title, drop in lost.items() if drop]
        gains = [found.paired(arm, of=other) for arm, other in zip(PAIRS["kernelized"], PAIRS["softmax"], strict=True)]
        if all(gains):
            with_skip, without = (written(fmean(gain.values()), "+z.1f") for gain in gains)
            remark = f" (kernelized against softmax: {with_skip} with the skips, {without} without)"
        elif not lost["kernelized"]:
            some = any(found.runs(arm) for arm in PAIRS["kernelized"])
            remark = f" (kernelized has not {'all ' if some else ''}run)"
        else:
            remark = ""
        said += [f"{listed(each)} on {found.title}{remark}"] if each else []
    return f"Without its attention skips a ViT-Tiny loses, in points of top-1, {'; '.join(said)}." if said else ""


def summary(found: Comparison) -> Iterable[Line]:
    for arm in found.trained:
        yield TableRow(f", {ARMS[arm].title}", found.reached(arm))
    for name, (arm, without) in PAIRS.items():
        if drops(found, name):
            yield TableRow(f", drop without its skip, {ARMS[arm].title}", found.gained(arm, of=without))
    for pair in PAIRS.values():
        for arm, softmax in zip(pair, PAIRS["softmax"], strict=True):
            if arm != softmax and found.paired(arm, of=softmax):
                yield TableRow(f", {ARMS[arm].title}, against {ARMS[softmax].title}", found.gained(arm, of=softmax))
    for arm in found.trained:
        for when in ("trained", "untrained") if found.measurements(arm, "kappa") else ():
            yield TableRow(
                f", {ARMS[arm].title}, {when}", found.conditioned(arm, SITES, when), "log κ around attention"
            )


def figure(sets: Sequence[Comparison]) -> Any:
    """Plot top-1 of each attention with its skip and without. The papers have no such figure."""
    rows, panels, shown = list[dict[str, Any]](), list[str](), dict[str, None]()
    for found in sets:
        for side, skips in enumerate((SKIPS["both"], SKIPS[WITHOUT])):
            panels.append(f"{found.title}, {skips.title}")
            for title, arm in ((ARMS[pair[0]].title, pair[side]) for pair in PAIRS.values()):
                if found.runs(arm):
                    shown[title] = None
                    rows.append(accuracy_row(found, arm, set=panels[-1]) | {"arm": title})
    layers = accuracies(list(shown), mark="", bars=True)[:-1]  # no number of a paper
    chart = by_set(layers, rows, panels, title=str, width=210, height=240)
    return titled(chart, "Accuracy of a ViT-Tiny by attention, with and without its skip", seeds_in_words(sets))


CLAIM = TrainedArms(
    id="new-kernel-skip",
    claim="kernelized attention loses less than softmax when its skip goes (nobody has published this)",
    test="softmax, linear, kernelized, Skyformer × skip or not, on CIFAR-10; softmax and kernelized on Tiny-ImageNet",
    holds_if="interval of drop(softmax) − drop(kernelized) above 0",
    arms=ARMS,
    in_part=True,
    sets=("cifar10", "tiny-imagenet"),
    asks="kernelized loses less without its skip than softmax: drop(softmax) − drop(kernelized) ≥ 0",
    grid=QUICK_GRID,
    reads={"kappa": partial(ends_of, sites=SITES)},
    judge=judge,
    says=says,
    summary=summary,
    figure=figure,
)
