"""Kernelized attention against its definition, and against softmax attention's weights."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from wellcond.attention import KernelizedAttention, kernelized_attention


def test_golden_numbers(golden, assert_golden) -> None:
    out = kernelized_attention(*golden)
    assert_golden(out, [0.851926, 2.944710, 2.115997, 1.060686], 32.003303, 9.009490)


def test_weights_are_those_of_softmax_normalised_on_both_sides() -> None:  # C = D_Q^-½ A D_K^-½
    q, k = torch.randn(3, 7, 5, dtype=torch.float64), torch.randn(3, 6, 5, dtype=torch.float64)
    root = 5**0.5
    scores = (q @ k.mT / root).exp()
    roots = [(t.square().sum(-1) / root).exp().rsqrt() for t in (q, k)]
    expected = roots[0][..., :, None] * scores * roots[1][..., None, :]
    torch.testing.assert_close(kernelized_attention(q, k, torch.eye(6).double().expand(3, 6, 6)), expected)


@given(n=st.integers(1, 9), m=st.integers(1, 9), p=st.integers(1, 6), c=st.integers(1, 6))
def test_shapes_masks_and_causality(kernel, n: int, m: int, p: int, c: int) -> None:
    torch.manual_seed(1000 * n + 100 * m + 10 * p + c)
    q, k, v = (torch.randn(2, 3, *s, dtype=torch.float64) for s in ((n, p), (m, p), (m, c)))
    weights = kernel(q, k)
    torch.testing.assert_close(kernelized_attention(q, k, v), weights @ v)
    torch.testing.assert_close(kernelized_attention(q, k, v, is_causal=True), weights.tril() @ v)
    torch.testing.assert_close(kernelized_attention(q, k, v, scale=0.1), kernel(q, k, 0.1) @ v)
    for shape in ((2, 1, n, m), (2, 3, 1, m), (m,)):
        keep = torch.rand(shape) > 0.4
        torch.testing.assert_close(kernelized_attention(q, k, v, keep), weights * keep @ v)
        bias = torch.randn(shape).masked_fill(~keep, -torch.inf)
        torch.testing.assert_close(kernelized_attention(q, k, v, bias), weights * bias.double().exp() @ v)


def test_dropout_drops_weights(kernel) -> None:
    q, k = torch.randn(2, 40, 8), torch.randn(2, 40, 8)
    weights = kernelized_attention(q, k, torch.eye(40).expand(2, 40, 40), dropout_p=0.5)
    dropped = weights == 0
    assert 0.4 < dropped.float().mean() < 0.6
    torch.testing.assert_close(weights[~dropped].double(), 2 * kernel(q, k)[~dropped], rtol=1e-4, atol=1e-6)


def test_gradients_through_masks() -> None:
    q, k, v = (torch.randn(2, 2, 5, 3, dtype=torch.float64, requires_grad=True) for _ in range(3))
    keys = torch.tensor([1, 1, 0, 1, 0], dtype=torch.bool)
    general = torch.rand(5, 5) > 0.3
    for mask in (None, keys, general):
        assert torch.autograd.gradcheck(lambda *x, mask=mask: kernelized_attention(*x, mask), (q, k, v))


@pytest.mark.parametrize("huge", [1e3, 1e4, 1e20, 1e37])
@pytest.mark.parametrize("how", ["keys", "full", "numbers", "causal", "causal, dropout"])
def test_what_is_masked_may_be_huge(huge: float, how: str) -> None:
    tensors = [torch.randn(2, 2, 20, 8) for _ in range(3)]
    padded = [t.index_fill(2, torch.arange(15, 20), huge).requires_grad_() for t in tensors]
    alone = [t[:, :, :15].clone().requires_grad_() for t in tensors]
    keys = (torch.arange(20) < 15)[None, None, None]
    full = keys.expand(1, 1, 20, 20).contiguous()
    numbers = torch.zeros(1, 1, 20, 20).masked_fill(~full, -torch.inf)
    mask = {"keys": keys, "full": full, "numbers": numbers}.get(how)
    dropout, causal = (1e-9 if "dropout" in how else 0.0), "causal" in how
    out = kernelized_attention(*padded, mask, dropout, causal)[:, :, :15]
    want = kernelized_attention(*alone, None, 0.0, causal)
    torch.testing.assert_close(out, want)
    g = torch.randn(out.shape)
    for one, other in zip(torch.autograd.grad(out, padded, g), torch.autograd.grad(want, alone, g), strict=True):
        torch.testing.assert_close(one[:, :, :15], other)
        assert torch.equal(one[:, :, 15:], torch.zeros_like(one[:, :, 15:]))


def test_mask_and_causal_together_raise() -> None:
    q = torch.randn(2, 5, 4)
    with pytest.raises(ValueError, match="not both"):
        kernelized_attention(q, q, q, torch.ones(5, 5, dtype=torch.bool), is_causal=True)


def test_above_the_size_of_one_chunk_it_is_as_exact_under_autocast() -> None:
    q, k = (torch.randn(1, 1, 2100, 8) * 0.3 for _ in range(2))
    v = torch.randn(1, 1, 2100, 8)
    q, k, v = (t.bfloat16() for t in (q, k, v - v.mean(-2, keepdim=True)))
    expected = kernelized_attention(q.double(), k.double(), v.double())
    with torch.autocast("cpu", torch.bfloat16):
        found = kernelized_attention(q, k, v)
    assert (found - expected).norm() < 4e-3 * expected.norm()


def test_a_layer_that_is_compiled_has_its_gradients_at_that_size_too() -> None:
    layer, x = KernelizedAttention(8, num_heads=2), torch.randn(1, 1500, 8, requires_grad=True)
    plain = torch.autograd.grad(layer(x).square().sum(), [x, layer.qkv.weight])
    found = torch.autograd.grad(torch.compile(layer)(x).square().sum(), [x, layer.qkv.weight])
    torch.testing.assert_close(found, plain, rtol=1e-4, atol=1e-4)


def test_weights_of_large_tokens_have_the_accuracy_that_is_documented() -> None:
    x = torch.randn(1, 1, 64, 32)
    x = x / x.norm(dim=-1, keepdim=True) * 1e7
    itself = kernelized_attention(x, x, torch.eye(64)[None, None])[0, 0].diagonal()
    assert (itself - 1).abs().max() < 0.02
