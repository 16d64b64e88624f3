"""Helpers shared by all surgery, which swaps the class of a module for a subclass of it.

Everything else about the module is preserved: its parameter names, hooks, optimisers that hold the parameters, deepcopy
and pickle.
"""

import contextlib
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import NoReturn, Self

import torch
from torch import nn
from torch.nn.utils import parametrize

__all__ = ["Undoable", "class_was_given", "forget_compiled_code", "keep_compiled_code"]

SHARDED = {"FSDPModule", "ReplicateModule"}  # base classes added to a module's class by fully_shard and replicate

_keeping_compiled_code = False


class Undoable(ABC):
    """A record of a change, which `undo`, or leaving its `with` block, reverts."""

    @abstractmethod
    def undo(self) -> None: ...

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.undo()

    def __call__(self, *_args: object, **_kwargs: object) -> NoReturn:
        raise TypeError("this is a record of the change, not the model: the model was changed in place; call that one")


def class_was_given(module: nn.Module) -> bool:
    """Whether fully_shard, parametrize or the like has swapped the module's class; another swap would undo theirs."""
    return bool(SHARDED & {cls.__name__ for cls in type(module).__mro__}) or parametrize.is_parametrized(module)


def forget_compiled_code() -> None:
    """Make all compiled models recompile: torch 2.11 does not notice a changed class and would run the old code."""
    if "torch._dynamo" in sys.modules and not _keeping_compiled_code:
        torch.compiler.reset()


@contextlib.contextmanager
def keep_compiled_code() -> Iterator[None]:
    """Keep compiled code during surgery; only for models that are not compiled, or are identical in form, surgery
    included, to the last compiled."""
    global _keeping_compiled_code
    before, _keeping_compiled_code = _keeping_compiled_code, True
    try:
        yield
    finally:
        _keeping_compiled_code = before
