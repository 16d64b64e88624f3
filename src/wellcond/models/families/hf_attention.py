"""Replace the attention in Hugging Face models, through transformers' own interface for choosing attentions.

    choose_implementation(config, ours=True)       # "sdpa" → "wellcond_sdpa", now registered with transformers
    choose_implementation(config, ours=False)      # and back

Attention modules then call the function registered here, which uses the module's `attention_core`; a module without one
(in a block that was not selected) gets torch's scaled_dot_product_attention. Padding masks are passed on as masks of
keys. Models may share a config, so one whose attention is replaced gets a copy of its own.
"""

import copy
import functools
import inspect
from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from wellcond.attention import AttentionCore
from wellcond.models.families.forwards import Replaced, plain_attention_class

__all__ = ["HuggingFaceReplaced", "choose_implementation", "register_with_transformers"]

OURS = {name: f"wellcond_{name}" for name in ("eager", "sdpa")}  # so the config still shows what it had before
# Arguments that some models pass to their attention and none of ours supports.
FOREIGN = ("position_bias", "softcap", "s_aux", "sliding_window", "head_mask")


class HuggingFaceReplaced(Replaced):
    """Keeps the module's own forward, which calls the interface."""

    _has_forward = False

    @classmethod
    def refuses(cls, module: Any, core: AttentionCore, model: nn.Module) -> str:
        forward: Any = inspect.unwrap(plain_attention_class(module).forward)
        if "ALL_ATTENTION_FUNCTIONS" not in forward.__code__.co_names or not hasattr(module, "config"):
            return "in this version of transformers it does not choose its attention by their interface; upgrade to 5"
        chosen = module.config._attn_implementation
        if chosen not in {*OURS, *OURS.values(), None}:
            return f'its attention implementation is {chosen}; model.set_attn_implementation("sdpa") first'
        if _is_causal(module) and not core.takes_bias:  # without pairs of tokens there is no earlier and later
            return "the model is causal, and landmarks see every token; choose other blocks, or linear or kernelized"
        return ""

    @classmethod
    def weight_dropout(cls, module: Any) -> float:
        if isinstance(drop := getattr(module, "dropout", None), nn.Dropout):
            return drop.p
        rate = getattr(module, "attention_dropout", getattr(module, "dropout_prob", 0.0))
        return float(rate) if isinstance(rate, int | float) else 0.0

    @classmethod
    def after_swap(cls, modules: Iterable[Any], model: nn.Module) -> None:
        modules = list(modules)
        if any(isinstance(module, HuggingFaceReplaced) for module in modules):
            _give_own_config(model)
        used = {id(module.config) for module in model.modules() if isinstance(module, HuggingFaceReplaced)}
        for key, config in {id(module.config): module.config for module in modules}.items():  # blocks share one
            choose_implementation(config, ours=key in used)

    def is_asked(self) -> bool:
        """Whether ours is in use: not after `model.set_attn_implementation` has selected another attention."""
        return self.config._attn_implementation in OURS.values()

    def __setstate__(self, state: dict[str, Any]) -> None:
        register_with_transformers()  # unpickling may be this process's first use of our attention
        super().__setstate__(state)  # pyright: ignore[reportAttributeAccessIssue]


@functools.cache
def register_with_transformers() -> None:
    """Register our attention with transformers, once."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    for name in OURS.values():
        AttentionInterface.register(name, _attend)
        AttentionMaskInterface.register(name, _mask)


def choose_implementation(config: Any, *, ours: bool) -> None:
    """Make models with this config use our attention, or stop using it."""
    chosen = config._attn_implementation or "eager"
    if ours and chosen in OURS:
        register_with_transformers()
        config._attn_implementation = OURS[chosen]
    elif not ours and chosen in OURS.values():
        config._attn_implementation = chosen.removeprefix("wellcond_")


def _give_own_config(model: nn.Module) -> None:
    """Replace the configs in the model by copies, so that what is chosen there changes no other model.

    A part of a model, such as its encoder, keeps the config of the whole, which prepares the masks.
    """
    from transformers import PretrainedConfig, PreTrainedModel

    if not any(isinstance(module, PreTrainedModel) for module in model.modules()):
        return
    copies: dict[int, Any] = {}  # one memo for all, so that configs inside others stay there, and shared ones shared
    for module in model.modules():
        for name, value in list(vars(module).items()):
            if isinstance(value, PretrainedConfig):
                setattr(module, name, copy.deepcopy(value, copies))


def _is_causal(module: Any) -> bool:
    """Whether the module is causal; CLIP's text model says so only in each call, others have an attribute."""
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
    """Return padding as a mask of keys, (b, 1, 1, m), and any other mask in the form that SDPA expects."""
    from transformers.masking_utils import bidirectional_mask_function, sdpa_mask

    if kwargs.get("mask_function") is not bidirectional_mask_function:
        return sdpa_mask(*args, **kwargs)
    padding = kwargs.get("attention_mask")
    return None if padding is None else padding.bool()[:, None, None, :]
