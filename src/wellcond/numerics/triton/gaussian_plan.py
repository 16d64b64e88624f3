"""The Gaussian product and its gradient as a plan: everything that follows from shapes and strides is computed once.

    plan = plan_for(x, y, v, is_causal)              # None if columns are divided among programs, as for few rows
    out, halves = plan.forward(x, y, v, scale)
    dx, dy, dv = plan.backward(grad, x, y, v, scale, halves)

Four launches of the kernels in gaussian.py, without a mask of keys. `halves` is one buffer with the
half norms of x, then those of y.
"""

import math
from typing import Any

import torch
from torch import Tensor

from .gaussian import (
    HALF_NORMS_BLOCK,
    NO_MASK,
    grid_of,
    half_norms_kernel,
    is_even,
    precision_of,
    pull_kernel,
    stream_kernel,
    tiles_for,
)
from .launch import Launch, dense, layout, placed
from .plans import Kept, on_device
from .tiles import ceil_div, packed, padded

__all__ = ["Plan", "plan_for"]

_plans: Kept["Plan | None"] = Kept(1024)


def plan_for(x: Tensor, y: Tensor, v: Tensor, is_causal: bool) -> "Plan | None":
    """Return the plan for (b, h, n, p), (b, h, m, p) and (b, h, m, c), dense along the last dimension, or None."""
    given = layout(x, y, v), is_causal
    if given in _plans:
        return _plans[given]
    n, m, (p, c) = x.shape[2], y.shape[2], (x.shape[3], v.shape[3])
    ways = ((n, m, False), (n, m, True), (m, n, True))
    one_share = all(grid_of(rows, columns, tiles_for(p, c, pulls=pulls))[1] == 1 for rows, columns, pulls in ways)
    return _plans.add(given, Plan(x, y, v, is_causal) if one_share else None)


class Plan:
    """The plan for tensors of one layout."""

    def __init__(self, x: Tensor, y: Tensor, v: Tensor, is_causal: bool):
        (b, h, n, p), (m, c) = x.shape, v.shape[2:]
        self.device: torch.device = x.device
        self.is_causal: bool = is_causal
        self.placed: tuple[Any, ...] = placed(x, y, v)
        self.sizes: tuple[int, ...] = b * h, n, m, h, p, c
        self.out_shape: tuple[int, int, int, int] = (b, h, n, c)
        self.dtype: torch.dtype = v.dtype
        self.strides: tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]] = (
            x.stride()[:3],
            y.stride()[:3],
            v.stride()[:3],
        )
        self.of_x: int = ceil_div(b * h * n, 4) * 4  # so that y's half norms are aligned like x's
        self.halves_size: int = self.of_x + b * h * m
        self.norms: Launch = Launch(
            half_norms_kernel, (ceil_div(max(n, m), HALF_NORMS_BLOCK), b * h, 2),
            WIDTH=padded(p), BLOCK=HALF_NORMS_BLOCK, HAS_KEEP=False,
        )  # fmt: skip
        self.norms_numbers: tuple[int, int, int, int] = (n, m, h, p)
        self.norms_strides: tuple[int, ...] = (*self.strides[0], *self.strides[1], *NO_MASK[:2])
        tiles = tiles_for(p, c)
        rows, _, each = grid_of(n, m, tiles)
        self.stream: Launch = self._launch(
            stream_kernel, rows, tiles, CAUSAL=1 if is_causal else 0, EVEN=is_even(y, v, None, tiles),
            PRECISION=precision_of(x, v),
        )  # fmt: skip
        self.stream_numbers: tuple[int, ...] = (n, m, h, p, c, each)
        self.stream_strides: tuple[int, ...] = (*self.strides[0], *self.strides[1], *self.strides[2], *NO_MASK)
        self.pulls: dict[
            Any, tuple[Launch, tuple[Any, ...], tuple[Any, ...], Launch, tuple[Any, ...], tuple[Any, ...]]
        ] = {}

    def _launch(self, kernel: Any, rows: int, tiles: dict[str, int], **constants: Any) -> Launch:
        matrices, *_, p, c = self.sizes
        order = {"WIDTH": padded(p), "VALUES": padded(c), "BM": tiles["BM"], "BN": tiles["BN"], "KEEP": 0}
        options = {name: tiles[name] for name in ("num_warps", "num_stages")}
        return Launch(kernel, (rows, 1, matrices), **options, **order, **constants)

    def forward(self, x: Tensor, y: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        """Return (out, halves)."""
        halves = torch.empty(self.halves_size, dtype=torch.float32, device=self.device)
        out = torch.empty(self.out_shape, dtype=self.dtype, device=self.device)
        with on_device(self.device):
            to_x, to_y = self.norms.addresses(x, y)
            x_half, y_half = self._parts(self.norms, halves)
            self.norms(
                to_x, to_y, to_x, x_half, y_half, *self.norms_numbers, scale * math.log2(math.e), *self.norms_strides
            )
            to_x, to_y, to_v, to_out = self.stream.addresses(x, y, v, out)
            y_half = self._parts(self.stream, halves)[1]
            self.stream(to_x, to_y, to_v, y_half, to_x, to_x, to_out, *self.stream_numbers, scale, *self.stream_strides)
        return out, halves

    def backward(
        self, grad: Tensor, x: Tensor, y: Tensor, v: Tensor, scale: float, halves: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return (dx, dy, dv); grad (b, h, n, c) has v's dtype and is dense along the last dimension."""
        if self.placed != placed(x, y, v):
            x, y, v = packed(x), packed(y), packed(v)
            other = plan_for(x, y, v, self.is_causal)
            assert other is not None
            return other.backward(grad, x, y, v, scale, halves)
        halves = dense(halves)
        dx, dy, dv = (torch.empty(t.shape, dtype=t.dtype, device=self.device) for t in (x, y, v))
        of_grad = placed(grad)
        pulls = self.pulls.get(of_grad)
        if pulls is None:
            pulls = self.pulls[of_grad] = self._make_pulls(x, y, v, grad)
        of_rows, row_numbers, row_strides, of_columns, column_numbers, column_strides = pulls
        with on_device(self.device):
            to_x, to_y, to_g, to_v, to_dx = of_rows.addresses(x, y, grad, v, dx)
            y_half = self._parts(of_rows, halves)[1]
            of_rows(to_x, to_y, to_g, to_v, y_half, to_x, to_x, to_dx, to_dx, *row_numbers, scale, *row_strides)
            to_x, to_y, to_g, to_v, to_dy, to_dv = of_columns.addresses(x, y, grad, v, dy, dv)
            x_half = self._parts(of_columns, halves)[0]
            of_columns(
                to_y, to_x, to_v, to_g, x_half, to_y, to_y, to_dy, to_dv, *column_numbers, scale, *column_strides
            )
        return dx, dy, dv

    def halves_of(self, halves: Tensor) -> tuple[Tensor, Tensor]:
        """Return the half norms of x, (b, h, n), and of y, (b, h, m)."""
        (b, h), n = self.out_shape[:2], self.out_shape[2]
        return halves[: b * h * n].view(b, h, n), halves[self.of_x :].view(b, h, -1)

    def _make_pulls(self, x: Tensor, y: Tensor, v: Tensor, grad: Tensor) -> tuple[Any, ...]:
        _, n, m, h, p, c = self.sizes
        tiles = tiles_for(p, c, pulls=True)
        down, up = (1, -1) if self.is_causal else (0, 0)
        of_x, of_y, of_v = self.strides
        of_g = grad.stride()[:3]
        rows, _, each = grid_of(n, m, tiles)
        of_rows = self._launch(
            pull_kernel, rows, tiles, CAUSAL=down, EVEN=is_even(y, v, None, tiles), PRODUCT=False,
            PRECISION=precision_of(x, v),
        )  # fmt: skip
        row_numbers = (n, m, h, p, c, each)
        rows, _, each = grid_of(m, n, tiles)
        of_columns = self._launch(
            pull_kernel, rows, tiles, CAUSAL=up, EVEN=is_even(x, grad, None, tiles), PRODUCT=True,
            PRECISION=precision_of(y, grad),
        )  # fmt: skip
        return (
            of_rows, row_numbers, (*of_x, *of_y, *of_g, *of_v, *NO_MASK),
            of_columns, (m, n, h, p, c, each), (*of_y, *of_x, *of_v, *of_g, *NO_MASK),
        )  # fmt: skip

    def _parts(self, launch: Launch, halves: Tensor) -> tuple[Any, Any]:
        """Return the half norms of x and of y as a launch takes them."""
        (first,) = launch.addresses(halves)
        if isinstance(first, Tensor):
            return first[: self.of_x], first[self.of_x :]
        return first, first + 4 * self.of_x
