"""Tensors at a model's sites, caught during one forward pass without touching the model's code.

    capture = Capture(wanted, max_samples=64)
    with capture.hooks():               # always removed, also after an exception
        with capture.listening():
            model(images)
    capture.tensors                     # {Place("blocks.3", 3, "sa"): (b, n, d) tensor, …}

A hook detaches, cuts to the first `max_samples` samples and copies: nothing of the pass changes, no later in-place
operation reaches the copy, and no graph is kept alive. Nor does an error in it end the pass: it is kept in `errors`.
"""

import contextlib
import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from wellcond.models.surgery import GrayedConv2d
from wellcond.numerics.fused import tokens_of
from wellcond.probe.padding import Padding
from wellcond.probe.places import Place, Wanted
from wellcond.probe.separate import whose_pass

__all__ = ["Capture"]


class Capture:
    """Catches the wanted tensors of one pass; a block that runs more than once in it is caught at its first run."""

    def __init__(self, wanted: list[Wanted], *, max_samples: int):
        self.wanted = wanted
        self.max_samples = max_samples
        self.tensors: dict[Place, Tensor] = {}
        self.errors: dict[Place, Exception] = {}
        """What went wrong in a hook."""
        self.low_precision = False
        """Whether autocast computed in less than float32 when a tensor came by, whatever its own dtype is."""
        self.padding = Padding()
        self._listening = False
        self._owner: object | None = None
        self._block: nn.Module | None = None  # the one that runs: two blocks may share a module
        self._calls: dict[int, int] = {}

    @contextlib.contextmanager
    def listening(self, padding: Padding | None = None) -> Iterator[None]:
        """Starts anew, and catches what passes until the end of the block."""
        self.tensors, self.errors, self.low_precision = {}, {}, False
        self.padding = Padding() if padding is None else padding
        self._calls, self._block = {}, None
        self._listening, self._owner = True, whose_pass()
        try:
            yield
        finally:
            self._listening, self._block = False, None

    def _hears(self) -> bool:
        return self._listening and whose_pass() is self._owner

    def take(self) -> dict[Place, Tensor]:
        """What was caught, handed over: the capture keeps no memory."""
        caught, self.tensors = self.tensors, {}
        return caught

    @contextlib.contextmanager
    def hooks(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for handle in self._register():
                stack.callback(handle.remove)
            yield

    def _register(self) -> Iterator[Any]:
        by_module: dict[int, tuple[nn.Module, list[Wanted]]] = {}
        for want in self.wanted:
            module = want.block.get_submodule(want.tap.path)
            by_module.setdefault(id(module), (module, []))[1].append(want)
        for want in {id(want.block): want for want in self.wanted}.values():
            # The first of the hooks: which call of a module this is counts from the start of its block.
            yield want.block.register_forward_pre_hook(self._restart(want), prepend=True, with_kwargs=True)
        for module, wants in by_module.values():
            inputs = [want for want in wants if want.tap.end == "input"]
            outputs = [want for want in wants if want.tap.end == "output"]
            # Calls are counted as they begin, for inputs and outputs alike.
            yield module.register_forward_pre_hook(self._enter(module, inputs), with_kwargs=True)
            if outputs:
                yield module.register_forward_hook(self._leave(module, outputs))

    def _restart(self, want: Wanted) -> Any:
        block, place = want.block, want.place
        inner = {id(module) for module in block.modules()} - {id(block)}

        def hook(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if self._hears():
                self._block = block
                for key in inner:
                    self._calls.pop(key, None)
                try:
                    self.padding.see(place.block, block, args, kwargs)
                except Exception as error:
                    self.errors.setdefault(place, error)

        return hook

    def _enter(self, module: nn.Module, wants: list[Wanted]) -> Any:
        def hook(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if self._hears():
                call = self._calls[id(module)] = self._calls.get(id(module), -1) + 1
                if wants:
                    self._take(wants, call, _first_argument(module, args, kwargs))

        return hook

    def _leave(self, module: nn.Module, wants: list[Wanted]) -> Any:
        def hook(_module: nn.Module, _args: Any, output: Any) -> None:
            if self._hears():
                self._take(wants, self._calls.get(id(module), 0), output)

        return hook

    def _take(self, wants: list[Wanted], call: int, value: Any) -> None:
        for want in wants:
            if want.block is not self._block or want.tap.call != call or want.place in self.tensors:
                continue
            tensor = _first_tensor(value)
            if tensor is None:
                continue
            try:
                with torch.no_grad():
                    self.tensors[want.place] = _as_tokens(tensor.detach()[: self.max_samples], want).clone()
                self.low_precision = self.low_precision or _computes_low(tensor.device.type)
            except Exception as error:
                self.errors.setdefault(want.place, error)


def _computes_low(kind: str) -> bool:
    """Whether autocast is on for such devices, in less than float32."""
    return (
        torch.amp.is_autocast_available(kind)
        and torch.is_autocast_enabled(kind)
        and torch.get_autocast_dtype(kind).itemsize < 4
    )


def _first_argument(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What the module works on: the first argument of its forward, also where everything is passed by name."""
    if args:
        return args[0]
    first = next(iter(inspect.signature(module.forward).parameters), "")
    return kwargs[first] if first in kwargs else next(iter(kwargs.values()), None)


def _first_tensor(value: Any) -> Tensor | None:
    """The tensor itself, or the first of a tuple, a list or a Hugging Face output."""
    if isinstance(value, Tensor):
        return value if value.is_floating_point() else None
    if isinstance(value, dict):
        value = tuple(value.values())
    if isinstance(value, tuple | list):
        return next((found for item in value if (found := _first_tensor(item)) is not None), None)
    return None


def _as_tokens(tensor: Tensor, want: Wanted) -> Tensor:
    """(b, …) as token matrices (b, n, d)."""
    if want.place.site == "tokens":
        projection = want.block
        assert isinstance(projection, nn.Conv2d)
        if isinstance(projection, GrayedConv2d):
            tensor = projection.graying(tensor)
        height, width = projection.stride
        whole = tensor[..., : tensor.shape[-2] // height * height, : tensor.shape[-1] // width * width]
        return tokens_of(whole, height, width)  # of what is left over the convolution sees nothing, either
    if tensor.ndim == 2:  # one token a sample, without the dimension for it
        return tensor[:, None, :]
    if tensor.ndim == 4:
        return tensor.flatten(2).mT if want.channels_first else tensor.flatten(1, 2)
    return tensor
