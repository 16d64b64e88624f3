"""Which tokens are padding: what each block was told by its masks, or else the model.

    padding = Padding(whole)                        # (b, n) of the model's own mask: True counts; or None
    padding.see("layer.3", block, args, kwargs)     # what the block is called with
    padding.of("layer.3")                           # (b, n), or None where every token counts

A block's own mask says more than the model's: a wrapper may call its mask something else, and of a model with two
towers only one may be padded. A token is padding where no query may look at it. Where blocks are given masks, a block
without one has no padding; where none is, the model's mask stands for all.
"""

import inspect
from typing import Any

from torch import Tensor, nn

__all__ = ["Padding", "counted"]

HIDDEN = -1e4  # what is added to logits that are not to count, or less
TORCHS = (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer, nn.MultiheadAttention)  # for them True hides


class Padding:
    """The tokens that count in one pass, block by block."""

    def __init__(self, whole: Tensor | None = None, *, samples: int | None = None):
        self.whole, self.samples = whole, samples
        self.unread: dict[str, tuple[int, ...]] = {}
        """By block, the shape of a mask that does not tell padding apart."""
        self._blocks: dict[str, Tensor | None] = {}
        self._masked = False

    def see(self, name: str, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """What block `name` is called with, the first time."""
        if name in self._blocks:
            return
        self._blocks[name] = None
        tokens = args[0] if args else next(iter(kwargs.values()), None)
        if not isinstance(tokens, Tensor) or tokens.ndim != 3:
            return
        for argument, mask in _masks(block, args, kwargs).items():
            self._masked = True
            found = counted(mask, argument, tokens.shape[:2], hides=isinstance(block, TORCHS))
            if found is None:
                self.unread[name] = tuple(mask.shape)
                continue
            before = self._blocks[name]
            self._blocks[name] = found[: self.samples] if before is None else before & found[: self.samples]

    def of(self, name: str) -> Tensor | None:
        """Which tokens count there, (b, n) or (1, n); None for all."""
        return self._blocks.get(name) if self._masked else self.whole


def counted(mask: Tensor, argument: str, tokens: tuple[int, ...], *, hides: bool = False) -> Tensor | None:
    """Which of `tokens` (b, n) count by a mask that a block was given as `argument`: bool, (b, n) or (1, n).

    Shapes: (b, n) for keys, (n, n), (b, n, n) or (b, heads, n, n) for pairs, with ones that broadcast. True counts, or
    what is not zero, or what is not hidden by a large negative number; the other way round where `hides`, as in torch's
    own layers, and for what is called padding. None where it does not tell.
    """
    batch, n = tokens
    if mask.ndim < 2 or mask.shape[-1] != n:
        return None
    hides = hides or "padding" in argument
    kept = _kept(mask, hides=hides)
    if mask.ndim == 2:
        # Where there are as many samples as tokens the name decides.
        by_sample = len(mask) == batch and (batch != n or hides or argument == "attention_mask" or "valid" in argument)
        return kept if by_sample else kept.any(0, keepdim=True) if len(mask) in (1, n) else None
    if len(mask) not in (1, batch):
        return None
    return kept.flatten(1, -2).any(1)


def _kept(mask: Tensor, *, hides: bool) -> Tensor:
    if mask.is_floating_point():
        of_ones = mask.ndim == 2 and not hides and bool((mask >= 0).all()) and bool((mask > 0).any())
        return mask > 0 if of_ones else mask > HIDDEN
    return mask == 0 if hides else mask != 0


def _masks(block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Tensor]:
    """Tensors among the arguments whose name says that they are masks."""
    given = kwargs
    if len(args) > 1:
        given = {**dict(zip(inspect.signature(block.forward).parameters, args, strict=False)), **kwargs}
    return {n: t for n, t in given.items() if isinstance(t, Tensor) and ("mask" in n or "valid" in n)}
