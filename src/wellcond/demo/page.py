"""The page of the demo: what is proven and decided, a photograph to gray, four small transformers.

build(arms, photographs, grayed, paths=…, folder=Path("demo"), evidence=Path("evidence")).write("demo/index.html")
"""

import base64
import io
import math
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from wellcond.claims import ledger
from wellcond.claims.figures import VERDICT_COLORS
from wellcond.claims.overview import CAPTION, overview, overview_rows
from wellcond.data.digits import VALIDATION as DIGITS
from wellcond.demo.graying import CURVE, EPSILONS, PATCH, SIZE, Grayed, Photograph, shown
from wellcond.demo.training import TrainedArm, mean_log_kappa
from wellcond.environment import environment
from wellcond.report import (
    Axis,
    Chart,
    Html,
    Look,
    Page,
    bullets,
    code_block,
    grid,
    line_chart,
    looks_of,
    note,
    paragraph,
    section,
    slider,
    table,
    tag,
    tiles,
)
from wellcond.report.colors import CATEGORIES, LIGHT
from wellcond.report.readings import SITE_WORDS, Readings
from wellcond.report.run_charts import heat_maps, shown_steps
from wellcond.words import DEFAULT_SITES as SITES
from wellcond.words import VERDICTS

__all__ = ["build"]

NAMES = {"svd": "SVD", "dct": "DCT"}
QUALITY = 82  # of the pictures, as JPEG
USAGE = """\
import timm, wellcond

model = timm.create_model("vit_base_patch16_224")
wellcond.gray(model, "dct", epsilon=0.95)            # in place; train it as usual

kappa = wellcond.condition_number(tokens)            # (…, n, d) → (…)
grayed = wellcond.gray_tokens(tokens, "svd", epsilon=0.95)
"""


def build(
    arms: Sequence[TrainedArm],
    photographs: list[Photograph],
    grayed: dict[str, list[Grayed]],
    *,
    paths: dict[str, tuple[str, str]],
    folder: Path,
    evidence: Path | None,
) -> Page:
    """Build the page. `folder` is where it will be written, `evidence` the folder of larger experiments, if any."""
    hero = photographs[0].name
    plain, one = grayed[hero][0], _pick(grayed[hero], "svd", EPSILONS[0])
    page = Page(
        f"Graying lowers κ of a photograph's tokens from {plain.kappa:,.0f} to {one.kappa:,.0f}, as proven",
        f"SVD graying turns κ into exactly κ^ε; here ε = {EPSILONS[0]:g}. Below we measure what graying and skip "
        "connections do for training, and say where that is not known.",
        about="wellcond demo",
        footer=_footer(),
    )
    page.add(_hero_section(hero, grayed[hero]), *_arms_sections(arms))
    page.add(_evidence_section(evidence), _numbers_section(grayed, paths))
    page.add(section("Use it", code_block(USAGE), _more(folder)))
    return page


# ---- a photograph to gray


def _hero_section(name: str, found: list[Grayed]) -> Html:
    epsilons = sorted(CURVE)
    at = epsilons.index(EPSILONS[0])
    pictures, told = [], []
    for epsilon in epsilons:
        both = {method: found[0] if epsilon == 1 else _pick(found, method, epsilon) for method in NAMES}
        for method, one in both.items():
            alt = f"{name} after {NAMES[method]} graying with ε = {epsilon:g}, log κ {one.log_kappa:.2f}"
            pictures.append((method, epsilon, _picture(one.pixels, alt)))
        rule = f"; κ^ε is {found[0].kappa ** epsilon:,.0f}"
        text = (
            f"κ = {both['svd'].kappa:,.0f} by SVD{rule}. κ = {both['dct'].kappa:,.0f} by DCT, which has no such rule."
        )
        told.append(tag("p", text, data_epsilon=f"{epsilon:g}", hidden=epsilon != EPSILONS[0], class_="told"))
    images = [
        tag(
            "div",
            [
                tag("span", image, data_epsilon=f"{epsilon:g}", hidden=epsilon != EPSILONS[0])
                for which, epsilon, image in pictures
                if which == method
            ],
            tag("p", f"{title} graying", class_="caption"),
        )
        for method, title in NAMES.items()
    ]
    n, d = (SIZE // PATCH) ** 2, 3 * PATCH**2
    about = paragraph(
        f"A transformer reads {SIZE} × {SIZE} pixels as {n} patches, each a row of {d} values: the token matrix X. "
        "Its singular values σ say how strong its directions are; κ is the largest divided by the smallest. SVD "
        "graying raises each σ, relative to the largest, to the power ε. DCT graying does the same to the coefficients "
        "of a cosine transform, which is cheaper. At ε = 1 nothing changes. The pictures keep the photograph's "
        "brightness and contrast."
    )
    return section(
        "A photograph, grayed",
        slider("epsilon", epsilons, "ε", at=at),
        tag(
            "div",
            tag("div", tag("div", images, class_="photos"), told, about),
            _spectrum(name, found, epsilons),
            class_="hero",
        ),
    )


def _spectrum(name: str, found: list[Grayed], epsilons: Sequence[float]) -> Chart:
    def rows(line: str, one: Grayed, epsilon: float | None) -> list[dict[str, Any]]:
        largest = one.spectrum[0]
        return [
            {"tokens": line, "epsilon": epsilon, "i": i, "ratio": value / largest}
            for i, value in enumerate(one.spectrum, start=1)
        ]

    all_rows = rows("as they are", found[0], None)
    for epsilon in epsilons:
        for method, title in NAMES.items():
            all_rows += rows(title, found[0] if epsilon == 1 else _pick(found, method, epsilon), epsilon)
    looks = {"as they are": Look(LIGHT["muted"]), "SVD": Look(CATEGORIES[0]), "DCT": Look(CATEGORIES[1], dashed=True)}
    return line_chart(
        all_rows,
        title=f"Spectrum of {name}",
        x=Axis("i", "i, from the largest", whole=True),
        y=Axis("ratio", "σᵢ / σmax", log=True),
        by="tokens",
        looks=looks,
        steps=[*epsilons, EPSILONS[0]],
        signal="epsilon",
        caption="The right end of a line is 1/κ: the flatter the line, the better conditioned.",
    )


def _picture(pixels: np.ndarray, alt: str) -> Html:
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(np.round(pixels * 255).astype(np.uint8)).save(file, format="JPEG", quality=QUALITY)
    data = f"data:image/jpeg;base64,{base64.b64encode(file.getvalue()).decode()}"
    return tag("img", src=data, alt=alt, width=str(pixels.shape[1]), height=str(pixels.shape[0]))


def _pick(found: list[Grayed], method: str, epsilon: float) -> Grayed:
    return next(one for one in found if (one.method, one.epsilon) == (method, epsilon))


# ---- what larger experiments have decided


def _evidence_section(evidence: Path | None) -> Html:
    entries = ledger.entries(evidence) if evidence is not None else []
    decided = [entry for entry in entries if entry.verdict in VERDICTS]
    if not decided:
        text = "There is no larger evidence here yet; wellcond reproduce asa-fig1c --scale lab produces some."
        return section("What is decided", text)
    verdicts = [entry.verdict for entry in decided]
    counted = ", ".join(f"{one}: {verdicts.count(one)}" for one in VERDICTS if one in verdicts)
    rows = overview_rows(decided)
    chart = Chart(
        title="Larger evidence, statement by statement",
        drawing=lambda: overview(rows, on_page=True),
        rows=rows,
        by="outcome",
        looks={one: Look(VERDICT_COLORS[one]) for one in VERDICTS if any(row["outcome"] == one for row in rows)},
        caption=CAPTION,
    )
    return section(
        "What is decided",
        "These statements from Always Skip Attention and Skyformer have a verdict, by rules set in advance: real data, "
        f"tuned learning rates, paired seeds, intervals. {counted.capitalize()}; docs/claims.md has all.",
        chart,
    )


# ---- four small transformers


def _arms_sections(arms: Sequence[TrainedArm]) -> list[Html]:
    config = arms[0].config
    size = config.model_kwargs
    epochs = f"{config.epochs} epoch{'s' if config.epochs > 1 else ''}"
    measured = [Readings.of(arm.title, arm.run.probe) for arm in arms if arm.run.probe]
    steps = shown_steps(measured) if measured else []
    looks = looks_of([arm.title for arm in arms])
    charts = [
        _curves(
            arms, looks, "Training loss", Axis("loss"), lambda arm: [(row.epoch, row.loss) for row in arm.run.train]
        ),
        _curves(
            arms,
            looks,
            "Accuracy on new digits",
            Axis("top1", "top-1, %", least=10.0),
            lambda arm: [(row.epoch, 100 * row.metrics["top1"]) for row in arm.run.validation],
        ),
    ]
    scores = {arm.title: arm.result["metrics"]["top1"] for arm in arms if arm.result["metrics"]}
    said = ", ".join(f"{title} {100 * score:.1f} %" for title, score in scores.items())
    middle = max(scores.values(), default=0.5)
    error = 1.96 * math.sqrt(middle * (1 - middle) / DIGITS)
    return [
        section(
            "Four small transformers",
            f"Trained on this computer for {epochs} each, on handwritten digits of {size['img_size']} × "
            f"{size['img_size']} pixels: {size['depth']} blocks, {size['embed_dim']} wide. A block adds its "
            "attention's output to its tokens, then its MLP's output; these additions are the skip connections. One "
            "model has no skip around attention, one has none around the MLP, and one reads DCT-grayed tokens "
            "(ε = 0.95).",
            _headline(arms),
            bullets(*_seen(arms)),
            slider("step", steps, "step"),
            grid(*heat_maps(measured, steps)) if measured else None,
            bullets(*([tag("code", site), f": {SITE_WORDS[site]}"] for site in SITES)),
            grid(*charts),
            _table(arms),
        ),
        section(
            "What this does not show",
            bullets(
                f"Which model is more accurate ({said}): there is one seed and one learning rate, tuned for none of "
                f"them, and {DIGITS} test digits leave an error of ± {100 * error:.0f} points.",
                "That graying helps training: the paper reports 81.0 → 81.3 % top-1 for a ViT-B on ImageNet-1K, a "
                "difference too small to see here.",
            ),
        ),
    ]


def _curves(
    arms: Sequence[TrainedArm],
    looks: Mapping[str, Look],
    title: str,
    y: Axis,
    points: Callable[[TrainedArm], Sequence[tuple[float, float]]],
) -> Chart | None:
    rows = [{"model": arm.title, "epoch": x, y.field: value} for arm in arms for x, value in points(arm)]
    here = {name: look for name, look in looks.items() if any(row["model"] == name for row in rows)}
    return line_chart(rows, title=title, x=Axis("epoch"), y=y, by="model", looks=here) if rows else None


def _headline(arms: Sequence[TrainedArm]) -> Html:
    found = []
    for arm in arms:
        means, metrics = mean_log_kappa(arm, "trained"), arm.result["metrics"]
        accuracy = f"{metrics['top1']:.0%} of the digits correct" if metrics else "diverged"
        found.append((arm.title, f"log κ {means['+sa']:.1f}" if means else "–", f"after attention; {accuracy}"))
    return tiles(*found)


def _seen(arms: Sequence[TrainedArm]) -> list[str]:
    """Return sentences about what the skip does to κ."""
    with_skip, without = (mean_log_kappa(arm, "trained") for arm in arms[:2])
    if not with_skip:
        return []
    seen = [
        f"With both skips, log κ is {with_skip['sa']:.1f} at sa and {with_skip['+sa']:.1f} after the add: the skip "
        f"makes the tokens {_times(with_skip['sa'] - with_skip['+sa'])} better conditioned."
    ]
    if without:
        start = mean_log_kappa(arms[0], "untrained")
        seen.append(
            f"Without the attention skip, log κ stays at {without['+sa']:.1f}, and every later block gets such tokens. "
            "The cause is attention itself, not what it learned: at the random start, log κ at sa is "
            f"{start['sa']:.1f}."
        )
    return seen


def _times(gap: float) -> str:
    factor = math.exp(gap)
    return f"{factor:,.0f} times" if factor >= 2 else "hardly"


def _table(arms: Sequence[TrainedArm]) -> Html:
    rows = []
    for arm in arms:
        metrics = arm.result["metrics"] or {}
        for when in ("untrained", "trained"):
            means = mean_log_kappa(arm, when)
            score = f"{100 * metrics['top1']:.1f}" if when == "trained" and metrics else ""
            rows.append([arm.title, when, score, *(f"{means[site]:.2f}" if means else "–" for site in SITES)])
    images = next((arm.result["log_kappa"]["images"] for arm in arms if arm.result["log_kappa"]), 0)
    return table(
        ["model", "", "top-1, %", *SITES],
        rows,
        numeric={2, 3, 4, 5, 6},
        groups=True,
        caption=f"Mean log κ over the blocks, on {images} digits not used in training, in a separate float32 forward "
        "pass. Natural logarithm; 15.9 is the most that float32 can resolve.",
    )


# ---- numbers, and the rest


def _numbers_section(results: dict[str, list[Grayed]], paths: dict[str, tuple[str, str]]) -> Html:
    rows = []
    for name, found in results.items():
        for one in shown(found):
            numbers = [f"{one.log_kappa:.3f}", f"{one.kappa:,.1f}"]
            rule = f"{found[0].kappa ** one.epsilon:,.1f}" if one.method == "svd" else ""
            change = "" if one.method == "none" else f"{100 * one.change:.1f}\N{NO-BREAK SPACE}%"
            how = ["as it is", ""] if one.method == "none" else [NAMES[one.method], f"{one.epsilon:g}"]
            rows.append([name, *how, *numbers, rule, change])
    doubtful = [f"{name}: {one.status}" for name, found in results.items() for one in found if one.status != "ok"]
    took = "; ".join(f"{NAMES[method]} by {path} ({why})" for method, (path, why) in paths.items())
    return section(
        "Graying in numbers",
        table(
            ["photograph", "graying", "ε", "log κ", "κ", "κ(X)^ε", "‖X̃ − X‖/‖X‖"],
            rows,
            numeric={2, 3, 4, 5, 6},
            groups=True,
            caption=f"Tokens in float32. Paths taken: {took}.",
        ),
        *([note("Not every κ is trustworthy", "; ".join(doubtful))] if doubtful else []),
    )


def _more(folder: Path) -> Html:
    guide = Path(__file__).parents[3] / "docs" / "graying.md"
    inside = guide.exists() and folder.resolve().is_relative_to(guide.parents[1])
    target = os.path.relpath(guide, folder.resolve()) if inside else None  # elsewhere the link would lead nowhere
    name = "docs/graying.md"
    link = tag("a", name, href=Path(target).as_posix()) if target else f"{name} of the project"
    return paragraph("More on supported models, checkpoints, compile and export: ", link, ".")


def _footer() -> list[str]:
    facts = environment()
    versions = ", ".join(
        f"{name} {facts['versions'][name]}" for name in ("wellcond", "torch") if name in facts["versions"]
    )
    return [
        f"Written by wellcond demo on {facts['date'][:10]} with {versions}, on the CPU.",
        "The digits and the photographs come with scikit-learn; the photographs are china.jpg by danielbuechele and "
        "flower.jpg by vultilion, on Flickr, CC BY 2.0; cropped, resized and grayed.",
        "The ablation and Token Graying come from Always Skip Attention, figure 1 and algorithms 1 and 2.",
    ]
