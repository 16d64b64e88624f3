"""U Σ^ε Vᵀ of many token matrices by products on tensor cores: the fused twin of `products` in `numerics.spectral`.

With G the float64 Gram matrix of the shorter side scaled to λmax = 1, one inverse folds its ten decades onto five from
both ends: K = t (G + t)⁻¹, R = 4K(I − K). The power is then D(R) + F(R)·K, where D and F are weighted sums of the
iterates of R ← R (α − ¼α² R), one product per iterate. From K on, matrices are pairs of float16 (22 bits), which is
what the theory requires there: three half-precision products replace one in single precision, and are faster.

    fold_kernel      from −(G + t)⁻¹: K = t (G + t)⁻¹, and R = 4K(I − K), the first iterate
    iterate_kernel   R ← R (α − ¼α² R)
    sum_kernel       D(R) and F(R), weighted sums of all iterates
    join_kernel      W = D(R) + F(R)·K
    apply_kernel     W·X, or X·W

The second matrix of a pair holds what the first rounds off.
"""

import functools
from collections.abc import Callable, Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..constants import kept_constants
from ..power_fit import FoldedFit
from .geometry import Geometry, token_offset, value_offset
from .gram import gram, largest_eigenvalue
from .spd_inverse import negative_inverse

__all__ = ["spectral_power_in_place_layout"]

CHUNK = 256  # matrices at a time
# Pairs are stored 64 times larger: the low half stays clear of float16's subnormals, and both add up in one sum.
SCALE = tl.constexpr(64.0)


@kept_constants(64)
def _weights(fit: FoldedFit, device: str) -> Tensor:
    return torch.tensor([fit.near_constant, *fit.near, fit.far_constant, *fit.far], dtype=torch.float32, device=device)


def spectral_power_in_place_layout(
    x: Tensor, n: int, d: int, geometry: Geometry, fit: FoldedFit, *, restore_scale: bool
) -> Tensor:
    """Return U Σ^ε Vᵀ of every matrix of `x`, contiguous images or matrices laid out by `geometry`.

    Layout and dtype stay the same. Takes CHUNK matrices at a time: every iterate is kept until the sums are taken, 2
    MB for each 196 × 768 matrix. Half of the kernels wait for memory and half for a chain of steps, so that two halves
    of a batch fill each other's gaps.
    """
    out = torch.empty_like(x)
    for start in range(0, x.shape[0], CHUNK):
        count = 2 if x.is_cuda and min(n, d) > 128 and len(x) - start >= 64 else 1
        parts = zip(x[start : start + CHUNK].chunk(count), out[start : start + CHUNK].chunk(count), strict=True)
        _on_streams(
            x.device,
            [functools.partial(_gray_chunk, *part, n, d, geometry, fit, restore_scale) for part in parts],
        )
    return out


def _on_streams(device: torch.device, works: Sequence[Callable[[], object]]) -> None:
    """Call every function, each on its own stream: the first on the current one, where their inputs live.

    What they allocate belongs to their own streams, so they must free it themselves, by returning.
    """
    if len(works) == 1 or device.type != "cuda":
        for work in works:
            work()
        return
    here = torch.cuda.current_stream(device)
    lanes = [_lane(str(device), number) for number in range(len(works) - 1)]
    for lane in lanes:
        lane.wait_stream(here)
    for lane, work in zip([here, *lanes], works, strict=True):
        with torch.cuda.stream(lane):
            work()
    for lane in lanes:
        here.wait_stream(lane)


@functools.cache
def _lane(device: str, number: int) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def _gray_chunk(
    x: Tensor, out: Tensor, n: int, d: int, geometry: Geometry, fit: FoldedFit, restore_scale: bool
) -> None:
    batch, m = x.shape[0], min(n, d)
    g = gram(x, n, d, geometry)
    largest, _ = largest_eigenvalue(g, m, shift=fit.shift)
    g, _ = negative_inverse(g)
    ld = -(-m // 16) * 16
    size = batch * ld * ld
    count = len(fit.alphas) + 1
    iterates = torch.empty(count, 2, batch, ld, ld, dtype=torch.float16, device=x.device)
    k, far = (torch.empty(2, batch, ld, ld, dtype=torch.float16, device=x.device) for _ in range(2))
    near = torch.empty(batch, ld, ld, dtype=torch.float32, device=x.device)

    def grid(block: int) -> tuple[int, int, int]:
        return triton.cdiv(ld, block), triton.cdiv(ld, block), batch

    # 196 tokens are three tiles of 64 and four more rows: a whole tile for those would be a third of the work.
    rest = ld % 64
    last = rest if rest in (16, 32) else 64
    fold_kernel[grid(64)](
        g,
        largest,
        k,
        iterates[0],
        m,
        g.shape[-1],
        ld,
        size,
        fit.shift,
        BLOCK=64,
        LAST=last,
        BLOCK_K=16,
        num_warps=4,
        num_stages=3,
    )
    product = {"BLOCK": 64, "BLOCK_K": 32, "num_warps": 4, "num_stages": 3}
    unscale = 1.0 / (SCALE.value * SCALE.value)
    for step, alpha in enumerate(fit.alphas):
        iterate_kernel[grid(64)](
            iterates[step],
            iterates[step + 1],
            ld,
            size,
            unscale,
            alpha,
            -alpha * alpha / 4,
            LAST=last,
            CAREFUL=step < fit.careful,
            **product,
        )
    sum_kernel[grid(64)](
        iterates, _weights(fit, str(x.device)), near, far, ld, size, COUNT=count, BLOCK=64, num_warps=8
    )
    w = iterates[0]
    join_kernel[grid(64)](far, k, near, w, ld, size, unscale, **product)
    if n > d:
        tiles = {"BM": 64, "BN": max(16, min(64, triton.next_power_of_2(d))), "BK": 16, "num_warps": 4, "num_stages": 3}
    else:
        tiles = {"BM": 128, "BN": 128, "BK": 32, "num_warps": 8, "num_stages": 3}
    apply_kernel[(triton.cdiv(n, tiles["BM"]), triton.cdiv(d, tiles["BN"]), batch)](
        x, w, largest, out, n, d, x.stride(0), ld, size, *geometry, TALL=n > d, RESTORE=restore_scale, **tiles
    )


# ---- the kernels, in the order of their launches


@triton.jit
def _store_pair(at, size, value, mask):
    value = value * SCALE
    high = value.to(tl.float16)
    tl.store(at, high, mask=mask)
    tl.store(at + size, (value - high.to(tl.float32)).to(tl.float16), mask=mask)


@triton.jit
def _load_pair(at, size, mask):
    high = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    return (high + tl.load(at + size, mask=mask, other=0.0).to(tl.float32)) * (1.0 / SCALE)


@triton.jit
def _store_symmetric(at, value, i, j, ld, size, DIAGONAL: tl.constexpr):
    """Store a tile on or below the diagonal, and its mirror image."""
    inside = (i < ld)[:, None] & (j < ld)[None, :]
    _store_pair(at + i[:, None] * ld + j[None, :], size, value, inside)
    if not DIAGONAL:
        _store_pair(at + j[:, None] * ld + i[None, :], size, tl.trans(value), tl.trans(inside))


@triton.jit
def _fold_tile(
    swept, k_out, r_out, i, j, on_diagonal, tau, m, ld_in, ld, size,
    BM: tl.constexpr, BN: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    square = tl.zeros((BM, BN), dtype=tl.float64)
    for start in range(0, ld_in, BLOCK_K):
        r = start + tl.arange(0, BLOCK_K)
        left = tl.load(swept + i[:, None] * ld_in + r[None, :], mask=(i < m)[:, None] & (r < m)[None, :], other=0.0)
        right = tl.load(swept + j[None, :] * ld_in + r[:, None], mask=(j < m)[None, :] & (r < m)[:, None], other=0.0)
        square = tl.dot(left, right, square, input_precision="ieee", out_dtype=tl.float64)
    inside = (i < m)[:, None] & (j < m)[None, :]
    k = -tau * tl.load(swept + i[:, None] * ld_in + j[None, :], mask=inside, other=0.0)
    r = 4.0 * (k - tau * tau * square)
    if BM == BN:
        if on_diagonal:
            _store_symmetric(k_out, (0.5 * (k + tl.trans(k))).to(tl.float32), i, j, ld, size, True)
            _store_symmetric(r_out, (0.5 * (r + tl.trans(r))).to(tl.float32), i, j, ld, size, True)
        else:
            _store_symmetric(k_out, k.to(tl.float32), i, j, ld, size, False)
            _store_symmetric(r_out, r.to(tl.float32), i, j, ld, size, False)
    else:
        _store_symmetric(k_out, k.to(tl.float32), i, j, ld, size, False)
        _store_symmetric(r_out, r.to(tl.float32), i, j, ld, size, False)


@triton.jit
def fold_kernel(
    swept, largest, k_out, r_out, m, ld_in, ld, size, shift,
    BLOCK: tl.constexpr, LAST: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Compute K = −τ·S and R = 4K − 4K² from S = −(G + τ)⁻¹, τ = shift·λmax.

    K is squared in float64: where K ≈ 1, rounding would otherwise drown R.
    """
    tile_i, tile_j, batch = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    if tile_j > tile_i:
        return
    last = tl.num_programs(0) - 1
    swept += batch * ld_in * ld_in
    k_out += batch * ld * ld
    r_out += batch * ld * ld
    top = tl.load(largest + batch)
    tau = tl.where(top == 0, 1.0, shift * top)  # a zero matrix was shifted by 1
    full = tl.arange(0, BLOCK)
    short = tl.arange(0, LAST)
    j = tile_j * BLOCK + full
    if (LAST == BLOCK) or (tile_i < last):
        _fold_tile(swept, k_out, r_out, tile_i * BLOCK + full, j, tile_i == tile_j, tau, m, ld_in, ld, size,
                   BLOCK, BLOCK, BLOCK_K)  # fmt: skip
    elif tile_j < last:
        _fold_tile(swept, k_out, r_out, last * BLOCK + short, j, False, tau, m, ld_in, ld, size, LAST, BLOCK, BLOCK_K)
    else:
        end = last * BLOCK + short
        _fold_tile(swept, k_out, r_out, end, end, True, tau, m, ld_in, ld, size, LAST, LAST, BLOCK_K)


@triton.jit
def _product_tile(
    a, b, i, j, ld, size, unscale,
    BM: tl.constexpr, BN: tl.constexpr, BLOCK_K: tl.constexpr, CAREFUL: tl.constexpr,
):  # fmt: skip
    """Compute a tile of A·B for symmetric pairs A and B, whose columns are their rows.

    Tensor cores truncate their running sums instead of rounding them. CAREFUL adds up the blocks outside, rounding.
    """
    total = tl.zeros((BM, BN), dtype=tl.float32)
    acc = tl.zeros((BM, BN), dtype=tl.float32)
    for start in range(0, ld, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        at_a = a + i[:, None] * ld + k[None, :]
        at_b = b + j[None, :] * ld + k[:, None]
        mask_a = (i < ld)[:, None] & (k < ld)[None, :]
        mask_b = (j < ld)[None, :] & (k < ld)[:, None]
        a_high = tl.load(at_a, mask=mask_a, other=0.0)
        b_high = tl.load(at_b, mask=mask_b, other=0.0)
        a_low = tl.load(at_a + size, mask=mask_a, other=0.0)
        b_low = tl.load(at_b + size, mask=mask_b, other=0.0)
        if CAREFUL:
            part = tl.dot(a_high, b_low)
            part = tl.dot(a_low, b_high, part)
            part = tl.dot(a_high, b_high, part)
            total += part * unscale
        else:
            acc = tl.dot(a_high, b_high, acc)
            acc = tl.dot(a_high, b_low, acc)
            acc = tl.dot(a_low, b_high, acc)
    if not CAREFUL:
        total = acc * unscale
    return total


@triton.jit
def _iterate_tile(
    a, out, i, j, on_diagonal, ld, size, unscale, alpha, beta,
    BM: tl.constexpr, BN: tl.constexpr, BLOCK_K: tl.constexpr, CAREFUL: tl.constexpr,
):  # fmt: skip
    square = _product_tile(a, a, i, j, ld, size, unscale, BM, BN, BLOCK_K, CAREFUL)
    inside = (i < ld)[:, None] & (j < ld)[None, :]
    new = alpha * _load_pair(a + i[:, None] * ld + j[None, :], size, inside) + beta * square
    if BM == BN:
        if on_diagonal:
            new = 0.5 * (new + tl.trans(new))  # an antisymmetric rounding error would grow with every step
            _store_symmetric(out, new, i, j, ld, size, True)
        else:
            _store_symmetric(out, new, i, j, ld, size, False)
    else:
        _store_symmetric(out, new, i, j, ld, size, False)


@triton.jit
def iterate_kernel(
    a, out, ld, size, unscale, alpha, beta,
    BLOCK: tl.constexpr, LAST: tl.constexpr, BLOCK_K: tl.constexpr, CAREFUL: tl.constexpr,
):  # fmt: skip
    """Compute α·A + β·A² on and below the diagonal, and store its mirror image too."""
    tile_i, tile_j, batch = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    if tile_j > tile_i:
        return
    last = tl.num_programs(0) - 1
    a += batch * ld * ld
    out += batch * ld * ld
    full = tl.arange(0, BLOCK)
    short = tl.arange(0, LAST)
    j = tile_j * BLOCK + full
    if (LAST == BLOCK) or (tile_i < last):
        _iterate_tile(a, out, tile_i * BLOCK + full, j, tile_i == tile_j, ld, size, unscale, alpha, beta,
                      BLOCK, BLOCK, BLOCK_K, CAREFUL)  # fmt: skip
    elif tile_j < last:
        _iterate_tile(a, out, last * BLOCK + short, j, False, ld, size, unscale, alpha, beta,
                      LAST, BLOCK, BLOCK_K, CAREFUL)  # fmt: skip
    else:
        end = last * BLOCK + short
        _iterate_tile(a, out, end, end, True, ld, size, unscale, alpha, beta, LAST, LAST, BLOCK_K, CAREFUL)


@triton.jit
def sum_kernel(iterates, weights, near, far, ld, size, COUNT: tl.constexpr, BLOCK: tl.constexpr):
    """Compute D and F, weighted sums of the identity and of every iterate; D on and below the diagonal only."""
    tile_i, tile_j, batch = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    if tile_j > tile_i:
        return
    i = tile_i * BLOCK + tl.arange(0, BLOCK)
    j = tile_j * BLOCK + tl.arange(0, BLOCK)
    inside = (i < ld)[:, None] & (j < ld)[None, :]
    at = iterates + batch * ld * ld + i[:, None] * ld + j[None, :]
    identity = (i[:, None] == j[None, :]).to(tl.float32)
    d = tl.load(weights) * identity
    f = tl.load(weights + COUNT + 1) * identity
    for step in tl.static_range(COUNT):
        iterate = _load_pair(at + step * 2 * size, size, inside)
        d += tl.load(weights + step + 1) * iterate
        f += tl.load(weights + COUNT + step + 2) * iterate
    tl.store(near + batch * ld * ld + i[:, None] * ld + j[None, :], d, mask=inside)
    if tile_i == tile_j:
        _store_symmetric(far + batch * ld * ld, f, i, j, ld, size, True)
    else:
        _store_symmetric(far + batch * ld * ld, f, i, j, ld, size, False)


@triton.jit
def join_kernel(f, k, near, out, ld, size, unscale, BLOCK: tl.constexpr, BLOCK_K: tl.constexpr):
    """Compute W = D + F·K.

    In exact arithmetic F and K commute. In this order the rounding of F meets the small K of the large singular values
    of X, and stays in the columns that meet small ones, where it does no harm; hence W is not treated as symmetric.
    """
    tile_i, tile_j, batch = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    i = tile_i * BLOCK + tl.arange(0, BLOCK)
    j = tile_j * BLOCK + tl.arange(0, BLOCK)
    offset = batch * ld * ld
    product = _product_tile(f + offset, k + offset, i, j, ld, size, unscale, BLOCK, BLOCK, BLOCK_K, False)
    inside = (i < ld)[:, None] & (j < ld)[None, :]
    lower = offset + tl.maximum(i[:, None], j[None, :]) * ld + tl.minimum(i[:, None], j[None, :])
    w = tl.load(near + lower, mask=inside, other=0.0) + product
    _store_pair(out + offset + i[:, None] * ld + j[None, :], size, w, inside)


@triton.jit
def _split(value):
    high = value.to(tl.float16)
    return high, (value - high.to(tl.float32)).to(tl.float16)


@triton.jit
def apply_kernel(
    x, w, largest, out, n, d, stride_b, ld, size,
    COLS: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr,
    TALL: tl.constexpr, RESTORE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Compute W·X, or X·W if there are more tokens than values, scaling X to σmax = 1 as it is read."""
    tile_i, tile_j, batch = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    token = tile_i * BM + tl.arange(0, BM)
    value = tile_j * BN + tl.arange(0, BN)
    x += batch * stride_b
    out += batch * stride_b
    w += batch * ld * ld
    top = tl.sqrt(tl.load(largest + batch)).to(tl.float32)
    scale = tl.where(top == 0, 1.0, SCALE / top)
    at_token = token_offset(token, COLS, WIDTH, PH, PW)
    at_value = value_offset(value, HEIGHT, WIDTH, PH, PW)
    acc = tl.zeros((BM, BN), dtype=tl.float32)
    for start in range(0, ld, BK):
        k = start + tl.arange(0, BK)
        if TALL:
            at_x = at_token[:, None] + value_offset(k, HEIGHT, WIDTH, PH, PW)[None, :]
            left = tl.load(x + at_x, mask=(token < n)[:, None] & (k < d)[None, :], other=0.0).to(tl.float32)
            a_high, a_low = _split(left * scale)
            at_w = w + value[None, :] * ld + k[:, None]  # Wᵀ: its rows are the ones that meet the large singular values
            mask = (value < ld)[None, :] & (k < ld)[:, None]
            b_high = tl.load(at_w, mask=mask, other=0.0)
            b_low = tl.load(at_w + size, mask=mask, other=0.0)
        else:
            at_w = w + token[:, None] * ld + k[None, :]
            mask = (token < ld)[:, None] & (k < ld)[None, :]
            a_high = tl.load(at_w, mask=mask, other=0.0)
            a_low = tl.load(at_w + size, mask=mask, other=0.0)
            at_x = token_offset(k, COLS, WIDTH, PH, PW)[:, None] + at_value[None, :]
            right = tl.load(x + at_x, mask=(k < n)[:, None] & (value < d)[None, :], other=0.0).to(tl.float32)
            b_high, b_low = _split(right * scale)
        acc = tl.dot(a_high, b_high, acc)
        acc = tl.dot(a_high, b_low, acc)
        acc = tl.dot(a_low, b_high, acc)
    result = acc * ((top if RESTORE else 1.0) / (SCALE * SCALE))
    inside = (token < n)[:, None] & (value < d)[None, :]
    tl.store(out + at_token[:, None] + at_value[None, :], result.to(out.dtype.element_ty), mask=inside)
