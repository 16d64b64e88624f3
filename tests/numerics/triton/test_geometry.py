"""Tokens are found where `tokens_of` finds them."""

import pytest
import torch
import triton
import triton.language as tl

from wellcond.numerics.fused import tokens_of
from wellcond.numerics.triton.geometry import Geometry, token_offset, value_offset


@triton.jit
def _gather_kernel(
    x, out, n, d, stride_b,
    COLS: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr,
    N: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    batch = tl.program_id(0)
    token = tl.arange(0, N)
    value = tl.arange(0, D)
    at = token_offset(token, COLS, WIDTH, PH, PW)[:, None] + value_offset(value, HEIGHT, WIDTH, PH, PW)[None, :]
    inside = (token < n)[:, None] & (value < d)[None, :]
    found = tl.load(x + batch * stride_b + at, mask=inside, other=0.0)
    tl.store(out + batch * n * d + token[:, None] * d + value[None, :], found, mask=inside)


def gather(x, n, d, geometry):
    out = x.new_full((x.shape[0], n, d), -1.0)
    _gather_kernel[(x.shape[0],)](
        x, out, n, d, x.stride(0), *geometry, N=triton.next_power_of_2(n), D=triton.next_power_of_2(d)
    )
    return out


@pytest.mark.parametrize(
    ("channels", "height", "width", "patch"),
    [
        (3, 8, 8, (4, 4)),
        (1, 6, 10, (3, 5)),
        (2, 4, 12, (2, 1)),
        (3, 5, 7, (5, 7)),
        (1, 3, 3, (1, 1)),
        (4, 16, 32, (16, 16)),
    ],
)
def test_patches_of_images(device, channels, height, width, patch):
    images = torch.randn(2, channels, height, width, device=device)
    tokens = tokens_of(images, *patch)
    n, d = tokens.shape[1:]
    assert torch.equal(gather(images, n, d, Geometry.of_images(height, width, patch)), tokens)


@pytest.mark.parametrize("shape", [(1, 1), (3, 7), (7, 3), (16, 16)])
def test_rows_of_matrices(device, shape):
    x = torch.randn(2, *shape, device=device)
    assert torch.equal(gather(x, *shape, Geometry.of_matrices(*shape)), x)
