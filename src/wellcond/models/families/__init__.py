"""One file a family: what wellcond knows of a kind of model, four things.

1. where its images or words become the first tokens (`Family.models`, `Family.embeddings`);
2. its blocks, and where each keeps its sites (`Family.blocks`);
3. the forward of a block without its skips (`Family.skipless`);
4. the modules that attend: q, k, v and output weights, and a forward around another attention (`Family.attention`).

Surgery, the probe and files of weights look a class up here and know no model. A new family is a new file, imported
below; from another package it is a call of `register_family` (docs/families.md).
"""

from wellcond.models.families import (  # each registers what it knows
    cait,
    convmixer,
    eva,
    hf_bert,
    hf_vit,
    pvt_v2,
    sequence,
    swin,
    timm_features,
    torch_encoder,
    torchvision,
    vit,
)
from wellcond.models.families.family import (
    AttentionKind,
    BlockKind,
    Family,
    PatchProjection,
    Tap,
    WeightPaths,
    attention_kind,
    block_kind,
    by_hand,
    class_names,
    find_embedding,
    find_projection,
    full_name,
    register,
    register_blocks,
    register_family,
    unwrap,
)
from wellcond.models.families.forwards import Replaced, Skipless, split_heads, split_qkv

__all__ = [
    "AttentionKind",
    "BlockKind",
    "Family",
    "PatchProjection",
    "Replaced",
    "Skipless",
    "Tap",
    "WeightPaths",
    "attention_kind",
    "block_kind",
    "by_hand",
    "cait",
    "class_names",
    "convmixer",
    "eva",
    "find_embedding",
    "find_projection",
    "full_name",
    "hf_bert",
    "hf_vit",
    "pvt_v2",
    "register",
    "register_blocks",
    "register_family",
    "sequence",
    "split_heads",
    "split_qkv",
    "swin",
    "timm_features",
    "torch_encoder",
    "torchvision",
    "unwrap",
    "vit",
]
