"""Linear attention as a plan: everything that follows from shapes and strides is computed once, then four launches.

    plan = plan_for(query, key, value)
    out, small = plan.forward(query, key, value, factor)
    dq, dk, dv = plan.backward(grad, query, key, value, factor, small)

`small` is S, (b · h, width, width) in float32, padded. The shares of a sum are in a temporary buffer.
"""

from typing import Any

import torch
from torch import Tensor

from .counters import Counters
from .launch import Launch, dense, layout, placed
from .linear_sides import keys_kernel, output_kernel, queries_kernel, sums_kernel
from .plans import LARGE_BLOCK, Kept, on_device, padded_alike, shares_of
from .tiles import ceil_div, packed

__all__ = ["Plan", "plan_for"]

_plans: Kept["Plan"] = Kept(1024)


def plan_for(query: Tensor, key: Tensor, value: Tensor) -> "Plan":
    """Return the plan for tokens (b, h, n, p), (b, h, m, p) and (b, h, m, c), dense along the last dimension."""
    given = layout(query, key, value)
    plan = _plans.get(given)
    return plan or _plans.add(given, Plan(query, key, value))


class Plan:
    """The plan for tensors of one layout."""

    def __init__(self, query: Tensor, key: Tensor, value: Tensor):
        (b, h, n, p), (m, c) = query.shape, value.shape[2:]
        self.matrices: int = b * h
        self.device: torch.device = query.device
        self.placed: tuple[Any, ...] = placed(query, key, value)
        self.out_shape: tuple[int, int, int, int] = (b, h, n, c)
        self.dtype: torch.dtype = value.dtype
        wider = padded_alike(p, c)
        self.shape: dict[str, int] = {"WIDTH": wider, "VALUES": wider}
        # tokens at a time; more would spill registers
        self.block = LARGE_BLOCK if wider == 32 and query.dtype == torch.bfloat16 else LARGE_BLOCK // 2
        self.parts: dict[str, Any] = {"BLOCK": self.block, "PARTS": query.dtype == torch.bfloat16}
        self.query_shares: int
        self.query_shares, query_each = shares_of(n)
        self.key_shares: int
        self.key_shares, key_each = shares_of(m)
        self.small: tuple[int, int, int] = (self.matrices, wider, wider)
        self.query_strides: tuple[int, ...] = query.stride()[:3]
        self.key_strides: tuple[int, ...] = key.stride()[:3]
        self.value_strides: tuple[int, ...] = value.stride()[:3]
        self.sums_numbers: tuple[int, ...] = (m, h, p, c, key_each)
        self.output_numbers: tuple[int, int, int, int] = (n, h, p, c)
        self.query_numbers: tuple[int, ...] = (n, h, p, c, query_each)
        self.key_numbers: tuple[int, int, int, int] = (m, h, p, c)
        self.counters: Counters = Counters(self.matrices, query.device)
        self.sums: Launch = self._launch(sums_kernel, self.key_shares)
        self.output: Launch = self._launch(output_kernel, ceil_div(n, self.block))
        self.pull_of_keys: Launch = self._launch(keys_kernel, ceil_div(m, self.block))
        self.pulls_of_queries: dict[Any, Launch] = {}

    def _launch(self, kernel: Any, programs: int) -> Launch:
        return Launch(kernel, (programs, self.matrices), num_warps=4, num_stages=2, **self.shape, **self.parts)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, factor: float) -> tuple[Tensor, Tensor]:
        """Return (out, small)."""
        small = torch.empty(self.small, dtype=torch.float32, device=self.device)
        parts = self._parts(self.key_shares, small)
        out = torch.empty(self.out_shape, dtype=self.dtype, device=self.device)
        with on_device(self.device):
            y, v, to_small, to_parts, counters = self.sums.addresses(key, value, small, parts, self.counters())
            self.sums(
                y, v, to_small, to_parts, counters, *self.sums_numbers, factor, *self.key_strides, *self.value_strides
            )
            x, to_small, to_out = self.output.addresses(query, small, out)
            self.output(x, to_small, to_out, *self.output_numbers, *self.query_strides)
        return out, small

    def backward(
        self, grad: Tensor, query: Tensor, key: Tensor, value: Tensor, factor: float, small: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return (dq, dk, dv); grad (b, h, n, c) has value's dtype and is dense along the last dimension."""
        if self.placed != placed(query, key, value):
            query, key, value = packed(query), packed(key), packed(value)
            return plan_for(query, key, value).backward(grad, query, key, value, factor, small)
        small = dense(small)
        dq, dk, dv = (torch.empty(t.shape, dtype=t.dtype, device=self.device) for t in (query, key, value))
        pulls = torch.empty(self.small, dtype=torch.float32, device=self.device)
        parts = self._parts(self.query_shares, pulls)
        of_grad = placed(grad)
        pull = self.pulls_of_queries.get(of_grad)
        if pull is None:
            pull = self.pulls_of_queries[of_grad] = self._launch(queries_kernel, self.query_shares)
        with on_device(self.device):
            x, g, to_small, to_pulls, to_parts, counters, d_x = pull.addresses(
                query, grad, small, pulls, parts, self.counters(), dq
            )
            pull(
                x, g, to_small, to_pulls, to_parts, counters, d_x, *self.query_numbers, factor,
                *self.query_strides, *grad.stride()[:3],
            )  # fmt: skip
            y, v, to_pulls, d_y, d_v = self.pull_of_keys.addresses(key, value, pulls, dk, dv)
            self.pull_of_keys(y, v, to_pulls, d_y, d_v, *self.key_numbers, *self.key_strides, *self.value_strides)
        return dq, dk, dv

    def _parts(self, shares: int, instead: Tensor) -> Tensor:
        """Allocate the shares of a sum, if there are several."""
        if shares == 1:
            return instead
        return torch.empty(shares, *self.small, dtype=torch.float32, device=self.device)
