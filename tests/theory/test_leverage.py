import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import wellcond
from wellcond.theory.leverage import completion, leverage, leverage_scores, statistical_dimension, sufficient_landmarks

SIZE = st.integers(1, 9)


def draw(n, m, p, spread, seed):
    source = torch.Generator().manual_seed(seed)
    return tuple(spread * torch.randn(rows, p, dtype=torch.float64, generator=source) for rows in (n, m))


def by_definition(q, k, epsilon):
    """C̄(C̄ + λ)⁻¹, entry by entry and with an eigendecomposition."""
    x = torch.cat([q, k])
    kernel = torch.exp(-0.5 * torch.cdist(x, x, compute_mode="donot_use_mm_for_euclid_dist") ** 2 / q.shape[-1] ** 0.5)
    lam = epsilon * torch.linalg.svdvals(kernel[: len(q), len(q) :])[0]
    values, vectors = torch.linalg.eigh(kernel)
    return (vectors.square() * (values / (values + lam))).sum(-1)


@given(SIZE, SIZE, st.integers(1, 5), st.floats(0.01, 1.5), st.floats(0.01, 0.99), st.integers(0, 2**31))
def test_the_scores_are_those_of_the_definition(n, m, p, spread, epsilon, seed):
    q, k = draw(n, m, p, spread, seed)
    scores = leverage_scores(q, k, epsilon)
    torch.testing.assert_close(scores, by_definition(q, k, epsilon), atol=1e-9, rtol=1e-7)
    assert bool(((scores > 0) & (scores < 1)).all())
    torch.testing.assert_close(statistical_dimension(q, k, epsilon), scores.sum())


@given(st.floats(0.05, 0.4), st.integers(0, 2**31))
def test_a_smaller_error_needs_more(epsilon, seed):
    q, k = draw(6, 7, 3, 0.5, seed)
    assert statistical_dimension(q, k, epsilon) > statistical_dimension(q, k, 2 * epsilon)


def test_equal_tokens_are_one_direction():
    q = torch.zeros(8, 4)
    torch.testing.assert_close(statistical_dimension(q, q, 0.1), torch.tensor(1 / 1.05))  # 16/(16 + 0.1·8)


def test_tokens_far_apart_are_as_many_directions_as_tokens():
    q = 100.0 * torch.eye(6, dtype=torch.float64)
    assert float(statistical_dimension(q, q, 1e-6)) == pytest.approx(6, abs=1e-4)  # each query is its key's twin


@pytest.mark.parametrize("apart", [1.0, 2.0, 3.0, 4.0, 5.0, 10.0, 50.0])
@pytest.mark.parametrize("epsilon", [0.5, 0.1, 1e-3])
def test_what_drowns_in_rounding_is_no_number(apart, epsilon):
    """Eight equal queries and eight equal keys: eigenvalues 8(1 ± c) and zeros, so that d_stat is known."""
    q, k = torch.zeros(8, 16), torch.full((8, 16), apart)
    c = math.exp(-0.5 * apart**2 * 16 / 4)
    lam = epsilon * 8 * c
    if lam < 3e-12:  # 1e3 · 16 · eps
        with pytest.raises(ValueError, match="scale them down, or raise epsilon"):
            statistical_dimension(q, k, epsilon)
        return
    truth = sum(x / (x + lam) for x in (8 * (1 + c), 8 * (1 - c)))
    assert float(statistical_dimension(q, k, epsilon)) == pytest.approx(truth, rel=1e-3)


def test_a_tiny_error_is_a_number_where_no_eigenvalue_is_tiny():
    q, k = 8.0 * torch.eye(6, dtype=torch.float64), 8.0 * torch.eye(6, dtype=torch.float64).roll(3, 1) + 6
    torch.testing.assert_close(leverage_scores(q, k, 0.1), by_definition(q, k, 0.1))
    assert leverage(q, k, 0.1).lam < 1e-12


def test_a_batch_is_each_input_by_itself():
    q, k = torch.randn(2, 3, 5, 4), torch.randn(2, 3, 6, 4)
    found = leverage(q, k, 0.2)
    assert found.scores.shape == (2, 3, 11)
    assert found.dimension.shape == found.lam.shape == (2, 3)
    assert found.scores.dtype == torch.float32
    for i in range(2):
        for j in range(3):
            assert torch.equal(found.scores[i, j], leverage_scores(q[i, j], k[i, j], 0.2))


def test_scale_is_attentions():
    q, k = draw(5, 5, 4, 1.0, 0)
    torch.testing.assert_close(leverage_scores(q, k, 0.2, scale=2.0), leverage_scores(2 * q, 2 * k, 0.2))


def test_far_from_the_origin_nothing_cancels():
    q, k = draw(6, 6, 3, 0.5, 0)
    torch.testing.assert_close(completion(q + 1e5, k + 1e5), completion(q, k), atol=1e-8, rtol=0)


def test_theorem_2s_number():
    q, k = draw(20, 20, 3, 0.3, 0)
    found = leverage(q, k, 0.3)
    beta = found.dimension / (40 * found.scores.max())
    expected = math.ceil(56 / 3 * float(found.dimension / beta) * math.log(80 / 0.1))
    assert float(sufficient_landmarks(q, k, 0.3, 0.1)) == expected


@pytest.mark.parametrize(
    ("q", "k", "epsilon", "message"),
    [
        (torch.zeros(3), torch.zeros(3), 0.1, "do not fit"),
        (torch.zeros(3, 2), torch.zeros(3, 4), 0.1, "do not fit"),
        (torch.zeros(2, 3, 2), torch.zeros(3, 2), 0.1, "do not fit"),
        (torch.zeros(0, 2), torch.zeros(3, 2), 0.1, "do not fit"),
        (torch.zeros(3, 2).long(), torch.zeros(3, 2), 0.1, "floating-point"),
        (torch.zeros(3, 2), torch.zeros(3, 2), 1.0, "epsilon"),
        (torch.zeros(3, 2), torch.zeros(3, 2) / 0, 0.1, "NaN"),
        (torch.zeros(3, 2), torch.full((3, 2), 1e4), 0.1, "so far apart"),
    ],
)
def test_bad_input(q, k, epsilon, message):
    with pytest.raises(ValueError, match=message):
        statistical_dimension(q, k, epsilon)


def test_a_probability_is_below_one_half():
    with pytest.raises(ValueError, match="delta"):
        sufficient_landmarks(torch.zeros(3, 2), torch.zeros(3, 2), 0.1, 0.5)


def test_they_are_public():
    assert wellcond.statistical_dimension is statistical_dimension
    assert wellcond.leverage_scores is leverage_scores
