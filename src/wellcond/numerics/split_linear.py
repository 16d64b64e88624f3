"""A float32 linear layer on the tensor cores of a GPU, as accurate as the library's own float32 product and faster.

    y = split_linear(x, weight, bias)            # (…, k), (m, k), (m,) → (…, m); float32, no gradient
    with linear_by_parts():                      # every large F.linear and patch-wise F.conv2d inside, on a GPU
        model(images)

Tensor cores multiply float16 exactly and add in float32. So each row is scaled by a power of two and cut into two
float16 parts, x = (h + l/2048)·2^e, which together hold 22 bits, and
    x·w = (h_x·h_w + (h_x·l_w + l_x·h_w)/2048)·2^(e_x + e_w),
where l_x·l_w/2048² is below rounding. Tensor cores truncate as they add, which would accumulate over a long sum:
h_x·h_w is therefore summed in parts of at most CHUNK terms, and the parts are added in ordinary float32. Compared with
float64, the error is no larger than that of a plain float32 product, which rounds once per term (tested, on a GPU too).

The probe's own pass is a second forward pass in float32, and on an H100 or H200 its products take nearly all of its
time.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from wellcond.numerics.fastpaths import fused_kernels
from wellcond.numerics.fused import tokens_of

__all__ = ["linear_by_parts", "split_linear"]

CHUNK = 384  # most terms that tensor cores add by themselves
LEAST = 2**24  # multiplications from which on splitting is worth the extra launches
WIDEST = 8192  # longest row that one program splits


def split_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x Wᵀ + bias for float32 (…, k), (m, k), (m,), without a gradient; k must be a multiple of 8."""
    k, m = x.shape[-1], weight.shape[0]
    rows = x.detach().reshape(-1, k)
    count = _parts(k)
    if fused_kernels(x.device):
        from .triton.split_linear import combine, split_rows

        (xs, x_inverse), (ws, w_inverse) = split_rows(rows, weight=False), split_rows(weight.detach(), weight=True)
        high = xs[:, :k].view(len(rows), count, -1).transpose(0, 1), ws[:, k:].view(m, count, -1).permute(1, 2, 0)
        parts = torch.bmm(*high, out_dtype=torch.float32)
        low = torch.mm(xs, ws.mT, out_dtype=torch.float32)
        return combine(parts, low, x_inverse, w_inverse, None if bias is None else bias.detach()).view(*x.shape[:-1], m)
    (xh, xl, x_unit), (wh, wl, w_unit) = _split_plainly(rows), _split_plainly(weight.detach())
    parts = xh.view(-1, count, k // count).transpose(0, 1) @ wh.view(m, count, k // count).permute(1, 2, 0)
    total = (parts.sum(0) + (xh @ wl.mT + xl @ wh.mT) / 2048) * (x_unit[:, None] * w_unit)
    return (total if bias is None else total + bias.detach()).view(*x.shape[:-1], m)


def _split_plainly(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return (high, low, unit) of rows: float16 values, held in float32."""
    exponent = torch.frexp(x.abs().amax(1)).exponent - 14
    scaled = torch.ldexp(x, -exponent[:, None])
    high = scaled.half().float()
    return high, ((scaled - high) * 2048).half().float(), torch.ldexp(torch.ones_like(x[:, 0]), exponent)


def _parts(k: int) -> int:
    """Return into how many equal parts to cut a sum of k terms: multiples of 8, of at most CHUNK terms if possible."""
    return next((c for c in range(-(-k // CHUNK), k // 8 + 1) if k % (8 * c) == 0), 1)


@contextlib.contextmanager
def linear_by_parts() -> Iterator[None]:
    """Run large float32 linear layers on a GPU by `split_linear` while active, unless gradients are enabled."""
    with _ByParts():
        yield


class _ByParts(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func is F.linear and _suits(*args, **(kwargs or {})):
            return split_linear(*args, **(kwargs or {}))
        if func is F.conv2d and (found := _patches(*args, **(kwargs or {}))) is not None:
            return found
        return func(*args, **(kwargs or {}))


def _suits(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> bool:  # noqa: A002 (torch's name)
    k = input.shape[-1]
    return (
        input.is_cuda
        and input.dtype == weight.dtype == torch.float32
        and (bias is None or bias.dtype == torch.float32)
        and not torch.is_grad_enabled()
        and type(weight) in (Tensor, torch.nn.Parameter)
        and k % 64 == 0
        and k <= WIDEST
        and weight.shape[0] % 8 == 0
        and weight.stride(-1) == 1
        and input.numel() * weight.shape[0] >= LEAST
        and not torch.is_autocast_enabled("cuda")
        and fused_kernels(input.device)
    )


def _patches(
    input: Tensor,  # noqa: A002 (torch's name)
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | tuple[int, ...] = 1,
    padding: int | str | tuple[int, ...] = 0,
    dilation: int | tuple[int, ...] = 1,
    groups: int = 1,
) -> Tensor | None:
    """Compute a convolution whose patches do not overlap, as a linear layer of them; return None for any other."""
    height, width = weight.shape[2:]
    plain = padding in (0, (0, 0), "valid") and dilation in (1, (1, 1)) and groups == 1 and input.ndim == 4
    side = (stride, stride) if isinstance(stride, int) else tuple(stride)
    if not plain or side != (height, width) or input.shape[-2] % height or input.shape[-1] % width:
        return None
    tokens = tokens_of(input, height, width)
    flat = weight.flatten(1)
    if not _suits(tokens, flat, bias):
        return None
    return split_linear(tokens, flat, bias).mT.unflatten(2, (input.shape[-2] // height, input.shape[-1] // width))
