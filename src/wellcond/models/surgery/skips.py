"""Remove the skips of a model's blocks, in place, and restore them.

    wellcond.remove_skip(model, "sa")                       # every block: only the attention branch is passed on
    wellcond.skips_of(model)                                # {'blocks.0': ('sa',), 'blocks.1': ('sa',), …}
    wellcond.restore_skip(model)                            # exactly the original model
    with wellcond.remove_skip(model, "mlp", blocks="blocks.1*"):      # only inside
        model(images)

The class of the module that adds the skip is swapped for a subclass whose forward does not add it. Everything else is
preserved: the parameter names, hooks, optimisers that hold the parameters, deepcopy and pickle.
"""

import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from wellcond.models.families.forwards import Skipless, forward_is_known, plain_class, removed_skips, skipless_class
from wellcond.models.sites import Block, Which, find_blocks, select_blocks
from wellcond.models.surgery.swap import Undoable, class_was_given, forget_compiled_code
from wellcond.words import SKIPS, meant, our_word

__all__ = ["SkipChange", "plan_skips", "put_skips", "remove_skip", "restore_skip", "skips_of"]

# If every block scales its branch by less than this, no signal is left without skips (CaiT starts at 1e-5).
TINY = 1e-2

Plan = dict[nn.Module, frozenset[str]]  # the module that adds skips → the skips it should leave out


@dataclass(frozen=True, kw_only=True)
class SkipChange(Undoable):
    """What `remove_skip` or `restore_skip` changed; `undo`, or leaving its `with` block, reverts that."""

    blocks: Mapping[str, tuple[str, ...]]
    """Block → the skips that were changed."""
    _flipped: tuple[tuple[nn.Module, str, bool], ...] = field(default=(), repr=False)
    _filled: tuple[tuple[nn.Parameter, Tensor, Tensor], ...] = field(default=(), repr=False)

    def undo(self) -> None:
        """Revert the changed skips, and the filled LayerScale values unless they have been trained since."""
        plan: Plan = {}
        for adder, skip, removed in self._flipped:
            _flip(plan, adder, skip, remove=not removed)
        put_skips(_checked(plan))
        with torch.no_grad():
            for parameter, before, filled in self._filled:
                if torch.equal(parameter, filled):
                    parameter.copy_(before)


def remove_skip(model: nn.Module, skip: str, *, blocks: Which = None, layer_scale: float | None = None) -> SkipChange:
    """Remove the skip around the attention ("sa") or the MLP ("mlp") of the blocks, in place.

    "attention", "attn", "ffn" and other common names for the two are accepted.
    The result is exactly the branch, bit for bit: with its LayerScale, and never dropped by drop path. `blocks` is a
    name ("blocks.3"), an fnmatch pattern, an index, several of these, or None for all. Wrapped models (DDP,
    torch.compile) are changed inside; a compiled model recompiles. `layer_scale=1.0` sets the parameters that scale the
    branches (LayerScale, or a norm at the branch's end) to that value: if they start near zero, as in CaiT, no signal
    gets through.

    Returns a record of the change; in `with remove_skip(…):` the change is reverted at the end.

    Raises ValueError, before anything is changed, if a block has no such skip.
    """
    skip = _skip_named(skip)
    chosen = select_blocks(find_blocks(model), blocks)
    plan, flipped = _plan(chosen, [skip], remove=True)
    scales = {block.name: scale for block in chosen if (scale := _scale(block, skip)) is not None}
    if layer_scale is None:
        _warn_of_tiny(scales, skip, [name for name in flipped if name in scales])
    elif not scales:
        raise ValueError(f"layer_scale={layer_scale}: nothing scales the {skip} branches here; leave it out")
    put_skips(plan)
    filled = [] if layer_scale is None else [_fill(scale, layer_scale) for scale in scales.values()]
    return _change(flipped, filled)


def restore_skip(model: nn.Module, skip: str | None = None, *, blocks: Which = None) -> SkipChange:
    """Restore removed skips, in place: all of them, or only those around the attention ("sa") or the MLP ("mlp").

    `blocks` as for `remove_skip`. Filled LayerScale values stay. Returns a record of the change; in
    `with restore_skip(…):` the skips are removed again at the end.
    """
    skip = None if skip is None else _skip_named(skip)
    if blocks is None and not _any_removed(model):
        return SkipChange(blocks={})
    chosen = select_blocks(find_blocks(model), blocks)
    plan, flipped = _plan(chosen, SKIPS if skip is None else [skip], remove=False)
    put_skips(plan)
    return _change(flipped)


def skips_of(model: nn.Module) -> dict[str, tuple[str, ...]]:
    """Return the removed skips by block, {"blocks.3": ("sa",)}; empty if the model has all its skips."""
    if not _any_removed(model):
        return {}
    removed = {block.name: tuple(s for s in SKIPS if s in _removed(block)) for block in find_blocks(model)}
    return {name: skips for name, skips in removed.items() if skips}


def plan_skips(model: nn.Module, wanted: Mapping[str, Iterable[str]]) -> Plan:
    """Return what `put_skips` must do so that exactly these skips are removed; ValueError if that is impossible."""
    if not wanted and not _any_removed(model):
        return {}
    blocks = {block.name: block for block in find_blocks(model)}
    if unknown := sorted(wanted.keys() - blocks.keys()):
        raise ValueError(f"the model has no block {unknown[0]}; its blocks are {', '.join(list(blocks)[:4])}, …")
    plan: Plan = {}
    for name, block in blocks.items():
        skips = {_skip_named(skip) for skip in wanted.get(name, ())}
        for remove, names in ((True, skips), (False, set(SKIPS) - skips)):
            plan |= _plan([block], names, remove=remove, plan=plan)[0]
    return plan


def put_skips(plan: Plan) -> None:
    """Swap the classes as planned."""
    for adder, removed in plan.items():
        adder.__class__ = skipless_class(plain_class(adder), removed)
    if plan:
        forget_compiled_code()


def _plan(
    blocks: Iterable[Block], skips: Iterable[str], *, remove: bool, plan: Plan | None = None
) -> tuple[Plan, dict[str, list[tuple[nn.Module, str, bool]]]]:
    """Return the checked changes without making them, and the skips that they flip in each block."""
    plan = dict(plan or {})
    flipped: dict[str, list[tuple[nn.Module, str, bool]]] = {}
    for block in blocks:
        for skip in skips:
            if skip not in block.kind.skips:
                if remove:
                    raise ValueError(f"cannot remove the {skip} skip of {block.name}: {block.kind.why_no_skip}")
                continue
            adder = block.module.get_submodule(block.kind.skips[skip])
            if _flip(plan, adder, skip, remove=remove):
                flipped.setdefault(block.name, []).append((adder, skip, remove))
    return _checked(plan), flipped


def _flip(plan: Plan, adder: nn.Module, skip: str, *, remove: bool) -> bool:
    before = plan.get(adder, removed_skips(adder))
    if (skip in before) == remove:
        return False
    plan[adder] = before ^ {skip}
    return True


def _checked(plan: Plan) -> Plan:
    """Return the plan; raise ValueError if swapping a class would break a module or not change its forward."""
    for adder in plan:
        kind = type(adder).__name__
        if class_was_given(adder):
            raise ValueError(
                f"a block's {kind} was given that class by fully_shard, parametrize or the like: "
                "remove and restore skips before that, or on a model without it"
            )
        if type(adder) is not skipless_class(plain_class(adder), removed_skips(adder)):
            raise ValueError(f"the class {kind} was made from a block without skips; restore its skips on that block")
        if not forward_is_known(adder):
            raise ValueError(
                f"{kind} has a forward that remove_skip does not know: its own, one replaced by a hook, or that of "
                "another version of its library (transformers before 5). Upgrade that, or give "
                "wellcond.register_family a forward for it (skipless=, docs/families.md)"
            )
    return plan


def _removed(block: Block) -> set[str]:
    return {s for s, path in block.kind.skips.items() if s in removed_skips(block.module.get_submodule(path))}


def _any_removed(model: nn.Module) -> bool:
    return any(isinstance(module, Skipless) for module in model.modules())


def _skip_named(name: str) -> str:
    skip = our_word(name) if isinstance(name, str) else name
    if skip not in SKIPS:
        near = meant(str(name), SKIPS)
        raise ValueError(f'a skip is "sa" (around the attention) or "mlp" (around the MLP), not {name!r}{near}')
    return skip


def _change(
    flipped: Mapping[str, list[tuple[nn.Module, str, bool]]],
    filled: Iterable[tuple[nn.Parameter, Tensor, Tensor]] = (),
) -> SkipChange:
    return SkipChange(
        blocks={name: tuple(skip for _, skip, _ in flips) for name, flips in flipped.items()},
        _flipped=tuple(flip for flips in flipped.values() for flip in flips),
        _filled=tuple(filled),
    )


def _scale(block: Block, skip: str) -> nn.Parameter | None:
    """Return the parameter that scales this branch, if the block was built with one."""
    if skip not in block.kind.scales:
        return None
    path, _, name = block.kind.scales[skip].rpartition(".")
    scale = getattr(block.module.get_submodule(path), name, None)
    return scale if isinstance(scale, nn.Parameter) else None


def _fill(scale: nn.Parameter, value: float) -> tuple[nn.Parameter, Tensor, Tensor]:
    before = scale.detach().clone()
    with torch.no_grad():
        scale.fill_(value)
    return scale, before, scale.detach().clone()


def _largest(scale: nn.Parameter) -> float:
    whole = getattr(scale, "full_tensor", scale.detach)()  # a DTensor if fully_shard sharded only the root
    return float(whole.detach().abs().max())


def _warn_of_tiny(scales: Mapping[str, nn.Parameter], skip: str, names: list[str]) -> None:
    largest = {name: _largest(scales[name]) for name in names if not scales[name].is_meta}
    if tiny := {name: value for name, value in largest.items() if value < TINY}:
        name, value = next(iter(tiny.items()))
        warnings.warn(
            f"{len(tiny)} blocks scale their {skip} branch by {value:.0e} or so ({name} first), and without the skip "
            f'next to no signal is left; remove_skip(model, "{skip}", layer_scale=1.0) sets these scales to 1',
            stacklevel=3,
        )
