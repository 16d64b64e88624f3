"""Nyström attention as a plan: all that follows from shapes and strides is worked out once, then eight launches.

    plan = plan_for(query, key, value, num_landmarks, num_iterations)
    out, space, work = plan.forward(query, key, value, scale, differentiable=True)
    dq, dk, dv = plan.backward(grad, query, key, value, scale, space, work)

The gradient needs `space`, which holds the means, what was solved and the narrow matrix of each step, in float32, and
`work`, which holds the large matrices of the steps, in pairs of float16. All else lies in buffers that are given back
at the end of each pass: a model keeps every layer's until its backward pass.
"""

from typing import Any

import torch
import triton
from torch import Tensor

from .landmark_plan import padded_sizes
from .launch import Launch, dense, layout, placed
from .nystrom_inverse import ROOM_BACK, head_back_kernel, head_kernel
from .nystrom_means import finish_kernel, means_kernel
from .nystrom_sides import keys_kernel, output_kernel, queries_kernel, right_kernel
from .plans import LARGE_BLOCK, Kept, on_device, shares_of, side_by_side
from .tiles import packed

__all__ = ["Plan", "plan_for", "space_sizes"]

BLOCKS = (LARGE_BLOCK, 64, 32, 16)  # of tokens at a time, as many as fit: few and large ones spill less
TOGETHER = 64  # tokens that a program takes the mean of at a time, of one segment or of several

_plans: Kept["Plan"] = Kept(1024)


def plan_for(query: Tensor, key: Tensor, value: Tensor, num_landmarks: int, num_iterations: int) -> "Plan":
    """Tokens are (b, h, n, p), (b, h, m, p) and (b, h, m, c), dense along the last dimension; at least as many of each
    as landmarks."""
    given = layout(query, key, value), num_landmarks, num_iterations
    plan = _plans.get(given)
    return plan or _plans.add(given, Plan(query, key, value, num_landmarks, num_iterations))


class Plan:
    """For tensors of one layout."""

    def __init__(self, query: Tensor, key: Tensor, value: Tensor, num_landmarks: int, num_iterations: int):
        (b, h, n, p), (m, c) = query.shape, value.shape[2:]
        d, matrices = num_landmarks, b * h
        assert d <= min(n, m)
        self.side: int
        self.width: int
        self.side, self.width, values = sizes = padded_sizes(d, p, c)
        self.query_shares: int
        self.query_shares, query_each = shares_of(n)
        self.key_shares: int
        self.key_shares, key_each = shares_of(m)
        self.matrices: int = matrices
        self.iterations: int = num_iterations
        self.device: torch.device = query.device
        self.placed: tuple[Any, ...] = placed(query, key, value)
        self.kept: dict[bool, dict[str, int]] = {
            wanted: _kept(matrices, sizes, num_iterations, wanted) for wanted in (False, True)
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
        self.query_strides: tuple[int, ...] = query.stride()[:3]
        self.key_strides: tuple[int, ...] = key.stride()[:3]
        self.value_strides: tuple[int, ...] = value.stride()[:3]
        self.means_numbers: tuple[int, ...] = (n, m, h, d, p, *self.query_strides, *self.key_strides)
        self.right_numbers: tuple[int, ...] = (m, h, p, c, key_each)
        self.output_numbers: tuple[int, ...] = (n, h, d, p, c)
        self.query_numbers: tuple[int, ...] = (n, h, d, p, c, query_each)
        self.key_numbers: tuple[int, ...] = (m, h, d, p, c, key_each)
        self.finish_numbers: tuple[int, int, int, int] = (self.key_shares, n, d, p)
        self._make_launches(max(n, m))
        self.heads: dict[bool, Launch] = {}
        self.pulls_of_queries: dict[Any, Launch] = {}

    def _make_launches(self, longer: int) -> None:
        together = max(2, min(TOGETHER, triton.next_power_of_2(triton.cdiv(longer, self.landmarks))))
        group = min(self.side, TOGETHER // together)
        segments = {"SIDE": self.side, "WIDTH": self.width, "GROUP": group, "TOGETHER": together}
        groups = self.side // group
        self.means: Launch = Launch(means_kernel, (groups, self.matrices, 2), num_warps=4, **segments)
        self.right: Launch = self._long(right_kernel, self.key_shares, num_warps=8 if self.side > 64 else 4)
        self.output: Launch = Launch(
            output_kernel, lambda block: (triton.cdiv(self.out_shape[2], block), self.matrices), num_warps=4,
            **self.shape, BLOCK=BLOCKS[1:], **self.tokens,
        )  # fmt: skip
        # One warp for 16 rows: with more or fewer, Triton 3.6 made a backward kernel that went astray on an H200.
        self.head_options: dict[str, int] = {"num_warps": max(4, self.side // 16), "num_stages": 1, **self.shape}
        self.head_back: Launch = Launch(head_back_kernel, (self.matrices,), **self.head_options)
        self.pull_of_keys: Launch = self._long(keys_kernel, self.key_shares)
        self.finish: Launch = Launch(finish_kernel, (groups, self.matrices), num_warps=4, **segments)

    def _long(self, kernel: Any, shares: int, num_warps: int = 8) -> Launch:
        return Launch(
            kernel, (shares, self.matrices), num_warps=num_warps, num_stages=1,
            **self.shape, BLOCK=BLOCKS if self.tokens["PARTS"] else BLOCKS[1:], **self.tokens,
        )  # fmt: skip

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, scale: float, *, differentiable: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(out, space, work); only where it is `differentiable` does `work` hold what the gradient needs."""
        w_places, at, of_parts = _places(self.iterations, differentiable), self.kept[differentiable], self.parts
        space = torch.empty(at["end"], dtype=torch.float32, device=self.device)
        parts = torch.empty(of_parts["end"], dtype=torch.float32, device=self.device)
        work = self._pairs(1 + w_places)
        room = self._pairs(1) if differentiable else work
        out = torch.empty(self.out_shape, dtype=query.dtype, device=self.device)
        head = self.heads.get(differentiable)
        if head is None:
            head = self.heads[differentiable] = Launch(
                head_kernel, (self.matrices,), **self.head_options, KEEP=differentiable
            )
        with on_device(self.device):
            self.means(query, key, space, at["k_means"], *self.means_numbers)
            self.right(
                key, value, space, parts, of_parts["top"], of_parts["total"], *self.right_numbers, scale,
                *self.key_strides, *self.value_strides,
            )  # fmt: skip
            head(
                space, at["k_means"], at["right"], at["log"], at["solved"], at["steps"], at["powers"], parts,
                of_parts["top"], of_parts["total"], work, room, self.key_shares, self.landmarks, self.iterations,
                w_places, scale,
            )  # fmt: skip
            self.output(
                query, space, at["k_means"], at["solved"], out, *self.output_numbers, scale, *self.query_strides
            )
        return out, space, work

    def backward(
        self, grad: Tensor, query: Tensor, key: Tensor, value: Tensor, scale: float, space: Tensor, work: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(dq, dk, dv); grad (b, h, n, c) is dense along the last dimension."""
        if self.placed != placed(query, key, value):
            query, key, value = packed(query), packed(key), packed(value)
            other = plan_for(query, key, value, self.landmarks, self.iterations)
            return other.backward(grad, query, key, value, scale, space, work)
        space, work = dense(space), dense(work)
        dq, dk, dv = (torch.empty_like(t, memory_format=torch.contiguous_format) for t in (query, key, value))
        kept, at = self.kept[True], self.scratch
        scratch = torch.empty(at["end"], dtype=torch.float32, device=self.device)
        room = self._pairs(ROOM_BACK.value)
        of_grad = placed(grad)
        pull = self.pulls_of_queries.get(of_grad)
        if pull is None:
            pull = self.pulls_of_queries[of_grad] = self._long(queries_kernel, self.query_shares)
        with on_device(self.device):
            pull(
                query, grad, space, kept["k_means"], kept["solved"], scratch, at["parts_s"], at["parts_l"], dq,
                *self.query_numbers, scale, *self.query_strides, *grad.stride()[:3],
            )  # fmt: skip
            self.head_back(
                space, kept["k_means"], kept["right"], kept["steps"], kept["powers"], work, scratch, at["parts_s"],
                at["parts_l"], at["again"], at["d_right"], at["inner"], at["due_queries"], at["due_keys"], room,
                self.query_shares, self.landmarks, self.iterations, _places(self.iterations, True), scale,
            )  # fmt: skip
            self.pull_of_keys(
                key, value, space, kept["log"], scratch, at["d_right"], at["inner"], at["due_keys"], at["parts_l"], dk,
                dv, *self.key_numbers, scale, *self.key_strides, *self.value_strides,
            )  # fmt: skip
            self.finish(scratch, at["due_queries"], at["parts_l"], dq, *self.finish_numbers)
        return dq, dk, dv

    def _pairs(self, number: int) -> Tensor:
        """Room for so many large matrices of each head."""
        shape = (self.matrices, 2 * number, self.side, self.side)
        return torch.empty(shape, dtype=torch.float16, device=self.device)


def space_sizes(
    query: Tensor, value: Tensor, num_landmarks: int, num_iterations: int
) -> tuple[int, tuple[int, int, int, int]]:
    """(the size of `space`, the shape of `work` for a gradient), for tensors that hold nothing yet."""
    b, h, _, p = query.shape
    sizes = padded_sizes(num_landmarks, p, value.shape[3])
    of_work = (b * h, 2 * (1 + _places(num_iterations, True)), sizes[0], sizes[0])
    return _kept(b * h, sizes, num_iterations, True)["end"], of_work


def _places(iterations: int, differentiable: bool) -> int:
    """For how many W there is room."""
    return max(1, iterations if differentiable else min(2, iterations))


def _kept(matrices: int, sizes: tuple[int, int, int], iterations: int, differentiable: bool) -> dict[str, int]:
    """Where each part of `space` begins; some are empty where no gradient is wanted."""
    side, width, values = sizes
    found = {"q_means": side * width, "k_means": side * width, "solved": side * values}
    of_gradient = {"right": side * values, "log": 2 * side}
    places = _places(iterations, True)
    of_gradient |= {"steps": places * side * values, "powers": 1 + places * (1 + values)}
    return side_by_side(matrices, **found, **{k: v * differentiable for k, v in of_gradient.items()})
