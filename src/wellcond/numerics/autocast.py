"""Autocast: what must not happen under it, and what a function does that torch's autocast does not know.

with no_autocast(x):                                        # products of float32 stay float32
    weights = x.float() @ y.float().mT
query, key, value = autocast_like_sdpa(query, key, value)   # as scaled_dot_product_attention takes its inputs
autocast_dtype(x)                                           # what a product of x is computed in
with no_tf32():                                             # float32 products, convolutions too, have all their bits
    ...
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

__all__ = ["autocast_dtype", "autocast_like_sdpa", "no_autocast", "no_tf32"]


def no_autocast(x: Tensor, *, backward: bool = False) -> contextlib.AbstractContextManager[Any]:
    """Turns autocast off for x's kind of device, where it is on: entering a context costs as much as a product.

    In a `backward` pass always: compilers look at it where the forward pass was called, and may run it elsewhere.
    """
    if x.device.type == "meta" or not (backward or _is_on(x)):
        return contextlib.nullcontext()
    return torch.autocast(x.device.type, enabled=False)


@contextlib.contextmanager
def no_tf32() -> Iterator[None]:
    """By default torch rounds what goes into convolutions on a GPU to ten bits."""
    cudnn: Any = torch.backends.cudnn
    settings: tuple[Any, ...] = (torch.backends.cuda.matmul, cudnn.conv, cudnn.rnn)
    before = [setting.fp32_precision for setting in settings]
    for setting in settings:
        setting.fp32_precision = "ieee"
    try:
        yield
    finally:
        for setting, value in zip(settings, before, strict=True):
            setting.fp32_precision = value


def autocast_dtype(x: Tensor) -> torch.dtype:
    """Autocast's dtype where it is on, but for float64, which it leaves alone; x's own where it is off."""
    return torch.get_autocast_dtype(x.device.type) if _is_on(x) and x.dtype != torch.float64 else x.dtype


def autocast_like_sdpa(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Under autocast all but float64 in its dtype: norms of queries and keys leave these in float32 there."""
    if not _is_on(query):
        return query, key, value
    dtype = torch.get_autocast_dtype(query.device.type)
    query, key, value = (t if t.dtype in (dtype, torch.float64) else t.to(dtype) for t in (query, key, value))
    return query, key, value


def _is_on(x: Tensor) -> bool:
    kind = x.device.type
    return kind != "meta" and torch.is_autocast_enabled(kind)  # torch knows no autocast there, and raises
