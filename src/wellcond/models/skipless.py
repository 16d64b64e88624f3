"""Blocks without a skip: for each class that adds one, a forward that can leave the add out.

    block.__class__ = skipless_class(type(block), {"sa"})       # what remove_skip does
    removed_skips(block)                                        # frozenset({'sa'})

Each forward below is the family's own with every add replaced by `_add`, which hands on the branch alone where the skip
is removed. Drop path goes with the skip: a branch that is all there is must not be dropped. LayerScale stays.
"""

from torch import nn

__all__ = ["removed_skips"]


def removed_skips(module: nn.Module) -> frozenset[str]:
    """The skips that this module, which may be a block or a part of one, leaves out."""
    return frozenset(getattr(type(module), "_removed", ()))
