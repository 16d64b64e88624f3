"""Nyström attention as a plan: everything that follows from shapes and strides is computed once, then eight launches.

    plan = plan_for(query, key, value, keep, num_landmarks, num_iterations)
    out, space, work = plan.forward(query, key, value, keep, scale, differentiable=True)
    dq, dk, dv = plan.backward(grad, query, key, value, keep, scale, space, work)

A mask adds one launch, which numbers the tokens that are kept.

The gradient needs `space`, which holds the means, the solution and the narrow matrix of each step, in float32,
followed, if there is a mask, by the ranks of tokens, in int32; and `work`, which holds the large matrices of the steps,
as pairs of float16. Everything else is in buffers that are freed at the end of each pass, since what the gradient needs
is kept for every layer of a model until its backward pass.
"""

from typing import Any

import torch
import triton
from torch import Tensor

from .landmark_plan import padded_sizes
from .launch import Launch, dense, layout, placed
from .nystrom_inverse import ROOM_BACK, head_back_kernel, head_kernel
from .nystrom_means import RANKS_AT, finish_kernel, means_kernel, ranks_kernel
from .nystrom_sides import keys_kernel, output_kernel, queries_kernel, right_kernel
from .plans import LARGE_BLOCK, Kept, on_device, shares_of, side_by_side
from .tiles import keep_strides, packed

__all__ = ["Plan", "plan_for", "space_sizes"]

BLOCKS = (LARGE_BLOCK, 64, 32, 16)  # tokens at a time, as many as fit: a few large blocks spill less
MOST_RANKS = 4096  # most tokens that are numbered at a time
TOGETHER = 64  # tokens that a program averages at a time, of one segment or of several

_plans: Kept["Plan"] = Kept(1024)


def plan_for(
    query: Tensor, key: Tensor, value: Tensor, keep: Tensor | None, num_landmarks: int, num_iterations: int
) -> "Plan":
    """Return the plan for tokens (b, h, n, p), (b, h, m, p) and (b, h, m, c), dense along the last dimension.

    There must be at least as many of each as landmarks. A mask of queries and keys is (b, h, m), where b and h may be
    1, with n = m.
    """
    given = layout(query, key, value, keep), num_landmarks, num_iterations
    plan = _plans.get(given)
    return plan or _plans.add(given, Plan(query, key, value, keep, num_landmarks, num_iterations))


class Plan:
    """The plan for tensors of one layout."""

    def __init__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        keep: Tensor | None,
        num_landmarks: int,
        num_iterations: int,
    ):
        (b, h, n, p), (m, c) = query.shape, value.shape[2:]
        d, matrices = num_landmarks, b * h
        assert d <= min(n, m)
        assert keep is None or n == m
        self.side: int
        self.width: int
        self.side, self.width, values = sizes = padded_sizes(d, p, c)
        self.query_shares: int
        self.query_shares, query_each = shares_of(n)
        self.key_shares: int
        self.key_shares, key_each = shares_of(m)
        self.matrices: int = matrices
        self.num_heads: int = h
        self.iterations: int = num_iterations
        self.device: torch.device = query.device
        self.placed: tuple[Any, ...] = placed(query, key, value, keep)
        self.kept: dict[bool, dict[str, int]] = {
            wanted: _kept(matrices, sizes, num_iterations, wanted, keep) for wanted in (False, True)
        }
        narrow, line = self.side * self.width, self.side  # values are as wide
        self.parts: dict[str, int] = side_by_side(
            matrices, sums=self.key_shares * narrow, top=self.key_shares * line, total=self.key_shares * line
        )
        self.scratch: dict[str, int] = side_by_side(
            matrices, d_right=narrow, inner=line, due_queries=narrow, due_keys=narrow, again=3 * narrow,
            parts_s=self.query_shares * narrow, parts_l=max(self.query_shares, self.key_shares) * narrow,
        )  # fmt: skip
        self.out_shape: tuple[int, int, int, int] = (b, h, n, c)
        self.landmarks = d
        self.shape: dict[str, int] = {"SIDE": self.side, "WIDTH": self.width, "VALUES": values}
        self.tokens: dict[str, bool] = {"PARTS": query.dtype == torch.bfloat16}
        self.masks: dict[str, bool] = {"HAS_KEEP": keep is not None}
        self.mask_rows: int = _rows(keep)
        self.mask_numbers: tuple[int, ...] = (m, 1 if keep is None else keep.shape[1], *keep_strides(keep))
        self.rank_strides: tuple[int, int] = _rank_strides(keep)
        self.query_strides: tuple[int, ...] = query.stride()[:3]
        self.key_strides: tuple[int, ...] = key.stride()[:3]
        self.value_strides: tuple[int, ...] = value.stride()[:3]
        self.means_numbers: tuple[int, ...] = (
            n, m, h, d, p, *self.query_strides, *self.key_strides, *self.rank_strides,
        )  # fmt: skip
        self.right_numbers: tuple[int, ...] = (m, h, d, p, c, key_each)
        self.output_numbers: tuple[int, ...] = (n, h, d, p, c)
        self.query_numbers: tuple[int, ...] = (n, h, d, p, c, query_each)
        self.key_numbers: tuple[int, ...] = (m, h, d, p, c, key_each)
        self.finish_numbers: tuple[int, ...] = (self.key_shares, n, h, d, p, *self.rank_strides)
        self._make_launches(max(n, m))
        self.heads: dict[bool, Launch] = {}
        self.pulls_of_queries: dict[Any, Launch] = {}

    def _make_launches(self, longer: int) -> None:
        together = max(2, min(TOGETHER, triton.next_power_of_2(triton.cdiv(longer, self.landmarks))))
        group = min(self.side, TOGETHER // together)
        segments = {"SIDE": self.side, "WIDTH": self.width, "GROUP": group, "TOGETHER": together, **self.masks}
        groups = self.side // group
        self.ranks: Launch = Launch(
            ranks_kernel, (self.mask_rows,), num_warps=8, BLOCK=min(MOST_RANKS, triton.next_power_of_2(longer))
        )
        self.means: Launch = Launch(means_kernel, (groups, self.matrices, 2), num_warps=4, **segments)
        self.right: Launch = self._long(right_kernel, self.key_shares, num_warps=8 if self.side > 64 else 4)
        self.output: Launch = Launch(
            output_kernel, lambda block: (triton.cdiv(self.out_shape[2], block), self.matrices), num_warps=4,
            **self.shape, BLOCK=BLOCKS[1:], **self.tokens, **self.masks,
        )  # fmt: skip
        # One warp per 16 rows: with more or fewer, Triton 3.6 made a backward kernel with illegal accesses on an H200.
        self.head_options: dict[str, int] = {"num_warps": max(4, self.side // 16), "num_stages": 1, **self.shape}
        self.head_back: Launch = Launch(head_back_kernel, (self.matrices,), **self.head_options, **self.masks)
        self.pull_of_keys: Launch = self._long(keys_kernel, self.key_shares)
        self.finish: Launch = Launch(finish_kernel, (groups, self.matrices), num_warps=4, **segments)

    def _long(self, kernel: Any, shares: int, num_warps: int = 8) -> Launch:
        return Launch(
            kernel, (shares, self.matrices), num_warps=num_warps, num_stages=1,
            **self.shape, BLOCK=BLOCKS if self.tokens["PARTS"] else BLOCKS[1:], **self.tokens, **self.masks,
        )  # fmt: skip

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, keep: Tensor | None, scale: float, *, differentiable: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return (out, space, work); they hold what the gradient needs only if `differentiable`."""
        w_places, at, of_parts = _places(self.iterations, differentiable), self.kept[differentiable], self.parts
        space = torch.empty(at["end"], dtype=torch.float32, device=self.device)
        parts = torch.empty(of_parts["end"], dtype=torch.float32, device=self.device)
        work = self._pairs(1 + w_places)
        room = self._pairs(1) if differentiable else work
        out = torch.empty(self.out_shape, dtype=query.dtype, device=self.device)
        head = self.heads.get(differentiable)
        if head is None:
            head = self.heads[differentiable] = Launch(
                head_kernel, (self.matrices,), **self.head_options, KEEP=differentiable, **self.masks
            )
        with on_device(self.device):
            ranks = space.view(torch.int32), at["ranks"]
            if keep is not None:
                self.ranks(keep, *ranks, *self.mask_numbers)
            self.means(query, key, *ranks, space, at["k_means"], *self.means_numbers)
            self.right(
                key, value, *ranks, space, parts, of_parts["top"], of_parts["total"], *self.right_numbers, scale,
                *self.key_strides, *self.value_strides, *self.rank_strides,
            )  # fmt: skip
            head(
                space, at["k_means"], at["right"], at["log"], at["solved"], at["steps"], at["powers"], parts,
                of_parts["top"], of_parts["total"], work, room, *ranks, self.key_shares, self.num_heads, self.landmarks,
                self.iterations, w_places, scale, *self.rank_strides,
            )  # fmt: skip
            self.output(
                query, *ranks, space, at["k_means"], at["solved"], out, *self.output_numbers, scale,
                *self.query_strides, *self.rank_strides,
            )  # fmt: skip
        return out, space, work

    def backward(
        self,
        grad: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        keep: Tensor | None,
        scale: float,
        space: Tensor,
        work: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return (dq, dk, dv); grad (b, h, n, c) is dense along the last dimension."""
        if self.placed != placed(query, key, value, keep):
            query, key, value = packed(query), packed(key), packed(value)
            keep = None if keep is None else packed(keep)
            other = plan_for(query, key, value, keep, self.landmarks, self.iterations)
            return other.backward(grad, query, key, value, keep, scale, space, work)
        space, work = dense(space), dense(work)
        dq, dk, dv = (torch.empty_like(t, memory_format=torch.contiguous_format) for t in (query, key, value))
        kept, at = self.kept[True], self.scratch
        scratch = torch.empty(at["end"], dtype=torch.float32, device=self.device)
        room = self._pairs(ROOM_BACK.value)
        of_grad = placed(grad)
        pull = self.pulls_of_queries.get(of_grad)
        if pull is None:
            pull = self.pulls_of_queries[of_grad] = self._long(queries_kernel, self.query_shares)
        ranks = space.view(torch.int32), kept["ranks"]
        with on_device(self.device):
            pull(
                query, grad, *ranks, space, kept["k_means"], kept["solved"], scratch, at["parts_s"], at["parts_l"], dq,
                *self.query_numbers, scale, *self.query_strides, *grad.stride()[:3], *self.rank_strides,
            )  # fmt: skip
            self.head_back(
                space, kept["k_means"], kept["right"], kept["steps"], kept["powers"], work, scratch, at["parts_s"],
                at["parts_l"], at["again"], at["d_right"], at["inner"], at["due_queries"], at["due_keys"], room,
                *ranks, self.query_shares, self.num_heads, self.landmarks, self.iterations,
                _places(self.iterations, True), scale, *self.rank_strides,
            )  # fmt: skip
            self.pull_of_keys(
                key, value, *ranks, space, kept["log"], scratch, at["d_right"], at["inner"], at["due_keys"],
                at["parts_l"], dk, dv, *self.key_numbers, scale, *self.key_strides, *self.value_strides,
                *self.rank_strides,
            )  # fmt: skip
            self.finish(scratch, at["due_queries"], at["parts_l"], dq, *ranks, *self.finish_numbers)
        return dq, dk, dv

    def _pairs(self, number: int) -> Tensor:
        """Allocate `number` large matrices per head."""
        shape = (self.matrices, 2 * number, self.side, self.side)
        return torch.empty(shape, dtype=torch.float16, device=self.device)


def space_sizes(
    query: Tensor, value: Tensor, keep: Tensor | None, num_landmarks: int, num_iterations: int
) -> tuple[int, tuple[int, int, int, int]]:
    """Return (the size of `space`, the shape of `work` for a gradient) from shapes alone, for fake tensors."""
    b, h, _, p = query.shape
    sizes = padded_sizes(num_landmarks, p, value.shape[3])
    of_work = (b * h, 2 * (1 + _places(num_iterations, True)), sizes[0], sizes[0])
    return _kept(b * h, sizes, num_iterations, True, keep)["end"], of_work


def _places(iterations: int, differentiable: bool) -> int:
    """Return for how many W there is room."""
    return max(1, iterations if differentiable else min(2, iterations))


def _rows(keep: Tensor | None) -> int:
    return 0 if keep is None else keep.shape[0] * keep.shape[1]


def _rank_strides(keep: Tensor | None) -> tuple[int, int]:
    """Return the strides of ranks between samples and between heads; 0 where they share a mask."""
    if keep is None:
        return 0, 0
    b, h, m = keep.shape
    each = RANKS_AT.value + 2 * m
    return h * each * (b > 1), each * (h > 1)


def _kept(
    matrices: int, sizes: tuple[int, int, int], iterations: int, differentiable: bool, keep: Tensor | None
) -> dict[str, int]:
    """Return where each part of `space` begins; some are empty if no gradient is needed."""
    side, width, values = sizes
    found = {"q_means": side * width, "k_means": side * width, "solved": side * values}
    of_gradient = {"right": side * values, "log": 2 * side}
    places = _places(iterations, True)
    of_gradient |= {"steps": places * side * values, "powers": 1 + places * (1 + values)}
    found |= {name: length * differentiable for name, length in of_gradient.items()}
    at = side_by_side(matrices, **found)
    of_ranks = 0 if keep is None else _rows(keep) * (RANKS_AT.value + 2 * keep.shape[2])
    return at | {"ranks": at["end"], "end": at["end"] + of_ranks}
