"""Attention modules that attend in another way: for each class a forward with the attention itself left open.

    replaced = replaced_class(type(block.attn))               # None for a class without such a forward
    block.attn.__class__, block.attn.attention_core = replaced, SkyformerCore()      # what replace_attention does

Each forward below is the family's own, with its projections, norms, rotations and biases, around `_attend`. What a
family has that another attention cannot have is said in `drops`, or refused.
"""

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from wellcond.attention import AttentionCore
from wellcond.models.families import full_name

__all__ = ["Replaced", "plain_attention_class", "register_forward", "replaced_class"]

TIMM = "timm.models."

_forwards: dict[str, type["Replaced"]] = {}  # full name of an attention class → what is mixed into it


class Replaced:
    """Mixed into the class of an attention module: its forward around another attention."""

    _plain_class: type
    _has_forward: ClassVar[bool] = True
    """Whether it brings a forward, so that the plain class must have the one it was written after."""
    drops: ClassVar[str] = ""
    """What of the plain forward no other attention has a place for."""
    attention_core: AttentionCore

    if TYPE_CHECKING:  # the modules and parameters of the class it is mixed into

        def __getattr__(self, name: str) -> Any: ...

    @classmethod
    def refuses(cls, module: Any, core: AttentionCore, model: nn.Module) -> str:
        """Why this module of the model cannot attend like this; "" if it can."""
        return ""

    def _attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
        *,
        bias: Tensor | None = None,
        keep: Tensor | None = None,
    ) -> Tensor:
        """(b, heads, n, p) → (b, n, heads · p)."""
        dropout = self.attn_drop.p if self.training and self.attention_core.drops_weights else 0.0
        if bias is None:
            out = self.attention_core(q, k, v, attn_mask, dropout, is_causal)
        else:
            out = self.attention_core.with_bias(q, k, v, bias, keep, dropout)
        return out.transpose(1, 2).flatten(2)

    def __reduce_ex__(self, protocol: Any) -> Any:
        # The class is made on demand, so that pickle could not find it by name: it is made again from the plain one.
        if type(self) is not replaced_class(self._plain_class):
            return super().__reduce_ex__(protocol)  # someone subclassed it further, and knows better
        return _new_replaced, (self._plain_class,), self.__getstate__()


def plain_attention_class(module: nn.Module) -> type[nn.Module]:
    """The module's class with its own attention."""
    return module._plain_class if isinstance(module, Replaced) else type(module)


@functools.cache
def replaced_class(plain: type[nn.Module]) -> type[nn.Module] | None:
    """`plain` with an open attention; None where no forward is known for it, or only for one it has overridden."""
    known = next((cls for cls in plain.__mro__ if full_name(cls) in _forwards), None)
    if known is None:
        return None
    mixin = _forwards[full_name(known)]
    if mixin._has_forward and plain.forward is not known.forward:
        return None
    return type(f"Replaced{plain.__name__}", (mixin, plain), {"_plain_class": plain, "__module__": __name__})


def _new_replaced(plain: type[nn.Module]) -> nn.Module:
    made = replaced_class(plain)
    assert made is not None
    return made.__new__(made)


def register_forward(*names: str) -> Callable[[type[Replaced]], type[Replaced]]:
    """Remember the decorated mixin for the classes of these full names."""

    def remember(mixin: type[Replaced]) -> type[Replaced]:
        _forwards.update(dict.fromkeys(names, mixin))
        return mixin

    return remember


def _heads(x: Tensor, heads: int) -> Tensor:
    """(b, n, heads · p) → (b, heads, n, p)."""
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


def _three(x: Tensor, heads: int) -> tuple[Tensor, ...]:
    """(b, n, 3 · heads · p) → three of (b, heads, n, p)."""
    return x.unflatten(-1, (3, heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)


@register_forward("timm.layers.attention.Attention", TIMM + "vision_transformer.Attention")
class _ViT(Replaced):
    @classmethod
    def refuses(cls, module: Any, core: AttentionCore, model: nn.Module) -> str:
        if core.takes_pair_masks or not any(type(part).__name__ == "NaFlexVit" for part in model.modules()):
            return ""
        return (
            "NaFlexVit hides padding by numbers that it adds for each pair of tokens, which this attention has no "
            "place for; softmax and kernelized attention take them"
        )

    def forward(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        q, k, v = _three(self.qkv(x), self.num_heads)
        y = self.norm(self._attend(self.q_norm(q), self.k_norm(k), v, attn_mask, is_causal))
        return self.proj_drop(self.proj(self._gated(x, y)))

    def _gated(self, x: Tensor, y: Tensor) -> Tensor:
        gate = getattr(self, "gate", None)  # not in older versions of timm
        return y if gate is None else y * gate(x).sigmoid()


@register_forward("timm.layers.attention.AttentionRope", TIMM + "eva.EvaAttention")
class _Rope(_ViT):
    """Rotations turn queries and keys before they meet, whatever the attention."""

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, x: Tensor, rope: Tensor | None = None, attn_mask: Tensor | None = None, is_causal: bool = False
    ) -> Tensor:
        q, k, v = self._project(x)
        q, k = self.q_norm(q), self.k_norm(k)
        if rope is not None:
            q, k = self._rotated(q, rope).type_as(v), self._rotated(k, rope).type_as(v)
        if (groups := getattr(self, "num_kv_groups", 1)) > 1:
            k, v = (t.repeat_interleave(groups, dim=1) for t in (k, v))
        y = self.norm(self._attend(q, k, v, attn_mask, is_causal))
        return self.proj_drop(self.proj(self._gated(x, y)))

    def _project(self, x: Tensor) -> tuple[Tensor, ...]:
        if self.qkv is None:
            kv_heads = getattr(self, "num_kv_heads", self.num_heads)
            return (
                _heads(self.q_proj(x), self.num_heads),
                _heads(self.k_proj(x), kv_heads),
                _heads(self.v_proj(x), kv_heads),
            )
        return _three(_with_query_bias(self, x), self.num_heads)

    def _rotated(self, t: Tensor, rope: Tensor) -> Tensor:
        from timm.layers.pos_embed_sincos import apply_rot_embed_cat

        first = self.num_prefix_tokens  # the class token and registers have no position
        turned = apply_rot_embed_cat(t[:, :, first:], rope, half=getattr(self, "rotate_half", False))
        return torch.cat([t[:, :, :first], turned], dim=2)


def _with_query_bias(module: Any, x: Tensor) -> Tensor:
    """qkv(x) of EVA and BEiT, whose keys have no bias of their own."""
    if getattr(module, "q_bias", None) is None:
        return module.qkv(x)
    bias = torch.cat((module.q_bias, module.k_bias, module.v_bias))
    if getattr(module, "qkv_bias_separate", False):
        return module.qkv(x) + bias
    return F.linear(x, weight=module.qkv.weight, bias=bias)


class _WithBias(Replaced):
    """For modules whose relative position bias is a number for each pair of tokens, their own or the whole model's."""

    @classmethod
    def refuses(cls, module: Any, core: AttentionCore, model: nn.Module) -> str:
        own = getattr(module, "relative_position_bias_table", None) is not None
        shared = any(getattr(part, "rel_pos_bias", None) is not None for part in model.modules())
        if core.takes_bias or not (own or shared):
            return ""
        return (
            "it has a relative position bias, a number for each pair of tokens, and landmarks know no pairs; "
            "softmax, kernelized and linear attention keep it"
        )


@register_forward(TIMM + "swin_transformer.WindowAttention")
class _Swin(_WithBias):
    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, v = _three(self.qkv(x), self.num_heads)
        keep = None
        if mask is not None:  # 0 within a window's own region, -100 across
            keep = (mask > -50)[:, None].repeat(len(x) // len(mask), 1, 1, 1)
        return self.proj_drop(self.proj(self._attend(q, k, v, bias=self._get_rel_pos_bias(), keep=keep)))


@register_forward(TIMM + "beit.Attention")
class _Beit(_WithBias):
    def forward(self, x: Tensor, shared_rel_pos_bias: Tensor | None = None) -> Tensor:
        q, k, v = _three(_with_query_bias(self, x), self.num_heads)
        bias = shared_rel_pos_bias
        if self.relative_position_bias_table is not None:
            own = self._get_rel_pos_bias()
            bias = own if bias is None else own + bias
        if bias is not None and not self.attention_core.takes_bias:
            raise ValueError("this model shares a relative position bias among its blocks, and landmarks know no pairs")
        return self.proj_drop(self.proj(self._attend(q, k, v, bias=bias)))


@register_forward(TIMM + "cait.TalkingHeadAttn")
class _CaiT(Replaced):
    drops = "talking heads (proj_l and proj_w, which mix the weights of all heads, and get no gradient any more)"

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = _three(self.qkv(x), self.num_heads)
        return self.proj_drop(self.proj(self._attend(q, k, v)))


@register_forward(TIMM + "cait.ClassAttn")
class _CaiTClass(Replaced):
    def forward(self, x: Tensor) -> Tensor:
        q = _heads(self.q(x[:, :1]), self.num_heads)
        k, v = _heads(self.k(x), self.num_heads), _heads(self.v(x), self.num_heads)
        return self.proj_drop(self.proj(self._attend(q, k, v)))


@register_forward(TIMM + "pvt_v2.Attention")
class _PVTv2(Replaced):
    """Keys and values come from a smaller picture, as before."""

    def forward(self, x: Tensor, feat_size: list[int]) -> Tensor:
        q, smaller = _heads(self.q(x), self.num_heads), x
        if self.pool is not None or self.sr is not None:
            image = x.mT.unflatten(-1, tuple(feat_size))
            image = image if self.pool is None else self.pool(image)
            smaller = self.norm(self.sr(image).flatten(2).mT)
            smaller = smaller if self.act is None else self.act(smaller)
        k, v = self.kv(smaller).unflatten(-1, (2, self.num_heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        return self.proj_drop(self.proj(self._attend(q, k, v)))
