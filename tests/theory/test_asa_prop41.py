import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from wellcond.theory import asa_prop41
from wellcond.theory.asa_prop41 import product_rule_applies, wide_times_tall
from wellcond.theory.draws import (
    INDEPENDENT,
    WEIGHTS,
    generator,
    kappa,
    kappa_at_rank,
    linear_attention,
    scores,
    softmax_attention,
    weights,
)


@pytest.fixture(scope="module")
def cases():
    """By name; seed and number of draws are this file's own."""
    return {case.name: case for case in asa_prop41.cases(40, seed=3)}


@given(st.integers(1, 6), st.integers(0, 5), st.lists(st.floats(0, 2), min_size=4, max_size=4), st.integers(0, 2**31))
def test_the_cube_holds_for_one_head_and_enough_tokens(matrix, d, more, logs, seed):
    x = matrix(d + more, d, logs[0], seed)[None]
    wq, wk, wv = (matrix(d, d, log, seed + i)[None] for i, log in enumerate(logs[1:], start=1))
    bound = asa_prop41.bound_of(x, wq, wk, wv)
    assert bool(kappa(linear_attention(x, wq, wk, wv)) <= bound * (1 + 1e-6))


@given(st.integers(1, 6), st.integers(1, 6), st.integers(0, 2**31))
def test_scores_take_the_place_of_the_cube(matrix, n, d, seed):
    source = generator(seed, "property")
    x, (wq, wk, wv) = matrix(n, d, 1.0, seed)[None], [weights("gaussian", 1, d, d, source) for _ in range(3)]
    a = (scores(x, wq, wk)[:, 0] * d**-0.5).softmax(-1)
    known = kappa(a) * kappa(x) * kappa(wv)
    measured = kappa(softmax_attention(x, wq, wk, wv))
    assert bool(measured <= known * (1 + 1e-6)) or bool(measured > 1e8)


def test_the_cube_is_attained_by_identity_weights(matrix):
    x, eye = matrix(9, 5, 2.0, 0)[None], torch.eye(5).double()[None]
    torch.testing.assert_close(kappa(linear_attention(x, eye, eye, eye)), asa_prop41.bound_of(x, eye, eye, eye))


def test_an_upper_bound_does_not_make_an_output_ill_conditioned(matrix):
    x, eye = matrix(9, 5, 2.0, 0)[None], torch.eye(5).double()[None]
    undo = torch.linalg.inv(x.mT @ x)
    torch.testing.assert_close(kappa(linear_attention(x, undo, eye, eye)), kappa(x))


@pytest.mark.parametrize("heads", [1, 2, 4])
def test_heads_side_by_side_are_one_matrix_to_the_right(heads):
    source = generator(0)
    x = torch.randn(2, 9, 8, dtype=torch.float64, generator=source)
    w = [weights("gaussian", 2, 8, 8, source) for _ in range(3)]
    torch.testing.assert_close(x @ asa_prop41.mixing(x, *w, heads=heads), linear_attention(x, *w, heads=heads))


def test_the_examples_break_the_bound_with_perfectly_conditioned_factors():
    found = asa_prop41.examples()
    assert len(found) == 4
    for example in found:
        assert example.bound == pytest.approx(1)
        assert example.measured > 50


@pytest.mark.parametrize(("n", "d", "heads"), [(2, 3, 1), (2, 7, 1), (5, 6, 1), (3, 3, 3), (4, 4, 2), (8, 6, 3)])
def test_turned_weights_have_no_bound(n, d, heads):
    x, w = asa_prop41.turned(n, d, heads=heads, degrees=89.9)
    assert float(asa_prop41.bound_of(x, *w)) == pytest.approx(1)
    measured = float(kappa(linear_attention(x, *w, heads=heads)))
    assert measured == pytest.approx(1 / math.cos(math.radians(89.9)))


def test_the_claim_has_independent_entries_and_one_head(cases):
    inside = [case for case in cases.values() if case.part == "claim"]
    assert {case.settings["weights"] for case in inside} == set(INDEPENDENT)
    assert {case.settings.get("heads", 1) for case in inside} == {1}
    assert any(case.failures == 0 for case in inside)  # "holds in part", and not for want of independent entries
    for kind in INDEPENDENT:
        for n, d in ((2, 3), (3, 4)):
            small = cases[f"linear, 1 head, {kind}, n = {n}, d = {d}"]
            assert small.draws == 4000
            assert 0.0005 < small.failures / small.draws < 0.02
        assert cases[f"linear, 4 heads, {kind}, n = 64, d = 4"].failures > 0


def test_one_head_holds_for_n_at_least_d_and_fails_below(cases):
    for kind in WEIGHTS:
        for n in (32, 64):
            assert cases[f"linear, 1 head, {kind}, n = {n}"].failures == 0
    assert cases["linear, 1 head, orthogonal, n = 16"].failures > 20
    assert cases["linear, 4 heads, orthogonal, n = 64"].failures > 0


def test_what_is_said_instead_is_never_violated(cases):
    assert [case.name for case in cases.values() if case.part == "instead" and case.failures] == []


def test_the_constant_is_one_for_orthogonal_weights_alone(cases):
    for d in (16, 64):
        assert cases[f"C ≤ 2 for orthogonal weights, d = {d}"].failures == 0
        gaussian = cases[f"C ≤ 2 for gaussian weights, d = {d}"]
        assert gaussian.failures == gaussian.draws


@pytest.mark.parametrize("d", [16, 48])
def test_the_constant_of_gaussian_weights_follows_edelman(d):
    source = generator(0, d)
    c = asa_prop41.constant(*(weights("gaussian", 200, d, d, source) for _ in range(3)))
    expected = 3 * (math.log(d) + 1.537)
    spread = float(c.log().std()) / 200**0.5
    assert float(c.log().mean()) == pytest.approx(expected, abs=4 * spread + 0.3)  # the limit is for large d


# ---- κ(AB) ≤ κ(A)κ(B)

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
