"""Other attentions inside Hugging Face's models, through the interface by which they choose theirs.

    choose_implementation(config, ours=True)       # "sdpa" → "wellcond_sdpa", an attention that transformers knows now
    choose_implementation(config, ours=False)      # and back

Their attention modules call the function registered here, which asks the module for its `attention_core`; a module
without one, of a block that was not chosen, gets torch's scaled_dot_product_attention. A mask of padding stays one of
keys.
"""

import functools
import inspect
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from wellcond.attention import AttentionCore
from wellcond.models.attending import Replaced, plain_attention_class, register_forward

__all__ = ["HuggingFaceReplaced", "choose_implementation", "is_asked", "register_with_transformers"]

OURS = {name: f"wellcond_{name}" for name in ("eager", "sdpa")}  # a config so remembers what it had before
HF = "transformers.models."
# What some models hand to their attention, and what none of ours has.
FOREIGN = ("position_bias", "softcap", "s_aux", "sliding_window", "head_mask")
VIT_LIKE = ("vit", "ViT"), ("deit", "DeiT"), ("vit_mae", "ViTMAE"), ("dinov2", "Dinov2"), ("dinov3_vit", "DINOv3ViT")
VIT_LIKE += (("dinov2_with_registers", "Dinov2WithRegisters"), ("clip", "CLIP"), ("siglip", "Siglip"))
BERT_LIKE = ("bert", "Bert"), ("roberta", "Roberta"), ("xlm_roberta", "XLMRoberta"), ("camembert", "Camembert")
BERT_LIKE += (("electra", "Electra"),)


@register_forward(
    *(f"{HF}{name}.modeling_{name}.{cls}{kind}" for name, cls in VIT_LIKE for kind in ("Attention", "SelfAttention")),
    *(f"{HF}{name}.modeling_{name}.{cls}SelfAttention" for name, cls in BERT_LIKE),
    HF + "distilbert.modeling_distilbert.DistilBertSelfAttention",
)
class HuggingFaceReplaced(Replaced):
    """The module's own forward: it asks the interface."""

    _has_forward = False

    @classmethod
    def refuses(cls, module: Any, core: AttentionCore, model: nn.Module) -> str:
        forward: Any = inspect.unwrap(plain_attention_class(module).forward)
        if "ALL_ATTENTION_FUNCTIONS" not in forward.__code__.co_names or not hasattr(module, "config"):
            return "in this version of transformers it does not choose its attention by their interface; upgrade to 5"
        chosen = module.config._attn_implementation
        if chosen not in {*OURS, *OURS.values(), None}:
            return f'its attention implementation is {chosen}; model.set_attn_implementation("sdpa") first'
        if _is_causal(module) and not core.takes_bias:  # what knows no pairs of tokens knows no earlier and later
            return "the model is causal, and landmarks see every token; choose other blocks, or linear or kernelized"
        return ""

    def __setstate__(self, state: dict[str, Any]) -> None:
        register_with_transformers()  # a pickle may be the first that this process hears of us
        super().__setstate__(state)  # pyright: ignore[reportAttributeAccessIssue]


@functools.cache
def register_with_transformers() -> None:
    """Teach the installed transformers our name, once."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    for name in OURS.values():
        AttentionInterface.register(name, _attend)
        AttentionMaskInterface.register(name, _mask)


def choose_implementation(config: Any, *, ours: bool) -> None:
    """Let the models of this config ask for our attention, or no longer."""
    chosen = config._attn_implementation or "eager"
    if ours and chosen in OURS:
        register_with_transformers()
        config._attn_implementation = OURS[chosen]
    elif not ours and chosen in OURS.values():
        config._attn_implementation = chosen.removeprefix("wellcond_")


def is_asked(module: Any) -> bool:
    """Whether this module's core is what attends: `model.set_attn_implementation` may have chosen another since."""
    return not isinstance(module, HuggingFaceReplaced) or module.config._attn_implementation in OURS.values()


def _is_causal(module: Any) -> bool:
    """CLIP's text model says so at each call alone; the others' attentions know."""
    return bool(getattr(module, "is_causal", False)) or module.config.model_type == "clip_text_model"


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    if foreign := [name for name in FOREIGN if kwargs.get(name) is not None]:
        raise ValueError(f"{type(module).__name__} asks its attention for {foreign[0]}, which none of ours has")
    if kwargs.get("output_attentions"):
        raise ValueError("output_attentions asks for weights that are never made; restore_attention(model) first")
    if (groups := getattr(module, "num_key_value_groups", 1)) > 1:
        key, value = (t.repeat_interleave(groups, dim=1) for t in (key, value))
    causal = getattr(module, "is_causal", False) if is_causal is None else is_causal
    causal = bool(causal) and attention_mask is None and query.shape[-2] > 1
    core = getattr(module, "attention_core", None)
    if core is None:
        out = F.scaled_dot_product_attention(query, key, value, attention_mask, dropout, causal, scale=scaling)
    else:
        dropout = dropout if core.drops_weights else 0.0
        out = core(query, key, value, attention_mask, dropout, causal, scaling)
    return out.transpose(1, 2).contiguous(), None


def _mask(*args: Any, **kwargs: Any) -> Tensor | None:
    """Padding as a mask of keys, (b, 1, 1, m); any other mask as SDPA has it."""
    from transformers.masking_utils import bidirectional_mask_function, sdpa_mask

    if kwargs.get("mask_function") is not bidirectional_mask_function:
        return sdpa_mask(*args, **kwargs)
    padding = kwargs.get("attention_mask")
    return None if padding is None else padding.bool()[:, None, None, :]
