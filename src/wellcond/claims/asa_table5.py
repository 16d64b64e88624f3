"""asa-table5: what DCT graying adds to masked autoencoding: accuracy after fine-tuning, and of a linear head.

    wellcond reproduce asa-table5 --scale smoke                                    # the digits, on a CPU
    wellcond reproduce asa-table5 --scale lab --data-dir tiny-imagenet=data/tiny   # one GPU, half an hour

A ViT-Tiny is pre-trained once for each seed, plain and with graying of the visible tokens. Two trainings start from the
weights of each, with the same graying: one fine-tunes the whole model, the other trains a linear head on frozen
features. Each of the three takes the set's 50 epochs; the paper pre-trains for 400 and fine-tunes for 100. Both
pre-trainings use the recipe's learning rate, because there is no accuracy to choose it by; the other trainings take
theirs from the grid, and those that choose it start from the first seed's weights. The paper has no linear head. A
pre-training and what starts from it take longer than the two minutes up to which seeds are added.
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from statistics import fmean
from typing import Any

from wellcond.claims.arms import GRID, TrainedArms
from wellcond.claims.claim import THE_PAPER, Line, TableRow
from wellcond.claims.comparison import Arm, Comparison, ends_of
from wellcond.claims.figures import INK, altair, arm_color, paper_marks, seeds_in_words, titled, with_interval
from wellcond.verdicts import Part, at_least, listed, written
from wellcond.words import BLOCK_SITES

__all__ = ["CLAIM"]

DCT: dict[str, Any] = {"gray": "dct", "epsilon": 0.95}
UNMIXED = {"mixup": 0.0, "cutmix": 0.0, "label_smoothing": 0.0}
HEAD_RATES = (1e-3, 3e-3, 1e-2)  # for a single layer on frozen features
KINDS = {"finetune": "fine-tuned", "probe": "a linear head"}
STATES = {"trained": "at the end", "untrained": "as pre-trained"}
METRICS = {"top1": "top-1", "top5": "top-5"}
PAPER = {"finetune": {"top1": 83.0, "top5": 96.4}, "finetune-dct": {"top1": 83.2, "top5": 96.6}}  # ImageNet-1K, ViT-B


def _arms(title: str, start: str, gray: dict[str, Any]) -> dict[str, Arm]:
    """Return the two arms that start from one pre-training."""
    suffix = start.removeprefix("mae")
    return {
        f"finetune{suffix}": Arm(
            title=f"fine-tuned{title}", recipe="mae_base_finetune", settings=gray, start=start
        ),
        f"probe{suffix}": Arm(
            title=f"a linear head{title}", recipe="mae_base_probe", start=start, grid=HEAD_RATES,
            settings={**gray, **UNMIXED, "probe_marks": False},  # its blocks are frozen
        ),
    }  # fmt: skip


_BOTH = {**_arms("", "mae", {}), **_arms(", grayed", "mae-dct", DCT)}
ARMS = {arm: _BOTH[arm] for kind in KINDS for arm in (kind, f"{kind}-dct")}
"""In the order of training: if time is short, one pair can be compared."""


def judge(found: Comparison) -> Iterable[Part]:
    for kind, title in KINDS.items():
        name, gains, arms = f"gain of graying, {title}, ≥ 0", _gains(found, kind).values(), (kind, f"{kind}-dct")
        yield at_least(name, gains, 0.0, unit=" points", confidence=found.confidence, about=arms)


def _gains(found: Comparison, kind: str, metric: str = "top1") -> dict[int, float]:
    """Return the gain of graying by seed, in points; empty if one side has no runs yet."""
    return found.paired(f"{kind}-dct", of=kind, name=metric)


def says(sets: Mapping[str, Comparison]) -> str:
    (found,) = sets.values()
    gains = {title: fmean(there.values()) for kind, title in KINDS.items() if (there := _gains(found, kind))}
    said = listed(f"{written(gain, '+z.1f')} ({title})" for title, gain in gains.items()) if gains else ""
    if not said:
        return ""
    plain, grayed = (found.mean_log_kappa(arm, "+sa") for arm in ("finetune", "finetune-dct"))
    measured = (
        f"; log κ after attention is, after fine-tuning, {fmean(grayed):.2f} instead of {fmean(plain):.2f}"
        if plain and grayed
        else ""
    )
    return f"DCT graying changes top-1 of a ViT-Tiny after masked autoencoding by {said}, in points{measured}."


def summary(found: Comparison) -> Iterable[Line]:
    for arm in found.trained:
        paper = "top-1 {top1} %, top-5 {top5} % (ViT-B, ImageNet-1K)".format(**PAPER[arm]) if arm in PAPER else ""
        yield TableRow(f", {found.arms[arm].title}", {**found.reached(arm), THE_PAPER: paper})
    for kind, title in KINDS.items():
        if _gains(found, kind):
            paper = f"{_paper_gain(kind, 'top1') or 'not tried'}"
            yield TableRow(f", gain of graying, {title}", {**found.gained(f"{kind}-dct", of=kind), THE_PAPER: paper})
    for arm in found.trained:
        for when in STATES if found.measurements(arm, "kappa") else ():
            cells = found.conditioned(arm, BLOCK_SITES, when)
            yield TableRow(f", {found.arms[arm].title}, {STATES[when]}", cells, "log κ on 64 images, in float64")


def _paper_gain(kind: str, metric: str) -> float | None:
    return round(PAPER[f"{kind}-dct"][metric] - PAPER[kind][metric], 1) if kind in PAPER else None


def figure(sets: Sequence[Comparison]) -> Any:
    """Plot what graying adds, with its interval; diamonds for the paper's table."""
    alt, (found,) = altair(), sets
    rows = []
    for kind, title in KINDS.items():
        for metric, name in METRICS.items():
            if gains := _gains(found, kind, metric):
                gain = with_interval(found.interval(gains.values()))
                rows.append({"kind": title, "metric": name, **gain, "paper": _paper_gain(kind, metric)})
    if not rows:
        return None
    base = alt.Chart(alt.Data(values=rows)).encode(
        y=alt.Y("kind:N", sort=list(KINDS.values()), title=None),
        yOffset=alt.YOffset("metric:N", sort=list(METRICS.values())),
    )
    color = arm_color(list(METRICS.values()), field="metric")
    x = alt.X("mean:Q", title="points more with DCT graying", scale=alt.Scale(padding=12))
    points = base.mark_point(filled=True, size=80, opacity=1).encode(x=x, color=color)
    errors = base.mark_rule(strokeWidth=2).encode(x="low:Q", x2="high:Q", color=color)
    paper = paper_marks(base, "the paper, ImageNet-1K", x=True)
    zero = alt.Chart().mark_rule(color=INK, strokeDash=[4, 3]).encode(x=alt.datum(0))
    chart = alt.layer(zero, errors, points, paper).properties(width=460, height=160)
    caption = f"{found.title}, ViT-Tiny, {found.record['epochs']} epochs of each training. {seeds_in_words(sets)}"
    return titled(chart, "What graying adds to masked autoencoding", caption)


CLAIM = TrainedArms(
    id="asa-table5",
    claim="DCT graying improves masked autoencoding",
    test="MAE of a ViT-Tiny on Tiny-ImageNet, fine-tuned and linear-probed, 50 epochs of each, grayed in pre-training "
    "and afterwards; the pre-trainings at one rate for "
    "both (1e-3, no grid) and on all training images, without their labels; linear heads, which are ours, at rates of "
    f"{', '.join(f'{rate:g}' for rate in HEAD_RATES)} and beyond",
    holds_if="interval of the gain above 0",
    starts={
        "mae": Arm(title="MAE", recipe="mae_base", settings=UNMIXED),
        "mae-dct": Arm(title="MAE, grayed", recipe="mae_base", settings={**UNMIXED, **DCT}),
    },
    arms=ARMS,
    plain="finetune",
    in_part=True,
    sets=("tiny-imagenet",),
    asks="interval of the gain above 0",
    grid={**GRID, "smoke": GRID["smoke"][:1]},
    measures=(),
    reads={"kappa": partial(ends_of, sites=BLOCK_SITES)},
    second_look=False,
    paper={"tiny-imagenet": PAPER},
    judge=judge,
    says=says,
    summary=summary,
    figure=figure,
)
