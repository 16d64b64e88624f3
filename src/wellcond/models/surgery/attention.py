"""Replace the attention of a model's blocks, in place, and restore the model's own.

    wellcond.replace_attention(model, "skyformer", num_landmarks=128)     # every block
    wellcond.attention_of(model)                                          # {'blocks.0': AttentionSettings(…), …}
    wellcond.restore_attention(model)                                     # exactly the original model
    with wellcond.replace_attention(model, "kernelized", blocks="blocks.1*"):     # only inside
        model(images)

The class of the attention module is swapped for a subclass whose forward computes another attention; in Hugging Face
models the module's own forward calls it. Everything else is preserved: the parameters and their names, hooks,
optimisers, deepcopy and pickle.
"""

import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from torch import nn

from wellcond.attention import ATTENTIONS, AttentionCore, AttentionLayer, find_attention
from wellcond.models.families.forwards import Replaced, plain_attention_class, replaced_class
from wellcond.models.sites import Block, Which, find_blocks, select_blocks
from wellcond.models.surgery.swap import Undoable, class_was_given, forget_compiled_code
from wellcond.words import meant

__all__ = [
    "AttentionChange",
    "AttentionSettings",
    "attention_of",
    "built_attention",
    "plan_attention",
    "put_attention",
    "replace_attention",
    "restore_attention",
]

Plan = dict[nn.Module, AttentionCore | None]  # attention module → the attention to put there; None for its own


@dataclass(frozen=True, kw_only=True)
class AttentionSettings:
    """The attention of one block."""

    name: str
    """`softmax`, `linear`, `kernelized`, `skyformer`, `nystrom`, or the name of another registered attention."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """All its settings, including those left at their defaults."""


@dataclass(frozen=True, kw_only=True)
class AttentionChange(Undoable):
    """What `replace_attention` or `restore_attention` changed; `undo`, or leaving its `with` block, reverts that."""

    blocks: tuple[str, ...]
    """The blocks whose attention was changed."""
    _model: nn.Module = field(repr=False)
    _before: Mapping[nn.Module, AttentionCore | None] = field(default_factory=dict, repr=False)

    def undo(self) -> None:
        """Restore the attention that the changed blocks had before."""
        plan = dict(self._before)
        _check_classes(plan)
        put_attention(self._model, plan)


def replace_attention(model: nn.Module, name: str, *, blocks: Which = None, **settings: Any) -> AttentionChange:
    """Replace the attention of the model's blocks, in place, by softmax, linear, kernelized, skyformer, nystrom, or
    another registered attention.

    `settings` are those of the attention, e.g. `num_landmarks=64`. `blocks` is a name ("blocks.3"), an fnmatch pattern,
    an index, several of these, or None for all. Projections, their weights, norms and rotary positions are kept. Parts
    that the new attention cannot use are dropped with a warning (CaiT's talking heads, dropout of attention weights) or
    refused (by methods with landmarks: the relative position bias of Swin and BEiT, and causal models). Attention that
    was replaced before is replaced again. Wrapped models are changed inside; a compiled model recompiles.
    A Hugging Face model gets a copy of its config, which other models may share.

    Returns a record of the change; in `with replace_attention(…):` the change is reverted at the end.

    Raises ValueError, before anything is changed, if a block cannot use this attention.
    """
    chosen = select_blocks(_blocks_of(model), blocks)
    wanted = AttentionSettings(name=name, settings=check_settings(name, settings))
    plan = _plan(model, ((block, wanted) for block in chosen))
    _warn(plan)
    return _change(model, chosen, plan)


def restore_attention(model: nn.Module, *, blocks: Which = None) -> AttentionChange:
    """Restore the model's own attention, in place; `blocks` as for `replace_attention`.

    Returns a record of the change; in `with restore_attention(…):` the attention is replaced again at the end.
    """
    if blocks is None and not _any_replaced(model):
        return AttentionChange(blocks=(), _model=model)
    chosen = [block for block in select_blocks(find_blocks(model), blocks) if _core_of(block) is not None]
    plan: Plan = {_attention_module(block): None for block in chosen}
    _check_classes(plan)
    return _change(model, chosen, plan)


def attention_of(model: nn.Module) -> dict[str, AttentionSettings]:
    """Return the attention of each block whose attention was replaced, or built as one of ours with `attn_layer=`:
    {"blocks.3": AttentionSettings(name="skyformer", …)}.

    Blocks of a Hugging Face model are left out once its `set_attn_implementation` has selected another attention, which
    is then in use; call `replace_attention` again to bring ours back.
    """
    replaced = _any_replaced(model)
    if not replaced and not any(isinstance(module, AttentionLayer) for module in model.modules()):
        return {}
    try:
        blocks = find_blocks(model)
    except ValueError:
        if replaced:
            raise
        return {}  # an unknown model, whose blocks we cannot name
    cores = {block.name: _attending_core(block) for block in blocks}
    return {name: how for name, core in cores.items() if (how := _settings_of(core)) is not None}


def built_attention(model: nn.Module) -> dict[str, AttentionSettings]:
    """Return the entries of `attention_of` that the model was built with, so that there is nothing to restore."""
    present = attention_of(model)
    blocks = [block for block in find_blocks(model) if block.name in present] if present else []
    return {block.name: present[block.name] for block in blocks if isinstance(_attention_module(block), AttentionLayer)}


def plan_attention(model: nn.Module, wanted: Mapping[str, AttentionSettings]) -> Plan:
    """Return what `put_attention` must do to give exactly these blocks these attentions; ValueError if impossible."""
    if not wanted and not _any_replaced(model):
        return {}
    blocks = {block.name: block for block in find_blocks(model)}
    if unknown := sorted(wanted.keys() - blocks.keys()):
        raise ValueError(f"the model has no block {unknown[0]}; its blocks are {', '.join(list(blocks)[:4])}, …")
    present, built = attention_of(model), built_attention(model)
    for name in sorted(wanted.keys() & built.keys()):
        if built[name] != wanted[name]:
            raise ValueError(
                f"{name} was built with {_in_words(built[name])}, and not with {_in_words(wanted[name])}; build the "
                "model with that attention, or without attn_layer="
            )
    plan = _plan(model, ((blocks[name], how) for name, how in wanted.items() if present.get(name) != how))
    back: Plan = {
        _attention_module(b): None for name, b in blocks.items() if name not in wanted and _core_of(b) is not None
    }
    _check_classes(back)
    return plan | back


def put_attention(model: nn.Module, plan: Plan) -> None:
    """Swap the classes as planned."""
    swapped: dict[type[Replaced], list[nn.Module]] = {}
    left = [module for module in model.modules() if isinstance(module, Replaced) and not module.is_asked()]
    plan = dict.fromkeys(left) | plan  # restore modules that were switched off, or the swap would switch them on again
    for module, core in plan.items():
        made = _made(module)
        if made is not None:
            swapped.setdefault(made, []).append(module)
        if core is not None:
            module.__class__ = cast(Any, made)
            module.attention_core = core.train(module.training)
        elif isinstance(module, Replaced):
            module.__class__ = module._plain_class
            del module.attention_core
    for made, modules in swapped.items():
        made.after_swap(modules, model)
    if plan:
        forget_compiled_code()


def _made(module: nn.Module) -> type[Replaced] | None:
    """Return the module's class with a replaceable attention; None if no such forward is known."""
    return cast("type[Replaced] | None", replaced_class(plain_attention_class(module)))


def _blocks_of(model: nn.Module) -> list[Block]:
    """Return the model's blocks; if none are known, raise an error that says how else to replace the attention."""
    if not isinstance(model, nn.Module):
        raise TypeError(f'the model comes first: replace_attention(model, "skyformer"); got {type(model).__name__}')
    try:
        return find_blocks(model)
    except ValueError as error:
        raise ValueError(
            f"{type(model).__name__} has no blocks whose attention replace_attention could replace: docs/attention.md "
            "names the models of timm and Hugging Face that it knows. In another one put a module of "
            "wellcond.attention where it attends (SkyformerAttention(dim, num_heads)), or call one of its functions as "
            "you would scaled_dot_product_attention; or teach wellcond the model with register_family "
            "(docs/families.md)"
        ) from error


def _plan(model: nn.Module, wanted: Iterable[tuple[Block, AttentionSettings]]) -> Plan:
    """Return the checked changes without making them."""
    plan: Plan = {}
    for block, how in wanted:
        core, module = find_attention(how.name).core(**how.settings), _attention_module(block)
        made = _replaceable(block, module)
        if why := made.refuses(module, core, model):
            raise ValueError(f"{block.name} cannot attend like {how.name}: {why}")
        plan[module] = core
    _check_classes(plan)
    return plan


def _replaceable(block: Block, module: nn.Module) -> type[Replaced]:
    kind = type(module).__name__
    if isinstance(module, AttentionLayer):
        raise ValueError(
            f"{block.name} was built with {kind}; build the model with another attn_layer, or without one, instead"
        )
    made = _made(module)
    if made is None or "forward" in vars(module):
        raise ValueError(
            f"the attention of {block.name}, a {kind}, has a forward that replace_attention does not know (its own, "
            "one replaced by a hook, or that of another version of its library). docs/attention.md names those it "
            "knows; some of timm's models can be built with attn_layer=wellcond.attention.SkyformerAttention, and "
            "wellcond.register_family teaches a forward of your own (docs/families.md)"
        )
    return made


def _check_classes(plan: Iterable[nn.Module]) -> None:
    """Raise ValueError for modules that would break if their class were swapped."""
    for module in plan:
        if class_was_given(module):
            raise ValueError(
                f"an attention's {type(module).__name__} was given that class by fully_shard, parametrize or the like: "
                "replace and restore attention before that, or on a model without it"
            )
        if isinstance(module, Replaced) and type(module) is not replaced_class(module._plain_class):
            raise ValueError(f"the class {type(module).__name__} was made from a replaced attention; restore that one")


def check_settings(name: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings completed with the defaults; ValueError for settings that the attention does not have."""
    kind = find_attention(name)
    known = kind.core().settings
    if unknown := sorted(settings.keys() - known.keys()):
        near = meant(unknown[0], known)
        raise ValueError(f"{name} attention has no setting {unknown[0]!r}{near} (it has {', '.join(known) or 'none'})")
    if settings.get("conv_kernel") is not None:
        raise ValueError(
            "conv_kernel has weights, which a model that exists lacks; build it with attn_layer=NystromAttention"
        )
    return kind.core(**settings).settings


def _change(model: nn.Module, blocks: Iterable[Block], plan: Plan) -> AttentionChange:
    before = {module: module.attention_core if isinstance(module, Replaced) else None for module in plan}
    put_attention(model, plan)
    return AttentionChange(blocks=tuple(block.name for block in blocks), _model=model, _before=before)


def _warn(plan: Plan) -> None:
    lost: dict[str, int] = {}
    for module, core in plan.items():
        made = _made(module)
        if made is None or core is None:
            continue
        rate = made.weight_dropout(module)
        if rate and not core.drops_weights:
            what = f"dropout of attention weights (p = {rate}), which it never makes; dropout of outputs stays"
            lost[what] = lost.get(what, 0) + 1
        if made.drops and not isinstance(module, Replaced):
            lost[made.drops] = lost.get(made.drops, 0) + 1
    for what, count in lost.items():
        warnings.warn(f"the replaced attention of {count} blocks goes without {what}", stacklevel=3)


def _attention_module(block: Block) -> nn.Module:
    if block.attention is None:
        raise ValueError(f"{block.name} ({type(block.module).__name__}) has no single module that attends")
    return block.module.get_submodule(block.attention)


def _core_of(block: Block) -> AttentionCore | None:
    """Return the replacement of this block's attention, whether or not it is in use; None if not replaced."""
    module = None if block.attention is None else _attention_module(block)
    return module.attention_core if isinstance(module, Replaced) else None


def _attending_core(block: Block) -> AttentionCore | None:
    """Return the attention in use in this block, if it is one of ours."""
    module = None if block.attention is None else _attention_module(block)
    if isinstance(module, AttentionLayer):
        return module.core
    return module.attention_core if isinstance(module, Replaced) and module.is_asked() else None


def _settings_of(core: AttentionCore | None) -> AttentionSettings | None:
    """Return the core's name and settings; None for an unregistered core, which has no name."""
    if core is None:
        return None
    names = [name for name, kind in ATTENTIONS.items() if type(core) is kind.core]
    return AttentionSettings(name=names[0], settings=core.settings) if names else None


def _in_words(how: AttentionSettings) -> str:
    settings = ", ".join(f"{name}={value!r}" for name, value in how.settings.items())
    return f"{how.name}({settings})"


def _any_replaced(model: nn.Module) -> bool:
    return any(isinstance(module, Replaced) for module in model.modules())
