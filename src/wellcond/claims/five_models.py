"""Five models at 224 pixels, plain and with DCT graying, as asa-table4 and asa-fig5 compare them.

ARMS["vit_base"], ARMS["vit_base-dct"], ARMS["swin_small"], …     # one seed each, both sides from the same start
lowered(found, "vit_base")                                        # how much graying lowers log κ of `+sa`
"""

from typing import Any

from wellcond.claims.arms import GRID
from wellcond.claims.asa_table3 import PAPER as TABLE3
from wellcond.claims.comparison import Arm, Comparison

__all__ = ["ARMS", "MODELS", "PAPER_KAPPA", "SETTINGS", "SIDES", "lowered"]

MODELS = {
    "vit_base": "ViT-B", "vit_small": "ViT-S", "swin_small": "Swin-S", "cait_s24": "CaiT-S24", "pvt_v2_b3": "PVT v2 b3",
}  # fmt: skip
"""ViT-B comes first because asa-fig5 is about it."""
SIDES: dict[str, tuple[str, dict[str, Any]]] = {
    "": ("plain", {}),
    "-dct": ("DCT graying", {"gray": "dct", "epsilon": 0.95}),
}
ARMS = {
    f"{model}{side}": Arm(title=f"{title}, {words}", recipe=model, settings=settings)
    for model, title in MODELS.items()
    for side, (words, settings) in SIDES.items()
}
SETTINGS: dict[str, dict[str, Any]] = {
    "smoke": {"model_kwargs": None, "image_size": None, "steps": 4, "batch_size": 32},
    "lab": {
        "model_kwargs": {},
        "padding": 0,
        "scale_min": 0.35,
        "lr": GRID["lab"][1],
        "probe_samples": 16,
        "save_every": 100_000,  # only at the end: a checkpoint is a gigabyte, and a run takes two minutes
    },
}
"""At `lab` scale the models in their usual form for 224 pixels, at `smoke` scale as in their recipes."""
PAPER_KAPPA = {"vit_base": TABLE3["both"][2], "vit_base-dct": TABLE3["dct-0.95"][2]}  # mean log κ_out


def lowered(found: Comparison, model: str) -> list[list[float]]:
    """Return how much graying lowers log κ of `+sa`, by group of images and block; empty if there are no runs."""
    sides = [found.measurements(f"{model}{side}", "log_kappa_groups") for side in SIDES]
    if not all(sides):
        return []
    pairs = zip(*(side[0] for side in sides), strict=True)
    return [[plain - grayed for plain, grayed in zip(*pair, strict=True)] for pair in pairs]
