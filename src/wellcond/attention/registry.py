"""The attentions by name, and the decorator that adds one.

    @register_attention("cosine")
    def cosine_attention(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, *, tau=10.0):
        ...

    kind = find_attention("cosine")
    kind.function(query, key, value, tau=5.0)           # called like scaled_dot_product_attention
    kind.layer(192, num_heads=3, tau=5.0)               # built like timm's Attention
    kind.core(tau=5.0)                                  # the settings and the attention, without projections

Everything follows from the function's signature. Its keyword-only arguments that are numbers, strings or booleans are
the settings: those of the module, of `replace_attention(model, "cosine", tau=5.0)`, and those that `save` and `load`
keep. `wellcond bench attention` times every registered attention. SDPA's arguments after `value` may be left out: the
module then raises if they are needed.
"""

import functools
import inspect
import math
import sys
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar, Union, get_args, get_origin

from torch import Tensor

from wellcond.attention.layer import AttentionCore, AttentionLayer, stored_fraction
from wellcond.words import meant

__all__ = ["ATTENTIONS", "AttentionKind", "find_attention", "register_attention"]

SDPA = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale")
Function = TypeVar("Function", bound=Callable[..., Tensor])


@dataclass(frozen=True, kw_only=True)
class AttentionKind:
    """One attention in its three forms."""

    name: str
    function: Callable[..., Tensor]
    """Has the signature of scaled_dot_product_attention; settings are keywords."""
    layer: type[AttentionLayer]
    """Has the constructor and the forward of timm's Attention; settings are keywords."""

    @property
    def core(self) -> type[AttentionCore]:
        """What a layer holds and `replace_attention` puts into a model: settings and attention, without projections."""
        return self.layer.core_class


ATTENTIONS: dict[str, AttentionKind] = {}
"""Every attention by its name; `register_attention` adds to it."""


def register_attention(
    name: str, *, pairs: bool = True, core: type[AttentionCore] | None = None
) -> Callable[[Function], Function]:
    """Register the decorated function as an attention; the function itself is returned unchanged.

    Args:
        name: its name in `replace_attention`, in a recipe's `attention=` and in weights files.
        pairs: False for a method without a weight for each pair of tokens (landmarks, random features): it then has
            nothing for dropout to act on, and takes no relative position bias and only masks of keys.
        core: a subclass of AttentionCore, if the module has to differ from the function: other defaults, different
            behaviour in training and evaluation, weights of its own.

    Raises ValueError for a name that is taken, TypeError for a signature or a core that does not fit.
    """

    if not isinstance(name, str):
        raise TypeError('write @register_attention("name"), with the name of the attention in brackets')
    if core is not None and not pairs:
        raise TypeError(
            f"attention {name!r}: pairs=False is for a derived core; set the flags of {core.__name__} instead"
        )
    if core is not None and core.name not in ("", name):
        raise TypeError(
            f"attention {name!r}: {core.__name__} is the core of {core.name!r} already; subclass AttentionCore"
        )

    def register(function: Function) -> Function:
        defaults, missing = _read_signature(name, function)
        _check_name(name, function)
        whole = _refusing(name, function, missing) if missing else function
        title = "".join(part.capitalize() for part in name.replace("-", "_").split("_"))
        if core is None:
            flags: dict[str, Any] = {"drops_weights": pairs and "dropout_p" not in missing}
            flags |= dict.fromkeys(("takes_bias", "takes_pair_masks"), pairs and "attn_mask" not in missing)
            kind = _derive(f"{title}Core", AttentionCore, function, f"`{function.__name__}` inside a module.", flags)
        else:
            kind = core
        _complete(kind, name, whole, defaults)
        about = f"Multi-head {name} attention, built like timm's Attention; settings: {_listed(kind.defaults)}."
        layer = _derive(f"{title}Attention", AttentionLayer, function, about, {"core_class": kind})
        ATTENTIONS[name] = AttentionKind(name=name, function=whole, layer=layer)
        return function

    return register


def find_attention(name: str) -> AttentionKind:
    """Return the attention of this name; raise ValueError, listing the names there are, for an unknown one."""
    if name not in ATTENTIONS:
        raise ValueError(
            f"there is no attention {name!r}{meant(name, ATTENTIONS)} (there are {', '.join(sorted(ATTENTIONS))}; for "
            "another one, import the module that registers it)"
        )
    return ATTENTIONS[name]


def _read_signature(name: str, function: Callable[..., Tensor]) -> tuple[dict[str, Any], frozenset[str]]:
    """Return the settings with their defaults, and which of SDPA's arguments the function leaves out."""
    try:
        parameters = inspect.signature(function, eval_str=True).parameters
    except NameError:  # an annotation that only type checkers can resolve
        parameters = inspect.signature(function).parameters
    positional = tuple(p.name for p in parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD)
    if positional[:3] != SDPA[:3] or positional != tuple(arg for arg in SDPA if arg in positional):
        raise TypeError(
            f"attention {name!r}: {function.__name__}({', '.join(positional)}) must take the arguments of "
            f"scaled_dot_product_attention, in its order: {', '.join(SDPA)}, of which those after value may be left "
            "out. Settings follow as keyword-only arguments: *, num_features=64"
        )
    defaults = {}
    for parameter in parameters.values():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            raise TypeError(
                f"attention {name!r}: write the settings out, each with its default, in place of {parameter}"
            )
        if parameter.kind is parameter.KEYWORD_ONLY:
            if parameter.default is parameter.empty:
                raise TypeError(f"attention {name!r}: its setting {parameter.name!r} needs a default")
            if _is_setting(parameter):
                defaults[parameter.name] = parameter.default
    return defaults, frozenset(SDPA) - frozenset(positional)


def _is_setting(parameter: inspect.Parameter) -> bool:
    """Whether its values can be stored in a file: tensors and generators are arguments of one call, not settings."""
    plain = (bool, int, float, str)
    if isinstance(parameter.default, plain):
        return True
    union = get_origin(parameter.annotation) in (Union, types.UnionType)
    kinds = get_args(parameter.annotation) if union else (parameter.annotation,)
    return any(kind in plain for kind in kinds)


def _check_name(name: str, function: Callable[..., Tensor]) -> None:
    if not name.replace("-", "_").isidentifier():
        raise ValueError(f"{name!r} cannot name an attention: use letters, digits, - and _")
    taken = ATTENTIONS.get(name)
    known = taken and inspect.unwrap(taken.function)
    if known and (known.__module__, known.__qualname__) != (function.__module__, function.__qualname__):
        raise ValueError(
            f"there is an attention {name!r} already, {known.__module__}.{known.__qualname__}; choose another name"
        )


def _refusing(name: str, function: Callable[..., Tensor], missing: frozenset[str]) -> Callable[..., Tensor]:
    """Wrap `function` to accept all of SDPA's arguments, and to raise if one that it lacks is used."""

    @functools.wraps(function)
    def attend(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        **settings: Any,
    ) -> Tensor:
        usual = scale is None or math.isclose(scale, query.shape[-1] ** -0.5)  # models pass 1/√p
        given = {"attn_mask": attn_mask, "dropout_p": dropout_p, "is_causal": is_causal, "scale": scale}
        asked = {"attn_mask": attn_mask is not None, "dropout_p": dropout_p > 0, "is_causal": is_causal}
        for argument in ("attn_mask", "dropout_p", "is_causal", "scale"):
            if argument in missing and asked.get(argument, not usual):
                raise ValueError(f"{name} attention takes no {argument}: its function has no such argument")
        return function(query, key, value, **{k: v for k, v in given.items() if k not in missing}, **settings)

    return attend


def _derive(
    title: str, base: type[Any], function: Callable[..., Tensor], doc: str, attributes: Mapping[str, Any]
) -> type[Any]:
    body = {"__doc__": doc, "__module__": function.__module__, "__qualname__": title, "_derived": True}
    made = type(title, (base,), {**body, **attributes})
    # Put it beside its function, where pickle looks for it: timm's models store the arguments they were built with.
    home = sys.modules.get(function.__module__)
    if home is not None and "_derived" in getattr(getattr(home, title, made), "__dict__", {}):
        setattr(home, title, made)
    return made


def _complete(core: type[AttentionCore], name: str, function: Callable[..., Tensor], defaults: dict[str, Any]) -> None:
    """Set a core's function, and add the function's settings to those it declares itself."""
    core.name, core.function = name, staticmethod(function)
    core.defaults = types.MappingProxyType({**defaults, **core.defaults})
    for setting, default in core.defaults.items():
        if isinstance(default, float):
            setattr(core, setting, stored_fraction(setting))


def _listed(settings: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={default!r}" for name, default in settings.items()) or "none"
