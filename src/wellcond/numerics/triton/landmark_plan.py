"""Landmark attention as a plan: everything that follows from shapes and strides is computed once, then four launches.

    plan = plan_for(query, key, value, rows, positions, split, valid, keep)
    out, space, work = plan.forward(query, key, value, rows, positions, valid, keep, scale, gamma)
    dq, dk, dv, d_rows = plan.backward(grad, query, key, value, rows, positions, keep, scale, space, work)

The gradient needs `space`, which holds the landmarks, their half norms and the solution, in float32, and where the mask
of keys ends; and `work`, which holds −Z in float64. Everything else is in buffers that are freed at the end of each
pass, since what the gradient needs is kept for every layer of a model until its backward pass. Counters tell which
program of a head is the last; they are zero between launches, and each stream has its own.
"""

from typing import Any

import torch
import triton
from torch import Tensor

from .gaussian import ends_of
from .landmark_sides import output_kernel, pull_kernel, sums_kernel
from .launch import Launch, dense, layout, placed
from .plans import LARGE_BLOCK, Counters, Kept, on_device, padded_alike, shares_of, side_by_side
from .tiles import packed

__all__ = ["Plan", "padded_sizes", "plan_for", "space_size"]

BLOCKS = (LARGE_BLOCK, 64, 32, 16)  # tokens at a time, as many as fit: a few large blocks are faster

_plans: Kept["Plan"] = Kept(1024)


def plan_for(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    rows: Tensor | None,
    positions: Tensor | None,
    split: int,
    valid: Tensor | None,
    keep: Tensor | None,
) -> "Plan":
    """Return the plan for landmarks given as `rows`, (b, h, d, p), or as `positions` of tokens, (d), (1, d) or (b, d),
    the first `split` of them in the queries.

    Tokens are (b, h, n, p), (b, h, m, p) and (b, h, m, c), dense along the last dimension; so are the masks `valid`
    (b, h, d) and `keep` (b, h, m).
    """
    given = layout(query, key, value, rows, positions, valid, keep), split
    plan = _plans.get(given)
    return plan or _plans.add(given, Plan(query, key, value, rows, positions, split, valid, keep))


class Plan:
    """The plan for tensors of one layout."""

    def __init__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        rows: Tensor | None,
        positions: Tensor | None,
        split: int,
        valid: Tensor | None,
        keep: Tensor | None,
    ):
        (b, h, n, p), (m, c) = query.shape, value.shape[2:]
        matrices = b * h
        d = _landmarks(rows, positions)
        side, width, values = padded_sizes(d, p, c)
        self.side: int = side
        self.width: int = width
        self.values: int = values
        self.query_shares: int
        self.query_shares, query_each = shares_of(n)
        self.key_shares: int
        self.key_shares, key_each = shares_of(m)
        self.matrices: int = matrices
        self.device: torch.device = query.device
        self.placed: tuple[Any, ...] = placed(query, key, value, keep)
        self.split: int = split
        self.kept: dict[str, int] = _kept(matrices, (side, width, values))
        self.parts_size: int = matrices * self.key_shares * side * values
        self.scratch: dict[str, int] = side_by_side(
            matrices, d_sums=side * values, d_rows=side * width, parts_s=self.query_shares * side * values,
            parts_l=max(self.query_shares, self.key_shares) * side * width,
        )  # fmt: skip
        self.out_shape: tuple[int, int, int, int] = (b, h, n, c)
        self.shape: dict[str, int] = {"SIDE": self.side, "WIDTH": self.width, "VALUES": self.values}
        self.tokens: dict[str, Any] = {
            "PARTS": query.dtype == torch.bfloat16,
            # Float32 tokens are multiplied as three TF32 parts; TF32 keeps every bit of half-precision ones.
            "PRECISION": "tf32x3" if query.dtype == torch.float32 else "tf32",
        }
        source = query if rows is None else rows
        per_batch = 0 if positions is None or positions.ndim == 1 or len(positions) == 1 else d
        self.sums_numbers: tuple[int, ...] = (m, h, d, split, p, c, key_each)
        self.sums_strides: tuple[int, ...] = (
            *source.stride()[:3], *key.stride()[:3], *value.stride()[:3], per_batch, *_strides(valid), *_strides(keep),
        )  # fmt: skip
        self.output_numbers: tuple[int, int, int, int] = (n, h, p, c)
        self.query_strides: tuple[int, ...] = query.stride()[:3]
        self.query_numbers: tuple[int, ...] = (n, 0, h, d, split, p, c, query_each)
        self.key_numbers: tuple[int, ...] = (m, n if rows is None else d, h, d, split, p, c, key_each)
        self.key_strides: tuple[int, ...] = (*key.stride()[:3], *value.stride()[:3], *_strides(keep), per_batch)
        self.masks: dict[str, bool] = {
            "GATHER": rows is None,
            "HAS_VALID": valid is not None,
            "HAS_KEEP": keep is not None,
        }
        self._make_launches()
        self.pulls_of_queries: dict[Any, Launch] = {}
        self.counters: Counters = Counters(matrices, query.device)

    def _make_launches(self) -> None:
        self.sums: Launch = Launch(
            sums_kernel, (self.key_shares, self.matrices), num_warps=8 if self.side > 64 else 4,
            **self.shape, BLOCK=BLOCKS, **self.masks, **self.tokens,
        )  # fmt: skip
        self.output: Launch = Launch(
            output_kernel, lambda block: (triton.cdiv(self.out_shape[2], block), self.matrices), num_warps=4,
            **self.shape, BLOCK=BLOCKS[1:], **self.tokens,
        )  # fmt: skip
        self.pull_of_keys: Launch = self._pull(self.key_shares, has_keep=self.masks["HAS_KEEP"], keys=True)

    def _pull(self, shares: int, *, has_keep: bool, keys: bool) -> Launch:
        return Launch(
            pull_kernel, (shares, self.matrices), num_warps=8, num_stages=2 if self.tokens["PARTS"] else 1,
            **self.shape, BLOCK=BLOCKS if self.tokens["PARTS"] else BLOCKS[1:], HAS_KEEP=has_keep,
            GATHER=self.masks["GATHER"], KEYS=keys, **self.tokens,
        )  # fmt: skip

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        rows: Tensor | None,
        positions: Tensor | None,
        valid: Tensor | None,
        keep: Tensor | None,
        scale: float,
        gamma: float,
        counters: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return (out, space, work); pass `counters` where the plan's own must not be used."""
        space = torch.empty(self.kept["end"], dtype=torch.float32, device=self.device)
        parts = torch.empty(self.parts_size, dtype=torch.float32, device=self.device)
        work = torch.empty(self.matrices, self.side, self.side, dtype=torch.float64, device=self.device)
        out = torch.empty(self.out_shape, dtype=query.dtype, device=self.device)
        ends = None if keep is None else ends_of(keep)
        at = self.kept
        with on_device(self.device):
            *tokens, to_space, to_parts, to_work, to_counters = self.sums.addresses(
                query if rows is None else rows, key, value, key if positions is None else positions,
                key if valid is None else valid, key if keep is None else keep, key if ends is None else ends,
                space, parts, work, self.counters() if counters is None else counters,
            )  # fmt: skip
            self.sums(
                *tokens, to_space, at["halves"], at["solved"], at["ends"], to_parts, to_work, to_counters,
                *self.sums_numbers, scale, gamma, *self.sums_strides, *((0, 0) if ends is None else ends.stride()),
            )  # fmt: skip
            x, to_space, y = self.output.addresses(query, space, out)
            self.output(x, to_space, at["halves"], at["solved"], y, *self.output_numbers, scale, *self.query_strides)
        return out, space, work

    def backward(
        self,
        grad: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        rows: Tensor | None,
        positions: Tensor | None,
        keep: Tensor | None,
        scale: float,
        space: Tensor,
        work: Tensor,
        counters: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Return (dq, dk, dv, d_rows); grad (b, h, n, c) is dense along the last dimension."""
        if self.placed != placed(query, key, value, keep):
            query, key, value = packed(query), packed(key), packed(value)
            keep = None if keep is None else packed(keep)
            other = plan_for(query, key, value, rows, positions, self.split, None, keep)
            return other.backward(grad, query, key, value, rows, positions, keep, scale, space, work, counters)
        space, work = dense(space), dense(work)
        positions = None if positions is None else dense(positions)
        dq, dk, dv = (torch.empty_like(t, memory_format=torch.contiguous_format) for t in (query, key, value))
        d_rows = None if rows is None else torch.empty(rows.shape, dtype=rows.dtype, device=self.device)
        scratch = torch.empty(self.scratch["end"], dtype=torch.float32, device=self.device)
        of_grad = placed(grad)
        pull = self.pulls_of_queries.get(of_grad)
        if pull is None:
            pull = self.pulls_of_queries[of_grad] = self._pull(self.query_shares, has_keep=False, keys=False)
        where = key if positions is None else positions
        with on_device(self.device):
            shared = (where, space, work, self.counters() if counters is None else counters, scratch)
            x, g, d_x, *given = pull.addresses(query, grad, dq, *shared)
            pull(
                x, g, x, *self._around(*given), d_x, d_x, d_x,
                *self.query_numbers, scale, *self.query_strides, *grad.stride()[:3], 0, 0, 0,
            )  # fmt: skip
            first = dq if d_rows is None else d_rows
            y, v, mask, d_y, d_v, d_first, *given = self.pull_of_keys.addresses(
                key, value, key if keep is None else keep, dk, dv, first, *shared
            )
            self.pull_of_keys(
                y, v, mask, *self._around(*given), d_y, d_v, d_first, *self.key_numbers, scale, *self.key_strides
            )
        return dq, dk, dv, d_rows

    def _around(self, where: Any, space: Any, work: Any, counters: Any, scratch: Any) -> tuple[Any, ...]:
        """Return the arguments that both pulls take besides tokens."""
        kept, at = self.kept, self.scratch
        return (
            where, space, kept["halves"], kept["solved"], kept["ends"], work, counters,
            scratch, at["d_sums"], at["d_rows"], at["parts_s"], at["parts_l"],
        )  # fmt: skip


def space_size(query: Tensor, value: Tensor, rows: Tensor | None, positions: Tensor | None) -> tuple[int, int]:
    """Return (the size of `space`, the side of `work`) from shapes alone, for fake tensors."""
    b, h, _, p = query.shape
    sizes = padded_sizes(_landmarks(rows, positions), p, value.shape[3])
    return _kept(b * h, sizes)["end"], sizes[0]


def _landmarks(rows: Tensor | None, positions: Tensor | None) -> int:
    if rows is not None:
        return rows.shape[2]
    assert positions is not None
    return positions.shape[-1]


def padded_sizes(landmarks: int, width: int, values: int) -> tuple[int, int, int]:
    """Round the sizes up to powers of two."""
    wider = padded_alike(width, values)
    return max(32, triton.next_power_of_2(landmarks)), wider, wider


def _kept(matrices: int, sizes: tuple[int, int, int]) -> dict[str, int]:
    """Return where each part of `space` begins; the ends, one per matrix, are padded to keep what follows aligned."""
    side, width, values = sizes
    return side_by_side(matrices, rows=side * width, halves=side, ends=16, solved=side * values)


def _strides(mask: Tensor | None) -> tuple[int, int]:
    return (0, 0) if mask is None else (mask.stride(0), mask.stride(1))
