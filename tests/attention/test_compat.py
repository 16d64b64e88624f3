"""The published code's behaviour: its numbers, and the quirks that `compat` is for.

`compat` agreed with the published code, given the same draws, to 4e-7 in float32, forward and backward. Two things
keep it so: the method written out step by step from its description, with loops over samples and heads, and numbers of
our own from the state that was compared (compat.json; `python tests/attention/test_compat.py` writes it anew).
"""

import json
import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

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


GOLDEN = Path(__file__).with_name("compat.json")
AGREEMENT = 4e-7  # of the largest entry


def case(dtype: torch.dtype = torch.float64) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor, Tensor, Tensor]:
    """(q, k, v) of two samples, two heads, 24 tokens of width 32, by formula; a mask with holes; draws; weights."""
    b, h, i, j = torch.meshgrid(*(torch.arange(m, dtype=torch.float64) for m in (2, 2, 24, 32)), indexing="ij")
    q = torch.sin(0.7 * i + 1.3 * j + 0.5 * h + b)
    k = torch.cos(0.5 * i - 0.9 * j + 0.3 * h * j + 0.2 * b)
    v = torch.sin(0.3 * i * j + 0.2 + h - b)
    mask = torch.ones(2, 24, dtype=torch.bool)
    mask[0, 15:] = False
    mask[1, [2, 3, 9, 14, 20]] = False  # as where a black pixel counts as padding
    draws = torch.remainder(torch.arange(12, dtype=torch.float64) * 0.6180339887, 1)
    weights = torch.cos(0.11 * i * j + 0.4 * b - h) / 5
    return (q.to(dtype), k.to(dtype), v.to(dtype)), mask, draws.to(dtype), weights.to(dtype)


def described(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, draws: Tensor) -> Tensor:
    """The method from its description, one sample and head after the other."""
    samples, heads, n, p = q.shape
    d, half = len(draws), len(draws) // 2
    parts = {}
    for b in range(samples):
        keep = mask[b].to(q.dtype)[:, None]
        first = [math.floor(float(u) * int(mask[b].sum())) for u in draws]  # among the first n_valid places
        for h in range(heads):
            queries, keys, values = q[b, h] * keep * p**-0.25, k[b, h] * keep * p**-0.25, v[b, h] * keep
            chosen = [queries[at] for at in first[:half]] + [keys[at] for at in first[half:]]
            landmarks = torch.stack(chosen)

            def kernel(x: Tensor, y: Tensor) -> Tensor:
                return torch.stack([(-(x - row).square().sum(-1) / 2).exp() for row in y], -1)

            with_gamma = kernel(landmarks, landmarks) + 0.1 * torch.eye(d, dtype=q.dtype)
            root = with_gamma.sum(-1).rsqrt()
            parts[b, h] = (queries, keys, values, landmarks, kernel, root, root[:, None] * with_gamma * root)
    normals = torch.stack([part[-1] for part in parts.values()])
    c = normals.sum(-2).max()  # one number for the whole batch
    outputs = []
    for queries, keys, values, landmarks, kernel, root, normal in parts.values():
        eye, z = torch.eye(d, dtype=q.dtype), normal.T / c
        for _ in range(6):
            az = normal @ z
            z = z @ (13 * eye - az @ (15 * eye - az @ (7 * eye - az))) / 4
        inverse = root[:, None] * z * root
        outputs.append(kernel(queries, landmarks) @ (inverse @ (kernel(keys, landmarks).T @ values)))
    return torch.stack(outputs).reshape(samples, heads, n, p)


def forward_and_gradients(attend, dtype: torch.dtype) -> dict[str, Tensor]:
    tokens, mask, draws, weights = case(dtype)
    q, k, v = (t.requires_grad_() for t in tokens)
    out = attend(q, k, v, mask, draws)
    gradients = torch.autograd.grad((out * weights).sum(), (q, k, v))
    return {"out": out.detach(), **dict(zip(("query", "key", "value"), gradients, strict=True))}


def ours(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, draws: Tensor) -> Tensor:
    return skyformer_compat(q, k, v, mask[:, None, None], draws=draws)


def assert_near(found: dict[str, Tensor], expected: dict[str, Tensor], share: float) -> None:
    for name, wanted in expected.items():
        largest = float(wanted.abs().max())
        assert largest > 1e-3, name
        assert float((found[name].double() - wanted).abs().max()) < share * largest, name


def test_it_is_the_method_that_is_described() -> None:
    expected = forward_and_gradients(described, torch.float64)
    assert_near(forward_and_gradients(ours, torch.float64), expected, 1e-11)
    assert_near(forward_and_gradients(ours, torch.float32), expected, 5 * AGREEMENT)


def test_numbers_of_the_state_that_was_compared() -> None:
    found, golden = forward_and_gradients(ours, torch.float64), json.loads(GOLDEN.read_text())
    for name, kept in golden.items():
        wanted = {key: torch.tensor(value, dtype=torch.float64) for key, value in kept.items()}
        assert_near(summary(found[name]), wanted, 1e-10)
    for name, kept in golden.items():
        largest = float(found[name].abs().max())
        rounded = forward_and_gradients(ours, torch.float32)[name].double()
        assert float((rounded[0, 1, 5] - torch.tensor(kept["row"])).abs().max()) < 5 * AGREEMENT * largest, name


def summary(x: Tensor) -> dict[str, Tensor]:
    """One row of it, and of each sample and head the sum of squares and a sum with changing weights."""
    weights = torch.cos(torch.arange(x[0, 0].numel(), dtype=torch.float64)).reshape(x[0, 0].shape)
    return {"row": x[0, 1, 5], "squares": x.square().sum((-2, -1)), "sums": (x * weights).sum((-2, -1))}


if __name__ == "__main__":
    numbers = forward_and_gradients(ours, torch.float64)
    kept = {name: {key: value.tolist() for key, value in summary(x).items()} for name, x in numbers.items()}
    GOLDEN.write_text(json.dumps(kept, indent=1) + "\n")
