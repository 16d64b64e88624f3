import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from wellcond.theory.draws import generator
from wellcond.theory.leverage import completion, sufficient_landmarks
from wellcond.theory.sky_lemma_c2 import sample_counts
from wellcond.theory.sky_theorem2 import SMALL, Instance


def inputs(n, p, spread, seed):
    source = torch.Generator().manual_seed(seed)
    return [spread * torch.randn(n, p, dtype=torch.float64, generator=source) for _ in range(2)]


def residual_of(q, k, chosen, ridge=0.0):
    """C̄ − C̃̄, dense, by the pseudo-inverse or with a ridge on the landmarks' kernel."""
    kernel = completion(q, k)
    some, inner = kernel[:, chosen], kernel[chosen][:, chosen]
    if ridge:
        return kernel - some @ torch.linalg.solve(inner + ridge * torch.eye(len(inner)).double(), some.mT)
    return kernel - some @ torch.linalg.pinv(inner, rtol=1e-13, hermitian=True) @ some.mT


@given(st.integers(2, 12), st.floats(0.1, 1.0), st.floats(0.1, 0.9), st.integers(1, 20), st.integers(0, 2**31))
def test_errors_lie_between_the_exact_ones_and_those_with_a_ridge(n, spread, epsilon, d, seed):
    q, k = inputs(n, 3, spread, seed)
    instance = Instance.of("x", q, k, epsilon=epsilon)
    inner, outer = (float(part[0]) * instance.lam for part in instance.errors(d, 1, generator(seed)))
    chosen = sample_counts(1, 2 * n, d, generator(seed))[0] > 0
    exact, tau = residual_of(q, k, chosen), SMALL * instance.lam
    whole, ridged = (float(torch.linalg.matrix_norm(e, 2)) for e in (exact, residual_of(q, k, chosen, tau)))
    assert whole - 1e-7 <= outer <= ridged + tau + 1e-9
    assert inner <= outer / 2 + 1e-9
    assert float(torch.linalg.eigvalsh(exact)[0]) > -1e-7  # C̃̄ ⪯ C̄, always
    assert float(torch.linalg.matrix_norm(exact[:n, n:], 2)) <= whole / 2 + 1e-7


def test_errors_are_the_exact_ones_where_landmarks_are_apart():
    q, k = inputs(20, 8, 1.0, 0)
    instance = Instance.of("x", q, k, epsilon=0.3)
    inner, outer = instance.errors(12, 1, generator(0))
    exact = residual_of(q, k, sample_counts(1, 40, 12, generator(0))[0] > 0)
    assert float(outer[0]) * instance.lam == pytest.approx(float(torch.linalg.matrix_norm(exact, 2)), rel=5e-3)
    block = float(torch.linalg.matrix_norm(exact[:20, 20:], 2))
    assert float(inner[0]) * instance.lam == pytest.approx(block, rel=5e-3)


@given(st.integers(1, 5), st.integers(1, 5), st.integers(0, 2**31))
def test_a_block_of_a_positive_matrix_has_at_most_half_its_norm(n, m, seed):
    half = torch.randn(n + m, n + m, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    e = half @ half.mT
    assert torch.linalg.matrix_norm(e[:n, n:], 2) <= torch.linalg.matrix_norm(e, 2) / 2 * (1 + 1e-12)


def test_the_number_is_that_of_the_public_function():
    q, k = inputs(10, 4, 0.3, 0)
    assert Instance.of("x", q, k, epsilon=0.3).enough(0.1) == int(sufficient_landmarks(q, k, 0.3, 0.1))


def test_an_instance_for_which_the_theorem_says_something():
    q, k = inputs(160, 4, 0.02, 0)
    instance = Instance.of("small", q, k, epsilon=0.5)
    d = instance.enough(0.1)
    assert d < instance.tokens == 320
    _, outer = instance.errors(d, 60, generator(0))
    assert float(outer.max()) < 1


def test_too_few_landmarks_miss_a_cluster():
    centres = 20 * torch.eye(4, dtype=torch.float64)
    tokens = centres.repeat(4, 1)
    instance = Instance.of("clusters", tokens, tokens, epsilon=0.1)
    inner, _ = instance.errors(3, 20, generator(0))
    assert bool((inner > 1).all())  # three landmarks cannot hit four clusters
    assert instance.dimension == pytest.approx(4 * 8 / (8 + 0.1 * 4))
    assert instance.enough(0.1) == math.ceil(56 / 3 * instance.dimension * math.log(64 / 0.1))  # β = 1
