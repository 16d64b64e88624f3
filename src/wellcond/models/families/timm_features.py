"""The three wrappers that timm's `features_only=True` puts around the stages of a model of any family."""

from wellcond.models.families.family import Family, PatchProjection, register
from wellcond.models.families.pvt_v2 import EMBED
from wellcond.models.families.vit import TIMM_EMBED

FEATURES = "timm.models._features."

register(
    Family(
        # Swin and PVT v2 are taken apart into a dictionary of their stages.
        models={FEATURES + "FeatureDictNet": PatchProjection(path="patch_embed.proj", embeddings=(TIMM_EMBED, EMBED))},
        # The others are kept whole, in an attribute that prefixes the names of their weights.
        inner={FEATURES + "FeatureGetterNet": "model", FEATURES + "FeatureHookNet": "body"},
    )
)
