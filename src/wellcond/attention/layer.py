"""The base of all attention modules: timm's projections around a core that attends.

    layer = SkyformerAttention(192, num_heads=3, qkv_bias=True, num_landmarks=64)
    layer(tokens)                                                        # (b, n, 192) → (b, n, 192)
    timm.create_model("vit_tiny_patch16_224", attn_layer=SkyformerAttention)

A core holds the settings of one attention and maps query, key and value to the output. A layer adds projections, with
the constructor and parameter names of timm's Attention, so that weights load either way. Both are derived from the
attention's function (registry.py). timm's `attn_layer` takes a class; one with other settings takes two lines:

    class Sky64(SkyformerAttention):
        __init__ = functools.partialmethod(SkyformerAttention.__init__, num_landmarks=64)
"""

import importlib
import inspect
import math
import operator
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

__all__ = ["AttentionCore", "AttentionLayer", "stored_fraction"]


class AttentionCore(nn.Module):
    """The settings of an attention, and the attention itself: (…, heads, n, p) → (…, heads, n, c).

    `register_attention` derives a core from a function, with that function's settings and defaults. Subclass it only if
    the module has to differ from the function, and pass the subclass to `register_attention(name, core=…)`. `settings`
    are the keyword arguments that build the core again.
    """

    name: ClassVar[str] = ""
    """The name it is registered under."""
    function: ClassVar[Callable[..., Tensor]]
    """The function it calls, with SDPA's arguments and the settings."""
    defaults: ClassVar[Mapping[str, Any]] = {}
    """The default of each setting. Those that a subclass declares override the function's, or are added to them."""
    drops_weights: ClassVar[bool] = True
    """Whether it has attention weights that dropout can act on."""
    takes_bias: ClassVar[bool] = True
    """Whether a relative position bias can be added to the scores: a number for each pair of tokens."""
    takes_pair_masks: ClassVar[bool] = True
    """Whether a floating-point mask may differ from query to query."""
    softmax_over_keys: ClassVar[bool] = True
    """Whether the first softmax that it computes, if any, gives the attention weights, which a probe then measures."""

    def __init__(self, **settings: Any) -> None:
        super().__init__()
        if unknown := sorted(settings.keys() - self.defaults.keys()):
            has = ", ".join(self.defaults) or "none"
            raise TypeError(f"{type(self).__name__} has no settings {unknown}; its settings are: {has}")
        settings = {**self.defaults, **settings}
        self.check(**settings)
        for name, value in settings.items():
            _store(self, name, _like_default(name, value, self.defaults[name]))

    @classmethod
    def check(cls, **settings: Any) -> None:
        """Raise ValueError or TypeError for invalid values. It is called with all settings."""

    @classmethod
    def for_layer(cls, settings: Mapping[str, Any], *, num_heads: int, **factory: Any) -> Self:
        """Build the core of a layer. Override it if the core has weights, which need the heads, device and dtype."""
        return cls(**settings)

    @classmethod
    def setting_names(cls) -> tuple[str, ...]:
        """The names of the settings."""
        return tuple(cls.defaults)

    @property
    def settings(self) -> dict[str, Any]:
        """The settings by name: the keyword arguments that build the core again."""
        return {name: getattr(self, name) for name in self.defaults}

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
    ) -> Tensor:
        attend = type(self).function
        return attend(query, key, value, attn_mask, dropout_p, is_causal, scale, **self.settings)

    def with_bias(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        bias: Tensor,
        keep: Tensor | None = None,
        dropout_p: float = 0.0,
    ) -> Tensor:
        """Attend with `bias` (…, n, m) added to the scores; pairs for which `keep` is False are masked."""
        mask = bias if keep is None else bias.masked_fill(~keep, -torch.inf)
        return self(query, key, value, mask.to(query.dtype), dropout_p)

    def extra_repr(self) -> str:
        return ", ".join(f"{name}={value!r}" for name, value in self.settings.items())

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _by_name(self, "core") or super().__reduce_ex__(protocol)


def stored_fraction(name: str) -> property:
    """Return the property of a float setting, which `AttentionCore` stores as a ratio of two integers.

    torch.compile treats a module's integers as constants, but its floats as graph inputs.
    """

    def get(self: AttentionCore) -> Any:
        stored = getattr(self, f"_{name}")
        return stored[0] / stored[1] if isinstance(stored, tuple) else stored

    return property(get)


def _store(core: AttentionCore, name: str, value: Any) -> None:
    if isinstance(getattr(type(core), name, None), property):
        finite = isinstance(value, float) and math.isfinite(value)
        setattr(core, f"_{name}", value.as_integer_ratio() if finite else value)
    else:
        setattr(core, name, value)


def _like_default(name: str, value: Any, default: Any) -> Any:
    """Convert a value, NumPy's too, to the type of its default; raise TypeError if it is of another kind."""
    kind = type(default)
    if value is None or default is None or (isinstance(value, bool) and kind is bool):
        return value
    if isinstance(value, str) == (kind is str) and not isinstance(value, bool) and kind in (int, float, str):
        try:
            return operator.index(value) if kind is int else kind(value)
        except (TypeError, ValueError):
            pass
    raise TypeError(f"{name}={value!r} must be of type {kind.__name__}, as its default {default!r} is")


def _by_name(module: "AttentionCore | AttentionLayer", form: str) -> Any:
    """Return how to pickle a module whose class `register_attention` created: by the name it is registered under.

    None for any other class, which pickle can find on its own.
    """
    if "_derived" not in vars(type(module)):
        return None
    core = type(module) if isinstance(module, AttentionCore) else module.core_class
    home = inspect.unwrap(core.function).__module__
    return _make_again, (home, core.name, form), module.__getstate__()


def _make_again(home: str, name: str, form: str) -> nn.Module:
    importlib.import_module(home)  # registers it, in a process that has not imported it yet
    from wellcond.attention.registry import find_attention

    cls = getattr(find_attention(name), form)
    return cls.__new__(cls)


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
                f"{type(self).__name__} never computes the attention weights that attn_drop={attn_drop} would drop; "
                "use proj_drop, on its output"
            )
        like: dict[str, Any] = {"device": device, "dtype": dtype}
        self.num_heads: int = num_heads
        self.head_dim: int = attn_head_dim or dim // num_heads
        self.attn_dim: int = num_heads * self.head_dim
        self.qkv: nn.Linear = nn.Linear(dim, 3 * self.attn_dim, bias=qkv_bias, **like)
        self.q_norm: nn.Module = norm_layer(self.head_dim, **like) if qk_norm and norm_layer else nn.Identity()
        self.k_norm: nn.Module = norm_layer(self.head_dim, **like) if qk_norm and norm_layer else nn.Identity()
        self.attn_drop: nn.Dropout = nn.Dropout(attn_drop)
        self.norm: nn.Module = norm_layer(self.attn_dim, **like) if scale_norm and norm_layer else nn.Identity()
        self.gate: nn.Linear | None = nn.Linear(dim, self.attn_dim, bias=qkv_bias, **like) if gated else None
        self.proj: nn.Linear = nn.Linear(self.attn_dim, dim_out or dim, bias=proj_bias, **like)
        self.proj_drop: nn.Dropout = nn.Dropout(proj_drop)
        self.core: AttentionCore = self.core_class.for_layer(settings, num_heads=num_heads, **like)

    def forward(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        b, n, _ = x.shape
        q, k, v = self.qkv(x).reshape(b, n, 3, self.num_heads, self.head_dim).permute(2, 0, 3, 1, 4).unbind(0)
        dropout = self.attn_drop.p if self.training else 0.0
        y = self.core(self.q_norm(q), self.k_norm(k), v, attn_mask, dropout, is_causal)
        y = self.norm(y.transpose(1, 2).reshape(b, n, self.attn_dim))
        y = y if self.gate is None else y * self.gate(x).sigmoid()
        return self.proj_drop(self.proj(y))

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _by_name(self, "layer") or super().__reduce_ex__(protocol)
