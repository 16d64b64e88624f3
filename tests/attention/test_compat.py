"""The published code's behaviour: its numbers, and the quirks that `compat` is for."""

import pytest
import torch

from wellcond.attention import skyformer_attention, skyformer_compat


def test_golden_numbers(golden, assert_golden) -> None:
    draws = (torch.tensor([0, 3, 5, 1, 4, 6], dtype=torch.float64) + 0.5) / 8
    out = skyformer_compat(*golden, draws=draws)
    assert_golden(out, [0.836074, 2.888845, 2.057966, 1.014275], 31.909092, 8.801199)


def test_many_steps_are_the_exact_solve(golden, golden_landmarks) -> None:
    draws = (torch.tensor([0, 3, 5, 1, 4, 6], dtype=torch.float64) + 0.5) / 8
    out = skyformer_compat(*golden, draws=draws, num_iterations=20)
    torch.testing.assert_close(out, skyformer_attention(*golden, landmarks=golden_landmarks))


def test_one_draw_serves_the_batch_and_the_start_couples_it() -> None:
    x = torch.randn(3, 2, 16, 4, dtype=torch.float64)
    draws = torch.rand(8, dtype=torch.float64)
    both = skyformer_compat(x, x, x, draws=draws, num_iterations=2)
    alone = skyformer_compat(x[:1], x[:1], x[:1], draws=draws, num_iterations=2)
    assert not torch.allclose(both[:1], alone, rtol=1e-6, atol=0)
    both, alone = (skyformer_compat(t, t, t, draws=draws, num_iterations=30) for t in (x, x[:1]))
    torch.testing.assert_close(both[:1], alone)  # the landmarks were the same


def test_padding_behind_the_tokens_changes_nothing() -> None:
    x, draws = torch.randn(2, 2, 12, 4, dtype=torch.float64), torch.rand(6, dtype=torch.float64)
    keep = torch.arange(12) < 9
    out = skyformer_compat(x, x, x, keep, draws=draws)
    torch.testing.assert_close(out[:, :, :9], skyformer_compat(*[x[:, :, :9]] * 3, draws=draws))


def test_one_entry_for_all_keys_is_as_many_entries() -> None:
    x, draws = torch.randn(2, 2, 12, 4, dtype=torch.float64), torch.rand(6, dtype=torch.float64)
    mask = torch.ones(2, 1, 1, 1, dtype=torch.bool)
    torch.testing.assert_close(skyformer_compat(x, x, x, mask, draws=draws), skyformer_compat(x, x, x, draws=draws))


def test_no_tokens() -> None:
    assert skyformer_compat(*[torch.randn(2, 3, 0, 4)] * 3).shape == (2, 3, 0, 4)


def test_it_is_what_compat_gives() -> None:
    x = torch.randn(2, 2, 12, 4)
    out = skyformer_attention(x, x, x, compat=True, num_landmarks=6, generator=torch.Generator().manual_seed(3))
    same = skyformer_compat(x, x, x, num_landmarks=6, generator=torch.Generator().manual_seed(3))
    assert torch.equal(out, same)


def test_gradients() -> None:
    q, k, v = (torch.randn(2, 1, 6, 3, dtype=torch.float64, requires_grad=True) for _ in range(3))
    draws = torch.rand(4, dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda *parts: skyformer_compat(*parts, draws=draws), (q, k, v))


def test_lengths_must_agree() -> None:
    with pytest.raises(ValueError, match="as many queries as keys"):
        skyformer_compat(torch.randn(4, 2), torch.randn(5, 2), torch.randn(5, 2))


def test_masks_of_numbers_and_no_landmarks_raise() -> None:
    x = torch.randn(2, 3, 6, 4)
    with pytest.raises(ValueError, match="mask > -1"):
        skyformer_attention(x, x, x, torch.tensor([0, -2.0, 0, 1, 0, 3]), compat=True)
    with pytest.raises(ValueError, match="at least one"):
        skyformer_compat(x, x, x, num_landmarks=0)
