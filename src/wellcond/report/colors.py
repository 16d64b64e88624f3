"""The colours of pages and charts, once for light and once for dark.

A drawing names a colour (`var(--c1)`), the page defines it for both, and a drawing that is downloaded gets the light
ones written in.
"""

import re

from wellcond.words import BLOCK_SITES

__all__ = ["CATEGORIES", "HEAT", "HEAT_LEVELS", "RAMP", "SITE_COLORS", "heat_style", "resolve", "stylesheet"]

# name: (light, dark). Every line colour keeps a contrast of 3:1 or more with its background, every text colour 4.5:1.
COLORS = {
    "paper": ("#ffffff", "#10141b"),
    "panel": ("#f5f6f8", "#191f29"),
    "ink": ("#171b24", "#e7eaf0"),
    "muted": ("#576072", "#9ba6b8"),
    "rule": ("#dfe3e9", "#2c3442"),
    "accent": ("#2456c4", "#8db4ff"),
    # categories: told apart by hue
    "c1": ("#2f6fd6", "#6ea8ff"),
    "c2": ("#c8571b", "#ff9d5c"),
    "c3": ("#1f8a5b", "#4fcf98"),
    "c4": ("#a3399f", "#e58ae0"),
    "c5": ("#8a6d00", "#e0c14a"),
    "c6": ("#c22f4e", "#ff7f96"),
    # an ordered quantity: told apart by hue and lightness together
    "r1": ("#3a4bb8", "#8b9bff"),
    "r2": ("#8436ad", "#c98cf2"),
    "r3": ("#c43273", "#ff80b0"),
    "r4": ("#d4552a", "#ff9a66"),
    "r5": ("#a97a00", "#f2cf5b"),
}
# Levels of a heat map, from low to high. The lightness falls steadily (in the dark: rises), so that the order also
# shows in gray and to colour-blind readers. "h" fills a cell, "k" writes on it, with a contrast of 4.5:1 or more.
HEAT_LEVELS = 9
HEAT = {
    "h0": ("#f8f4e1", "#2a1c28"),
    "h1": ("#f0d6ad", "#4d253c"),
    "h2": ("#edb380", "#732e44"),
    "h3": ("#e68e64", "#993a41"),
    "h4": ("#d86b5b", "#b94f34"),
    "h5": ("#c04c5e", "#d16c24"),
    "h6": ("#a03563", "#de8f29"),
    "h7": ("#7a2662", "#e2b451"),
    "h8": ("#541d57", "#e3d687"),
    **{f"k{level}": ("#171b24", "#ffffff") for level in range(5)},
    **{f"k{level}": ("#ffffff", "#10141b") for level in range(5, HEAT_LEVELS)},
}
CATEGORIES = ("c1", "c2", "c3", "c4", "c5", "c6")
# Sites keep their colour from chart to chart; a branch is dashed, the stream after its add is not.
SITE_COLORS = dict(zip(BLOCK_SITES, ("c5", "c2", "c1", "c6", "c3"), strict=True))
RAMP = ("r1", "r2", "r3", "r4", "r5")


def stylesheet() -> str:
    """The custom properties for a page: light, and dark where the reader asks for it."""
    light, dark = ("".join(f"--{name}:{pair[i]};" for name, pair in (COLORS | HEAT).items()) for i in (0, 1))
    return f":root{{color-scheme:light dark;{light}}}@media (prefers-color-scheme:dark){{:root{{{dark}}}}}"


def heat_style() -> str:
    """The rules that colour a heat map's cells by their class, so that a script can move one to another level."""
    return "".join(
        f"svg .h{level} rect{{fill:var(--h{level})}}svg .h{level} text{{fill:var(--k{level})}}"
        for level in range(HEAT_LEVELS)
    )


def resolve(markup: str) -> str:
    """`markup` with the light colours written in, for programs that know no custom properties."""
    return re.sub(r"var\(--([a-z0-9]+)\)", lambda match: (COLORS | HEAT)[match[1]][0], markup)
