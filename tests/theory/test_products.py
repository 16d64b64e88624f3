import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from wellcond.theory.draws import kappa_at_rank
from wellcond.theory.products import product_rule_applies, wide_times_tall

SIZES = st.integers(1, 7)


def draw(rows, columns, seed):
    return torch.randn(rows, columns, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@given(SIZES, SIZES, SIZES, st.integers(0, 2**31))
def test_the_rule_holds_where_it_applies(m, r, k, seed):
    a, b = draw(m, r, seed), draw(r, k, seed + 1)
    assert product_rule_applies(a, b) == (m >= r or k >= r)
    if product_rule_applies(a, b):
        known = kappa_at_rank(a, min(m, r)) * kappa_at_rank(b, min(r, k))
        assert kappa_at_rank(a @ b, min(m, r, k)) <= known * (1 + 1e-9)


@given(st.floats(1, 89.9))
def test_the_example_breaks_it_by_the_cosine(degrees):
    example = wide_times_tall(degrees)
    a, b = (torch.tensor(example.matrices[name], dtype=torch.float64) for name in "AB")
    assert not product_rule_applies(a, b)
    assert example.bound == pytest.approx(1)
    assert example.measured == pytest.approx(1 / math.cos(math.radians(degrees)))


def test_matrices_without_a_product():
    with pytest.raises(ValueError, match="no product"):
        product_rule_applies(torch.eye(2), torch.eye(3))
