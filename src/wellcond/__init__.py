"""wellcond measures and improves the conditioning of transformers.

    import timm, wellcond
    model = wellcond.gray(timm.create_model("vit_base_patch16_224"), "dct", epsilon=0.95)

Names are imported on first use, so that `import wellcond` is quick and the report works without torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0.dev0"

_HOME = {
    "wellcond.numerics": (
        "Conditioning", "condition_number", "dct", "dct2", "effective_rank", "idct", "idct2",
        "jacobian_spectrum", "measure_conditioning", "singular_values", "spectral_power", "stable_rank",
    ),
    "wellcond.attention": ("register_attention",),
    "wellcond.data": ("register_source",),
    "wellcond.graying": ("TokenGraying", "gray_tokens"),
    "wellcond.models": (
        "attention_of", "attention_weights", "gray", "graying_of", "is_grayed", "load", "register_blocks",
        "register_family", "remove_skip", "replace_attention", "restore_attention", "restore_skip", "save",
        "set_attention_weights", "sites", "skips_of", "ungray",
    ),
    "wellcond.probe": ("Probe",),
    "wellcond.stability": ("instability_ratio", "instability_score", "instability_scores"),
    "wellcond.theory": ("leverage_scores", "statistical_dimension"),
    "wellcond.train.tasks": ("register_task",),
    "wellcond.claims": ("register_claim",),
}  # fmt: skip
_WHERE = {name: module for module, names in _HOME.items() for name in names}

__all__ = ["__version__", *sorted(_WHERE)]  # pyright: ignore[reportUnsupportedDunderAll]

if TYPE_CHECKING:
    from wellcond.attention import register_attention as register_attention
    from wellcond.claims import register_claim as register_claim
    from wellcond.data import register_source as register_source
    from wellcond.graying import TokenGraying as TokenGraying
    from wellcond.graying import gray_tokens as gray_tokens
    from wellcond.models import (
        attention_of,
        attention_weights,
        gray,
        graying_of,
        is_grayed,
        load,
        register_blocks,
        register_family,
        remove_skip,
        replace_attention,
        restore_attention,
        restore_skip,
        save,
        set_attention_weights,
        sites,
        skips_of,
        ungray,
    )
    from wellcond.numerics import (
        Conditioning,
        condition_number,
        dct,
        dct2,
        effective_rank,
        idct,
        idct2,
        jacobian_spectrum,
        measure_conditioning,
        singular_values,
        spectral_power,
        stable_rank,
    )
    from wellcond.probe import Probe
    from wellcond.stability import instability_ratio, instability_score, instability_scores
    from wellcond.theory import leverage_scores, statistical_dimension
    from wellcond.train.tasks import register_task as register_task


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'wellcond' has no attribute {name!r}")
    value = getattr(importlib.import_module(_WHERE[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_WHERE})
