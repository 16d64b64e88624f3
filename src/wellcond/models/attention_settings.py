"""How the blocks of a model attend, where that is in one of our ways.

attention_of(model)                       # {"blocks.3": AttentionSettings(name="skyformer", settings={…})}
built_attention(model)                    # those among them that `attn_layer=` built, and nothing replaced
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from wellcond.attention import ATTENTIONS, AttentionCore, AttentionLayer
from wellcond.models.attending import Replaced
from wellcond.models.hf_attention import is_asked
from wellcond.models.sites import Block, find_blocks

__all__ = [
    "AttentionSettings",
    "any_replaced",
    "attention_module",
    "attention_of",
    "built_attention",
    "core_of",
    "in_words",
]


@dataclass(frozen=True, kw_only=True)
class AttentionSettings:
    """How one block attends."""

    name: str
    """`softmax`, `linear`, `kernelized`, `skyformer` or `nystrom`."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """All its settings, those left at their defaults too."""


def attention_of(model: nn.Module) -> dict[str, AttentionSettings]:
    """How the blocks attend whose attention was replaced, or built as one of ours by `attn_layer=`: {"blocks.3":
    AttentionSettings(name="skyformer", …)}.

    Those of a Hugging Face model are not among them once its `set_attn_implementation` has chosen another attention:
    then they attend like that. `replace_attention` again puts ours back.
    """
    replaced = any_replaced(model)
    if not replaced and not any(isinstance(module, AttentionLayer) for module in model.modules()):
        return {}
    try:
        blocks = find_blocks(model)
    except ValueError:
        if replaced:
            raise
        return {}  # a model of somebody's own, whose blocks have no names for us
    cores = {block.name: _attending_core(block) for block in blocks}
    return {name: how for name, core in cores.items() if (how := _settings_of(core)) is not None}


def built_attention(model: nn.Module) -> dict[str, AttentionSettings]:
    """Those of `attention_of` that the model was built with, which nothing can restore."""
    present = attention_of(model)
    blocks = [block for block in find_blocks(model) if block.name in present] if present else []
    return {block.name: present[block.name] for block in blocks if isinstance(attention_module(block), AttentionLayer)}


def attention_module(block: Block) -> nn.Module:
    if block.attention is None:
        raise ValueError(f"{block.name} ({type(block.module).__name__}) has no single module that attends")
    return block.module.get_submodule(block.attention)


def core_of(block: Block) -> AttentionCore | None:
    """What was put in the place of this block's attention, whether or not it is asked to attend."""
    module = None if block.attention is None else attention_module(block)
    return module.attention_core if isinstance(module, Replaced) else None


def _attending_core(block: Block) -> AttentionCore | None:
    """What attends in this block, if it is one of ours."""
    module = None if block.attention is None else attention_module(block)
    if isinstance(module, AttentionLayer):
        return module.core
    return module.attention_core if isinstance(module, Replaced) and is_asked(module) else None


def _settings_of(core: AttentionCore | None) -> AttentionSettings | None:
    """None for a core of somebody's own, which has no name."""
    if core is None:
        return None
    names = [name for name, kind in ATTENTIONS.items() if type(core) is kind.core]
    return AttentionSettings(name=names[0], settings=core.settings) if names else None


def in_words(how: AttentionSettings) -> str:
    settings = ", ".join(f"{name}={value!r}" for name, value in how.settings.items())
    return f"{how.name}({settings})"


def any_replaced(model: nn.Module) -> bool:
    return any(isinstance(module, Replaced) for module in model.modules())
