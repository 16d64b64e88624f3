"""Models: where each family keeps what, surgery on them, and files of weights that remember the surgery."""

from wellcond.models.families import register_family
from wellcond.models.surgery import GrayingSettings, gray, graying_of, is_grayed, ungray
from wellcond.models.weights import Loaded, load, save

__all__ = [
    "GrayingSettings",
    "Loaded",
    "gray",
    "graying_of",
    "is_grayed",
    "load",
    "register_family",
    "save",
    "ungray",
]
