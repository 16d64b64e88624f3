"""Autocast: what must not happen under it, and what a function does that torch's autocast does not know.

with no_autocast(x):                                        # products of float32 stay float32
    weights = x.float() @ y.float().mT
query, key, value = autocast_like_sdpa(query, key, value)   # as scaled_dot_product_attention takes its inputs
autocast_dtype(x)                                           # what a product of x is computed in
with no_tf32():                                             # float32 products, convolutions too, have all their bits
    ...
with tf32():                                                # or ten of them, on GPUs that multiply faster so
    ...
"""

import contextlib
from collections.abc import Iterator
from typing import Any, Literal

import torch
from torch import Tensor

__all__ = ["autocast_dtype", "autocast_like_sdpa", "no_autocast", "no_tf32", "tf32"]


def no_autocast(x: Tensor, *, backward: bool = False) -> contextlib.AbstractContextManager[Any]:
    """Turns autocast off for x's kind of device, where it is on: entering a context costs as much as a product.

    In a `backward` pass always: compilers look at it where the forward pass was called, and may run it elsewhere.
    """
    if x.device.type == "meta" or not (backward or _is_on(x)):
        return contextlib.nullcontext()
    return torch.autocast(x.device.type, enabled=False)


def no_tf32() -> contextlib.AbstractContextManager[None]:
    """By default torch rounds what goes into convolutions on a GPU to ten bits."""
    return _float32_products("highest", "ieee")


def tf32() -> contextlib.AbstractContextManager[None]:
    """A CPU, and a GPU older than Ampere, compute in float32 all the same."""
    return _float32_products("high", "tf32")


@contextlib.contextmanager
def _float32_products(whole: Literal["highest", "high"], each: Literal["ieee", "tf32"]) -> Iterator[None]:
    """torch has older settings for all products and newer ones for each kind. Where they differ, reading the older ones
    raises, as its compiler does: so both are set, and both put back."""
    backends: Any = torch.backends
    settings: tuple[Any, ...] = (
        backends.cuda.matmul, backends.mkldnn.matmul, backends.cudnn.conv, backends.cudnn.rnn,
    )  # fmt: skip
    before = [setting.fp32_precision for setting in settings]
    by_tf32 = before[0] == "tf32", before[2] == before[3] == "tf32"
    try:
        whole_before = torch.get_float32_matmul_precision()
    except RuntimeError:  # they differ, so it is the other one
        whole_before = "highest" if by_tf32[0] else "high"
    try:
        cudnn_before = backends.cudnn.allow_tf32
    except RuntimeError:
        cudnn_before = not by_tf32[1]
    torch.set_float32_matmul_precision(whole)
    backends.cudnn.allow_tf32 = each == "tf32"
    for setting in settings:
        setting.fp32_precision = each
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(whole_before)
        backends.cudnn.allow_tf32 = cudnn_before
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
