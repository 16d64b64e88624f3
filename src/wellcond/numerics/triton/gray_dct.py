"""DCT graying on tensor cores: tokens are read from the images once and written once; all in between is float16.

    fold       tokens → sums and differences about the middle, of values and of tokens, scaled to float16
    along      Y = X D_dᵀ, along each token
    across     Z = power(D_n Y), across the tokens
               D_nᵀ Z D_d, two plain products
    unfold     back into the images, times peak^(1−ε)

The largest coefficient enters only as a factor, so nothing waits for it until the end. Cosines are even or odd about
the middle: on sums and differences each basis splits into two of half the size, which halves the work, and since
folding is done once for both sides, the products in between are plain ones. Bases hold plain cosines, whose constant
row is exact in float16, and are scaled in float32 afterwards: otherwise the largest coefficient of a picture, its mean,
would spread the rounding of one number everywhere. Sums are float32.

Plain twin: `wellcond.numerics.dct.dct_power`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..constants import kept_constants
from .geometry import Geometry, token_offset, value_offset

__all__ = ["gray_dct_images"]

LARGEST_CHUNK = 2**30  # elements in flight, so that offsets within a chunk fit 32 bits


@triton.jit
def _power_of_two_below(value):
    """Return 2^floor(log2(value)), read off the exponent bits; 0 for zero."""
    return (value.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)


@triton.jit
def _corner_offsets(
    i, k, n, d,
    COLS: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr,
):  # fmt: skip
    """Return the offsets of tokens i and n−1−i and of values k and d−1−k."""
    top = token_offset(i, COLS, WIDTH, PH, PW)[:, None]
    bottom = token_offset(n - 1 - i, COLS, WIDTH, PH, PW)[:, None]
    near = value_offset(k, HEIGHT, WIDTH, PH, PW)[None, :]
    far = value_offset(d - 1 - k, HEIGHT, WIDTH, PH, PW)[None, :]
    return top, bottom, near, far


@triton.jit
def _fold_kernel(
    x, folded, scales, n, d, half_n, half_d, hp_n, hp_d, stride_b,
    COLS: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr,
    TOKENS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Store (2, batch, hp_n, 2·hp_d): even, odd tokens × even, odd values, each token pair scaled by a power of two."""
    batch = tl.program_id(1)
    i = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    k = tl.arange(0, BLOCK)
    top, bottom, near, far = _corner_offsets(i, k, n, d, COLS, HEIGHT, WIDTH, PH, PW)
    in_i = (i < half_n)[:, None]
    in_k = (k < half_d)[None, :]
    has_bottom = (n - 1 - i > i)[:, None]  # the middle token of an odd number has no mirror image
    has_far = (d - 1 - k > k)[None, :]
    x += batch * stride_b
    top_near = tl.load(x + top + near, mask=in_i & in_k, other=0.0).to(tl.float32)
    top_far = tl.load(x + top + far, mask=in_i & has_far, other=0.0).to(tl.float32)
    bottom_near = tl.load(x + bottom + near, mask=has_bottom & in_k, other=0.0).to(tl.float32)
    bottom_far = tl.load(x + bottom + far, mask=has_bottom & has_far, other=0.0).to(tl.float32)
    size = tl.maximum(
        tl.maximum(tl.abs(top_near), tl.abs(top_far)), tl.maximum(tl.abs(bottom_near), tl.abs(bottom_far))
    )
    scale = _power_of_two_below(tl.max(size, axis=1))
    tl.store(scales + batch * hp_n + i, scale, mask=i < hp_n)
    shrink = (1.0 / tl.where(scale == 0, 1.0, scale))[:, None]
    top_even = (top_near + top_far) * shrink
    top_odd = tl.where(has_far, top_near - top_far, 0.0) * shrink
    bottom_even = (bottom_near + bottom_far) * shrink
    bottom_odd = tl.where(has_far, bottom_near - bottom_far, 0.0) * shrink
    at = folded + (batch * hp_n + i)[:, None] * (2 * hp_d) + k[None, :]
    mask = (i < hp_n)[:, None] & (k < hp_d)[None, :]
    tl.store(at, (top_even + bottom_even).to(tl.float16), mask=mask)
    tl.store(at + hp_d, (top_odd + bottom_odd).to(tl.float16), mask=mask)
    at += tl.num_programs(1) * (hp_n * 2 * hp_d)  # odd tokens come after the even ones of all images
    tl.store(at, tl.where(has_bottom, top_even - bottom_even, 0.0).to(tl.float16), mask=mask)
    tl.store(at + hp_d, tl.where(has_bottom, top_odd - bottom_odd, 0.0).to(tl.float16), mask=mask)


@triton.jit
def _unfold_kernel(
    folded, out, largest, peak, n, d, half_n, half_d, hp_n, hp_d, stride_b, epsilon,
    COLS: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr,
    RESTORE: tl.constexpr, TOKENS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    batch = tl.program_id(1)
    i = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    k = tl.arange(0, BLOCK)
    top, bottom, near, far = _corner_offsets(i, k, n, d, COLS, HEIGHT, WIDTH, PH, PW)
    in_i = (i < half_n)[:, None]
    in_k = (k < half_d)[None, :]
    has_bottom = (n - 1 - i > i)[:, None]
    has_far = (d - 1 - k > k)[None, :]
    even = folded + (batch * hp_n + i)[:, None] * hp_d + k[None, :]
    rows = tl.num_programs(1) * hp_n
    odd = even + rows * 2 * hp_d  # (2, 2, batch, hp_n, hp_d): even and odd values, of even and odd tokens
    mask = in_i & in_k
    even_even = tl.load(even, mask=mask, other=0.0).to(tl.float32)
    even_odd = tl.load(odd, mask=mask, other=0.0).to(tl.float32)
    odd_even = tl.load(even + rows * hp_d, mask=mask, other=0.0).to(tl.float32)
    odd_odd = tl.load(odd + rows * hp_d, mask=mask, other=0.0).to(tl.float32)
    highest = tl.load(peak + batch)
    highest = tl.where(highest == 0, 1.0, highest)
    if RESTORE:
        gain = tl.exp2((1.0 - epsilon) * tl.log2(highest)) * tl.load(largest + batch)
    else:
        gain = tl.exp2(-epsilon * tl.log2(highest))
    top_even = (even_even + odd_even) * gain
    top_odd = (even_odd + odd_odd) * gain
    bottom_even = (even_even - odd_even) * gain
    bottom_odd = (even_odd - odd_odd) * gain
    out += batch * stride_b
    dtype = out.dtype.element_ty
    tl.store(out + top + near, (top_even + top_odd).to(dtype), mask=in_i & in_k)
    tl.store(out + top + far, (top_even - top_odd).to(dtype), mask=in_i & has_far)
    tl.store(out + bottom + near, (bottom_even + bottom_odd).to(dtype), mask=has_bottom & in_k)
    tl.store(out + bottom + far, (bottom_even - bottom_odd).to(dtype), mask=has_bottom & has_far)


@triton.jit
def _largest_scale_kernel(scales, largest, hp_n, BLOCK: tl.constexpr):
    batch = tl.program_id(0)
    best = tl.zeros((BLOCK,), dtype=tl.float32)
    for start in range(0, hp_n, BLOCK):
        at = start + tl.arange(0, BLOCK)
        best = tl.maximum(best, tl.load(scales + batch * hp_n + at, mask=at < hp_n, other=0.0))
    tl.store(largest + batch, tl.max(best, axis=0))


@triton.jit
def _along_kernel(
    a, y, basis, norms, scales, largest, rows, hp_n, hp_d,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Multiply the even or odd half of every row by its basis, and change from the rows' own scales to the image's."""
    part = tl.program_id(2)
    row = tl.program_id(0) * BM + tl.arange(0, BM)
    f = tl.program_id(1) * BN + tl.arange(0, BN)
    a += part * hp_d
    basis += part * hp_d * hp_d
    acc = tl.zeros((BM, BN), dtype=tl.float32)
    for start in range(0, hp_d, BK):
        k = start + tl.arange(0, BK)
        in_k = k < hp_d
        left = tl.load(
            a + row[:, None] * (2 * hp_d) + k[None, :], mask=(row < rows)[:, None] & in_k[None, :], other=0.0
        )
        right = tl.load(basis + f[None, :] * hp_d + k[:, None], mask=(f < hp_d)[None, :] & in_k[:, None], other=0.0)
        acc = tl.dot(left, right, acc)
    pair = row % (rows // 2)  # sums of token pairs are the first half of the rows, differences the second
    scale = tl.load(scales + pair, mask=row < rows, other=0.0)
    top = tl.load(largest + pair // hp_n, mask=row < rows, other=1.0)
    acc *= (scale / tl.where(top == 0, 1.0, top))[:, None]
    acc *= tl.load(norms + part * hp_d + f, mask=f < hp_d, other=0.0)[None, :]
    mask = (row < rows)[:, None] & (f < hp_d)[None, :]
    tl.store(y + row[:, None] * (2 * hp_d) + part * hp_d + f[None, :], acc.to(tl.float16), mask=mask)


@triton.jit
def _signed_power(z, epsilon):
    power = tl.exp2(epsilon * tl.log2(tl.abs(z)))  # 0 stays 0: exp2(−inf)
    return tl.where(z < 0, -power, power)


@triton.jit
def _across_kernel(
    y, z, basis, norms, column_norms, peak, hp_n, width, epsilon,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Compute power(D_n Y) for the even or odd tokens of an image, times the norms that the inverse transform needs."""
    row = tl.program_id(0) * BM + tl.arange(0, BM)
    col = tl.program_id(1) * BN + tl.arange(0, BN)
    batches = tl.num_programs(2) // 2
    part, batch = tl.program_id(2) // batches, tl.program_id(2) % batches
    basis += part * hp_n * hp_n
    offset = tl.program_id(2) * hp_n * width
    acc = tl.zeros((BM, BN), dtype=tl.float32)
    for start in range(0, hp_n, BK):
        k = start + tl.arange(0, BK)
        in_k = k < hp_n
        left = tl.load(basis + row[:, None] * hp_n + k[None, :], mask=(row < hp_n)[:, None] & in_k[None, :], other=0.0)
        right = tl.load(
            y + offset + k[:, None] * width + col[None, :], mask=in_k[:, None] & (col < width)[None, :], other=0.0
        )
        acc = tl.dot(left, right, acc)
    norm = tl.load(norms + part * hp_n + row, mask=row < hp_n, other=0.0)[:, None]
    acc *= norm
    tl.atomic_max(peak + batch, tl.max(tl.abs(acc)))
    acc = _signed_power(acc, epsilon) * norm * tl.load(column_norms + col, mask=col < width, other=0.0)[None, :]
    mask = (row < hp_n)[:, None] & (col < width)[None, :]
    tl.store(z + offset + row[:, None] * width + col[None, :], acc.to(tl.float16), mask=mask)


@kept_constants(32)
def _halves(length: int, device: str) -> tuple[Tensor, Tensor]:
    """Return even and odd cosines on the first half of `length`, (2, hp, hp) float16, and row norms, (2, hp) float32.

    hp is that half rounded up to a multiple of 16, with zero padding, so that loads are whole and aligned.
    """
    half = (length + 1) // 2
    hp = -(-half // 16) * 16
    frequency = torch.arange(length, dtype=torch.float64)[:, None]
    position = torch.arange(half, dtype=torch.float64)[None, :]
    cosines = torch.cos(torch.remainder((2 * position + 1) * frequency, 4 * length) * (torch.pi / (2 * length)))
    basis = torch.zeros(2, hp, hp, dtype=torch.float64)
    norms = torch.zeros(2, hp, dtype=torch.float64)
    basis[0, :half, :half] = cosines[0::2]
    basis[1, : length // 2, :half] = cosines[1::2]
    if length % 2:
        basis[1, :, half - 1] = 0  # odd cosines vanish in the middle
    norms[0, :half] = (2 / length) ** 0.5
    norms[1, : length // 2] = (2 / length) ** 0.5
    norms[0, 0] = (1 / length) ** 0.5
    return basis.to(device, torch.float16), norms.to(device, torch.float32)


def gray_dct_images(x: Tensor, n: int, d: int, geometry: Geometry, epsilon: float, *, restore_scale: bool) -> Tensor:
    """Gray contiguous images or (b, n, d) matrices, laid out by `geometry`, by the DCT; return the same layout."""
    per_image = max(x[0].numel(), 4 * ((n + 31) // 2) * ((d + 31) // 2))
    chunk = max(1, LARGEST_CHUNK // per_image)
    out = torch.empty_like(x)
    for start in range(0, x.shape[0], chunk):
        _gray_chunk(x[start : start + chunk], out[start : start + chunk], n, d, geometry, epsilon, restore_scale)
    return out


def _gray_chunk(
    x: Tensor, out: Tensor, n: int, d: int, geometry: Geometry, epsilon: float, restore_scale: bool
) -> None:
    batch, device = x.shape[0], str(x.device)
    basis_d, norms_d = _halves(d, device)
    basis_n, norms_n = _halves(n, device)
    half_d, half_n, hp_d, hp_n = (d + 1) // 2, (n + 1) // 2, basis_d.shape[-1], basis_n.shape[-1]
    rows, width = batch * 2 * hp_n, 2 * hp_d
    y, z = (torch.empty(2, batch, hp_n, width, dtype=torch.float16, device=x.device) for _ in range(2))
    scales = torch.empty(batch * hp_n, dtype=torch.float32, device=x.device)
    largest, peak = torch.zeros(2, batch, dtype=torch.float32, device=x.device)
    sizes = (n, d, half_n, half_d, hp_n, hp_d, x.stride(0))
    block = triton.next_power_of_2(hp_d)
    tokens = max(1, (1024 if block > 64 else 256) // block)
    fold_grid = (triton.cdiv(hp_n, tokens), batch)
    fold = {"TOKENS": tokens, "BLOCK": block, "num_warps": 4 if block > 64 else 2}
    along = _tiles((128, 128, 64, 8, 3) if hp_d > 64 else (128, 32, 32, 4, 1))
    across = _tiles((64, 128, 32, 4, 3) if width > 64 else (128, 64, 64, 4, 3))

    _fold_kernel[fold_grid](x, y, scales, *sizes, *geometry, **fold)
    _largest_scale_kernel[(batch,)](scales, largest, hp_n, BLOCK=256, num_warps=4)
    _along_kernel[(triton.cdiv(rows, along["BM"]), triton.cdiv(hp_d, along["BN"]), 2)](
        y, z, basis_d, norms_d, scales, largest, rows, hp_n, hp_d, **along
    )
    _across_kernel[(triton.cdiv(hp_n, across["BM"]), triton.cdiv(width, across["BN"]), 2 * batch)](
        z, y, basis_n, norms_n, norms_d, peak, hp_n, width, epsilon, **across
    )
    # The inverse transform has nothing to fuse: plain half-precision products, which cuBLAS does best.
    for part in range(2):
        torch.bmm(basis_n[part].mT.expand(batch, hp_n, hp_n), y[part], out=z[part])
    back = torch.bmm(z.view(rows, 2, hp_d).transpose(0, 1), basis_d)
    _unfold_kernel[fold_grid](back, out, largest, peak, *sizes, epsilon, *geometry, RESTORE=restore_scale, **fold)


def _tiles(shape: tuple[int, int, int, int, int]) -> dict[str, int]:
    return dict(zip(("BM", "BN", "BK", "num_warps", "num_stages"), shape, strict=True))
