import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binomtest

from wellcond.theory.intervals import clopper_pearson


@given(st.integers(1, 600), st.floats(0, 1), st.sampled_from([0.9, 0.95, 0.99]))
def test_it_is_scipys_exact_interval(draws, part, confidence):
    failures = round(part * draws)
    expected = binomtest(failures, draws).proportion_ci(confidence, method="exact")
    assert clopper_pearson(failures, draws, confidence) == pytest.approx((expected.low, expected.high), abs=1e-8)


@pytest.mark.parametrize(("failures", "draws"), [(-1, 5), (6, 5), (0, 0)])
def test_no_rate_without_draws(failures, draws):
    with pytest.raises(ValueError, match="make no rate"):
        clopper_pearson(failures, draws)


def test_a_confidence_is_a_part():
    with pytest.raises(ValueError, match="between 0 and 1"):
        clopper_pearson(1, 2, 1.0)
