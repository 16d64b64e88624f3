"""Models: where each family keeps what, surgery on them, and files of weights that remember the surgery."""

from wellcond.models.families import register_family
from wellcond.models.sites import SiteList, register_blocks, sites
from wellcond.models.skips import SkipChange, remove_skip, restore_skip, skips_of
from wellcond.models.surgery import GrayingSettings, gray, graying_of, is_grayed, ungray
from wellcond.models.weights import Loaded, load, save

__all__ = [
    "GrayingSettings",
    "Loaded",
    "SiteList",
    "SkipChange",
    "gray",
    "graying_of",
    "is_grayed",
    "load",
    "register_blocks",
    "register_family",
    "remove_skip",
    "restore_skip",
    "save",
    "sites",
    "skips_of",
    "ungray",
]
