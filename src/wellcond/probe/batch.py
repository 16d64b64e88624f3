"""What a model was called with: how many samples there are, the first of them, and one argument by its name.

batch_size(args, kwargs)                                     # 256
args, kwargs = first_samples((args, kwargs), 64)             # copies
argument(model, "attention_mask", args, kwargs)              # given by position or by name
"""

import inspect
from typing import Any

from torch import Tensor, nn
from torch.utils import _pytree as pytree

__all__ = ["argument", "batch_size", "first_samples"]


def batch_size(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """The length of the first tensor; 1 where there is none."""
    sizes = _lengths((args, kwargs))
    return sizes[0] if sizes else 1


def first_samples(tree: Any, samples: int) -> Any:
    """Copies of the tensors, of the first `samples` where a tensor's first dimension is the batch's.

    Copies, for some models work on their input in place, and the model's own pass is still to come.
    """
    size = next(iter(_lengths(tree)), 0)

    def cut(tensor: Tensor) -> Tensor:
        return (tensor[:samples] if tensor.ndim > 0 and len(tensor) == size else tensor).detach().clone()

    return pytree.tree_map_only(Tensor, cut, tree)


def argument(model: nn.Module, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What the model was given as `name`, by position or by name; None if nothing."""
    if name in kwargs or not args:
        return kwargs.get(name)
    parameters = list(inspect.signature(model.forward).parameters)
    place = parameters.index(name) if name in parameters else len(args)
    return args[place] if place < len(args) else None


def _lengths(tree: Any) -> list[int]:
    return [len(leaf) for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor) and leaf.ndim > 0]
