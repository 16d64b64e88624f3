"""The parts of a narrow pre-norm layer before and after its attention, with gradients, as Triton kernels.

    q, k, v = enter(x, before, ends, dtype=torch.bfloat16)                # the norm and one product for all three
    dx, sums = enter_back((dq, dk, dv), x, before, ends)
    y = leave(a, x, after, seed, ends, dropout_p=0.1)                     # x + proj(a), plus the MLP of its norm
    da, dx, sums = leave_back(dy, a, x, after, seed, ends, dropout_p=0.1)

Rows of up to 64 numbers, and an MLP twice as wide, fit into a program with all their weights, so that tokens are read
and written once where a compiler's kernels do so a dozen times. Forward passes save nothing; backward passes recompute
everything from `x` and `a`. Each program goes through many blocks of rows, and accumulates its share of a weight's
gradient in registers; these sums are added up in a fixed order, so that results are reproducible to the bit.

Tokens are (b, n, width). In each sequence, the rows from its `ends` on are never read: they give zeros and get no
gradient. Products have operands of the dtype of `a` and sums in float32; norms, dropout and skips are float32. What is
dropped is decided by a hash of (seed, place, row, column).
"""

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import launch, layout
from .softmax import bits_of_columns, bits_of_rows, drop_keys, drop_threshold, stays_at
from .tiles import ceil_div

__all__ = [
    "enter",
    "enter_back",
    "enter_back_kernel",
    "enter_kernel",
    "leave",
    "leave_back",
    "leave_back_kernel",
    "leave_kernel",
    "sums_of",
    "weights_kernel",
]

Tiles = dict[str, int]
TILES: dict[str, Tiles] = {
    "enter": {"ROWS": 64, "num_warps": 4, "programs": 528},
    "leave": {"ROWS": 64, "num_warps": 4, "programs": 264},
    "enter_back": {"ROWS": 64, "num_warps": 4, "programs": 264},
    "leave_back": {"ROWS": 64, "num_warps": 4, "programs": 264},
    "weights": {"ROWS": 64, "num_warps": 4, "programs": 53, "num_stages": 3},
}
"""Rows per block, and programs, each of which goes through many blocks: as many as an H100 runs at once."""


@triton.jit
def _counting(rows, count, n, ends, HAS_ENDS: tl.constexpr):
    """Return which of the rows exist, and which of these count."""
    there = rows < count
    counts = there
    if HAS_ENDS:
        counts = there & (rows % n < tl.load(ends + rows // n, mask=there, other=0))
    return there, counts


@triton.jit
def _stays(seed, place: tl.constexpr, rows, columns, threshold):
    """Return which numbers of a block stay, in the dropout at this place."""
    of_rows, of_columns = drop_keys(seed, tl.full((), place, dtype=tl.int32))
    return stays_at(bits_of_rows(rows, of_rows), bits_of_columns(columns, of_columns), threshold)


@triton.jit
def _normed(x, eps, WIDTH: tl.constexpr):
    """Return rows minus their mean, over their standard deviation; and the reciprocal of the latter."""
    centred = x - (tl.sum(x, axis=1) / WIDTH)[:, None]
    inverse = tl.rsqrt(tl.sum(centred * centred, axis=1) / WIDTH + eps)
    return centred * inverse[:, None], inverse


@triton.jit
def _unnormed(d, normed, inverse, WIDTH: tl.constexpr):
    """Return the gradient of the rows, given that of the normed rows."""
    along = tl.sum(d * normed, axis=1) / WIDTH
    return (d - (tl.sum(d, axis=1) / WIDTH)[:, None] - normed * along[:, None]) * inverse[:, None]


@triton.jit
def _block(base, rows, mask, WIDTH: tl.constexpr):
    c = tl.arange(0, WIDTH)
    return tl.load(base + rows[:, None] * WIDTH + c[None, :], mask=mask[:, None], other=0.0)


@triton.jit
def _put(base, rows, there, counts, tile, WIDTH: tl.constexpr):
    """Store a tile, with zeros for rows that do not count."""
    c = tl.arange(0, WIDTH)
    tile = tl.where(counts[:, None], tile, 0.0).to(base.dtype.element_ty)
    tl.store(base + rows[:, None] * WIDTH + c[None, :], tile, mask=there[:, None])


@triton.jit
def _matrix(base, stride, WIDTH: tl.constexpr, dtype: tl.constexpr):
    """Load a square matrix whose rows are `stride` apart."""
    c = tl.arange(0, WIDTH)
    return tl.load(base + c[:, None] * stride + c[None, :]).to(dtype)


@triton.jit
def _put_sums(base, product, bias, WIDTH: tl.constexpr):
    """Store a product, and the bias in the row after it. All columns of `bias` are alike: it is a product with ones,
    which adds up rows without making threads wait for each other."""
    c = tl.arange(0, WIDTH)
    tl.store(base + c[:, None] * WIDTH + c[None, :], product)
    tl.store(base + WIDTH * WIDTH + c, tl.max(bias, axis=1))


@triton.jit
def _row(at):
    """Load a vector as a row, where it is needed: if held, each would take sixteen registers of every thread."""
    return tl.load(at)[None, :]


@triton.jit
def enter_kernel(
    x, gamma, beta, weight, bias, q, k, v, ends, count, n, eps,
    WIDTH: tl.constexpr, ROWS: tl.constexpr, HAS_ENDS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    c = tl.arange(0, WIDTH)
    dtype: tl.constexpr = q.dtype.element_ty
    size: tl.constexpr = WIDTH * WIDTH
    wq, wk, wv = (
        _matrix(weight, WIDTH, WIDTH, dtype),
        _matrix(weight + size, WIDTH, WIDTH, dtype),
        _matrix(weight + 2 * size, WIDTH, WIDTH, dtype),
    )
    for block in range(tl.program_id(0), tl.cdiv(count, ROWS), tl.num_programs(0)):
        rows = block * ROWS + tl.arange(0, ROWS)
        there, counts = _counting(rows, count, n, ends, HAS_ENDS)
        if tl.max(counts.to(tl.int32), axis=0) > 0:
            normed, _ = _normed(_block(x, rows, counts, WIDTH), eps, WIDTH)
            h = (normed * _row(gamma + c) + _row(beta + c)).to(dtype)
            _put(q, rows, there, counts, tl.dot(h, tl.trans(wq), input_precision=PRECISION) + _row(bias + c), WIDTH)
            _put(
                k,
                rows,
                there,
                counts,
                tl.dot(h, tl.trans(wk), input_precision=PRECISION) + _row(bias + WIDTH + c),
                WIDTH,
            )
            _put(
                v,
                rows,
                there,
                counts,
                tl.dot(h, tl.trans(wv), input_precision=PRECISION) + _row(bias + 2 * WIDTH + c),
                WIDTH,
            )
        else:
            zeros = tl.zeros((ROWS, WIDTH), dtype=tl.float32)
            _put(q, rows, there, counts, zeros, WIDTH)
            _put(k, rows, there, counts, zeros, WIDTH)
            _put(v, rows, there, counts, zeros, WIDTH)


@triton.jit
def enter_back_kernel(
    dq, dk, dv, x, gamma, weight, dx, sums, ends, count, n, eps,
    WIDTH: tl.constexpr, ROWS: tl.constexpr, HAS_ENDS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    c = tl.arange(0, WIDTH)
    dtype: tl.constexpr = dq.dtype.element_ty
    size: tl.constexpr = WIDTH * WIDTH
    wq, wk, wv = (
        _matrix(weight, WIDTH, WIDTH, dtype),
        _matrix(weight + size, WIDTH, WIDTH, dtype),
        _matrix(weight + 2 * size, WIDTH, WIDTH, dtype),
    )
    of_q = tl.zeros((WIDTH, WIDTH), dtype=tl.float32)
    of_k = tl.zeros((WIDTH, WIDTH), dtype=tl.float32)
    of_v = tl.zeros((WIDTH, WIDTH), dtype=tl.float32)
    ones = tl.full((ROWS, 16), 1.0, dtype=dtype)
    bias_q = tl.zeros((WIDTH, 16), dtype=tl.float32)
    bias_k = tl.zeros((WIDTH, 16), dtype=tl.float32)
    bias_v = tl.zeros((WIDTH, 16), dtype=tl.float32)
    for block in range(tl.program_id(0), tl.cdiv(count, ROWS), tl.num_programs(0)):
        rows = block * ROWS + tl.arange(0, ROWS)
        there, counts = _counting(rows, count, n, ends, HAS_ENDS)
        if tl.max(counts.to(tl.int32), axis=0) > 0:
            normed, inverse = _normed(_block(x, rows, counts, WIDTH), eps, WIDTH)
            h = normed.to(dtype)
            g = _block(dq, rows, counts, WIDTH)
            dh = tl.dot(g, wq, input_precision=PRECISION)
            of_q = tl.dot(tl.trans(g), h, of_q, input_precision=PRECISION)
            bias_q = tl.dot(tl.trans(g), ones, bias_q, input_precision=PRECISION)
            g = _block(dk, rows, counts, WIDTH)
            dh = tl.dot(g, wk, dh, input_precision=PRECISION)
            of_k = tl.dot(tl.trans(g), h, of_k, input_precision=PRECISION)
            bias_k = tl.dot(tl.trans(g), ones, bias_k, input_precision=PRECISION)
            g = _block(dv, rows, counts, WIDTH)
            dh = tl.dot(g, wv, dh, input_precision=PRECISION)
            of_v = tl.dot(tl.trans(g), h, of_v, input_precision=PRECISION)
            bias_v = tl.dot(tl.trans(g), ones, bias_v, input_precision=PRECISION)
            _put(dx, rows, there, counts, _unnormed(dh * _row(gamma + c), normed, inverse, WIDTH), WIDTH)
        else:
            _put(dx, rows, there, counts, tl.zeros((ROWS, WIDTH), dtype=tl.float32), WIDTH)
    sums += tl.program_id(0).to(tl.int64) * 3 * (size + WIDTH)
    _put_sums(sums, of_q, bias_q, WIDTH)
    _put_sums(sums + size + WIDTH, of_k, bias_k, WIDTH)
    _put_sums(sums + 2 * (size + WIDTH), of_v, bias_v, WIDTH)


@triton.jit
def _gelu(u):
    """Return GELU and its derivative. Φ is Abramowitz and Stegun's 7.1.26, which errs by less than 1e-7 and shares its
    exponential with the derivative."""
    bell = tl.exp2(u * u * -0.7213475204444817)  # exp(−u²/2)
    t = 1.0 / (1.0 + 0.2316418882 * tl.abs(u))
    tail = 0.5307027145 * t - 0.7265760135
    tail = (0.7107068705 + t * tail) * t - 0.142248368
    tail = (0.127414796 + t * tail) * t * bell  # 1 − Φ(|u|)
    below = tl.where(u < 0, tail, 1.0 - tail)
    return u * below, below + u * bell * 0.3989422804014327


@triton.jit
def leave_kernel(
    a, x, proj, proj_bias, gamma, beta, up, up_bias, down, down_bias, seed, out, ends, count, n, eps, threshold,
    enlarge,
    WIDTH: tl.constexpr, ROWS: tl.constexpr, DROPS: tl.constexpr, HAS_ENDS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    c = tl.arange(0, WIDTH)
    dtype: tl.constexpr = a.dtype.element_ty
    w_proj = _matrix(proj, WIDTH, WIDTH, dtype)
    up_0, up_1 = _matrix(up, WIDTH, WIDTH, dtype), _matrix(up + WIDTH * WIDTH, WIDTH, WIDTH, dtype)
    down_0, down_1 = _matrix(down, 2 * WIDTH, WIDTH, dtype), _matrix(down + WIDTH, 2 * WIDTH, WIDTH, dtype)
    for block in range(tl.program_id(0), tl.cdiv(count, ROWS), tl.num_programs(0)):
        rows = block * ROWS + tl.arange(0, ROWS)
        there, counts = _counting(rows, count, n, ends, HAS_ENDS)
        if tl.max(counts.to(tl.int32), axis=0) > 0:
            y = tl.dot(_block(a, rows, counts, WIDTH), tl.trans(w_proj), input_precision=PRECISION) + _row(
                proj_bias + c
            )
            if DROPS:
                y = tl.where(_stays(seed, 0, rows, c, threshold), y * enlarge, 0.0)
            y += _block(x, rows, counts, WIDTH)
            normed, _ = _normed(y, eps, WIDTH)
            h = (normed * _row(gamma + c) + _row(beta + c)).to(dtype)
            m, _ = _gelu(tl.dot(h, tl.trans(up_0), input_precision=PRECISION) + _row(up_bias + c))
            if DROPS:
                m = tl.where(_stays(seed, 1, rows, c, threshold), m * enlarge, 0.0)
            z = tl.dot(m.to(dtype), tl.trans(down_0), input_precision=PRECISION)
            m, _ = _gelu(tl.dot(h, tl.trans(up_1), input_precision=PRECISION) + _row(up_bias + WIDTH + c))
            if DROPS:
                m = tl.where(_stays(seed, 2, rows, c, threshold), m * enlarge, 0.0)
            z = tl.dot(m.to(dtype), tl.trans(down_1), z, input_precision=PRECISION) + _row(down_bias + c)
            if DROPS:
                z = tl.where(_stays(seed, 3, rows, c, threshold), z * enlarge, 0.0)
            _put(out, rows, there, counts, y + z, WIDTH)
        else:
            _put(out, rows, there, counts, tl.zeros((ROWS, WIDTH), dtype=tl.float32), WIDTH)


@triton.jit
def _half_back(
    h, dz, dh, up, up_bias, down, m_out, du_out, seed, place: tl.constexpr, rows, counts, c, threshold, enlarge,
    WIDTH: tl.constexpr, DROPS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add the part of half the MLP's hidden layer to `dh`; store that half's output and the gradient of its input."""
    m, slope = _gelu(tl.dot(h, tl.trans(up), input_precision=PRECISION) + _row(up_bias))
    if DROPS:
        kept = tl.where(_stays(seed, place, rows, c, threshold), enlarge, 0.0)
        m, slope = m * kept, slope * kept
    at = rows[:, None] * (2 * WIDTH) + c[None, :]
    tl.store(m_out + at, m.to(h.dtype), mask=counts[:, None])
    du = (tl.dot(dz, down, input_precision=PRECISION) * slope).to(h.dtype)
    tl.store(du_out + at, du, mask=counts[:, None])
    return tl.dot(du, up, dh, input_precision=PRECISION)


@triton.jit
def leave_back_kernel(
    grad, a, x, proj, proj_bias, gamma, beta, up, up_bias, down, seed, da, dx, space, ends, count, n, eps, threshold,
    enlarge,
    WIDTH: tl.constexpr, ROWS: tl.constexpr, DROPS: tl.constexpr, HAS_ENDS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """`space` receives, for `weights_kernel`: dy, dz, the normed rows, du and m, the last two twice as wide."""
    c = tl.arange(0, WIDTH)
    size: tl.constexpr = WIDTH * WIDTH
    dtype: tl.constexpr = a.dtype.element_ty
    w_proj = _matrix(proj, WIDTH, WIDTH, dtype)
    up_0, up_1 = _matrix(up, WIDTH, WIDTH, dtype), _matrix(up + size, WIDTH, WIDTH, dtype)
    down_0, down_1 = _matrix(down, 2 * WIDTH, WIDTH, dtype), _matrix(down + WIDTH, 2 * WIDTH, WIDTH, dtype)
    part = tl.cast(count, tl.int64) * WIDTH
    du, m = space + 3 * part, space + 5 * part
    for block in range(tl.program_id(0), tl.cdiv(count, ROWS), tl.num_programs(0)):
        rows = block * ROWS + tl.arange(0, ROWS)
        there, counts = _counting(rows, count, n, ends, HAS_ENDS)
        if tl.max(counts.to(tl.int32), axis=0) > 0:
            y = tl.dot(_block(a, rows, counts, WIDTH), tl.trans(w_proj), input_precision=PRECISION)
            y += _row(proj_bias + c)
            if DROPS:
                y = tl.where(_stays(seed, 0, rows, c, threshold), y * enlarge, 0.0)
            normed, inverse = _normed(y + _block(x, rows, counts, WIDTH), eps, WIDTH)
            _put(space + 2 * part, rows, there, counts, normed, WIDTH)
            h = (normed * _row(gamma + c) + _row(beta + c)).to(dtype)
            dz = _block(grad, rows, counts, WIDTH)
            if DROPS:
                dz = tl.where(_stays(seed, 3, rows, c, threshold), dz * enlarge, 0.0)
            _put(space + part, rows, there, counts, dz, WIDTH)
            dz = dz.to(dtype)
            dh = tl.zeros((ROWS, WIDTH), dtype=tl.float32)
            dh = _half_back(
                h, dz, dh, up_0, up_bias + c, down_0, m, du, seed, 1, rows, counts, c, threshold, enlarge, WIDTH, DROPS,
                PRECISION,
            )  # fmt: skip
            dh = _half_back(
                h, dz, dh, up_1, up_bias + WIDTH + c, down_1, m + WIDTH, du + WIDTH, seed, 2, rows, counts, c,
                threshold, enlarge, WIDTH, DROPS, PRECISION,
            )  # fmt: skip
            dy = _unnormed(dh * _row(gamma + c), normed, inverse, WIDTH) + _block(grad, rows, counts, WIDTH)
            _put(dx, rows, there, counts, dy, WIDTH)
            if DROPS:
                dy = tl.where(_stays(seed, 0, rows, c, threshold), dy * enlarge, 0.0)
            _put(space, rows, there, counts, dy, WIDTH)
            _put(da, rows, there, counts, tl.dot(dy.to(dtype), w_proj, input_precision=PRECISION), WIDTH)
        else:
            zeros = tl.zeros((ROWS, WIDTH), dtype=tl.float32)
            _put(dx, rows, there, counts, zeros, WIDTH)
            _put(da, rows, there, counts, zeros, WIDTH)


@triton.jit
def weights_kernel(
    a, space, sums, ends, count, n,
    WIDTH: tl.constexpr, ROWS: tl.constexpr, HAS_ENDS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute five products over all rows, each by programs of its own: dyᵀa, du₀ᵀ normed, du₁ᵀ normed, dzᵀm₀, dzᵀm₁;
    and the sums over the rows of their left factors, as products with ones."""
    which = tl.program_id(1)
    part = tl.cast(count, tl.int64) * WIDTH
    left, right = space, a
    left_stride, right_stride = WIDTH, WIDTH
    if which > 0:
        left, right = space + 3 * part + (which - 1) * WIDTH, space + 2 * part
        left_stride = 2 * WIDTH
    if which > 2:
        left, right = space + part, space + 5 * part + (which - 3) * WIDTH
        left_stride, right_stride = WIDTH, 2 * WIDTH
    c = tl.arange(0, WIDTH)
    ones = tl.full((ROWS, 16), 1.0, dtype=a.dtype.element_ty)
    product = tl.zeros((WIDTH, WIDTH), dtype=tl.float32)
    bias = tl.zeros((WIDTH, 16), dtype=tl.float32)
    for block in range(tl.program_id(0), tl.cdiv(count, ROWS), tl.num_programs(0)):
        rows = block * ROWS + tl.arange(0, ROWS)
        _, counts = _counting(rows, count, n, ends, HAS_ENDS)
        g = tl.load(left + rows[:, None] * left_stride + c[None, :], mask=counts[:, None], other=0.0)
        t = tl.load(right + rows[:, None] * right_stride + c[None, :], mask=counts[:, None], other=0.0)
        product = tl.dot(tl.trans(g), t, product, input_precision=PRECISION)
        bias = tl.dot(tl.trans(g), ones, bias, input_precision=PRECISION)
    _put_sums(sums + (tl.program_id(0) * 5 + which).to(tl.int64) * (WIDTH * WIDTH + WIDTH), product, bias, WIDTH)


def enter(
    x: Tensor, before: Sequence[Tensor], ends: Tensor | None, *, dtype: torch.dtype, eps: float,
    tiles: Tiles | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return three products with the normed rows, (b, n, width) each.

    Args:
        before: weight and bias of the norm, weight (3 · width, width) and bias of the products.
        ends: int32, (b,): for each sequence, one more than its last row that counts.
    """
    q, k, v = (torch.empty(x.shape, dtype=dtype, device=x.device) for _ in range(3))
    _launch("enter", enter_kernel, (x, *before, q, k, v), ends, x, (float(eps),), {}, tiles)
    return q, k, v


def enter_back(
    grads: Sequence[Tensor], x: Tensor, before: Sequence[Tensor], ends: Tensor | None, *, eps: float,
    tiles: Tiles | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return the gradient of x and, for each program, to be added up, (3, width + 1, width): the products of the three
    gradients with the normed rows (without the norm's weight and bias), and the gradient of the bias."""
    gamma, _, weight, _ = before
    dx, sums = torch.empty_like(x), _sums(x, 3, tiles or TILES["enter_back"])
    given = (*grads, x, gamma, weight, dx, sums)
    _launch("enter_back", enter_back_kernel, given, ends, x, (float(eps),), {}, tiles)
    return dx, sums


def leave(
    a: Tensor, x: Tensor, after: Sequence[Tensor], seed: Tensor | None, ends: Tensor | None, *, dropout_p: float,
    eps: float, tiles: Tiles | None = None,
) -> Tensor:  # fmt: skip
    """Return y + down(gelu(up(norm(y)))) with y = x + proj(a), (b, n, width), and dropout after proj, gelu and down.

    Args:
        after: weight and bias of proj (width, width), of the norm, of up (2 · width, width) and of down.
        seed: one int64, if dropout_p > 0.
    """
    out = torch.empty_like(x)
    given = (a, x, *after, x if seed is None else seed, out)
    _launch(
        "leave", leave_kernel, given, ends, x, (float(eps), *_dropping(dropout_p)), {"DROPS": seed is not None}, tiles
    )
    return out


def leave_back(
    grad: Tensor, a: Tensor, x: Tensor, after: Sequence[Tensor], seed: Tensor | None, ends: Tensor | None, *,
    dropout_p: float, eps: float, tiles: Tiles | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Return the gradients of a and x and, for each program, to be added up, (5, width + 1, width): the products dyᵀa,
    duᵀ with the normed rows in two halves and dzᵀm in two halves, and the sums of dy, du₀, du₁, dz and dz again, where
    y, z and u are the outputs of proj, down and up, and m is the input of down."""
    da, dx = torch.empty_like(a), torch.empty_like(x)
    space = torch.empty(7 * x.numel(), dtype=a.dtype, device=a.device)
    given = (grad, a, x, *after[:7], x if seed is None else seed, da, dx, space)
    numbers = (float(eps), *_dropping(dropout_p))
    _launch("leave_back", leave_back_kernel, given, ends, x, numbers, {"DROPS": seed is not None}, tiles)
    sums = _sums(x, 5, TILES["weights"])
    _launch("weights", weights_kernel, (a, space, sums), ends, x, (), {}, None, across=5)
    return da, dx, sums


def _launch(
    name: str, kernel: Any, given: tuple[Tensor, ...], ends: Tensor | None, x: Tensor, numbers: tuple[float, ...],
    constants: dict[str, Any], tiles: Tiles | None, *, across: int = 1,
) -> None:  # fmt: skip
    tiles = tiles or TILES[name]
    n, width = x.shape[-2:]
    count = x.numel() // width
    launch(
        kernel,
        (_programs(count, tiles), across),
        (layout(*given, ends), tiles["num_warps"]),
        (*given, x if ends is None else ends, count, n, *numbers),
        WIDTH=width, ROWS=tiles["ROWS"], **constants, HAS_ENDS=ends is not None, PRECISION="ieee",
        num_warps=tiles["num_warps"], num_stages=tiles.get("num_stages", 1),
    )  # fmt: skip


def _programs(count: int, tiles: Tiles) -> int:
    return min(tiles["programs"], ceil_div(count, tiles["ROWS"]))


def sums_of(x: Tensor, products: int, kind: str) -> tuple[int, int, int, int]:
    """Return the shape of the sums that programs leave to be added up."""
    return _shape(x, products, TILES[kind])


def _shape(x: Tensor, products: int, tiles: Tiles) -> tuple[int, int, int, int]:
    width = x.shape[-1]
    return _programs(x.shape[:-1].numel(), tiles), products, width + 1, width


def _sums(x: Tensor, products: int, tiles: Tiles) -> Tensor:
    return torch.empty(_shape(x, products, tiles), dtype=torch.float32, device=x.device)


def _dropping(dropout_p: float) -> tuple[int, float]:
    """Return the threshold below which a hash, as a signed number, lets its number stay; and 1 / (1 − p)."""
    return drop_threshold(dropout_p), 1 / (1 - dropout_p)
