"""Control of autocast and TF32: turn them off where they would cost precision, and autocast like torch's own functions.

with no_autocast(x):                                        # float32 products stay float32
    weights = x.float() @ y.float().mT
query, key, value = autocast_like_sdpa(query, key, value)   # cast inputs as scaled_dot_product_attention does
autocast_dtype(x)                                           # the dtype in which a product of x is computed
with no_tf32():                                             # float32 products and convolutions in full precision
    ...
with tf32():                                                # or with ten-bit inputs, on GPUs where that is faster
    ...
"""

import contextlib
from collections.abc import Iterator
from typing import Any, Literal

import torch
from torch import Tensor

__all__ = ["autocast_dtype", "autocast_like_sdpa", "no_autocast", "no_tf32", "tf32"]


def no_autocast(x: Tensor, *, backward: bool = False) -> contextlib.AbstractContextManager[Any]:
    """Return a context that turns autocast off for x's device type, or does nothing where it is off already.

    Entering an autocast context costs as much as a product, so it is avoided. In a `backward` pass it is always
    entered: compilers check autocast where the forward pass was called, and may run the backward pass elsewhere.
    """
    if x.device.type == "meta" or not (backward or _is_on(x)):
        return contextlib.nullcontext()
    return torch.autocast(x.device.type, enabled=False)


def no_tf32() -> contextlib.AbstractContextManager[None]:
    """Compute float32 in full precision: by default torch rounds the inputs of GPU convolutions to ten bits."""
    return _float32_products("highest", "ieee")


def tf32() -> contextlib.AbstractContextManager[None]:
    """Allow TF32. CPUs, and GPUs older than Ampere, compute in full float32 all the same."""
    return _float32_products("high", "tf32")


@contextlib.contextmanager
def _float32_products(whole: Literal["highest", "high"], each: Literal["ieee", "tf32"]) -> Iterator[None]:
    """Set torch's older settings, for all products, and its newer ones, for each kind; restore both at the end. Where
    they disagree, reading the older ones raises, and torch's compiler reads them: hence both are set."""
    backends: Any = torch.backends
    settings: tuple[Any, ...] = (
        backends.cuda.matmul, backends.mkldnn.matmul, backends.cudnn.conv, backends.cudnn.rnn,
    )  # fmt: skip
    before = [setting.fp32_precision for setting in settings]
    by_tf32 = before[0] == "tf32", before[2] == before[3] == "tf32"
    try:
        whole_before = torch.get_float32_matmul_precision()
    except RuntimeError:  # they disagree, so the older one is the opposite of the newer
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
    """Return autocast's dtype if it is on and x is not float64, which it leaves alone; otherwise x's own."""
    return torch.get_autocast_dtype(x.device.type) if _is_on(x) and x.dtype != torch.float64 else x.dtype


def autocast_like_sdpa(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Under autocast, cast all but float64 to its dtype: normalising queries and keys leaves them in float32 there."""
    if not _is_on(query):
        return query, key, value
    dtype = torch.get_autocast_dtype(query.device.type)
    query, key, value = (t if t.dtype in (dtype, torch.float64) else t.to(dtype) for t in (query, key, value))
    return query, key, value


def _is_on(x: Tensor) -> bool:
    kind = x.device.type
    return kind != "meta" and torch.is_autocast_enabled(kind)  # torch has no autocast for meta, and raises
