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


@given(st.integers(2, 12), st.floats(0.1, 1.0), st.floats(0.1, 0.9), st.integers(1, 20), st.integers(0, 2**31))
def test_errors_are_never_below_those_of_the_pseudo_inverse_and_hardly_above(n, spread, epsilon, d, seed):
    q, k = inputs(n, 3, spread, seed)
    instance = Instance.of("x", q, k, epsilon=epsilon)
    inner, outer = instance.errors(d, 1, generator(seed))
    chosen = sample_counts(1, 2 * n, d, generator(seed))[0] > 0
    kernel = completion(q, k)
    some = kernel[:, chosen]
    residual = kernel - some @ torch.linalg.pinv(kernel[chosen][:, chosen], rtol=1e-13, hermitian=True) @ some.mT
    whole = float(torch.linalg.matrix_norm(residual, 2)) / instance.lam
    block = float(torch.linalg.matrix_norm(residual[:n, n:], 2)) / instance.lam
    # τ enters once by itself, and once as a ridge on directions that the landmarks carry weakly.
    assert whole - 1e-7 <= float(outer[0]) <= whole + SMALL * (2 + 4 * n * n)
    assert abs(float(inner[0]) - block) <= SMALL * (2 + 4 * n * n)
    assert float(torch.linalg.eigvalsh(residual)[0]) > -1e-7 * instance.lam - 1e-10  # C̃̄ ⪯ C̄, always
    assert block <= whole / 2 + 1e-7


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
