"""Linear attention against the product written out."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from wellcond.attention import linear_attention
from wellcond.attention.linear import LinearCore


@given(n=st.integers(1, 9), m=st.integers(1, 9), p=st.integers(1, 6), c=st.integers(1, 6))
def test_the_product(n: int, m: int, p: int, c: int) -> None:
    torch.manual_seed(1000 * n + 100 * m + 10 * p + c)
    q, k, v = (torch.randn(2, 3, *s, dtype=torch.float64) for s in ((n, p), (m, p), (m, c)))
    scores = q @ k.mT / 16
    torch.testing.assert_close(linear_attention(q, k, v), scores @ v)
    torch.testing.assert_close(linear_attention(q, k, v, divisor=5.0), scores * 16 / 5 @ v)
    torch.testing.assert_close(linear_attention(q, k, v, scale=2.0), scores * 32 @ v)
    torch.testing.assert_close(linear_attention(q, k, v, is_causal=True), scores.tril() @ v)
    general = torch.rand(2, 1, n, m) > 0.5
    torch.testing.assert_close(linear_attention(q, k, v, general), scores * general @ v)
    keys = torch.rand(2, 1, 1, m) > 0.5
    torch.testing.assert_close(linear_attention(q, k, v, keys), scores * keys @ v)


def test_dropout_drops_scores() -> None:
    q, k = torch.randn(2, 40, 8), torch.randn(2, 40, 8)
    weights = linear_attention(q, k, torch.eye(40).expand(2, 40, 40), dropout_p=0.5)
    dropped = weights == 0
    assert 0.4 < dropped.float().mean() < 0.6
    torch.testing.assert_close(weights[~dropped], (q @ k.mT / 8)[~dropped])


def test_a_bias_is_dropped_with_its_score() -> None:
    q, bias = torch.ones(1, 3, 49, 32), torch.full((1, 3, 49, 49), 5.0)  # 32/16 + 5 = 7, twice that where it is kept
    weights = LinearCore().with_bias(q, q, torch.eye(49).expand(1, 3, 49, 49), bias, None, 0.5)
    assert weights.unique().tolist() == [0, 14]
    assert 0.4 < (weights == 0).float().mean() < 0.6


def test_a_bias_and_its_mask() -> None:
    q, k, v = (torch.randn(2, 3, 7, 4) for _ in range(3))
    bias, keep = torch.randn(3, 7, 7), torch.rand(2, 1, 7, 7) > 0.4
    scores = q.double() @ k.double().mT / 8 + bias
    core = LinearCore(divisor=8.0)
    for mask, want in ((None, scores), (keep, scores * keep)):
        out = core.with_bias(q, k, v, bias, mask)
        torch.testing.assert_close(out.double(), want @ v.double(), rtol=1e-5, atol=1e-5)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert torch.equal(core.with_bias(q, k, v, bias, mask), out)


@pytest.mark.parametrize("divisor", [0, -1.0, float("inf"), float("nan"), "16"])
def test_divisors_that_cannot_be(divisor) -> None:
    q = torch.randn(2, 5, 4)
    with pytest.raises(ValueError, match="must be a positive number; 16 is usual"):
        linear_attention(q, q, q, divisor=divisor)
    with pytest.raises(ValueError, match="must be a positive number; 16 is usual"):
        LinearCore(divisor=divisor)


def test_what_it_does_not_take() -> None:
    q = torch.randn(2, 5, 4)
    with pytest.raises(ValueError, match="mask > -1"):
        linear_attention(q, q, q, torch.zeros(5, 5))
    with pytest.raises(ValueError, match="not both"):
        linear_attention(q, q, q, torch.ones(5, 5, dtype=torch.bool), is_causal=True)
