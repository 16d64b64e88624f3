import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from wellcond.attention import kernelized_attention
from wellcond.theory import sky_lemma1


def tokens(n, p, spread, seed):
    return spread * torch.randn(n, p, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(scope="module")
def cases():
    """By name; seed and number of draws are this file's own."""
    return {case.name: case for case in sky_lemma1.cases(40, seed=1)}


@given(st.integers(1, 8), st.integers(1, 8), st.integers(1, 6), st.floats(0.1, 2), st.integers(0, 2**31))
def test_scores_are_the_gaussian_kernel_between_two_diagonals(n, m, p, spread, seed):
    q, k = tokens(n, p, spread, seed), tokens(m, p, spread, seed + 1)
    a = torch.tensor([[math.exp(float(x @ y) / math.sqrt(p)) for y in k] for x in q]).double()
    between = sky_lemma1.sizes(q).sqrt()[:, None] * sky_lemma1.gaussian_kernel(q, k) * sky_lemma1.sizes(k).sqrt()
    torch.testing.assert_close(sky_lemma1.softmax_kernel(q, k), a, rtol=1e-5, atol=0.0)
    torch.testing.assert_close(sky_lemma1.softmax_kernel(q, k), between, rtol=1e-11, atol=0.0)


def test_the_gaussian_kernel_is_that_of_kernelized_attention():
    q, k = tokens(5, 4, 1.0, 0), tokens(7, 4, 1.0, 1)
    out = kernelized_attention(q[None, None], k[None, None], torch.eye(7).double()[None, None])[0, 0]
    torch.testing.assert_close(sky_lemma1.gaussian_kernel(q, k), out)


@given(st.integers(1, 6), st.integers(1, 4), st.integers(0, 2**31))
def test_the_series_of_the_proof(n, p, seed):
    """Σ c_i c_j exp(q_i·q_j/√p) is a sum of squares, degree by degree."""
    q, c = torch.nn.functional.normalize(tokens(n, p, 1.0, seed), dim=-1), tokens(n, 1, 1.0, seed + 1)[:, 0]
    powers, total = torch.ones(n, 1, dtype=torch.float64), 0.0
    for m in range(7):
        total += float((c @ powers).square().sum()) / (math.factorial(m) * p ** (m / 2))
        powers = (powers[:, :, None] * q[:, None, :]).flatten(1)
    exact = float(c @ sky_lemma1.softmax_kernel(q, q) @ c)
    rest = (math.e - sum(1 / math.factorial(m) for m in range(7))) * float(c.abs().sum()) ** 2
    assert exact - rest - 1e-12 <= total <= exact + 1e-12 * (1 + exact)


@given(st.integers(2, 6), st.integers(2, 5), st.floats(0.5, 1.5), st.integers(0, 2**31))
def test_eigenvalues_lie_between_the_constants(n, p, spread, seed):
    q = tokens(n, p, spread, seed)
    ratio = torch.linalg.eigvalsh(sky_lemma1.softmax_kernel(q, q)) / torch.linalg.eigvalsh(
        sky_lemma1.gaussian_kernel(q, q)
    )
    d = sky_lemma1.sizes(q)
    assert float(ratio.max()) <= float(d.max()) * (1 + 1e-6)
    assert float(ratio.min()) >= float(d.min()) * (1 - 1e-6)


def test_equal_tokens_are_the_only_singular_ones():
    q = tokens(3, 4, 1.0, 0)
    assert float(torch.linalg.eigvalsh(sky_lemma1.softmax_kernel(q, q))[0]) > 1e-3
    q[1] = q[0]
    assert abs(float(torch.linalg.eigvalsh(sky_lemma1.softmax_kernel(q, q))[0])) < 1e-12


def test_the_lemma_holds_and_queries_against_keys_are_beyond_it(cases):
    for case in cases.values():
        assert case.outcome == ("does not hold" if case.part == "beyond" else "holds"), case.name
    (example,) = sky_lemma1.examples()
    assert example.measured == pytest.approx(1 / math.e - math.e)
