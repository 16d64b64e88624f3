"""Capture one forward pass: the tensors at a model's sites, which tokens are padding, and what went wrong.

    capture = Capture(wanted, max_samples=64)
    with capture.hooks():               # always removed, even after an exception
        with capture.listening():
            model(images)
    capture.tensors                     # {Place("blocks.3", 3, "sa"): (b, n, d) tensor, …}

Each hook detaches the tensor, cuts it to the first `max_samples` samples and copies it. So the pass itself does not
change, later in-place operations do not reach the copy, and no graph is kept alive. The user's dispatch modes, such as
selective checkpointing's, do not see these operations, which they would count or replay. An error in a hook does not
end the pass; it is kept in `errors`.

    padding = Padding(whole)                        # the model's own mask (b, n), True for tokens that count, or None
    padding.see("layer.3", block, args, kwargs)     # the arguments of the block's call
    padding.of("layer.3")                           # (b, n), or None if every token counts

A block's own mask says more than the model's: a wrapper may use another name for its mask, and in a model with two
towers only one may be padded. A token is padding if no query may attend to it. If any block is given a mask, a block
without one has no padding; if none is, the model's mask holds for all blocks. In a block around torch's attention, the
masks that this is given count, since their meaning is known.
"""

import contextlib
import inspect
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from wellcond.models.families.family import block_kind
from wellcond.models.families.forwards import Skipless, plain_class
from wellcond.models.surgery import GrayedConv2d
from wellcond.numerics.fused import tokens_of
from wellcond.probe.attention import Heard
from wellcond.probe.passes import whose_pass
from wellcond.probe.places import Place, Wanted

__all__ = ["Capture", "Padding", "Pass", "counted"]

HIDDEN = -1e4  # additive masks put this or less on logits that they hide
TORCHS = (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer, nn.MultiheadAttention)  # in their masks True hides


class Padding:
    """Which tokens count in one pass, that is, are not padding, block by block."""

    def __init__(self, whole: Tensor | None = None, *, samples: int | None = None):
        self.whole: Tensor | None = whole
        self.samples: int | None = samples
        self.unread: dict[str, tuple[int, ...]] = {}
        """Block → the shape of a mask from which padding cannot be told."""
        self._blocks: dict[str, Tensor | None] = {}
        self._attended: set[str] = set()  # blocks whose attention has said more
        self._masked = False

    def see(self, name: str, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Read the masks among the arguments of block `name`, at its first call."""
        if name in self._blocks:
            return
        self._blocks[name] = None
        tokens = args[0] if args else next(iter(kwargs.values()), None)
        if not isinstance(tokens, Tensor) or tokens.ndim != 3:
            return
        for argument, mask in _masks(block, args, kwargs).items():
            self._masked = True
            found = counted(mask, argument, tokens.shape[:2], hides=_hides(block))
            if found is None:
                self.unread[name] = tuple(mask.shape)
                continue
            before = self._blocks[name]
            self._blocks[name] = found[: self.samples] if before is None else before & found[: self.samples]

    def see_attention(
        self, name: str, attention: nn.MultiheadAttention, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """Read the masks that torch's attention is given in block `name`, instead of the block's own."""
        if name in self._attended or not attention.batch_first or not _masks(attention, args, kwargs):
            return
        self._attended.add(name)
        self._blocks.pop(name, None)
        self.unread.pop(name, None)
        self.see(name, attention, args, kwargs)

    def of(self, name: str) -> Tensor | None:
        """Return which tokens count in block `name`, (b, n) or (1, n); None for all."""
        return self._blocks.get(name) if self._masked else self.whole


def counted(mask: Tensor, argument: str, tokens: tuple[int, ...], *, hides: bool = False) -> Tensor | None:
    """Return which of `tokens` (b, n) count under a mask passed to a block as `argument`: bool, (b, n) or (1, n).

    The mask is (b, n) for keys, or (n, n), (b, n, n) or (b, heads, n, n) for pairs; dimensions of size 1 broadcast.
    True or nonzero means that a token counts; in an additive mask, anything but a large negative number. With `hides`,
    as in torch's own layers, and for arguments named padding, True or nonzero hides instead, as it does in a mask of
    pairs that is True for all later tokens. None if it does not tell: with as many samples as tokens, a mask called
    "mask" may be of either kind, and one that would leave no token at all is not read rightly.
    """
    batch, n = tokens
    if mask.ndim < 2 or mask.shape[-1] != n:
        return None
    kept = mask == 0 if n > 1 and _is_causal(mask == 0) else _kept(mask, hides=hides or "padding" in argument)
    if not bool(kept.any()):
        return None
    if mask.ndim == 2:
        by_sample = len(mask) == batch
        if len(mask) == batch == n:  # it may be either: the argument's name decides
            by_sample = argument == "attention_mask" or "padding" in argument or "valid" in argument
            if not (by_sample or hides or argument == "attn_mask" or _is_causal(kept)):
                return None
        return kept if by_sample else kept.any(0, keepdim=True) if len(mask) in (1, n) else None
    if len(mask) not in (1, batch):
        return None
    return kept.flatten(1, -2).any(1)


def _kept(mask: Tensor, *, hides: bool) -> Tensor:
    if mask.is_floating_point():
        of_ones = bool(((mask == 0) | (mask == 1)).all()) or (mask.ndim == 2 and bool((mask >= 0).all()))
        return mask > 0 if of_ones and not hides and bool((mask > 0).any()) else mask > HIDDEN
    return mask == 0 if hides else mask != 0


def _is_causal(kept: Tensor) -> bool:
    return kept.shape[-2] == kept.shape[-1] and torch.equal(kept, torch.ones_like(kept).tril())


def _hides(block: nn.Module) -> bool:
    """Whether True in a mask of this block hides."""
    return isinstance(block, TORCHS) or _torchs_attention(block) is not None


def _torchs_attention(block: nn.Module) -> nn.MultiheadAttention | None:
    """Return torch's attention in a block, if that is what the block attends with."""
    kind = block_kind(block)
    inside = block if kind is None or kind.attention is None else block.get_submodule(kind.attention)
    return next((module for module in inside.modules() if isinstance(module, nn.MultiheadAttention)), None)


def _masks(block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Tensor]:
    """Return the tensor arguments whose names say that they are masks."""
    given = kwargs
    if len(args) > 1:
        # A forward without skips may take (x, *args): the names are those of the plain one.
        forward = plain_class(block).forward.__get__(block) if isinstance(block, Skipless) else block.forward
        given = {**dict(zip(inspect.signature(forward).parameters, args, strict=False)), **kwargs}
    return {n: t for n, t in given.items() if isinstance(t, Tensor) and ("mask" in n or "valid" in n)}


class Capture:
    """Capture the wanted tensors of one pass; for a block that runs more than once, those of its first run."""

    def __init__(self, wanted: list[Wanted], *, max_samples: int):
        self.wanted = wanted
        self.max_samples = max_samples
        self.tensors: dict[Place, Tensor] = {}
        self.errors: dict[Place, Exception] = {}
        """Place → the exception raised in its hook."""
        self.low_precision: bool = False
        """Whether autocast was computing below float32 when a tensor was captured, whatever the tensor's own dtype."""
        self.padding: Padding = Padding()
        self._listening = False
        self._owner: object | None = None
        self._block: nn.Module | None = None  # the one now running, since two blocks may share a module
        self._calls: dict[int, int] = {}

    @contextlib.contextmanager
    def listening(self, padding: Padding | None = None) -> Iterator[None]:
        """Discard earlier results and capture tensors until the end of the `with` block."""
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
        """Hand over the captured tensors, so that the capture holds no memory."""
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
            # This hook must run first: calls of a module are counted from the start of its block.
            yield want.block.register_forward_pre_hook(self._restart(want), prepend=True, with_kwargs=True)
            attention = None if isinstance(want.block, TORCHS) else _torchs_attention(want.block)
            if attention is not None:
                yield attention.register_forward_pre_hook(self._read_masks(want), with_kwargs=True)
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
                    with _disable_current_modes():
                        self.padding.see(place.block, block, args, kwargs)
                except Exception as error:
                    self.errors.setdefault(place, error)

        return hook

    def _read_masks(self, want: Wanted) -> Any:
        def hook(attention: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if self._hears() and want.block is self._block:
                assert isinstance(attention, nn.MultiheadAttention)
                try:
                    with _disable_current_modes():
                        self.padding.see_attention(want.place.block, attention, args, kwargs)
                except Exception as error:
                    self.errors.setdefault(want.place, error)

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
                with torch.no_grad(), _disable_current_modes():
                    self.tensors[want.place] = _as_tokens(tensor.detach()[: self.max_samples], want).clone()
                self.low_precision = self.low_precision or _computes_low(tensor.device.type)
            except Exception as error:
                self.errors.setdefault(want.place, error)


def _computes_low(kind: str) -> bool:
    """Whether autocast is on for devices of this kind, with a dtype below float32."""
    return (
        torch.amp.is_autocast_available(kind)
        and torch.is_autocast_enabled(kind)
        and torch.get_autocast_dtype(kind).itemsize < 4
    )


def _first_argument(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return what the module works on: the first argument of its forward, even if everything is passed by name."""
    if args:
        return args[0]
    first = next(iter(inspect.signature(module.forward).parameters), "")
    return kwargs[first] if first in kwargs else next(iter(kwargs.values()), None)


def _first_tensor(value: Any) -> Tensor | None:
    """Return a floating-point tensor itself, or the first one in a tuple, a list or a Hugging Face output."""
    if isinstance(value, Tensor):
        return value if value.is_floating_point() else None
    if isinstance(value, dict):
        value = tuple(value.values())
    if isinstance(value, tuple | list):
        return next((found for item in value if (found := _first_tensor(item)) is not None), None)
    return None


def _as_tokens(tensor: Tensor, want: Wanted) -> Tensor:
    """Return (b, …) as token matrices (b, n, d)."""
    if want.place.site == "tokens":
        projection = want.block
        assert isinstance(projection, nn.Conv2d)
        if isinstance(projection, GrayedConv2d):
            tensor = projection.graying(tensor)
        height, width = projection.stride
        whole = tensor[..., : tensor.shape[-2] // height * height, : tensor.shape[-1] // width * width]
        return tokens_of(whole, height, width)  # the convolution ignores the remainder, too
    if tensor.ndim == 2:  # one token per sample, without a token dimension
        return tensor[:, None, :]
    if tensor.ndim == 4:
        return tensor.flatten(2).mT if want.channels_first else tensor.flatten(1, 2)
    return tensor


@dataclass
class Pass:
    """What one measured pass yielded: tensors, masks, attention, and what went wrong."""

    exact: bool
    samples: int
    padding: Padding = field(default_factory=Padding)
    tensors: dict[Place, Tensor] = field(default_factory=dict)
    ends: dict[Place, Tensor] = field(default_factory=dict)
    """The blocks' inputs and outputs, if the linear map between them is to be measured."""
    heard: dict[str, Heard] = field(default_factory=dict)
    unheard: dict[str, Exception] = field(default_factory=dict)
    error: Exception | None = None
    """Why the pass as a whole could not be measured."""
    errors: dict[Place, Exception] = field(default_factory=dict)
    """Why individual places could not be measured."""
    low_precision: bool = False
    """Whether autocast computed below float32."""

    def remarks(self, missed: Iterable[Place], *, failed: bool) -> Iterator[str]:
        """Yield what went wrong, in words; `missed` places gave nothing, `failed` means that this was reported."""
        if not failed:
            if self.errors:
                why = next(iter(self.errors.values()))
                yield f"{len(self.errors)} places could not be measured: {_some(self.errors)}: {why!r}"
            unreached = [place for place in missed if place not in self.errors]
            if unreached:
                yield f"{len(unreached)} places were not reached: {_some(unreached)}"
        for block, shape in list(self.padding.unread.items())[:1]:
            yield f"a mask {shape} of {block} does not tell padding apart: every token was measured"
        for block, error in self.unheard.items():
            yield f"the attention of {block} could not be measured: {error!r}"
        low = sorted({str(tensor.dtype) for tensor in self.tensors.values() if tensor.dtype.itemsize < 4})
        if self.exact and low:
            yield f"the model computes in {', '.join(low)} by itself, in the exact pass too"


def _some(places: Iterable[Place]) -> str:
    names = [f"{place.site} of {place.block}" for place in places]
    return ", ".join(names[:4]) + (" …" if len(names) > 4 else "")
