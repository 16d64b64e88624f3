"""Change a model in place, and back: graying, skips, attention. Nothing here depends on a particular model family.

wellcond.gray(model, "dct", epsilon=0.95)                wellcond.ungray(model)
wellcond.remove_skip(model, "sa")                        wellcond.restore_skip(model)
wellcond.replace_attention(model, "skyformer")           wellcond.restore_attention(model)
"""

from wellcond.models.surgery.attention import (
    AttentionChange,
    AttentionSettings,
    attention_of,
    built_attention,
    plan_attention,
    put_attention,
    replace_attention,
    restore_attention,
)
from wellcond.models.surgery.graying import (
    GrayedConv2d,
    GrayingSettings,
    check_grayable,
    gray,
    graying_of,
    is_grayed,
    ungray,
)
from wellcond.models.surgery.skips import SkipChange, plan_skips, put_skips, remove_skip, restore_skip, skips_of
from wellcond.models.surgery.swap import keep_compiled_code

__all__ = [
    "AttentionChange",
    "AttentionSettings",
    "GrayedConv2d",
    "GrayingSettings",
    "SkipChange",
    "attention_of",
    "built_attention",
    "check_grayable",
    "gray",
    "graying_of",
    "is_grayed",
    "keep_compiled_code",
    "plan_attention",
    "plan_skips",
    "put_attention",
    "put_skips",
    "remove_skip",
    "replace_attention",
    "restore_attention",
    "restore_skip",
    "skips_of",
    "ungray",
]
