"""The page of the demonstration: what skips do to training and to condition numbers, then Token Graying in pictures.

build(arms, photographs, grayed, paths=…, folder=Path("demo"), evidence=Path("evidence")).write("demo/index.html")
"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from wellcond.claims import ledger
from wellcond.data.digits import VALIDATION as DIGITS
from wellcond.demo.graying import Grayed, Photograph
from wellcond.demo.graying_page import graying_sections
from wellcond.demo.training import TrainedArm, mean_log_kappa
from wellcond.environment import environment
from wellcond.records import read_json
from wellcond.report import (
    Axis,
    Html,
    Page,
    Series,
    bullets,
    line_chart,
    paragraph,
    section,
    side_by_side,
    table,
    tag,
    tiles,
)
from wellcond.report.by_block import block_section
from wellcond.report.readings import SITE_WORDS, Readings
from wellcond.words import DEFAULT_SITES as SITES

__all__ = ["build"]

SHOWN = ("asa-fig1b", "asa-fig1c")  # claims whose larger evidence belongs beside these small models


def build(
    arms: Sequence[TrainedArm],
    photographs: list[Photograph],
    grayed: dict[str, list[Grayed]],
    *,
    paths: dict[str, tuple[str, str]],
    folder: Path,
    evidence: Path | None,
) -> Page:
    """The page; `folder` is where it will lie, `evidence` what larger experiments have left, if anything."""
    page = Page(
        "Skips, graying and condition numbers",
        "A transformer's attention puts out badly conditioned tokens, and its skip connection repairs them. Four small "
        "models trained on this computer show it, and two photographs show what Token Graying does to the input.",
        footer=_footer(),
    )
    page.add(_headline(arms), _arms_section(arms), _sites_section(arms))
    measured = [Readings.of(arm.title, arm.run.probe) for arm in arms if arm.run.probe]
    if measured:
        page.add(block_section(measured))
    page.add(_limits_section(arms), _evidence_section(evidence))
    page.add(*graying_sections(photographs, grayed, paths=paths, folder=folder))
    return page


def _headline(arms: Sequence[TrainedArm]) -> Html:
    found = []
    for arm in arms:
        means, metrics = mean_log_kappa(arm, "trained"), arm.result["metrics"]
        accuracy = f"{metrics['top1']:.0%} of the digits right" if metrics else "diverged"
        found.append((arm.title, f"log κ {means['+sa']:.1f}" if means else "–", f"after attention; {accuracy}"))
    return tiles(*found)


def _arms_section(arms: Sequence[TrainedArm]) -> Html:
    config = arms[0].config
    size = config.model_kwargs
    epochs = f"{config.epochs} epoch{'s' if config.epochs > 1 else ''}"
    return section(
        "Four small transformers",
        f"Each reads a handwritten digit of {size['img_size']} × {size['img_size']} pixels as "
        f"{(size['img_size'] // size['patch_size']) ** 2} patches, has {size['depth']} blocks and is "
        f"{size['embed_dim']} wide. A block adds two things to the tokens: what its attention found, then what its MLP "
        "made of that. “Adds” is the skip connection: without the attention skip, tokens are replaced by the "
        "attention's output instead. The fourth model has both skips and reads tokens grayed by the cosine transform, "
        "ε = 0.95.",
        f"All four were trained for {epochs} with the same data, in the same order, at the same learning rate of "
        f"{config.lr:g}.",
        side_by_side(
            _curves(
                {arm.title: [(row.epoch, row.loss) for row in arm.run.train] for arm in arms},
                title="Training loss",
                y="loss",
            ),
            _curves(
                {arm.title: [(row.epoch, 100 * row.metrics["top1"]) for row in arm.run.validation] for arm in arms},
                title="Accuracy on new digits",
                y="top-1, %",
            ),
        ),
        _table(arms),
    )


def _curves(lines_of: Mapping[str, Sequence[tuple[float, float]]], *, title: str, y: str) -> Any:
    lines = [
        Series(name, [x for x, _ in points], [v for _, v in points], marks=len(points) < 3)
        for name, points in lines_of.items()
        if points
    ]
    return line_chart(lines, title=title, x=Axis("epoch"), y=y, names_below=True)


def _table(arms: Sequence[TrainedArm]) -> Html:
    rows = []
    for arm in arms:
        metrics = arm.result["metrics"] or {}
        for when in ("untrained", "trained"):
            means = mean_log_kappa(arm, when)
            after = when == "trained" and metrics
            scores = [f"{100 * metrics[name]:.1f}" if after else "" for name in ("top1", "top5")]
            rows.append([arm.title, when, *scores, *(f"{means[site]:.2f}" if means else "–" for site in SITES)])
    images = next((arm.result["log_kappa"]["images"] for arm in arms if arm.result["log_kappa"]), 0)
    return table(
        ["model", "", "top-1, %", "top-5, %", *SITES],
        rows,
        numeric={2, 3, 4, 5, 6, 7},
        groups=True,
        caption=f"Mean log κ over the blocks, of {images} digits that were not trained on, in a forward pass of its "
        "own in float32. Natural logarithm; 15.9 is the most that float32 can tell.",
    )


def _sites_section(arms: Sequence[TrainedArm]) -> Html:
    plain, bare = arms[0], arms[1]
    with_skip, without = mean_log_kappa(plain, "trained"), mean_log_kappa(bare, "trained")
    seen: list[Any] = []
    if with_skip:
        seen.append(
            f"With both skips, log κ is {with_skip['sa']:.1f} at sa and {with_skip['+sa']:.1f} after the add: the skip "
            f"makes the tokens {_times(with_skip['sa'] - with_skip['+sa'])} better conditioned."
        )
    if with_skip and without:
        seen.append(
            f"Without the attention skip there is nothing to repair them: log κ is {without['+sa']:.1f} where it was "
            f"{with_skip['+sa']:.1f}, and every later block gets such tokens."
        )
        start = mean_log_kappa(plain, "untrained")
        seen.append(
            f"Much of this is there before any training: at the random start log κ at sa is {start['sa']:.1f}. It is "
            "attention itself, not what it learned."
        )
    names = [tag("code", site) for site in SITES]
    return section(
        "Where to look",
        "A block is measured at four sites. κ is the ratio of the largest to the smallest singular value of one "
        "digit's tokens.",
        bullets(*([name, f": {SITE_WORDS[site]}"] for name, site in zip(names, SITES, strict=True))),
        "What the table and the maps show:",
        bullets(*seen),
    )


def _times(gap: float) -> str:
    factor = math.exp(gap)
    return f"{factor:,.0f} times" if factor >= 2 else "hardly"


def _limits_section(arms: Sequence[TrainedArm]) -> Html:
    scores = {arm.title: arm.result["metrics"]["top1"] for arm in arms if arm.result["metrics"]}
    said = ", ".join(f"{title} {100 * score:.1f} %" for title, score in scores.items())
    middle = max(scores.values(), default=0.5)
    error = 1.96 * math.sqrt(middle * (1 - middle) / DIGITS)
    return section(
        "What this shows, and what it does not",
        bullets(
            "It shows real condition numbers of real models: where they are large, and that the skip brings them down.",
            f"It does not rank the models by accuracy ({said}). There is one seed and one learning rate, tuned for "
            f"none of them, and {DIGITS} test digits leave an error of ± {100 * error:.0f} points. The paper's "
            "collapse, 22 points on CIFAR-10, is one of 12 blocks on photographs; 4 blocks on 8 × 8 pixels are no test "
            "of it.",
            "It does not show that graying helps. The paper reports 81.0 → 81.3 % top-1 for a ViT-B on ImageNet-1K "
            "with DCT graying at ε = 0.95; such a difference cannot be seen here. In the paper's own sweep, accuracy "
            "falls again at small ε.",
            "A claim is decided by the rules of docs/claims.md: real data, tuned rates, paired seeds, intervals. What "
            "has been decided so far stands in the next section.",
        ),
    )


def _evidence_section(evidence: Path | None) -> Html:
    parts: list[Any] = []
    decided = [
        entry
        for entry in (ledger.entries(evidence) if evidence is not None else [])
        if entry.id in SHOWN and entry.parts
    ]
    for entry in decided:
        parts.append(
            paragraph(tag("b", entry.id), f": {ledger.claim_of(entry)} Verdict: ", tag("b", entry.verdict), ".")
        )
        parts.append(bullets(*(f"{part.name}: {part.outcome} ({part.why})" for part in entry.parts), *entry.lines))
    trained = evidence / "trained" / "cifar10-vit.json" if evidence is not None else None
    if trained is not None and trained.exists():
        parts += _trained_elsewhere(read_json(trained))
    if not parts:
        parts.append("There is no larger evidence at hand yet; wellcond reproduce asa-fig1c --scale lab makes it.")
    return section("Larger evidence", *parts)


def _trained_elsewhere(record: dict[str, Any]) -> list[Any]:
    means = record["mean log_kappa"]
    rows = [[when, *(f"{means[when][site]:.2f}" for site in SITES)] for when in ("untrained", "trained")]
    return [
        f"A model that others have trained, {record['accuracy']:.1%} on CIFAR-10, 6 blocks and 65 tokens, measured at "
        "the same sites:",
        table(["", *SITES], rows, numeric={1, 2, 3, 4}, caption="Mean log κ over the blocks, of 64 photographs."),
    ]


def _footer() -> list[str]:
    facts = environment()
    versions = ", ".join(
        f"{name} {facts['versions'][name]}" for name in ("wellcond", "torch") if name in facts["versions"]
    )
    return [
        f"Written by wellcond demo on {facts['date'][:10]} with {versions}, on the CPU.",
        "The digits and the photographs come with scikit-learn; the photographs are china.jpg by danielbuechele and "
        "flower.jpg by vultilion, on Flickr, CC BY 2.0; cropped, resized and grayed.",
        "The ablation and Token Graying are those of Always Skip Attention, figure 1 and algorithms 1 and 2.",
    ]
