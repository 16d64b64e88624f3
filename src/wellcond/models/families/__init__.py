"""One file per model family, with the four things that wellcond knows about it.

1. where its images or words become the first tokens (`Family.models`, `Family.embeddings`);
2. its blocks, and where each has its sites (`Family.blocks`);
3. the forward of a block without its skips (`Family.skipless`);
4. its attention modules: q, k, v and output weights, and a forward for another attention (`Family.attention`).

Surgery, the probe and weight files look classes up here and contain nothing specific to a model. To add a family, add a
file and import it below; from another package, call `register_family` (docs/families.md).
"""

from wellcond.models.families import (  # noqa: F401 (they register their families)
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
    by_hand,
    find_embedding,
    find_projection,
    full_name,
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
    "by_hand",
    "find_embedding",
    "find_projection",
    "full_name",
    "register_blocks",
    "register_family",
    "split_heads",
    "split_qkv",
    "unwrap",
]
