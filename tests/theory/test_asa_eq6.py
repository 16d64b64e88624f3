import pytest
from hypothesis import given
from hypothesis import strategies as st

from wellcond.theory import asa_eq6
from wellcond.theory.draws import generator, kappa, weights


@pytest.fixture(scope="module")
def cases():
    """By name; seed and number of draws are this file's own."""
    return {case.name: case for case in asa_eq6.cases(40, seed=1)}


@given(st.integers(1, 6), st.integers(1, 6), st.integers(0, 2**31))
def test_square_weights_obey_it(matrix, n, d, seed):
    x, up, down = matrix(n, d, 2.0, seed), matrix(d, d, 2.0, seed + 1), matrix(d, d, 2.0, seed + 2)
    assert kappa(x @ up @ down) <= asa_eq6.bound_of(x, up, down) * (1 + 1e-6)


@given(st.integers(1, 6), st.integers(1, 5), st.integers(0, 12), st.integers(0, 2**31))
def test_the_product_of_the_weights_takes_the_place_of_the_factors(matrix, n, d, more, seed):
    x, up, down = matrix(n, d, 2.0, seed), matrix(d, d + more, 1.0, seed + 1), matrix(d + more, d, 1.0, seed + 2)
    known = kappa(x) * kappa(up @ down)
    assert kappa(x @ up @ down) <= known * (1 + 1e-6)


@given(st.integers(1, 6), st.integers(0, 8), st.integers(0, 2**31))
def test_tied_weights_obey_it_whatever_the_expansion(matrix, d, more, seed):
    """W_down with the column space of W_upᵀ: the inner dimension is kept."""
    x, up = matrix(7, d, 1.0, seed), matrix(d, d + more, 2.0, seed + 1)
    assert kappa(x @ up @ up.mT) <= asa_eq6.bound_of(x, up, up.mT) * (1 + 1e-6)


def test_the_example_has_perfect_weights_and_a_bad_output():
    (example,) = asa_eq6.examples()
    assert (example.bound, example.measured) == (pytest.approx(1), pytest.approx(100))


def test_the_usual_expansion_breaks_it_and_square_weights_do_not(cases):
    for kind in ("gaussian", "uniform", "orthogonal"):
        for n in (32, 64):
            assert cases[f"linear, expansion 4, {kind}, n = {n}"].failures > 0
            assert cases[f"linear, expansion 1, {kind}, n = {n}"].failures == 0
            assert cases[f"linear, expansion 0.5, {kind}, n = {n}"].failures == 0


def test_what_is_said_instead_is_never_violated(cases):
    assert [case.name for case in cases.values() if case.part == "instead" and case.failures] == []


def test_the_constant_of_the_usual_expansion_grows_with_the_width():
    product, factors = {}, {}
    for d in (8, 64):
        source = generator(0, d)
        up, down = weights("gaussian", 30, d, 4 * d, source), weights("gaussian", 30, 4 * d, d, source)
        product[d], factors[d] = kappa(up @ down).median(), (kappa(up) * kappa(down)).max()
    assert product[64] > 4 * product[8]
    assert max(factors.values()) < 20  # it tends to ((1 + 1/2)/(1 − 1/2))² = 9
