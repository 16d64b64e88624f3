"""Noticing each forward pass of a model, whatever the model is wrapped in.

    with watching(model, before, after):
        model(images)       # before(args, kwargs), the pass, after(finished)

`after` is called also when the pass fails, with False. A model compiled in place (`model.compile()`) does not look at
hooks once it has run, so there the compiled call itself is wrapped; `torch.compile(model)` is a module whose own hooks
stand outside the compiled code.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

__all__ = ["watching"]


@contextlib.contextmanager
def watching(
    model: nn.Module, before: Callable[[tuple[Any, ...], dict[str, Any]], None], after: Callable[[bool], None]
) -> Iterator[None]:
    compiled = model._compiled_call_impl
    if compiled is not None:

        @torch.compiler.disable(recursive=False)
        def call(*args: Any, **kwargs: Any) -> Any:
            before(args, kwargs)
            finished = False
            try:
                result = compiled(*args, **kwargs)
                finished = True
            finally:
                after(finished)
            return result

        model._compiled_call_impl = call
        try:
            yield
        finally:
            model._compiled_call_impl = compiled
        return

    def pre_hook(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        before(args, kwargs)

    def hook(_module: nn.Module, _args: Any, output: Any) -> None:
        # A failed pass calls it too, without an output. (A model that returns None is no model to be measured.)
        after(output is not None)

    handles = (
        model.register_forward_pre_hook(pre_hook, with_kwargs=True, prepend=True),
        model.register_forward_hook(hook, always_call=True),
    )
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
