"""Models: where each family keeps what, surgery on them, and files of weights that remember the surgery."""

from wellcond.models.attention_settings import AttentionSettings, attention_of
from wellcond.models.families import register_family
from wellcond.models.replace import AttentionChange, replace_attention, restore_attention
from wellcond.models.sites import SiteList, register_blocks, sites
from wellcond.models.skips import SkipChange, remove_skip, restore_skip, skips_of
from wellcond.models.surgery import GrayingSettings, gray, graying_of, is_grayed, ungray
from wellcond.models.weights import Loaded, load, save

__all__ = [
    "AttentionChange",
    "AttentionSettings",
    "GrayingSettings",
    "Loaded",
    "SiteList",
    "SkipChange",
    "attention_of",
    "gray",
    "graying_of",
    "is_grayed",
    "load",
    "register_blocks",
    "register_family",
    "remove_skip",
    "replace_attention",
    "restore_attention",
    "restore_skip",
    "save",
    "sites",
    "skips_of",
    "ungray",
]
