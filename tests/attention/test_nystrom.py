"""Nyström attention against its formula, and against softmax attention where it is exact."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from wellcond.attention import NystromAttention, nystrom_attention, softmax_attention
from wellcond.attention.landmarks import segment_means


def test_the_formula() -> None:
    q, k, v = (torch.randn(2, 3, *s, dtype=torch.float64) for s in ((13, 4), (17, 4), (17, 5)))
    q_means, k_means = segment_means(q, 6)[0], segment_means(k, 6)[0]
    left, middle, right = ((a @ b.mT / 2).softmax(-1) for a, b in ((q, k_means), (q_means, k_means), (q_means, k)))
    exact = left @ torch.linalg.pinv(middle) @ right @ v
    out = nystrom_attention(q, k, v, num_landmarks=6, num_iterations=40)
    torch.testing.assert_close(out, exact, rtol=1e-6, atol=1e-7)


def test_as_many_landmarks_as_tokens_are_softmax() -> None:
    q, k, v = (torch.randn(2, 3, 11, 4, dtype=torch.float64) for _ in range(3))
    for count in (11, 64):
        assert torch.equal(nystrom_attention(q, k, v, num_landmarks=count), softmax_attention(q, k, v))
    # so also for a sample with few tokens among padding, whatever its mates
    keep = torch.tensor([[1, 1, 0, 1, 0, 0, 1, 0, 1, 0, 1], [1] * 11], dtype=torch.bool)[:, None, None]
    bias = torch.randn(2, 1, 1, 11, dtype=torch.float64).masked_fill(~keep, -torch.inf)
    for mask in (keep, bias):
        out = nystrom_attention(q, k, v, mask, num_landmarks=6)
        torch.testing.assert_close(out[0], softmax_attention(q, k, v, mask)[0])
        assert not torch.allclose(out[1], softmax_attention(q, k, v, mask)[1], rtol=1e-4)


def test_more_landmarks_come_closer() -> None:
    x = torch.randn(1, 2, 64, 4, dtype=torch.float64).cumsum(2) / 4  # neighbours alike, as segments hope
    exact = softmax_attention(x, x, x)
    errors = [float((nystrom_attention(x, x, x, num_landmarks=d) - exact).norm()) for d in (4, 16, 64)]
    assert errors[0] > errors[1] > errors[2]


def test_convolution_is_added() -> None:
    q, k, v = (torch.randn(2, 3, 9, 4, dtype=torch.float64) for _ in range(3))
    kernel = torch.randn(3, 5, dtype=torch.float64)
    keep = torch.rand(2, 1, 1, 9) > 0.3
    out = nystrom_attention(q, k, v, keep, num_landmarks=4, conv_kernel=kernel)
    plain = nystrom_attention(q, k, v, keep, num_landmarks=4)
    padded = F.pad(v * keep.mT, (0, 0, 2, 2))
    added = sum(kernel[:, i, None, None] * padded[:, :, i : i + 9] for i in range(5))
    torch.testing.assert_close(out - plain, added)


def test_convolution_in_the_module() -> None:
    layer = NystromAttention(12, num_heads=3, num_landmarks=4, conv_kernel=5)
    assert layer.core.conv.shape == (3, 5)
    layer(torch.randn(2, 9, 12)).sum().backward()
    assert layer.core.conv.grad.abs().sum() > 0


def test_gradients_through_masks_and_pseudo_inverse() -> None:
    q, k, v = (torch.randn(2, 1, 7, 3, dtype=torch.float64, requires_grad=True) for _ in range(3))
    mask = torch.tensor([[1, 1, 0, 1, 0, 1, 1], [1, 1, 0, 0, 0, 0, 0]], dtype=torch.bool)[:, None, None]
    for attn_mask in (None, mask):

        def out(*parts: Tensor, attn_mask=attn_mask) -> Tensor:
            return nystrom_attention(*parts, attn_mask, num_landmarks=3)

        assert torch.autograd.gradcheck(out, (q, k, v))


def test_queries_that_are_padding_need_a_mask_of_their_own_across_lengths() -> None:
    q, k = torch.randn(1, 2, 7, 4, dtype=torch.float64), torch.randn(1, 2, 5, 4, dtype=torch.float64)
    keep = torch.tensor([1, 1, 1, 0, 1, 0, 1], dtype=torch.bool)
    alone = nystrom_attention(q[:, :, keep], k, k, num_landmarks=3)
    q[:, :, ~keep] = 3.0
    for mask in (keep, keep[None, None], keep[None, None, None]):
        out = nystrom_attention(q, k, k, num_landmarks=3, query_mask=mask)
        torch.testing.assert_close(out[:, :, keep], alone)


@pytest.mark.parametrize(
    ("settings", "word"),
    [
        ({"dropout_p": 0.1}, "dropout_p"), ({"is_causal": True}, "causal"), ({"num_landmarks": 0}, "at least one"),
        ({"num_landmarks": "64"}, "num_landmarks='64'"), ({"num_iterations": -1}, "num_iterations=-1"),
        ({"query_mask": torch.ones(2, 1, 5) > 0}, "query_mask"), ({"query_mask": torch.ones(6)}, "boolean"),
        ({"conv_kernel": torch.ones(2, 5)}, "conv_kernel"), ({"conv_kernel": torch.ones(3, 4)}, "odd"),
    ],
)  # fmt: skip
def test_mistakes_are_named(settings: dict, word: str) -> None:
    x = torch.randn(2, 3, 6, 4)
    with pytest.raises(ValueError, match=word):
        nystrom_attention(x, x, x, **settings)
    with pytest.raises(ValueError, match="odd"):
        NystromAttention(12, num_heads=3, conv_kernel=4)


def test_no_queries_with_a_mask():
    key = torch.randn(2, 2, 9, 4)
    mask = torch.ones(2, 1, 1, 9, dtype=torch.bool)
    assert nystrom_attention(torch.randn(2, 2, 0, 4), key, key, mask, num_landmarks=4).shape == (2, 2, 0, 4)
