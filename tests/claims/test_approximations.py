"""Approximations of softmax attention: each against its formula, and against exact attention where it must agree."""

import math

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from wellcond.claims import approximations
from wellcond.claims.approximations import (
    APPROXIMATIONS,
    approximate_output,
    approximation_errors,
    exact_output,
    informer,
    linformer,
    norm_of,
    performer,
    positive_features,
    skyformer,
)


def draws(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def tokens(n: int = 24, p: int = 8, *, size: float = 1.0, lead: tuple[int, ...] = (2, 3)) -> tuple[Tensor, ...]:
    generator = draws(7)
    q, k, v = (torch.randn(*lead, n, p, generator=generator, dtype=torch.float64) for _ in range(3))
    return size * q, size * k, v


def test_the_truth_and_its_norm() -> None:
    q, k, v = tokens()
    torch.testing.assert_close(exact_output(q, k, v), F.scaled_dot_product_attention(q, k, v))
    assert exact_output(q.float(), k.float(), v.float()).dtype == torch.float64
    torch.testing.assert_close(norm_of(v), torch.linalg.matrix_norm(v, 2))
    torch.testing.assert_close(norm_of(v.mT), norm_of(v))
    v[0, 1, 3, 2] = torch.nan
    assert norm_of(v).isnan().nonzero().tolist() == [[0, 1]]


def error_of(name: str, q: Tensor, k: Tensor, v: Tensor, budget: int, generator: torch.Generator) -> Tensor:
    out = approximate_output(name, q, k, v, budget=budget, generator=generator)
    return torch.linalg.matrix_norm(out - exact_output(q, k, v), 2)


def test_each_draw_of_each_matrix_has_its_own_error() -> None:
    q, k, v = tokens()
    found, generator = approximation_errors(q, k, v, budgets=(6, 8), draws=3, generator=draws()), draws()
    assert list(found) == [(name, budget) for name in APPROXIMATIONS for budget in (6, 8)]
    for (name, budget), errors in found.items():
        drawn = [error_of(name, q, k, v, budget, generator) for _ in range(1 if name == "nystromformer" else 3)]
        expected = torch.stack(drawn).expand(3, 2, 3)  # what draws nothing is computed once
        torch.testing.assert_close(errors, expected)
        assert errors.isfinite().all()


@pytest.mark.parametrize(("name", "budget"), [("skyformer", 48), ("nystromformer", 24), ("informer", 24)])
def test_with_every_token_nothing_is_lost(name: str, budget: int) -> None:
    q, k, v = tokens()
    assert error_of(name, q, k, v, budget, draws()).max() < 1e-8


@pytest.mark.parametrize("name", ["skyformer", "nystromformer", "informer", "performer"])
def test_a_larger_budget_is_nearer(name: str) -> None:
    (q, k, v), generator = tokens(128, size=0.5), draws()
    budgets = (8, 32, 100) if name != "performer" else (8, 64, 512)
    means = [sum(float(error_of(name, q, k, v, budget, generator).mean()) for _ in range(3)) / 3 for budget in budgets]
    assert means[0] > means[1] > means[2]


def test_many_features_are_exact() -> None:
    q, k, v = tokens(size=0.5, lead=(1,))
    errors = [float(error_of("performer", q, k, v, d, draws())) for d in (1000, 100_000)]
    assert errors[1] < 0.02
    assert errors[1] < 0.3 * errors[0]  # as 1/√d


def test_features_are_unbiased_and_orthogonal() -> None:
    """The mean over many draws of φ(q)·φ(k) is the kernel, within five standard errors; and so for odd numbers."""
    q, k, _ = tokens(3, 4, size=0.8, lead=())
    count, d = 20_000, 6
    many = approximations._orthogonal(q.expand(count, 3, 4), d, draws(3))
    assert many.shape == (count, d, 4)
    group = many[:, :4] @ many[:, :4].mT
    off = group - torch.diag_embed(group.diagonal(dim1=-2, dim2=-1))
    assert off.abs().max() < 1e-12
    assert float(many.square().mean()) == pytest.approx(1, abs=0.02)
    estimates = (positive_features(q, many).exp() @ positive_features(k, many).exp().mT) / d
    truth = (q @ k.mT / math.sqrt(4)).exp()
    error = estimates.std(0) / math.sqrt(count)
    assert ((estimates.mean(0) - truth).abs() < 5 * error).all()


def test_performer_is_its_formula() -> None:
    q, k, v = tokens(10, 4, lead=(2,))
    out = performer(q, k, v, 7, draws(5))
    directions = approximations._orthogonal(q, 7, draws(5))
    scores = positive_features(q, directions).exp() @ positive_features(k, directions).exp().mT
    torch.testing.assert_close(out, scores / scores.sum(-1, keepdim=True) @ v)
    large = performer(50 * q, 50 * k, v, 7, draws(5))  # exponents in the thousands
    assert large.isfinite().all()


def test_informer_gives_its_best_queries_all_and_the_others_the_mean() -> None:
    q, k, v = tokens(lead=())
    q[:20] *= 0.01  # nothing to say: their scores are flat
    out = informer(q, k, v, 4, draws())
    torch.testing.assert_close(out[20:], exact_output(q, k, v)[20:])
    torch.testing.assert_close(out[:20], v.mean(0).expand(20, -1))


def test_linformer_mixes_keys_and_values_alike() -> None:
    q, k, v = tokens(lead=())
    out = linformer(q, k, v, 5, draws(2))
    e = torch.randn(5, 24, generator=draws(2), dtype=torch.float64) / math.sqrt(5)
    torch.testing.assert_close(out, F.scaled_dot_product_attention(q[None], (e @ k)[None], (e @ v)[None])[0])


def test_skyformer_is_nystroms_method_on_the_completion() -> None:
    """Ã = SM(Q, L) SM(L, L)⁺ SM(L, K) with the landmarks that were drawn, divided by its row sums."""
    q, k, v = tokens(lead=(), size=0.7)
    out = skyformer(q, k, v, 10, draws(4))
    generator = draws(4)
    of_queries, of_keys = (torch.rand(24, generator=generator).topk(5).indices for _ in range(2))
    rows = torch.cat([q[of_queries], k[of_keys]])

    def kernel(x: Tensor, y: Tensor) -> Tensor:
        return (x @ y.T / math.sqrt(8)).exp()

    approximate = kernel(q, rows) @ torch.linalg.pinv(kernel(rows, rows), hermitian=True) @ kernel(rows, k)
    expected = approximate @ v / approximate.sum(-1, keepdim=True)
    torch.testing.assert_close(out, expected, rtol=1e-6, atol=1e-8)


def test_lost_row_sums_are_nan_and_no_others() -> None:
    q, k, v = tokens(lead=(2,))
    q[1], k[1] = 60 * q[1], -60 * k[1]
    out = skyformer(q, k, v, 4, draws())
    assert out[1].isnan().all()
    assert out[0].isfinite().all()


def test_mistakes_are_named() -> None:
    q, k, v = tokens()
    with pytest.raises(ValueError, match="there are skyformer"):
        approximate_output("reformer", q, k, v, budget=3)
    with pytest.raises(ValueError, match="at least 1"):
        approximate_output("informer", q, k, v, budget=0)
