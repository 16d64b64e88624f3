import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from wellcond.theory import sky_lemma_c2
from wellcond.theory.draws import generator


@given(st.integers(1, 6), st.integers(1, 30), st.integers(0, 2**31))
def test_the_error_is_that_of_the_sampled_columns(n, d, seed):
    h = torch.randn(n, n, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    counts = sky_lemma_c2.sample_counts(3, n, d, generator(seed))
    errors = sky_lemma_c2.sampling_errors(h, d, 3, generator(seed))
    for count, error in zip(counts, errors, strict=True):
        columns = torch.repeat_interleave(torch.arange(n), count.long())
        assert len(columns) == d
        pi = torch.zeros(n, d, dtype=torch.float64)
        pi[columns, torch.arange(d)] = math.sqrt(n / d)
        expected = torch.linalg.matrix_norm(h @ pi @ pi.mT @ h.mT - h @ h.mT, 2) / torch.linalg.matrix_norm(h, 2) ** 2
        torch.testing.assert_close(error, expected, atol=1e-12, rtol=1e-9)


@given(st.integers(2, 10), st.floats(0.01, 0.49), st.integers(0, 2**31))
def test_enough_columns_are_those_of_matrix_bernstein(n, delta, seed):
    """2n·exp(−3dβ/(28s)) ≤ δ at d, and not at d − 1."""
    h = torch.randn(n, n, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    s = float(h.square().sum() / torch.linalg.matrix_norm(h, 2) ** 2)
    beta = float(h.square().sum() / (n * h.square().sum(0).max()))
    d = sky_lemma_c2.enough_columns(h, delta)
    assert 2 * n * math.exp(-3 * d * beta / (28 * s)) <= delta * (1 + 1e-9)
    assert 2 * n * math.exp(-3 * (d - 1) * beta / (28 * s)) > delta * (1 - 1e-9)


def test_sampling_is_uniform_beyond_one_chunk():
    counts = sky_lemma_c2.sample_counts(4, 5, 10_000, generator(0))
    assert counts.sum(-1).tolist() == [10_000] * 4
    assert float((counts / 10_000 - 0.2).abs().max()) < 5 * (0.16 / 10_000) ** 0.5


def test_delta_is_below_one_half():
    with pytest.raises(ValueError, match="1/2"):
        sky_lemma_c2.enough_columns(torch.eye(2), 0.5)


def test_the_lemma_holds_and_without_a_diagonal_gram_matrix_too():
    found = list(sky_lemma_c2.cases(150, seed=2))
    assert {case.outcome for case in found} == {"holds"}
    assert {case.part for case in found} == {"claim", "instead"}


def test_with_far_fewer_columns_it_fails():
    _, h, _ = sky_lemma_c2._matrices(0)[0]
    errors = sky_lemma_c2.sampling_errors(h, sky_lemma_c2.enough_columns(h, 0.1) // 32, 50, generator(0))
    assert float((errors > 0.5).double().mean()) > 0.9
