"""What all attention modules share: timm's projections around a core that attends.

    layer = SkyformerAttention(192, num_heads=3, qkv_bias=True, num_landmarks=64)
    layer(tokens)                                                        # (b, n, 192) → (b, n, 192)
    timm.create_model("vit_tiny_patch16_224", attn_layer=SkyformerAttention)

A core is a module without weights that holds the settings of one attention and maps query, key and value to the output;
a layer adds projections with the names and the constructor of timm's Attention, so that weights load either way.
timm's `attn_layer` wants a class. One with other settings is two lines:

    class Sky64(SkyformerAttention):
        __init__ = functools.partialmethod(SkyformerAttention.__init__, num_landmarks=64)
"""

import inspect
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

__all__ = ["AttentionCore", "AttentionLayer"]


class AttentionCore(nn.Module):
    """The settings of an attention, and the attention itself: (…, heads, n, p) → (…, heads, n, c).

    `settings` are the keyword arguments that build it again.
    """

    drops_weights: ClassVar[bool] = True
    """Whether it has weights of which dropout could drop some."""
    takes_bias: ClassVar[bool] = True
    """Whether each pair of tokens may have a number of its own added to its score: a relative position bias."""

    takes_pair_masks: ClassVar[bool] = True
    """Whether each pair of tokens may be masked by a number added to its logit."""

    def __init__(self, **settings: Any) -> None:
        super().__init__()
        if settings:
            raise TypeError(f"{type(self).__name__} has no settings {sorted(settings)}")

    @classmethod
    def setting_names(cls) -> tuple[str, ...]:
        """The names of `settings`, as its constructor has them."""
        beside = ("self", "settings", "num_heads", "device", "dtype")
        return tuple(name for name in inspect.signature(cls.__init__).parameters if name not in beside)

    @property
    def settings(self) -> dict[str, Any]:
        return {}

    def with_bias(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        bias: Tensor,
        keep: Tensor | None = None,
        dropout_p: float = 0.0,
    ) -> Tensor:
        """Attention with `bias` (…, n, m) added to the scores of those pairs that `keep` names."""
        mask = bias if keep is None else bias.masked_fill(~keep, -torch.inf)
        return self(query, key, value, mask.to(query.dtype), dropout_p)

    def extra_repr(self) -> str:
        return ", ".join(f"{name}={value!r}" for name, value in self.settings.items())


class AttentionLayer(nn.Module):
    """Multi-head self-attention with timm's constructor, parameter names and forward; settings are keywords."""

    core_class: ClassVar[type[AttentionCore]]

    def __init__(
        self,
        dim: int,
        num_heads: int = 8,
        attn_head_dim: int | None = None,
        dim_out: int | None = None,
        qkv_bias: bool = False,
        qk_norm: bool = False,
        scale_norm: bool = False,
        proj_bias: bool = True,
        gated: bool = False,
        attn_drop: float = 0.0,
        proj_drop: float = 0.0,
        norm_layer: type[nn.Module] | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **settings: Any,
    ) -> None:
        super().__init__()
        if unknown := sorted(settings.keys() - self.core_class.setting_names()):
            has = ", ".join(self.core_class.setting_names()) or "none"
            raise TypeError(f"{type(self).__name__} has no argument {unknown[0]!r}; its settings are: {has}")
        if attn_head_dim is None and dim % num_heads:
            raise ValueError(f"dim={dim} does not divide among num_heads={num_heads}; or give attn_head_dim")
        if (qk_norm or scale_norm) and norm_layer is None:
            raise ValueError("qk_norm and scale_norm need a norm_layer, e.g. norm_layer=nn.LayerNorm")
        if attn_drop > 0 and not self.core_class.drops_weights:
            raise ValueError(
                f"{type(self).__name__} never has the attention weights that attn_drop={attn_drop} would drop; use "
                "proj_drop, on its output"
            )
        like: dict[str, Any] = {"device": device, "dtype": dtype}
        self.num_heads, self.head_dim = num_heads, attn_head_dim or dim // num_heads
        self.attn_dim = num_heads * self.head_dim
        self.qkv = nn.Linear(dim, 3 * self.attn_dim, bias=qkv_bias, **like)
        self.q_norm = norm_layer(self.head_dim, **like) if qk_norm and norm_layer else nn.Identity()
        self.k_norm = norm_layer(self.head_dim, **like) if qk_norm and norm_layer else nn.Identity()
        self.attn_drop = nn.Dropout(attn_drop)
        self.norm = norm_layer(self.attn_dim, **like) if scale_norm and norm_layer else nn.Identity()
        self.gate = nn.Linear(dim, self.attn_dim, bias=qkv_bias, **like) if gated else None
        self.proj = nn.Linear(self.attn_dim, dim_out or dim, bias=proj_bias, **like)
        self.proj_drop = nn.Dropout(proj_drop)
        self.core = self._make_core(settings, like)

    def _make_core(self, settings: dict[str, Any], like: dict[str, Any]) -> AttentionCore:
        return self.core_class(**settings)

    def forward(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        b, n, _ = x.shape
        q, k, v = self.qkv(x).reshape(b, n, 3, self.num_heads, self.head_dim).permute(2, 0, 3, 1, 4).unbind(0)
        dropout = self.attn_drop.p if self.training else 0.0
        y = self.core(self.q_norm(q), self.k_norm(k), v, attn_mask, dropout, is_causal)
        y = self.norm(y.transpose(1, 2).reshape(b, n, self.attn_dim))
        y = y if self.gate is None else y * self.gate(x).sigmoid()
        return self.proj_drop(self.proj(y))
