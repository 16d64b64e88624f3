"""Softmax attention is torch's own."""

import torch
from torch.nn import functional as F

from wellcond.attention import softmax_attention


def test_golden_numbers(golden, assert_golden) -> None:
    out = softmax_attention(*golden)
    assert_golden(out, [0.198669, 0.680297, 0.472863, 0.234946], 8.964867, 2.417019)


def test_it_is_sdpa_to_the_bit() -> None:
    q, k, v = torch.randn(2, 3, 7, 4), torch.randn(2, 3, 9, 4), torch.randn(2, 3, 9, 5)
    mask = torch.rand(2, 1, 7, 9) > 0.5
    assert torch.equal(softmax_attention(q, k, v, mask), F.scaled_dot_product_attention(q, k, v, mask))
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.3)
    assert torch.equal(softmax_attention(q, k, v, is_causal=True, scale=0.3), expected)
