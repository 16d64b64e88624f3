"""What all surgery has in common: the class of a module is swapped for a subclass of it.

Everything else about the module stays: the names of its weights, hooks, optimisers that hold the parameters, deepcopy
and pickle.
"""

import contextlib
import sys
from collections.abc import Iterator

import torch
from torch import nn
from torch.nn.utils import parametrize

__all__ = ["class_was_given", "forget_compiled_code", "keep_compiled_code"]

SHARDED = {"FSDPModule", "ReplicateModule"}  # what torch's fully_shard and replicate put before a module's class

_keeping_compiled_code = False


def class_was_given(module: nn.Module) -> bool:
    """Whether fully_shard, parametrize or the like swapped the module's class, which another swap would undo."""
    return bool(SHARDED & {cls.__name__ for cls in type(module).__mro__}) or parametrize.is_parametrized(module)


def forget_compiled_code() -> None:
    """Make every compiled model compile anew: torch 2.11 does not notice a changed class and runs the old code."""
    if "torch._dynamo" in sys.modules and not _keeping_compiled_code:
        torch.compiler.reset()


@contextlib.contextmanager
def keep_compiled_code() -> Iterator[None]:
    """Within it surgery forgets nothing: for a model of the very form, surgery included, of the one compiled last."""
    global _keeping_compiled_code
    before, _keeping_compiled_code = _keeping_compiled_code, True
    try:
        yield
    finally:
        _keeping_compiled_code = before
