"""asa-table4: DCT graying in five models: are the outputs of attention better conditioned in each of them?

    wellcond reproduce asa-table4 --scale smoke                                    # the digits, on a CPU
    wellcond reproduce asa-table4 --scale lab --data-dir imagenette=data/imagenette      # one GPU, forty minutes

ViT-S, ViT-B, Swin-S, CaiT-S24 and PVT v2 b3 at 224 pixels, plain and grayed with ε = 0.95, one seed each, both from the
same start. Log κ at `+sa`, averaged over blocks, is judged by its interval over ten groups of validation images, which
are the same for both. If a model's plain arm misses the accuracy asked of its set, its part is undecided. Accuracy is
not judged, so there is no grid: every arm trains at the middle rate of the usual one. The paper's accuracies are out of
reach here.
"""

from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean
from typing import Any

from wellcond.claims.arms import TrainedArms
from wellcond.claims.claim import THE_PAPER, Line, TableRow
from wellcond.claims.comparison import Comparison
from wellcond.claims.figures import altair, arm_color, paper_marks, titled
from wellcond.claims.five_models import ARMS, MODELS, PAPER_KAPPA, SETTINGS, SIDES, lowered
from wellcond.claims.imagenet import gpu_hours
from wellcond.verdicts import Part, at_least, listed, not_run, out_of_reach, undecided, written

__all__ = ["CLAIM"]

PAPER = {
    "vit_small": (80.2, 95.1), "vit_small-dct": (80.4, 95.2), "vit_base": (81.0, 95.3), "vit_base-dct": (81.3, 95.4),
    "swin_small": (81.3, 95.6), "swin_small-dct": (81.6, 95.6), "cait_s24": (82.6, 96.1), "cait_s24-dct": (82.7, 96.3),
    "pvt_v2_b3": (82.9, 96.0), "pvt_v2_b3-dct": (83.0, 96.1),
}  # fmt: skip
"""Top-1 and top-5 on ImageNet-1K."""


def judge(found: Comparison) -> Iterable[Part]:
    for model, title in MODELS.items():
        name, groups = f"{title}: log κ after attention is lower with graying", lowered(found, model)
        if not groups:
            lost = [ARMS[arm].title for side in SIDES if _diverged(found, arm := f"{model}{side}")]
            why = f"there is no κ to compare: {', '.join(lost)} diverged"
            yield Part(name=name, outcome="undecided", why=why) if lost else not_run(name)
            continue
        part = at_least(f"{name}, plain − grayed ≥ 0", list(map(fmean, groups)), 0.0, of="groups of images")
        reached, asked = found.values(model)[0], 100 * found.set.respectable
        enough = reached >= asked
        yield part if enough else undecided(part, f"plain it reaches {reached:.1f} %, not the {asked:.0f} asked")
    speeds = {arm: found.runs(arm)[0]["images per second"] or 0.0 for arm in found.trained}
    hours = sum(gpu_hours(ARMS[arm].recipe, speed) for arm, speed in speeds.items())
    known = len(speeds) == len(ARMS) and all(speeds.values())
    most = f", at most {3 * hours:,.0f} GPU hours (by these, which may have shared a GPU)" if known else ""
    yield out_of_reach(
        "top-1 is higher with graying in every model",
        f"gains of .1 to .3 points do not show on 3,925 images; it would take {len(ARMS)} trainings on "
        f"ImageNet-1K for each of three seeds{most}",
    )


def _diverged(found: Comparison, arm: str) -> bool:
    return any(run["status"] == "diverged" for run in found.runs(arm))


def says(sets: Mapping[str, Comparison]) -> str:
    (found,) = sets.values()
    falls = {title: fmean(map(fmean, groups)) for model, title in MODELS.items() if (groups := lowered(found, model))}
    if not falls:
        return ""
    said = listed(f"{written(-fall, '+z.2f')} in {title}" for title, fall in falls.items())
    left = sum(not any(found.runs(f"{model}{side}") for side in SIDES) for model in MODELS)
    missing = f"; {left} of {len(MODELS)} models are missing" if left else ""
    return f"DCT graying changes mean log κ after attention by {said} (one seed each{missing})."


def summary(found: Comparison) -> Iterable[Line]:
    for arm in found.trained:
        (run,) = found.runs(arm)
        if not run["log_kappa"]:  # it diverged
            continue
        after, before = (fmean(found.log_kappa(arm, "+sa", when)[0]) for when in ("trained", "untrained"))
        kappa = f"log κ of `+sa` {PAPER_KAPPA[arm]}, " if arm in PAPER_KAPPA else ""
        cells = {
            "log κ of `+sa`": f"{after:.2f}",
            "at the random start": f"{before:.2f}",
            "top-1": f"{run['top1']:.1f} %",
            "top-5": f"{run['top5']:.1f} %",
            THE_PAPER: f"{kappa}top-1 {PAPER[arm][0]} %, top-5 {PAPER[arm][1]} % (ImageNet-1K)",
        }
        yield TableRow(f", {ARMS[arm].title}", cells)


def figure(sets: Sequence[Comparison]) -> Any:
    """Plot log κ and top-1 of each model, plain and grayed; diamonds for the paper's numbers, where there are some."""
    alt, (found,) = altair(), sets
    rows = []
    for model, title in MODELS.items():
        for side, (words, _) in SIDES.items():
            arm = f"{model}{side}"
            for run in found.runs(arm):
                kappa = fmean(found.log_kappa(arm, "+sa")[0]) if run.get("log_kappa") else None
                row = {"model": title, "side": words, "log κ of +sa": kappa, "top-1, %": run["top1"]}
                rows.append(row | {"paper log κ of +sa": PAPER_KAPPA.get(arm), "paper top-1, %": PAPER[arm][0]})
    names = [words for words, _ in SIDES.values()]
    base = alt.Chart(alt.Data(values=rows)).encode(
        x=alt.X("model:N", sort=list(MODELS.values()), title=None, axis=alt.Axis(labelAngle=0)),
        xOffset=alt.XOffset("side:N", sort=names),
    )
    panels = []
    for field, title in (("log κ of +sa", "log κ after attention (+sa)"), ("top-1, %", "top-1, %")):
        y = alt.Y(f"{field}:Q", title=title, scale=alt.Scale(zero=False, padding=12))
        ours = base.mark_point(filled=True, size=90, opacity=1).encode(y=y, color=arm_color(names, field="side"))
        paper = paper_marks(base, "the paper", field=f"paper {field}")
        panels.append(alt.layer(ours, paper).properties(width=420, height=240))
    caption = (
        f"{found.title} at {found.record['scale']} scale, {found.record['epochs']} epochs, one seed; log κ is the mean "
        "over blocks. The paper's models are trained on ImageNet-1K, its log κ is that of its Table 3."
    )
    chart = alt.hconcat(*panels).resolve_scale(shape="shared", color="shared")
    return titled(chart, "κ after attention, and accuracy, without and with DCT graying", caption)


CLAIM = TrainedArms(
    id="asa-table4",
    claim="what DCT graying gains carries over to ViT-S/B, Swin-S, CaiT-S and PVT v2",
    test="each on Imagenette at 224: κ before and after, one seed, one learning rate for all (3e-4) and no grid; "
    "intervals over ten groups of validation images",
    holds_if="κ lower in every model; its accuracy is out of reach here: gains of .1 to .3 points do not show on 3,925 "
    "images",
    arms=ARMS,
    plain="vit_base",
    as_a_whole=False,  # each model is judged by itself
    sets=("imagenette",),
    seeds=1,
    in_rounds=True,
    asks="κ lower in every model",
    settings=SETTINGS,
    grid={},
    measures=("log_kappa", "log_kappa_groups"),
    paper={"imagenette": PAPER},
    judge=judge,
    says=says,
    summary=summary,
    figure=figure,
)
