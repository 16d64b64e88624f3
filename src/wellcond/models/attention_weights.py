"""Read and set the query, key, value and output weights of a block's attention, whatever its family.

    weights = attention_weights(model.blocks[0])            # copies; takes a block's module or a find_blocks result
    weights.value, weights.num_heads                        # (heads · p, d), as in nn.Linear: v = x Wᵀ + b
    weights.per_head("value")                               # (heads, p, d)
    identity = torch.eye(weights.value.shape[1])
    set_attention_weights(model.blocks[0], replace(weights, value=identity, output=identity))

Whatever else the module has is not included: norms of queries and keys, rotations, position biases, gates.

Notation: d is the width of the block, p that of a head.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from wellcond.models.families.family import WeightPaths, attention_kind, block_kind
from wellcond.models.sites import Block

__all__ = ["AttentionWeights", "attention_weights", "set_attention_weights"]

NAMES = ("query", "key", "value", "output")


@dataclass(frozen=True, kw_only=True)
class AttentionWeights:
    """The weights of one attention, each (out, in) as in nn.Linear. A bias is None if the module has none."""

    query: Tensor
    """(heads · p, d)."""
    key: Tensor
    """(heads · p, d); with grouped queries, keys and values have fewer heads."""
    value: Tensor
    """(heads · p, d)."""
    output: Tensor
    """(d, heads · p)."""
    num_heads: int
    query_bias: Tensor | None = None
    key_bias: Tensor | None = None
    value_bias: Tensor | None = None
    output_bias: Tensor | None = None

    @property
    def head_dim(self) -> int:
        """The width p of one head's queries and keys."""
        return self.query.shape[0] // self.num_heads

    def per_head(self, name: str) -> Tensor:
        """Return the `query`, `key` or `value` weights as (heads, p, d), or the `output` weights as (heads, d, p)."""
        if name not in NAMES:
            raise ValueError(f"{name!r} names no weights of an attention; they are {', '.join(NAMES)}")
        weight: Tensor = getattr(self, name)
        if name == "output":
            return weight.unflatten(1, (self.num_heads, -1)).transpose(0, 1)
        heads = self.num_heads if name == "query" else self.key.shape[0] // self.head_dim
        return weight.unflatten(0, (heads, -1))


class _Slot(NamedTuple):
    """The location of one tensor: all rows of a parameter, or some of them if it holds several projections."""

    owner: nn.Module
    parameter: Tensor
    rows: slice


def attention_weights(block: Block | nn.Module) -> AttentionWeights:
    """Return copies of the weights of the block's attention, with its dtype and device and without gradients.

    Raises ValueError, saying why, if the block's attention has no such weights or wellcond does not know them.
    """
    slots, heads = _slots(block)
    found: dict[str, Any] = {name: slot.parameter.detach()[slot.rows].clone() for name, slot in slots.items()}
    return AttentionWeights(num_heads=heads, **found)


def set_attention_weights(block: Block | nn.Module, weights: AttentionWeights) -> None:
    """Write the weights into the block's parameters, in place, so that optimisers keep holding them.

    Raises ValueError, before anything is changed, for a shape that does not fit, a bias given although the module has
    none or left out although it has one, and parameters that cannot be written (sharded, parametrized, on the meta
    device).
    """
    slots, heads = _slots(block)
    if weights.num_heads != heads:
        raise ValueError(f"the block's attention has {heads} heads, and the weights were made for {weights.num_heads}")
    for name in (*NAMES, *(f"{name}_bias" for name in NAMES)):
        _check(name, slots.get(name), getattr(weights, name))
    with torch.no_grad():
        for name, slot in slots.items():
            slot.parameter[slot.rows].copy_(getattr(weights, name))


def _check(name: str, slot: _Slot | None, wanted: Tensor | None) -> None:
    if slot is None:
        if wanted is not None:
            raise ValueError(f"the block's attention has no {name} that could be set; leave it None")
        return
    shape = tuple(slot.parameter[slot.rows].shape)
    if wanted is None:
        raise ValueError(f"the block's attention has a {name} of shape {shape}; give zeros for none")
    if tuple(wanted.shape) != shape:
        raise ValueError(f"{name} is of shape {tuple(wanted.shape)}, and the block's of {shape}")
    if parametrize.is_parametrized(slot.owner):
        raise ValueError(f"the {name} of this attention is computed by torch's parametrize; set what it is made of")
    if slot.parameter.is_meta:
        raise ValueError(f"the {name} of this attention is on the meta device, without memory: to_empty it first")


def _slots(block: Block | nn.Module) -> tuple[dict[str, _Slot], int]:
    """Return the slots of the attention's tensors, by their names in AttentionWeights, and the number of heads."""
    module = block.module if isinstance(block, Block) else block
    what = f"{block.name} ({type(module).__name__})" if isinstance(block, Block) else type(module).__name__
    kind = block.kind if isinstance(block, Block) else block_kind(module)
    if kind is None:
        raise ValueError(f"{what} is no block that wellcond knows: give one of the model's blocks, as sites lists them")
    if kind.attention is None:
        raise ValueError(f"{what} has no single module that attends, and so no weights of its own to read or to set")
    attention = module.get_submodule(kind.attention)
    known = attention_kind(attention)
    if known is None or known.weights is None:
        raise ValueError(
            f"wellcond does not know where the attention of {what}, a {type(attention).__name__}, keeps its query, "
            "key, value and output weights; wellcond.register_family teaches it (docs/families.md)"
        )
    paths = known.weights if isinstance(known.weights, WeightPaths) else known.weights(attention)
    slots: dict[str, _Slot] = {}
    for name in NAMES:
        outside = name == "output" and kind.output is not None
        root, path = (module, kind.output or "") if outside else (attention, getattr(paths, name))
        bias = paths.biases.get(name, path)
        slots |= {key: slot for key, slot in _weight_and_bias(name, root, path, bias) if slot is not None}
    if lacking := [name for name in NAMES if name not in slots]:
        raise ValueError(
            f"the attention of {what}, a {type(attention).__name__}, has no {lacking[0]} weights at "
            f"{getattr(paths, lacking[0])}: another version of its library, or another kind of layer than nn.Linear"
        )
    for name, slot in slots.items():
        if hasattr(slot.parameter, "full_tensor"):
            raise ValueError(f"the {name} of {what} is sharded: read and set its weights before fully_shard")
    return slots, int(getattr(attention, paths.heads))


def _weight_and_bias(name: str, root: nn.Module, path: str, bias: str | None) -> Iterator[tuple[str, _Slot | None]]:
    yield name, _slot(root, path, "weight")
    if bias is not None and (bias != path or _is_layer(root, path)):
        yield f"{name}_bias", _slot(root, bias, "bias")


def _is_layer(root: nn.Module, path: str) -> bool:
    return isinstance(_get(root, path.partition(":")[0])[1], nn.Module)


def _slot(root: nn.Module, path: str, what: str) -> _Slot | None:
    """Return the parameter at a path such as "qkv:1/3", or the `what` of the layer there; None if there is none."""
    path, _, share = path.partition(":")
    owner, found = _get(root, path)
    if isinstance(found, nn.Module):
        owner, found = found, getattr(found, what, None)
    if not isinstance(found, Tensor):
        return None
    if not share:
        return _Slot(owner, found, slice(None))
    part, of = (int(number) for number in share.split("/"))
    rows = found.shape[0] // of
    return _Slot(owner, found, slice(part * rows, (part + 1) * rows))


def _get(root: nn.Module, path: str) -> tuple[nn.Module, Any]:
    holder, _, name = path.rpartition(".")
    try:
        owner = root.get_submodule(holder)
    except AttributeError:
        return root, None
    return owner, getattr(owner, name, None)
