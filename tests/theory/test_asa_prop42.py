import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from wellcond.theory import asa_prop42
from wellcond.theory.asa_prop41 import mixing
from wellcond.theory.draws import INDEPENDENT, generator, kappa, tokens

SIZE = st.integers(1, 6)
SEED = st.integers(0, 2**31)


@pytest.fixture(scope="module")
def cases():
    """By name; seed and number of draws are this file's own."""
    return {case.name: case for case in asa_prop42.cases(40, seed=1)}


@given(SIZE, SIZE, st.floats(-3, 3), SEED)
def test_what_semi_definite_does_give(matrix, n, d, log_scale, seed):
    x = matrix(n, d, 1.5, seed)
    half = torch.randn(d, d, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    m = 10**log_scale * half.mT @ half
    eye = torch.eye(d).double()
    assert kappa(x @ m + x) <= asa_prop42.with_skip_bound(x, m) * (1 + 1e-6)
    assert kappa(m + eye) <= kappa(m) * (1 + 1e-9)


@given(SIZE, SIZE, st.floats(-3, 3), SEED)
def test_aligned_with_the_tokens_the_skip_helps_by_the_factor_that_is_said(matrix, n, d, log_scale, seed):
    x = matrix(n, d, 1.5, seed)
    m = 10**log_scale * x.mT @ x
    s = torch.linalg.svdvals(x).square() * 10**log_scale
    factor = (1 + 1 / s[-1]) / (1 + 1 / s[0])
    torch.testing.assert_close(asa_prop42.aligned_factor(x, m), factor)  # for n < d too, where M has zeros
    torch.testing.assert_close(kappa(x @ m) / kappa(x @ m + x), factor)
    assert factor >= 1 - 1e-12


@given(SIZE, SIZE, st.floats(0.01, 0.99), SEED)
def test_a_small_branch_is_harmless(matrix, n, d, norm, seed):
    x = matrix(n, d, 1.5, seed)
    m = torch.randn(d, d, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    m = norm * m / torch.linalg.matrix_norm(m, 2)
    assert kappa(x @ m + x) <= kappa(x) * (1 + norm) / (1 - norm) * (1 + 1e-9)


@pytest.mark.parametrize("family", asa_prop42.FAMILIES)
@pytest.mark.parametrize("n", [4, 8, 12])
def test_families_are_semi_definite_of_norm_one(family, n):
    x = tokens(5, n, 8, generator(0))
    m = asa_prop42.semi_definite(family, x, generator(1))
    values = torch.linalg.eigvalsh(m)
    torch.testing.assert_close(m, m.mT)
    assert float(values.min()) > -1e-12
    torch.testing.assert_close(values[:, -1], torch.ones(5).double())
    assert bool((torch.linalg.matrix_rank(m) == min(n, 8)).all())
    # W_Q W_Kᵀ = PΣ⁻¹Vᵀ and W_V = VΣ⁻¹Pᵀ, where M = PPᵀ, give this very M
    _, s, vt = torch.linalg.svd(x, full_matrices=False)
    vectors = torch.linalg.eigh(m).eigenvectors[..., -min(n, 8) :]
    p = vectors * values[:, None, -min(n, 8) :].sqrt()
    wq, wv = p / s[:, None, :] @ vt, vt.mT / s[:, None, :] @ p.mT
    eye = torch.eye(8).double().expand_as(m)
    torch.testing.assert_close(mixing(x, wq, eye, wv, heads=1), m)


@pytest.mark.parametrize("kind", INDEPENDENT)
def test_drawn_matrices_meet_the_assumptions(kind):
    x, m = asa_prop42.drawn_semi_definite(kind, 2000, 3, 2, generator(0, kind), spread=0.02)
    assert 20 < len(x) < 400
    v = torch.randn(2, 50, dtype=torch.float64)
    assert float((v * (m @ v)).sum(-2).min()) >= -1e-12
    assert float((m - m.mT).abs().amax((-2, -1)).min()) > 0  # and none of them is symmetric


def test_the_claim_has_independent_entries(cases):
    inside = [case for case in cases.values() if case.part == "claim"]
    assert {case.settings["weights"] for case in inside} == set(INDEPENDENT)
    smaller, much = ([c for c in inside if c.name.startswith(s)] for s in ("smaller", "ten times"))
    assert len(smaller) == len(much) == len(asa_prop42.SMALL) * len(INDEPENDENT) * len(asa_prop42.SPREADS)
    assert 0 < sum(c.failures for c in smaller) < 0.1 * sum(c.draws for c in smaller)
    assert sum(c.failures for c in much) > 0.5 * sum(c.draws for c in much)


def test_an_unknown_family():
    with pytest.raises(ValueError, match="tied, independent, whitening"):
        asa_prop42.semi_definite("random", tokens(1, 2, 2, generator(0)), generator(0))


def test_the_examples_are_worse_with_the_skip():
    whitening, cancelling, scale = asa_prop42.examples()
    m = torch.tensor(whitening.matrices["M"], dtype=torch.float64)
    assert torch.equal(m, m.mT)
    assert bool((torch.linalg.eigvalsh(m) > 0).all())
    assert (whitening.bound, whitening.measured) == (pytest.approx(1), pytest.approx(50.5))
    assert cancelling.measured > 100 * cancelling.bound
    assert scale.measured > 50 * scale.bound


def test_whitening_is_refuted_and_tied_is_not(cases):
    for n in asa_prop42.LENGTHS:
        whitening = cases[f"smaller: whitening M, n = {n}"]
        assert whitening.failures == whitening.draws
        assert cases[f"smaller: tied M, n = {n}"].failures == 0


def test_what_is_said_instead_is_never_violated(cases):
    assert [case.name for case in cases.values() if case.part == "instead" and case.failures] == []
