"""The colours of pages and charts, for light and dark mode.

Charts are written with the light colours, so that they work as pictures anywhere; in dark mode the page's script swaps
them.
"""

from wellcond.words import BLOCK_SITES

__all__ = ["CATEGORIES", "COLORS", "HEAT", "LIGHT", "RAMP", "SITE_COLORS", "dark_of_light", "stylesheet"]

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
# Levels of a heat map, from low to high. The lightness falls steadily (in dark mode: rises), so that the order also
# shows in gray and to colour-blind readers. Text is `ink` on the lower five, `paper` on the others, at 4.5:1 or more.
HEAT = (
    ("#f8f4e1", "#2a1c28"),
    ("#f0d6ad", "#4d253c"),
    ("#edb380", "#732e44"),
    ("#e68e64", "#993a41"),
    ("#d86b5b", "#ac4430"),
    ("#c04c5e", "#d16c24"),
    ("#a03563", "#de8f29"),
    ("#7a2662", "#e2b451"),
    ("#541d57", "#e3d687"),
)
INK_ON = 5  # levels
LIGHT = {name: light for name, (light, _) in COLORS.items()}
CATEGORIES = tuple(LIGHT[f"c{number}"] for number in (1, 2, 3, 4, 5, 6))
# Sites keep their colour from chart to chart; a branch is dashed, the stream after its add is not.
SITE_COLORS = {site: LIGHT[name] for site, name in zip(BLOCK_SITES, ("c5", "c2", "c1", "c6", "c3"), strict=True)}
RAMP = tuple(LIGHT[f"r{number}"] for number in (1, 2, 3, 4, 5))


def dark_of_light() -> dict[str, str]:
    return dict((*COLORS.values(), *HEAT))


def stylesheet() -> str:
    """Return a page's CSS custom properties: light, and dark if the reader's system prefers it."""
    light, dark = ("".join(f"--{name}:{pair[i]};" for name, pair in COLORS.items()) for i in (0, 1))
    return f":root{{color-scheme:light dark;{light}}}@media (prefers-color-scheme:dark){{:root{{{dark}}}}}"
