"""Softmax attention is torch's own."""

import pytest
import torch
from torch.nn import functional as F

from wellcond.attention import softmax_attention


def test_golden_numbers(golden, assert_golden) -> None:
    out = softmax_attention(*golden)
    assert_golden(out, [0.198669, 0.680297, 0.472863, 0.234946], 8.964867, 2.417019)


def test_it_is_sdpa_to_the_bit() -> None:
    q, k, v = torch.randn(2, 3, 7, 4), torch.randn(2, 3, 9, 4), torch.randn(2, 3, 9, 5)
    mask = torch.rand(2, 1, 7, 9) > 0.5
    mask[..., 0] = True
    assert torch.equal(softmax_attention(q, k, v, mask), F.scaled_dot_product_attention(q, k, v, mask))
    bias = torch.randn(2, 1, 1, 9)
    assert torch.equal(softmax_attention(q, k, v, bias), F.scaled_dot_product_attention(q, k, v, bias))
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.3)
    assert torch.equal(softmax_attention(q, k, v, is_causal=True, scale=0.3), expected)


@pytest.mark.parametrize("numbers", [False, True])
def test_a_query_without_keys_gets_zeros_and_gives_no_gradient(numbers: bool) -> None:
    q, k, v = (torch.randn(2, 3, 5, 4, requires_grad=True) for _ in range(3))
    keep = torch.ones(5, 5, dtype=torch.bool)
    keep[2] = False
    mask = torch.zeros(5, 5).masked_fill(~keep, -torch.inf) if numbers else keep
    out = softmax_attention(q, k, v, mask)
    assert (out[:, :, 2] == 0).all()
    out.sum().backward()
    assert all(t.grad.isfinite().all() for t in (q, k, v))
    assert (q.grad[:, :, 2] == 0).all()
