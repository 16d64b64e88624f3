"""What follows masked autoencoding: its encoder as a classifier, fine-tuned whole, or probed by a linear head alone.

model = timm.create_model("vit_base_patch16_224", global_pool="avg", drop_path_rate=0.1)
hand_over(mae.encoder, model)           # weights and surgery; the head stays fresh: fine-tune
linear_probe(model)                     # or, without drop path: only a fresh head can be trained
"""

from collections.abc import Mapping
from typing import Any, TypeVar

from timm.layers.drop import DropPath
from timm.models.vision_transformer import VisionTransformer
from torch import nn

from wellcond.models.attention_settings import attention_of
from wellcond.models.families import find_projection, unwrap
from wellcond.models.replace import plan_attention, put_attention
from wellcond.models.skips import plan_skips, put_skips, skips_of
from wellcond.models.surgery import gray, graying_of, ungray

__all__ = ["hand_over", "linear_probe"]

Model = TypeVar("Model", bound=nn.Module)


def hand_over(encoder: nn.Module, model: Model) -> Model:
    """Give a timm VisionTransformer the weights of another, in place, with its graying, removed skips and attention.

    The model's head stays as it is. Its pooling may differ: with mean pooling timm puts the last norm after the pool,
    and the encoder's is loaded there. Positions are trained or fixed as they were in the model.

    Raises ValueError, with what does not fit, and the model is then unchanged.
    """
    target = unwrap(model).state_dict()
    weights = unwrap(encoder).state_dict()
    ours, theirs = _norm_of(weights), _norm_of(target)
    weights = {
        theirs + name.removeprefix(ours) if name.startswith(ours) else name: tensor
        for name, tensor in weights.items()
        if not name.startswith("head.")
    }
    wanted = {name: tensor for name, tensor in target.items() if not name.startswith("head.")}
    shared = wanted.keys() & weights.keys()
    misfits = (wanted.keys() ^ weights.keys()) | {name for name in shared if wanted[name].shape != weights[name].shape}
    if misfits:
        some = ", ".join(sorted(misfits)[:4]) + (" …" if len(misfits) > 4 else "")
        raise ValueError(
            f"the encoder and the {type(unwrap(model)).__name__} differ at {some}; build the model with the encoder's "
            "settings (its img_size too: the model's set_input_size changes it afterwards)"
        )
    settings, skips = graying_of(encoder), plan_skips(model, skips_of(encoder))
    attention = plan_attention(model, attention_of(encoder))
    if settings is not None:
        find_projection(model)  # a reason to fail has to come before the first change
    unwrap(model).load_state_dict(weights, strict=False)
    put_skips(skips)
    put_attention(model, attention)
    if settings is None:
        return ungray(model)
    return gray(model, settings.method, epsilon=settings.epsilon, restore_scale=settings.restore_scale)


def _norm_of(names: Mapping[str, Any]) -> str:
    """Where a ViT keeps its one last norm: before the pool, or after it."""
    return "fc_norm." if "fc_norm.weight" in names else "norm."


def linear_probe(model: VisionTransformer, num_classes: int | None = None) -> VisionTransformer:
    """Freeze a ViT, in place, but for a fresh linear head behind a BatchNorm without parameters.

    The BatchNorm brings the features to one scale, so that one learning rate suits every encoder. `num_classes` is that
    of the model's own head if not given. Raises ValueError for a model that would drop frozen features at random.
    """
    classes = model.num_classes if num_classes is None else num_classes
    if classes < 1:
        raise ValueError("the model has no head that would tell the number of classes; give num_classes")
    for name, module in model.named_modules():
        if (isinstance(module, nn.Dropout) and module.p) or (isinstance(module, DropPath) and module.drop_prob):
            raise ValueError(f"{name} would drop frozen features at random; build the model without dropout")
    model.requires_grad_(False)
    model.reset_classifier(classes)
    linear = model.head
    assert isinstance(linear, nn.Linear)
    nn.init.trunc_normal_(linear.weight, std=0.01)
    nn.init.zeros_(linear.bias)
    device, dtype = linear.weight.device, linear.weight.dtype
    norm = nn.BatchNorm1d(linear.in_features, affine=False, eps=1e-6, device=device, dtype=dtype)
    model.add_module("head", nn.Sequential(norm, linear).train(model.training))
    return model
