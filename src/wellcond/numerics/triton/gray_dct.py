"""DCT graying on tensor cores: tokens are read once from the images and written once, and no coefficient goes back to float32.

    fold       tokens → sums and differences of mirrored values, scaled to float16 token by token
    along      Y = X D_dᵀ, along each token
    across     P = D_nᵀ · power(D_n Y), across the tokens: the power is pointwise, so a strip of columns stays on chip
    back       X̃ = P D_d · peak^(1−ε), and back into the images

The largest coefficient enters only as a factor, so nothing waits for it before the last step. Cosines are even or odd about
the middle: on sums and differences of mirrored entries each basis falls into two of half the size, a quarter of the work each.
Bases hold plain cosines, whose constant row is exact in float16, and are scaled in float32 afterwards: the largest
coefficient of a picture is its mean, and would otherwise carry the rounding of one number everywhere.

Plain twin: `wellcond.graying.gray_dct`.
"""

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from .geometry import Geometry, token_offset, value_offset

__all__ = ["gray_dct_images"]

MAX_ON_CHIP = 256  # more tokens than this go across in two products, through memory


@triton.jit
def _power_of_two_below(value):
    """2^floor(log2(value)), read off the exponent bits; 1 for zero."""
    bits = value.to(tl.int32, bitcast=True) & 0x7F800000
    return tl.where(value > 0, bits.to(tl.float32, bitcast=True), 1.0)


@triton.jit
def _fold_kernel(
    x, folded, scales, n, d, half, hp, stride_b,
    COLS: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr,
    TOKENS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    batch = tl.program_id(1).to(tl.int64)
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    k = tl.arange(0, BLOCK)
    mirror = d - 1 - k
    has_mirror = (mirror > k)[None, :]
    valid = (token < n)[:, None]
    base = x + batch * stride_b + token_offset(token, COLS, WIDTH, PH, PW)[:, None]
    near = tl.load(base + value_offset(k, HEIGHT, WIDTH, PH, PW)[None, :], mask=valid & (k < half)[None, :], other=0.0)
    far = tl.load(base + value_offset(mirror, HEIGHT, WIDTH, PH, PW)[None, :], mask=valid & has_mirror, other=0.0)
    near = near.to(tl.float32)
    far = far.to(tl.float32)
    scale = _power_of_two_below(tl.max(tl.maximum(tl.abs(near), tl.abs(far)), axis=1))
    row = batch * n + token
    tl.store(scales + row, scale, mask=token < n)
    near = near / scale[:, None]
    far = far / scale[:, None]
    out = folded + row[:, None] * (2 * hp) + k[None, :]
    inside = valid & (k < hp)[None, :]
    tl.store(out, (near + far).to(tl.float16), mask=inside)
    tl.store(out + hp, tl.where(has_mirror, near - far, 0.0).to(tl.float16), mask=inside)


@triton.jit
def _along_kernel(a, y, basis, norms, rows, hp, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    """One half (even or odd) of Y = X D_dᵀ; basis: (2, hp, hp) rows of cosines."""
    part = tl.program_id(2)
    row = tl.program_id(0) * BM + tl.arange(0, BM)
    f = tl.program_id(1) * BN + tl.arange(0, BN)
    a += part * hp
    basis += part * hp * hp
    acc = tl.zeros((BM, BN), dtype=tl.float32)
    for start in range(0, hp, BK):
        k = start + tl.arange(0, BK)
        left = tl.load(
            a + row[:, None] * (2 * hp) + k[None, :], mask=(row < rows)[:, None] & (k < hp)[None, :], other=0.0
        )
        right = tl.load(basis + f[None, :] * hp + k[:, None], mask=(f < hp)[None, :] & (k < hp)[:, None], other=0.0)
        acc = tl.dot(left, right, acc)
    acc *= tl.load(norms + part * hp + f, mask=f < hp, other=0.0)[None, :]
    mask = (row < rows)[:, None] & (f < hp)[None, :]
    tl.store(y + row[:, None] * (2 * hp) + part * hp + f[None, :], acc.to(tl.float16), mask=mask)


@triton.jit
def _signed_power(z, epsilon):
    power = tl.exp2(epsilon * tl.log2(tl.abs(z)))  # 0 stays 0: exp2(−inf)
    return tl.where(z < 0, -power, power)


@triton.jit
def _load_mirrored(base, scales, largest, i, col, n, half, width):
    """Rows i and n−1−i of a strip, brought from their own scales to the image's, as (even, odd) in float16."""
    mirror = n - 1 - i
    has_mirror = mirror > i
    in_col = (col < width)[None, :]
    near = tl.load(base + i[:, None] * width + col[None, :], mask=(i < half)[:, None] & in_col, other=0.0).to(
        tl.float32
    )
    far = tl.load(base + mirror[:, None] * width + col[None, :], mask=has_mirror[:, None] & in_col, other=0.0).to(
        tl.float32
    )
    near *= (tl.load(scales + i, mask=i < half, other=0.0) / largest)[:, None]
    far *= (tl.load(scales + mirror, mask=has_mirror, other=0.0) / largest)[:, None]
    odd = tl.where(has_mirror[:, None], near - far, 0.0)
    return (near + far).to(tl.float16), odd.to(tl.float16)


@triton.jit
def _store_mirrored(base, u, v, i, col, n, half, width):
    mirror = n - 1 - i
    in_col = (col < width)[None, :]
    tl.store(base + i[:, None] * width + col[None, :], (u + v).to(tl.float16), mask=(i < half)[:, None] & in_col)
    tl.store(base + mirror[:, None] * width + col[None, :], (u - v).to(tl.float16), mask=(mirror > i)[:, None] & in_col)


@triton.jit
def _largest_scale_kernel(scales, largest, n, BLOCK: tl.constexpr):
    batch = tl.program_id(0).to(tl.int64)
    best = tl.zeros((BLOCK,), dtype=tl.float32)
    for start in range(0, n, BLOCK):
        at = start + tl.arange(0, BLOCK)
        best = tl.maximum(best, tl.load(scales + batch * n + at, mask=at < n, other=0.0))
    tl.store(largest + batch, tl.max(best, axis=0))


@triton.jit
def _across_kernel(
    y, basis, norms, column_norms, scales, largest, peak, n, half, hp, width, epsilon,
    BN: tl.constexpr, BH: tl.constexpr, STRIPS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """In place on strips of columns of one image, all its tokens on chip; basis: (2, hp, hp), hp ≥ half."""
    batch = tl.program_id(0).to(tl.int64)
    h = tl.arange(0, BH)
    base = y + batch * n * width
    at = h[:, None] * hp + h[None, :]
    inside = (h < hp)[:, None] & (h < hp)[None, :]
    cos_e = tl.load(basis + at, mask=inside, other=0.0)
    cos_o = tl.load(basis + hp * hp + at, mask=inside, other=0.0)
    norm_e = tl.load(norms + h, mask=h < hp, other=0.0)[:, None]
    norm_o = tl.load(norms + hp + h, mask=h < hp, other=0.0)[:, None]
    top = tl.load(largest + batch)
    highest = 0.0
    for strip in tl.range(STRIPS, num_stages=STAGES):
        col = (tl.program_id(1) * STRIPS + strip) * BN + tl.arange(0, BN)
        even, odd = _load_mirrored(base, scales + batch * n, top, h, col, n, half, width)
        z_e = tl.dot(cos_e, even) * norm_e
        z_o = tl.dot(cos_o, odd) * norm_o
        highest = tl.maximum(highest, tl.max(tl.maximum(tl.abs(z_e), tl.abs(z_o))))
        z_e = _signed_power(z_e, epsilon) * norm_e
        z_o = _signed_power(z_o, epsilon) * norm_o
        scale = tl.load(column_norms + col, mask=col < width, other=0.0)[None, :]
        u = tl.dot(tl.trans(cos_e), z_e.to(tl.float16)) * scale
        v = tl.dot(tl.trans(cos_o), z_o.to(tl.float16)) * scale
        _store_mirrored(base, u, v, h, col, n, half, width)
    tl.atomic_max(peak + batch, highest)


@triton.jit
def _across_forward_kernel(
    y, z, basis, norms, scales, largest, peak, n, half, hp, width, epsilon,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """The first half of `_across_kernel` for many tokens: power(D_n Y), even rows above odd ones, (2·hp, width)."""
    f = tl.program_id(0) * BM + tl.arange(0, BM)
    col = tl.program_id(1) * BN + tl.arange(0, BN)
    batch = tl.program_id(2).to(tl.int64)
    top = tl.load(largest + batch)
    acc_e = tl.zeros((BM, BN), dtype=tl.float32)
    for start in range(0, half, BK):
        i = start + tl.arange(0, BK)
        even = _load_mirrored(y + batch * n * width, scales + batch * n, top, i, col, n, half, width)[0]
        at = f[:, None] * hp + i[None, :]
        acc_e = tl.dot(tl.load(basis + at, mask=(f < hp)[:, None] & (i < hp)[None, :], other=0.0), even, acc_e)
    acc_o = tl.zeros((BM, BN), dtype=tl.float32)
    for start in range(0, half, BK):
        i = start + tl.arange(0, BK)
        odd = _load_mirrored(y + batch * n * width, scales + batch * n, top, i, col, n, half, width)[1]
        at = hp * hp + f[:, None] * hp + i[None, :]
        acc_o = tl.dot(tl.load(basis + at, mask=(f < hp)[:, None] & (i < hp)[None, :], other=0.0), odd, acc_o)
    norm_e = tl.load(norms + f, mask=f < hp, other=0.0)[:, None]
    norm_o = tl.load(norms + hp + f, mask=f < hp, other=0.0)[:, None]
    acc_e *= norm_e
    acc_o *= norm_o
    tl.atomic_max(peak + batch, tl.max(tl.maximum(tl.abs(acc_e), tl.abs(acc_o))))
    out = z + batch * 2 * hp * width + f[:, None] * width + col[None, :]
    mask = (f < hp)[:, None] & (col < width)[None, :]
    tl.store(out, (_signed_power(acc_e, epsilon) * norm_e).to(tl.float16), mask=mask)
    tl.store(out + hp * width, (_signed_power(acc_o, epsilon) * norm_o).to(tl.float16), mask=mask)


@triton.jit
def _across_back_kernel(
    z, y, basis, column_norms, n, half, hp, width,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """The second half of `_across_kernel` for many tokens."""
    i = tl.program_id(0) * BM + tl.arange(0, BM)
    col = tl.program_id(1) * BN + tl.arange(0, BN)
    batch = tl.program_id(2).to(tl.int64)
    u = tl.zeros((BM, BN), dtype=tl.float32)
    z += batch * 2 * hp * width
    for start in range(0, hp, BK):
        f = start + tl.arange(0, BK)
        cos = tl.load(basis + f[None, :] * hp + i[:, None], mask=(f < hp)[None, :] & (i < hp)[:, None], other=0.0)
        here = f[:, None] * width + col[None, :]
        u = tl.dot(cos, tl.load(z + here, mask=(f < hp)[:, None] & (col < width)[None, :], other=0.0), u)
    v = tl.zeros((BM, BN), dtype=tl.float32)
    basis += hp * hp
    z += hp * width
    for start in range(0, hp, BK):
        f = start + tl.arange(0, BK)
        cos = tl.load(basis + f[None, :] * hp + i[:, None], mask=(f < hp)[None, :] & (i < hp)[:, None], other=0.0)
        here = f[:, None] * width + col[None, :]
        v = tl.dot(cos, tl.load(z + here, mask=(f < hp)[:, None] & (col < width)[None, :], other=0.0), v)
    scale = tl.load(column_norms + col, mask=col < width, other=0.0)[None, :]
    _store_mirrored(y + batch * n * width, u * scale, v * scale, i, col, n, half, width)


@triton.jit
def _back_kernel(
    p, out, basis, largest, peak, rows, n, d, half, hp, stride_b, epsilon,
    COLS: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr,
    RESTORE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * BM + tl.arange(0, BM)
    k = tl.program_id(1) * BN + tl.arange(0, BN)
    u = tl.zeros((BM, BN), dtype=tl.float32)
    for start in range(0, hp, BK):
        f = start + tl.arange(0, BK)
        left = tl.load(p + row[:, None] * (2 * hp) + f[None, :], mask=(row < rows)[:, None] & (f < hp)[None, :], other=0.0)
        cos = tl.load(basis + f[:, None] * hp + k[None, :], mask=(f < hp)[:, None] & (k < hp)[None, :], other=0.0)
        u = tl.dot(left, cos, u)
    v = tl.zeros((BM, BN), dtype=tl.float32)
    p += hp
    basis += hp * hp
    for start in range(0, hp, BK):
        f = start + tl.arange(0, BK)
        left = tl.load(p + row[:, None] * (2 * hp) + f[None, :], mask=(row < rows)[:, None] & (f < hp)[None, :], other=0.0)
        cos = tl.load(basis + f[:, None] * hp + k[None, :], mask=(f < hp)[:, None] & (k < hp)[None, :], other=0.0)
        v = tl.dot(left, cos, v)
    batch = row // n
    valid = row < rows
    top = tl.load(peak + batch, mask=valid, other=1.0)
    top = tl.where(top == 0, 1.0, top)
    if RESTORE:
        gain = tl.exp2((1.0 - epsilon) * tl.log2(top)) * tl.load(largest + batch, mask=valid, other=1.0)
    else:
        gain = tl.exp2(-epsilon * tl.log2(top))
    mirror = d - 1 - k
    base = out + (batch * stride_b + token_offset(row % n, COLS, WIDTH, PH, PW))[:, None]
    near = ((u + v) * gain[:, None]).to(out.dtype.element_ty)
    far = ((u - v) * gain[:, None]).to(out.dtype.element_ty)
    tl.store(base + value_offset(k, HEIGHT, WIDTH, PH, PW)[None, :], near, mask=valid[:, None] & (k < half)[None, :])
    tl.store(
        base + value_offset(mirror, HEIGHT, WIDTH, PH, PW)[None, :], far, mask=valid[:, None] & (mirror > k)[None, :]
    )


@functools.lru_cache(maxsize=32)
def _halves(length: int, device: str) -> tuple[Tensor, Tensor]:
    """Even and odd cosines on the first half of `length`, (2, hp, hp) float16, and each row's norm, (2, hp) float32.

    hp is the half rounded up to 16's, padded with zeros, so that loads are whole and aligned.
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


def gray_dct_images(
    x: Tensor, n: int, d: int, geometry: Geometry, epsilon: float, *, restore_scale: bool, chunk: int = 64,
    along=(128, 128, 64, 8, 3), across=(64, 8, 3, 1), back=(128, 64, 64, 8, 3), many=(128, 64, 32, 8, 3), fold=(4, 4), on_chip_limit=None,
) -> Tensor:  # fmt: skip
    """DCT graying of contiguous images, or (b, n, d) matrices, laid out by `geometry`; the same layout and dtype come back.

    `chunk` images at a time, so that what one step leaves is still in the cache when the next one reads it.
    """
    batch, device = x.shape[0], str(x.device)
    basis_d, norms_d = _halves(d, device)
    basis_n, norms_n = _halves(n, device)
    half_d, half_n, hp, hp_n = (d + 1) // 2, (n + 1) // 2, basis_d.shape[-1], basis_n.shape[-1]
    width = 2 * hp
    chunk = min(chunk, batch)
    out = torch.empty_like(x)
    folded, y = (torch.empty(chunk * n, width, dtype=torch.float16, device=x.device) for _ in range(2))
    scales = torch.empty(chunk * n, dtype=torch.float32, device=x.device)
    largest = torch.empty(batch, dtype=torch.float32, device=x.device)
    peaks = torch.zeros(batch, dtype=torch.float32, device=x.device)
    on_chip = n <= (MAX_ON_CHIP if on_chip_limit is None else on_chip_limit)
    z = folded if on_chip else torch.empty(chunk, 2 * hp_n, width, dtype=torch.float16, device=x.device)
    for start in range(0, batch, chunk):
        part, grayed, top, peak = (t[start : start + chunk] for t in (x, out, largest, peaks))
        b = part.shape[0]
        rows = b * n
        tokens, warps = fold
        _fold_kernel[(triton.cdiv(n, tokens), b)](
            part, folded, scales, n, d, half_d, hp, x.stride(0), *geometry,
            TOKENS=tokens, BLOCK=triton.next_power_of_2(hp), num_warps=warps,
        )  # fmt: skip
        _largest_scale_kernel[(b,)](scales, top, n, BLOCK=256, num_warps=4)
        bm, bn, bk, warps, stages = along
        _along_kernel[(triton.cdiv(rows, bm), triton.cdiv(hp, bn), 2)](
            folded, y, basis_d, norms_d, rows, hp, BM=bm, BN=bn, BK=bk, num_warps=warps, num_stages=stages
        )
        if on_chip:
            bn, warps, strips, stages = across
            _across_kernel[(b, triton.cdiv(width, bn * strips))](
                y, basis_n, norms_n, norms_d, scales, top, peak, n, half_n, hp_n, width, epsilon,
                BN=bn, BH=triton.next_power_of_2(hp_n), STRIPS=strips, STAGES=stages, num_warps=warps,
            )  # fmt: skip
        else:
            bm, bn, bk, warps, stages = many
            tiling = {"BM": bm, "BN": bn, "BK": bk, "num_warps": warps, "num_stages": stages}
            grid = (triton.cdiv(hp_n, bm), triton.cdiv(width, bn), b)
            _across_forward_kernel[grid](
                y, z, basis_n, norms_n, scales, top, peak, n, half_n, hp_n, width, epsilon, **tiling
            )
            _across_back_kernel[grid](z, y, basis_n, norms_d, n, half_n, hp_n, width, **tiling)
        bm, bn, bk, warps, stages = back
        _back_kernel[(triton.cdiv(rows, bm), triton.cdiv(half_d, bn))](
            y, grayed, basis_d, top, peak, rows, n, d, half_d, hp, x.stride(0), epsilon, *geometry,
            RESTORE=restore_scale, BM=bm, BN=bn, BK=bk, num_warps=warps, num_stages=stages,
        )  # fmt: skip
    return out
