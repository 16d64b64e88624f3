"""Intercept a model's attention as it is computed, to measure the entropy of its weights and the largest logit.

    listener = AttentionListener({"blocks.3": model.blocks[3].attn, …}, share=64 / 256, samples=64)
    with listener.hooks():               # inside these modules, a torch function mode sees every call to torch
        model(images)
    listener.found                       # {"blocks.3": Heard(entropy=…, rows=…, largest_logit=…, …)}

It intercepts `scaled_dot_product_attention`, whose weights no hook can see, and, for attention that is written out,
`softmax` over the last dimension, unless an attention of ours says that this is not over the keys. In the first case
the logits are recomputed from query and key, a few rows at a time. Everything is measured in float32 or better. Every
call goes through unchanged, even if measuring it fails; see `failed`.
"""

import contextlib
import functools
import math
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes

from wellcond.numerics.autocast import no_autocast
from wellcond.probe.passes import whose_pass

__all__ = ["AttentionListener", "Heard"]

SOFTMAX: set[Callable[..., Tensor]] = {torch.softmax, F.softmax, Tensor.softmax}
BUDGET_BYTES = 2**28  # memory for the logits processed at once


class Heard(NamedTuple):
    """Sums and the maximum over one attention call, which can be merged across ranks."""

    entropy: Tensor
    """Entropy in nats, summed over all rows (samples, heads, queries). A float64 scalar, like the next two fields."""
    rows: Tensor
    largest_logit: Tensor
    samples: int
    dtype: torch.dtype


class AttentionListener(TorchFunctionMode):
    """Measure the attention of `modules`, for the first `share` of each batch.

    This share holds `samples` samples; it is a fraction because a sample may be several windows. `valid(key)` returns
    which tokens are not padding, (b, n) or (1, n), or None for all; queries that are padding are left out. `blocks` are
    the modules around those of `modules`, by the same keys: two blocks may share their attention.
    """

    def __init__(
        self,
        modules: Mapping[Any, nn.Module],
        *,
        samples: int,
        share: float = 1.0,
        valid: Callable[[Any], Tensor | None] = lambda _key: None,
        blocks: Mapping[Any, nn.Module] | None = None,
    ):
        super().__init__()
        self.modules = modules
        self.blocks: Mapping[Any, nn.Module] = blocks or {}
        self.share: float = share
        self.samples: int = samples
        self.valid: Callable[[Any], Tensor | None] = valid
        self.found: dict[Any, Heard] = {}
        self.failed: dict[Any, Exception] = {}
        self._inside: list[Any] = []  # keys; None in a block that is not to be measured
        self._block: Any = None  # the key of the last one that began
        self._owner = whose_pass()

    @contextlib.contextmanager
    def hooks(self) -> Iterator[None]:
        keys_of: dict[nn.Module, list[Any]] = {}
        for key, module in self.modules.items():
            keys_of.setdefault(module, []).append(key)
        with contextlib.ExitStack() as stack:
            stack.callback(self._leave_all)
            for key, block in self.blocks.items():
                starts = block.register_forward_pre_hook(lambda *_, key=key: setattr(self, "_block", key))
                stack.callback(starts.remove)
            for module, keys in keys_of.items():
                enter = module.register_forward_pre_hook(lambda *_, keys=keys: self._arrived(keys))
                leave = module.register_forward_hook(lambda *_: self._left(), always_call=True)
                stack.callback(enter.remove)
                stack.callback(leave.remove)
            yield

    # The mode is active only inside attention; elsewhere it would slow down every torch call for nothing.

    def _arrived(self, keys: list[Any]) -> None:
        self._inside.append(next((key for key in keys if key not in self.blocks or key == self._block), None))
        self.__enter__()

    def _left(self) -> None:
        if self._inside:
            self._inside.pop()
            self.__exit__(None, None, None)

    def _leave_all(self) -> None:
        """Leave the modules still entered after a KeyboardInterrupt, on which hooks do not run."""
        while self._inside:
            self._left()

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.multi_head_attention_forward:
            with self:
                return _made_of_others(func)(*args, **kwargs)
        key = self._inside[-1] if self._inside else None
        if key is not None and key not in self.found and whose_pass() is self._owner:
            try:
                self._listen(func, args, kwargs)
            except Exception as error:
                self.failed.setdefault(key, error)
        return func(*args, **kwargs)

    @_disable_current_modes()  # the user's, such as selective checkpointing's, which would replay our operations
    def _listen(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if func is F.scaled_dot_product_attention:
            query = args[0] if args else kwargs["query"]
            self._hear(_sdpa_logits(self.share, self._counts(query), *args, **kwargs), query)
        elif func in SOFTMAX and not self._approximates() and (logits := _last_dimension(args, kwargs)) is not None:
            self._hear(_chunks_of(_first(logits, self.share), self._counts(logits)), logits)

    def _approximates(self) -> bool:
        """Whether the running module's softmax is over something else than the keys, as in Nyström attention of ours.

        That takes scaled_dot_product_attention where it is exact.
        """
        parts = self.modules[self._inside[-1]].modules()
        return not all(getattr(part, "softmax_over_keys", True) for part in parts)

    def _counts(self, x: Tensor) -> Tensor | None:
        """Return which queries of x (b, heads, queries, …) are not padding, (b, heads, queries); None to count all.

        With its weights wanted, torch's own module has both in one dimension: x and result are (b · heads, queries, …).
        """
        first, valid, module = _first(x, self.share), self.valid(self._inside[-1]), self.modules[self._inside[-1]]
        if valid is not None and x.ndim == 3 and isinstance(module, nn.MultiheadAttention):
            counts = self._counts(x.unflatten(0, (-1, module.num_heads)))
            return None if counts is None or counts.shape[:2].numel() != len(first) else counts.flatten(0, 1)
        if valid is None or x.ndim != 4 or valid.shape[1] != x.shape[2] or 1 < len(valid) < len(first):
            return None
        return valid[: len(first), None].expand(first.shape[:3])

    def _hear(self, chunks: Iterator[Tensor], like: Tensor) -> None:
        total = torch.zeros(2, dtype=torch.float64, device=like.device)
        largest = torch.full((), -math.inf, dtype=torch.float64, device=like.device)
        with torch.no_grad(), no_autocast(like):
            for logits in chunks:  # (…, queries, keys)
                top = logits.amax(-1)
                attends = ~top.isneginf()  # false for padding and for queries whose keys are all masked
                weights = torch.softmax(logits, -1)
                # A zero weight, such as a masked key's, adds nothing to the entropy.
                each = -(weights * weights.clamp_min(torch.finfo(weights.dtype).tiny).log()).sum(-1)
                total[0] += torch.where(attends, each, 0).sum(dtype=torch.float64)
                total[1] += attends.sum()
                largest = torch.maximum(largest, top.amax().double())
        self.found[self._inside[-1]] = Heard(total[0], total[1], largest, self.samples, like.dtype)


@functools.cache
def _made_of_others(func: Any) -> Any:
    """Return a copy of `func` without its own dispatch to function modes, so that we see the functions it calls."""
    scope = {**func.__globals__, "has_torch_function": lambda _tensors: False}
    twin = types.FunctionType(func.__code__, scope, func.__name__, func.__defaults__, func.__closure__)
    twin.__kwdefaults__ = func.__kwdefaults__
    return twin


def _first(x: Tensor, share: float) -> Tensor:
    """Return the measured samples: the first `share` of the batch, with all their windows."""
    x = x.detach()
    return x if share >= 1 else x[: max(1, round(len(x) * share))]


def _last_dimension(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
    logits = args[0] if args else kwargs.get("input")
    dim = args[1] if len(args) > 1 else kwargs.get("dim")
    if not isinstance(logits, Tensor) or logits.ndim < 3 or dim not in (-1, logits.ndim - 1):
        return None
    return logits


def _chunks_of(logits: Tensor, counts: Tensor | None) -> Iterator[Tensor]:
    size = max(1, BUDGET_BYTES // max(1, logits[:1].numel() * 4))
    for start in range(0, len(logits), size):
        part = logits[start : start + size]
        part = part if part.dtype == torch.float64 else part.float()
        yield part if counts is None else part.masked_fill(~counts[start : start + size, ..., None], -math.inf)


def _sdpa_logits(
    share: float,
    counts: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Iterator[Tensor]:
    """Yield the masked logits of `scaled_dot_product_attention` in chunks of (heads, queries, keys)."""
    query, key = _first(query, share), _first(key, share)
    if enable_gqa:
        key = key.repeat_interleave(query.shape[-3] // key.shape[-3], -3)
    dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
    n, m = query.shape[-2], key.shape[-2]
    if attn_mask is not None:
        attn_mask = (
            _first(attn_mask, share) if attn_mask.ndim == query.ndim and len(attn_mask) > 1 else attn_mask.detach()
        )
        attn_mask = attn_mask.expand(*query.shape[:-2], n, m)
    if is_causal:
        attn_mask = torch.ones(n, m, dtype=torch.bool, device=query.device).tril().expand(*query.shape[:-2], n, m)
    factor = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    lead = query.shape[:-2].numel()
    query, key = query.reshape(lead, n, -1), key.expand(*query.shape[:-2], m, -1).reshape(lead, m, -1)
    mask = None if attn_mask is None else attn_mask.reshape(lead, n, m)
    counts = None if counts is None else counts.reshape(lead, n, 1)
    rows = max(1, min(n, BUDGET_BYTES // (4 * m)))
    heads = max(1, BUDGET_BYTES // (4 * m * rows))
    for start in range(0, lead, heads):
        for row in range(0, n, rows):
            part, some = slice(start, start + heads), slice(row, row + rows)
            logits = query[part, some].to(dtype) @ key[part].to(dtype).mT * factor
            if mask is not None:
                here = mask[part, some]
                logits = logits.masked_fill(~here, -math.inf) if here.dtype == torch.bool else logits + here.to(dtype)
            if counts is not None:
                logits = logits.masked_fill(~counts[part, some], -math.inf)
            yield logits
