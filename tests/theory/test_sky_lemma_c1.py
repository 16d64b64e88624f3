import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from wellcond.theory import sky_lemma_c1
from wellcond.theory.draws import generator

FAMILIES = sky_lemma_c1.families(0)


@given(st.sampled_from(FAMILIES), st.floats(1e-6, 0.9))
def test_the_threshold_is_where_the_bound_is_delta(family, delta):
    assert sky_lemma_c1.bernstein(sky_lemma_c1.threshold(family, delta), family) == pytest.approx(delta)


@given(st.integers(1, 4), st.integers(2, 7), st.floats(0.2, 0.6), st.integers(0, 2**31))
def test_the_inequality_for_signs_counted_out(n, count, part, seed):
    """Few enough signs to take them all: the probability is exact."""
    g = torch.randn(count, n, n, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    family = sky_lemma_c1._signed("x", g + g.mT)
    signs = torch.cartesian_prod(*[torch.tensor([-1.0, 1.0]).double()] * count)
    norms = torch.linalg.matrix_norm(torch.einsum("bk,kij->bij", signs, g + g.mT), ord=2)
    for t in (part * float(norms.max()), float(norms.max())):
        assert float((norms >= t * (1 - 1e-12)).double().mean()) <= sky_lemma_c1.bernstein(t, family) + 1e-12


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_the_variance_is_that_of_the_sums(family):
    """E‖S‖² ≥ ‖E S²‖ = σ², and it is not far above for small matrices."""
    norms = family.norms(3000, generator(0, "variance"))
    mean = float(norms.square().mean())
    assert 0.9 * family.variance < mean < 2 * (1 + math.log(2 * family.n)) * family.variance
    assert float(norms.max()) <= sky_lemma_c1.SUMMANDS * family.r


def test_no_family_fails_more_often_than_the_bound_allows():
    found = list(sky_lemma_c1.cases(200, seed=5))
    assert {case.outcome for case in found} == {"holds"}
