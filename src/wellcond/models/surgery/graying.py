"""Insert Token Graying before a model's patch embedding or after its word embedding, in place, and remove it again.

    model = wellcond.gray(timm.create_model("vit_base_patch16_224"), "dct", epsilon=0.95)
    wellcond.graying_of(model)          # GrayingSettings(method='dct', epsilon=0.95, …)
    model = wellcond.ungray(model)      # exactly the original model

The class of the patch projection is swapped for a subclass that grays its input first. Everything else is preserved:
the parameter names, hooks, optimisers that hold the parameters, and (unlike with a patched `forward`) deepcopy and
pickle. Graying sits inside the patch embedding, hence after the padding of timm's `dynamic_img_pad`. Word ids cannot be
grayed, so for words the embedded sequence is grayed, positions included, and without each sample's padding.
"""

from dataclasses import dataclass
from typing import Any, TypeVar

from torch import Tensor, nn

from wellcond.graying import SequenceGraying, TokenGraying
from wellcond.models.families import by_hand, find_embedding, find_projection
from wellcond.models.families.forwards import MixedIn, is_mixed, mixed
from wellcond.models.surgery.swap import class_was_given, forget_compiled_code

__all__ = [
    "GrayedConv2d",
    "GrayedEmbedding",
    "GrayingSettings",
    "check_grayable",
    "gray",
    "graying_of",
    "is_grayed",
    "ungray",
]

Model = TypeVar("Model", bound=nn.Module)


@dataclass(frozen=True, kw_only=True)
class GrayingSettings:
    """How a model is grayed. The patch size is not a setting: it is the projection's stride."""

    method: str
    """`svd` or `dct`."""
    epsilon: float = 0.95
    """The exponent of the relative magnitudes, in (0, 1]."""
    restore_scale: bool = True
    """Whether the largest magnitude keeps its value; otherwise it becomes 1."""
    autocast: bool = False
    """Whether the DCT is computed in autocast's dtype, which is less accurate; for comparisons."""


class GrayedConv2d(nn.Conv2d):
    """A patch projection that grays the image first. Created by `gray`, never by hand."""

    graying: TokenGraying

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 (nn.Conv2d's own name)
        return super().forward(self.graying(input))


class GrayedEmbedding(MixedIn):
    """Mixin for the class of a word embedding that grays the embedded sequences. Created by `gray`."""

    graying: SequenceGraying

    def forward(self, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
        embedded = super().forward(tokens, mask)  # pyright: ignore[reportAttributeAccessIssue]
        return self.graying(embedded, mask)


def gray(
    model: Model, method: str, *, epsilon: float = 0.95, restore_scale: bool = True, autocast: bool = False
) -> Model:
    """Insert Token Graying before the patch embedding of `model`, or after its word embedding, in place.

    A model that is already grayed gets the new settings. The patch size is the stride of the patch projection, even if
    patches overlap (PVT v2's 7×7 kernel with stride 4 is grayed in 4×4 patches). Wrapped models (DDP, torch.compile,
    EMA) are grayed inside; a compiled model recompiles at its next call. `autocast` is for comparisons: the DCT of
    images is then computed in autocast's dtype instead of float32. Returns the model.

    Raises ValueError for an unknown family; the message says how to use `TokenGraying` by hand.
    """
    check_grayable(model)
    settings = GrayingSettings(method=method, epsilon=epsilon, restore_scale=restore_scale, autocast=autocast)
    if (embedding := find_embedding(model)) is not None:
        _put_behind(embedding, settings)
        forget_compiled_code()
        return model
    holder, projection = find_projection(model)
    _put(projection, settings)
    if hasattr(holder, "set_input_size") and not isinstance(holder, _KeepsGraying):
        holder.__class__ = mixed("Grayed", _KeepsGraying, type(holder))
    forget_compiled_code()
    return model


def ungray(model: Model) -> Model:
    """Remove the graying of `model`, in place, and return the model; one without graying is returned unchanged."""
    plain: dict[nn.Module, type] = {}
    for module in model.modules():
        if isinstance(module, GrayedConv2d):
            plain[module] = nn.Conv2d
        elif isinstance(module, _KeepsGraying | GrayedEmbedding):
            plain[module] = module._plain_class
    for module in plain:
        if type(module) is not GrayedConv2d and not is_mixed(type(module)):
            raise ValueError(
                f"part of the embedding was made a {type(module).__name__} after gray() (by fully_shard, "
                "parametrize or the like); undo that first, or load the weights into a model that never was grayed"
            )
    for module, plain_class in plain.items():
        if isinstance(module, GrayedConv2d | GrayedEmbedding):
            del module.graying
        module.__class__ = plain_class
    forget_compiled_code()
    return model


def graying_of(model: nn.Module) -> GrayingSettings | None:
    """Return the graying settings of `model`, or None. ValueError if it holds models grayed in different ways."""
    found = {_settings(module) for module in _grayed_modules(model)}
    if len(found) > 1:
        raise ValueError(f"{type(model).__name__} holds models grayed in different ways: {found}; ask for each alone")
    return found.pop() if found else None


def is_grayed(model: nn.Module) -> bool:
    """Whether the model has Token Graying before its patch embedding or after its word embedding."""
    return bool(_grayed_modules(model))


def check_grayable(model: nn.Module) -> None:
    """Raise ValueError, saying why and what to do instead, for a model that `gray` cannot gray."""
    embedding = find_embedding(model)
    if embedding is None:
        _check_plain(model, find_projection(model)[1])
        return
    plain = embedding._plain_class if isinstance(embedding, GrayedEmbedding) else type(embedding)
    known = type(embedding) is plain or is_mixed(type(embedding))
    if "forward" in vars(embedding) or class_was_given(embedding) or not known:
        raise ValueError(
            f"cannot gray {type(model).__name__}: its embedding, a {type(embedding).__name__}, was changed by a hook, "
            "fully_shard, parametrize or the like; gray before that"
        )


def _grayed_modules(model: nn.Module) -> list[Any]:
    return [module for module in model.modules() if isinstance(module, GrayedConv2d | GrayedEmbedding)]


def _settings(module: GrayedConv2d | GrayedEmbedding) -> GrayingSettings:
    graying = module.graying
    return GrayingSettings(
        method=graying.method, epsilon=graying.epsilon, restore_scale=graying.restore_scale, autocast=graying.autocast
    )


def _put(projection: nn.Conv2d, settings: GrayingSettings) -> None:
    height, width = projection.stride
    how = {"restore_scale": settings.restore_scale, "autocast": settings.autocast}
    graying = TokenGraying(settings.method, settings.epsilon, (height, width), **how)  # checks the settings
    if not isinstance(projection, GrayedConv2d):
        projection.__class__ = GrayedConv2d
    projection.graying = graying.train(projection.training)


def _put_behind(embedding: nn.Module, settings: GrayingSettings) -> None:
    if settings.autocast:
        raise ValueError("autocast=True is for images: embedded words are grayed in float32")
    graying = SequenceGraying(settings.method, settings.epsilon, restore_scale=settings.restore_scale)
    if not isinstance(embedding, GrayedEmbedding):
        embedding.__class__ = mixed("Grayed", GrayedEmbedding, type(embedding))
    embedding.graying = graying.train(embedding.training)


def _check_plain(model: nn.Module, projection: nn.Conv2d) -> None:
    """Raise ValueError if swapping the projection's class would break it, or if graying would silently be bypassed."""
    if not isinstance(projection, GrayedConv2d) and type(projection) is not nn.Conv2d:
        kind = f"{type(projection).__module__}.{type(projection).__name__}"
        why = f"its patch projection is a {kind}, not a plain nn.Conv2d (gray before parametrize or fully_shard)"
        raise ValueError(by_hand(model, why))
    if "forward" in vars(projection):  # as with accelerate's offloading: the old forward would still be called
        raise ValueError(by_hand(model, "the forward of its patch projection was replaced by a hook; gray before that"))


class _KeepsGraying(MixedIn):
    """Mixin for a patch embedding: a projection rebuilt by `set_input_size` is grayed like the one it replaces."""

    proj: nn.Conv2d

    def set_input_size(self, *args: Any, **kwargs: Any) -> None:
        before = self.proj
        super().set_input_size(*args, **kwargs)  # pyright: ignore[reportAttributeAccessIssue]
        if self.proj is not before and isinstance(before, GrayedConv2d):
            _put(self.proj, _settings(before))
