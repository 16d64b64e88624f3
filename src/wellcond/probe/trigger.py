"""Noticing each forward pass of a model, whatever the model is wrapped in.

    with watching(model, before, after):
        model(images)       # before(args, kwargs), the pass, after(finished)

`after` is called also when the pass fails, with False, but for a KeyboardInterrupt, of which a hook is not told. A
model compiled in place (`model.compile()`) does not look at hooks once it has run, so there the compiled call itself is
wrapped; `torch.compile(model)` is a module whose own hooks stand outside the compiled code.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

__all__ = ["watching"]

Before = Callable[[tuple[Any, ...], dict[str, Any]], None]
After = Callable[[bool], None]


@contextlib.contextmanager
def watching(model: nn.Module, before: Before, after: After) -> Iterator[None]:
    around = _around_compiled_call if model._compiled_call_impl is not None else _by_hooks
    with around(model, before, after):
        yield


@contextlib.contextmanager
def _around_compiled_call(model: nn.Module, before: Before, after: After) -> Iterator[None]:
    compiled: Any = model._compiled_call_impl

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
        if model._compiled_call_impl is call:  # else it was compiled anew meanwhile
            model._compiled_call_impl = compiled


@contextlib.contextmanager
def _by_hooks(model: nn.Module, before: Before, after: After) -> Iterator[None]:
    ends = Ends(before, after)
    handles = (
        model.register_forward_pre_hook(ends.enter, with_kwargs=True, prepend=True),
        model.register_forward_hook(ends.finish),
        model.register_forward_hook(ends.leave, always_call=True),
    )
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


class Ends:
    """Both ends of a pass, as hooks of one module. In a copy of it, deep or pickled (an EMA's, say), they do nothing.

    Nor do they where they are compiled into somebody's code: a probe of the inner model must not change that code. It
    then has seen no pass, and says so.
    """

    def __init__(self, before: Before | None, after: After | None):
        self.before, self.after = before, after
        self._finished: list[bool] = []
        # One of each pass that runs: a probe's own runs inside another. None, if attached in the middle of a pass.

    def __reduce__(self) -> Any:
        return Ends, (None, None)

    def enter(self, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if torch.compiler.is_compiling() or self.before is None:
            return
        self._finished.append(False)
        self.before(args, kwargs)

    def finish(self, _module: nn.Module, _args: Any, _output: Any) -> None:
        # Not called where the pass has failed. (The output tells nothing: a model may return None.)
        if torch.compiler.is_compiling() or self.after is None or not self._finished:
            return
        self._finished[-1] = True
        self.after(True)

    def leave(self, _module: nn.Module, _args: Any, _output: Any) -> None:
        if torch.compiler.is_compiling() or self.after is None or not self._finished:
            return
        if not self._finished.pop():
            self.after(False)
