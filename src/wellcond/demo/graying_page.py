"""A part of the demonstration's page: what a token matrix is, what graying does to it, in pictures, spectra, numbers.

page.add(*graying_sections(photographs, results, paths=explain_paths(), folder=Path("demo")))
"""

import os
from pathlib import Path

import numpy as np

from wellcond.demo.graying import EPSILONS, PATCH, SIZE, Grayed, Photograph, shown
from wellcond.report import (
    Axis,
    Html,
    Picture,
    Series,
    bullets,
    code_block,
    format_number,
    join,
    line_chart,
    note,
    ordered_colors,
    paragraph,
    picture_grid,
    section,
    side_by_side,
    table,
    tag,
    tiles,
)

__all__ = ["graying_sections"]

SIGMA_MAX, SIGMA_MIN = (join("σ", tag("sub", which)) for which in ("max", "min"))
NAMES = {"svd": "SVD", "dct": "DCT"}
USAGE = """\
import timm, wellcond

model = timm.create_model("vit_base_patch16_224")
wellcond.gray(model, "dct", epsilon=0.95)    # in place; train it as usual
"""
MEASURE = """\
kappa = wellcond.condition_number(tokens)           # (…, n, d) → (…)
grayed = wellcond.gray_tokens(tokens, "svd", epsilon=0.95)
"""


def graying_sections(
    photographs: list[Photograph],
    results: dict[str, list[Grayed]],
    *,
    paths: dict[str, tuple[str, str]],
    folder: Path,
) -> list[Html]:
    """The sections; `folder` is where the page will lie, for its link to the documentation."""
    return [
        _tokens_section(photographs[0], results[photographs[0].name][0]),
        _why_section(),
        _method_section(),
        section(
            "What graying looks like",
            tiles(*(_tile(name, found, method) for name, found in results.items() for method in ("svd", "dct"))),
            "The tokens put back together as pictures. A few directions that most patches share (sky, water, a dark "
            "background) carry most of the energy. Graying lifts the rest: fine detail gains, and with a small ε so "
            "does noise.",
            [_pictures(photo.name, results[photo.name], method) for photo in photographs for method in ("svd", "dct")],
            _differences(results),
        ),
        _spectra_section(results),
        _table_section(results, paths),
        section("Use it", code_block(USAGE), code_block(MEASURE), _more(folder)),
    ]


def _tile(name: str, found: list[Grayed], method: str) -> tuple[str, str, str]:
    plain, grayed = found[0], _pick(found, method, EPSILONS[0])
    logs = f"log κ {plain.log_kappa:.2f} → {grayed.log_kappa:.2f}"
    return f"{name}, {NAMES[method]}, ε = 0.95", f"κ {plain.kappa:,.0f} → {grayed.kappa:,.0f}", logs


def _tokens_section(photo: Photograph, plain: Grayed) -> Html:
    tokens = photo.tokens.numpy()
    low, high = np.quantile(tokens, [0.01, 0.99])
    side = SIZE // PATCH
    n, d = tokens.shape
    pictures = [
        Picture(
            plain.pixels,
            f"{side} × {side} patches of {PATCH} × {PATCH} pixels",
            name=f"{photo.name}-patches",
            grid=(side, side),
        ),
        Picture(
            np.clip((tokens - low) / (high - low), 0, 1),
            f"their values, one patch per row: {n} × {d}",
            name=f"{photo.name}-tokens",
            alt=f"The token matrix of {photo.name} as a gray picture of {n} rows and {d} columns",
            exact=True,
        ),
    ]
    return section(
        "A photograph as a token matrix",
        paragraph(
            f"A photograph of {SIZE} × {SIZE} pixels is cut into {n} patches. Each has {PATCH} · {PATCH} · 3 = {d} "
            "values, written as one row, a ",
            tag("em", "token"),
            f". All rows together are the token matrix X, {n} × {d}: what the first layer of a transformer reads.",
        ),
        picture_grid(
            pictures,
            title=f"{photo.name}: from patches to tokens",
            columns=(1, 3),
            caption="Values are normalised with ImageNet's mean and deviation; the darkest and the brightest 1 % are "
            "cut off. Many rows look alike, and rows that look alike make small singular values.",
        ),
    )


def _why_section() -> Html:
    return section(
        "Why the condition number matters",
        paragraph(
            "Every matrix is a sum of directions, each with a strength: its singular values σ. The condition number "
            "κ = ",
            SIGMA_MAX,
            "/",
            SIGMA_MIN,
            " compares the strongest direction with the weakest. At κ = 1 all are equal; at κ = 3,000 the "
            "weakest is lost beside the strongest, and a gradient step that suits one of them does not suit the other.",
        ),
        paragraph(
            "Attention makes this worse, because it multiplies tokens by tokens. ",
            tag("cite", "Always Skip Attention"),
            " bounds the condition number after linear attention without its skip connection by a constant times "
            "κ(X)³, and after an MLP by a constant times κ(X). It argues that this is why transformers cannot train "
            "without the attention's skip connection, and why a smaller κ at the input helps.",
        ),
    )


def _method_section() -> Html:
    return section(
        "What Token Graying does",
        "Strengths, relative to the largest one, are raised to a power ε between 0 and 1: the weak ones gain, the "
        "strongest stays.",
        bullets(
            Html(f"<b>SVD graying</b> does that to the singular values: σ → {SIGMA_MAX} · (σ/{SIGMA_MAX})<sup>ε</sup>. "
                 "So κ becomes κ<sup>ε</sup>, exactly, and the directions stay what they were."),
            Html("<b>DCT graying</b> does it to the coefficients of a two-dimensional cosine transform of X. That is "
                 "cheaper, and κ falls by a similar amount, though by no fixed rule. The paper's reason: the strongest "
                 "directions of natural images resemble low frequencies."),
        ),
        "It has no parameters and changes no weight. ε = 1 changes nothing; 0.95 is the default.",
    )  # fmt: skip


def _pictures(name: str, found: list[Grayed], method: str) -> Html:
    plain = found[0]
    pictures = [
        Picture(plain.pixels, f"as it is, log κ = {plain.log_kappa:.2f}", name=name, alt=f"The photograph {name}")
    ]
    for one in shown(found):
        if one.method == method:
            label = f"ε = {one.epsilon:g}, log κ = {one.log_kappa:.2f}"
            alt = f"{name} after {NAMES[method]} graying with ε = {one.epsilon:g}"
            pictures.append(Picture(one.pixels, label, name=f"{name}-{method}-{one.epsilon:g}", alt=alt))
    return picture_grid(pictures, title=f"{name}, {NAMES[method]} graying", columns=len(pictures))


def _differences(results: dict[str, list[Grayed]]) -> Html:
    pictures = [
        Picture(
            (one := _pick(found, method, EPSILONS[0])).difference,
            f"{name}, {NAMES[method]}: {_percent(one.change)} of ‖X‖",
            name=f"{name}-{method}-difference",
            alt=f"What {NAMES[method]} graying at ε = 0.95 changes in {name}",
        )
        for name, found in results.items()
        for method in ("svd", "dct")
    ]
    return picture_grid(
        pictures,
        title="What ε = 0.95 changes",
        columns=4,
        caption="Grayed minus original, stretched to be visible; middle gray is no change. In the pictures above, "
        "the brightness and contrast of each colour channel are those of the photograph, since graying adds energy: "
        "the true size of the change is in the table.",
    )


def _spectra_section(results: dict[str, list[Grayed]]) -> Html:
    charts = [_spectrum(name, found, method) for name, found in results.items() for method in ("svd", "dct")]
    curves = []
    for name, found in results.items():
        for method in ("svd", "dct"):
            points = sorted((one.epsilon, one.log_kappa) for one in found if one.method in (method, "none"))
            xs, ys = [x for x, _ in points], [y for _, y in points]
            curves.append(Series(f"{name} {NAMES[method]}", xs, ys, marks=True))
    return section(
        "Singular values before and after",
        "Each line is one token matrix: its 196 singular values, divided by the largest, on a logarithmic scale. "
        "The right end of a line is 1/κ. Graying turns the whole line towards the horizontal.",
        side_by_side(*charts),
        side_by_side(
            line_chart(
                curves,
                title="log κ against ε",
                x=Axis("ε", reverse=True),
                y=Axis("log κ"),
                caption="More graying to the right. SVD graying gives ε · log κ(X), a straight line. "
                "DCT graying follows no such rule.",
            ),
            note(
                "How to read a chart",
                "Move over it, touch it, or use the arrow keys to read values. SVG saves the drawing, CSV its numbers; "
                "a click on a picture saves the picture.",
            ),
        ),
    )


def _spectrum(name: str, found: list[Grayed], method: str):
    plain = found[0]
    wanted = [one for one in shown(found) if one.method == method]
    lines = [Series("as it is", *_relative(plain), color="ink")]
    for one, color in zip(wanted, ordered_colors(len(wanted)), strict=True):
        lines.append(Series(f"ε = {one.epsilon:g}", *_relative(one), color=color))
    return line_chart(
        lines, title=f"{name}, {NAMES[method]} graying: spectrum", x="index", y=Axis("σ / σmax", log=True)
    )


def _relative(one: Grayed) -> tuple[list[int], list[float]]:
    return list(range(1, len(one.spectrum) + 1)), [value / one.spectrum[0] for value in one.spectrum]


def _table_section(results: dict[str, list[Grayed]], paths: dict[str, tuple[str, str]]) -> Html:
    rows = []
    for name, found in results.items():
        plain = found[0]
        for one in shown(found):
            if one.method == "none":
                rows.append([name, "as it is", "", f"{one.log_kappa:.3f}", f"{one.kappa:,.1f}", "", "", ""])
            else:
                predicted = plain.kappa**one.epsilon
                check = (
                    [f"{predicted:,.1f}", format_number(abs(one.kappa / predicted - 1), 1)]
                    if one.method == "svd"
                    else ["–", "–"]
                )
                numbers = [f"{one.log_kappa:.3f}", f"{one.kappa:,.1f}"]
                rows.append([name, NAMES[one.method], f"{one.epsilon:g}", *numbers, *check, _percent(one.change)])
    doubtful = [f"{name}: {one.status}" for name, found in results.items() for one in found if one.status != "ok"]
    took = "; ".join(f"{NAMES[method]} by {path} ({why})" for method, (path, why) in paths.items())
    return section(
        "The numbers",
        table(
            ["photograph", "graying", "ε", "log κ", "κ", "κ(X)^ε", "off by", "‖X̃ − X‖/‖X‖"],
            rows,
            numeric={2, 3, 4, 5, 6, 7},
            groups=True,
            caption=f"log is the natural logarithm. Tokens in float32. Paths taken: {took}.",
        ),
        *([note("Not every κ is trustworthy", "; ".join(doubtful))] if doubtful else []),
    )


def _more(folder: Path) -> Html:
    text = (
        "More: what is exact and what is approximate, which models are supported, checkpoints, compile and export, in "
    )
    guide = Path(__file__).parents[3] / "docs" / "graying.md"
    inside = guide.exists() and folder.resolve().is_relative_to(guide.parents[1])
    target = os.path.relpath(guide, folder.resolve()) if inside else None  # elsewhere the link would lead nowhere
    name = "docs/graying.md"
    return paragraph(text, tag("a", name, href=Path(target).as_posix()) if target else f"{name} of the project", ".")


def _percent(part: float) -> str:
    return f"{100 * part:.1f}\N{NO-BREAK SPACE}%"


def _pick(found: list[Grayed], method: str, epsilon: float) -> Grayed:
    return next(one for one in found if (one.method, one.epsilon) == (method, epsilon))
