"""What timm's `features_only=True` makes of a model, whatever its family: three ways to keep its stages."""

from wellcond.models.families.family import Family, PatchProjection, register
from wellcond.models.families.pvt_v2 import EMBED
from wellcond.models.families.vit import TIMM_EMBED

FEATURES = "timm.models._features."

register(
    Family(
        # Swin and PVT v2 are taken apart into a dictionary of their stages.
        models={FEATURES + "FeatureDictNet": PatchProjection(path="patch_embed.proj", embeddings=(TIMM_EMBED, EMBED))},
        # The others are kept whole, and their weights are named after where.
        inner={FEATURES + "FeatureGetterNet": "model", FEATURES + "FeatureHookNet": "body"},
    )
)
