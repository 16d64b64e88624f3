"""Where each family of models keeps the convolution that projects its image patches.

    embedding, projection = find_projection(timm.create_model("vit_base_patch16_224"))   # PatchEmbed, Conv2d(3, 768, …)
    register_family(MyViT, "stem.patchify")                                              # teach one more family
    model = unwrap(torch.compile(DistributedDataParallel(model)))                        # the model inside its wrappers

A family is recognised by the name of its class, so that no model library is imported for another one's model.
"""

from dataclasses import dataclass

from torch import nn

__all__ = ["Family", "by_hand", "class_names", "find_projection", "full_name", "register_family", "unwrap"]

TIMM_EMBED = "timm.layers.patch_embed.PatchEmbed"
PVT_EMBED = "timm.models.pvt_v2.OverlapPatchEmbed"
HF_EMBED = "transformers.models.vit.modeling_vit.ViTPatchEmbeddings"


@dataclass(frozen=True, kw_only=True)
class Family:
    """One row: a model class and the path to its patch projection."""

    model: str
    """The class's full name; subclasses belong to the family too."""
    projection: str
    """The path from the model to the `nn.Conv2d` that reads the image."""
    embeddings: tuple[str, ...] = ()
    """The classes that may hold the projection: a CNN stem (timm's HybridEmbed) has one too, but on feature maps."""


ROWS = (
    # ViT, DeiT (distilled is a subclass), DINOv2, SigLIP, CLIP
    ("timm.models.vision_transformer.VisionTransformer", "patch_embed.proj", TIMM_EMBED),
    ("timm.models.eva.Eva", "patch_embed.proj", TIMM_EMBED),  # EVA, EVA-02, DINOv3, RoPE ViTs
    ("timm.models.beit.Beit", "patch_embed.proj", TIMM_EMBED),  # BEiT and BEiT v2
    ("timm.models.cait.Cait", "patch_embed.proj", TIMM_EMBED),
    ("timm.models.swin_transformer.SwinTransformer", "patch_embed.proj", TIMM_EMBED),
    ("timm.models.swin_transformer_v2.SwinTransformerV2", "patch_embed.proj", TIMM_EMBED),
    ("timm.models.pvt_v2.PyramidVisionTransformerV2", "patch_embed.proj", PVT_EMBED),
    ("timm.models.convmixer.ConvMixer", "stem.0"),
    # `features_only=True` takes Swin and PVT v2 apart into a dictionary of their stages
    ("timm.models._features.FeatureDictNet", "patch_embed.proj", TIMM_EMBED, PVT_EMBED),
    ("torchvision.models.vision_transformer.VisionTransformer", "conv_proj"),
    ("torchvision.models.swin_transformer.SwinTransformer", "features.0.0"),
    ("transformers.models.vit.modeling_vit.ViTModel", "embeddings.patch_embeddings.projection", HF_EMBED),
    (
        "transformers.models.vit.modeling_vit.ViTForImageClassification",
        "vit.embeddings.patch_embeddings.projection",
        HF_EMBED,
    ),
)
# Models that hold the whole of another model, kept by `unwrap` because their weights are named after it.
INNER = {"timm.models._features.FeatureGetterNet": "model", "timm.models._features.FeatureHookNet": "body"}

_families = {row[0]: Family(model=row[0], projection=row[1], embeddings=row[2:]) for row in ROWS}


def register_family(model: type[nn.Module] | str, projection: str) -> None:
    """Teach `gray` one more family: the model's class (or its full name) and the path to its patch projection.

    The projection is an `nn.Conv2d` that reads the image itself, and whose stride is the patch size.

        wellcond.models.register_family(MyViT, "stem.patchify")
    """
    name = model if isinstance(model, str) else full_name(model)
    _families[name] = Family(model=name, projection=projection)


def find_projection(model: nn.Module) -> tuple[nn.Module, nn.Conv2d]:
    """The module that holds the patch projection, and the projection itself.

    Raises ValueError, with a way out, for an unknown family.
    """
    root = unwrap(model)
    for name in class_names(root):
        if name in INNER and hasattr(root, INNER[name]):
            return find_projection(getattr(root, INNER[name]))
        if name in _families:
            return _resolve(root, _families[name])
    inner = next((path for path, child in root.named_modules() if path and _is_known(child)), None)
    if inner is None:
        raise ValueError(by_hand(root, "its family is not known (wellcond.models.register_family teaches one more)"))
    raise ValueError(
        f"cannot gray {type(root).__name__} as a whole, but it holds a {type(root.get_submodule(inner)).__name__}: "
        f'gray that, e.g. wellcond.gray(model.get_submodule("{inner}"), "dct")'
    )


def unwrap(model: nn.Module) -> nn.Module:
    """The model inside DistributedDataParallel, DataParallel, torch.compile, EMA: whatever adds no weights."""
    while not _is_known(model):
        children = dict(model.named_children())
        only_child = children.get("module") if len(children) == 1 else None
        if next(model.parameters(recurse=False), None) is not None:
            only_child = None  # it has weights of its own: a model, not a wrapper
        inner = children.get("_orig_mod", only_child)
        if inner is None:
            break
        model = inner
    return model


def by_hand(model: nn.Module, why: str) -> str:
    """The error message for a model that surgery cannot gray: why, and the two lines that do it from outside."""
    return (
        f"cannot gray {type(model).__name__}: {why}. Gray its images by hand instead, with its own patch size:\n"
        '    graying = wellcond.TokenGraying("dct", 0.95, patch_size=16)\n'
        "    model = nn.Sequential(graying, model)"
    )


def _resolve(root: nn.Module, family: Family) -> tuple[nn.Module, nn.Conv2d]:
    holder_path, _, _ = family.projection.rpartition(".")
    try:
        holder, projection = root.get_submodule(holder_path), root.get_submodule(family.projection)
    except AttributeError:
        raise ValueError(by_hand(root, f"it has no patch projection at {family.projection}")) from None
    if family.embeddings and not set(family.embeddings) & set(class_names(holder)):
        what = f"its {holder_path} is a {type(holder).__name__}, which does not read patches of the image"
        raise ValueError(by_hand(root, what))
    if not isinstance(projection, nn.Conv2d):
        what = f"its {family.projection} is a {type(projection).__name__}, not a convolution of patches"
        raise ValueError(by_hand(root, what))
    return holder, projection


def _is_known(model: nn.Module) -> bool:
    return any(name in _families or name in INNER for name in class_names(model))


def class_names(model: nn.Module) -> list[str]:
    """The full names of the model's class and of all it derives from, nearest first."""
    return [full_name(cls) for cls in type(model).__mro__]


def full_name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"
