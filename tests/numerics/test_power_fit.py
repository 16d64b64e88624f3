"""The fitted sums against the power itself, on points that no fit has seen."""

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from wellcond.numerics.power_fit import direct_fit, folded_fit

FLOOR = 1e-6
RESOLVED = 1e-5


def iterates(a, alphas):
    yield a
    for alpha in alphas:
        a = a * (alpha - alpha * alpha / 4 * a)
        yield a


def direct_sum(fit, g):
    return fit.constant + sum(w * a for w, a in zip(fit.weights, iterates(g, fit.alphas), strict=True))


def folded_sum(fit, g):
    k = fit.shift / (g + fit.shift)
    terms = list(iterates(4 * k * (1 - k), fit.alphas))
    near = fit.near_constant + sum(w * a for w, a in zip(fit.near, terms, strict=True))
    far = fit.far_constant + sum(w * a for w, a in zip(fit.far, terms, strict=True))
    return near + far * k


def relative_error(total, g, epsilon):
    """Of a sum that stands for g^(−(1−ε)/2), which makes σ out of σ^ε."""
    return np.abs(total / np.maximum(g, FLOOR**2) ** (-(1 - epsilon) / 2) - 1)


def fresh_grid(low, seed):
    return 10 ** np.random.default_rng(seed).uniform(2 * np.log10(low), 0, 20_000)


FITS = {"direct": (direct_fit, direct_sum), "folded": (folded_fit, folded_sum)}


@pytest.mark.parametrize("kind", FITS)
@settings(max_examples=10)
@given(epsilon=st.floats(0.5, 0.99), seed=st.integers(0, 1000))
@example(epsilon=0.5, seed=0)  # the hardest
def test_the_error_is_within_the_stated_bound(kind, epsilon, seed):
    fit_of, total_of = FITS[kind]
    fit = fit_of(epsilon, FLOOR)
    g = fresh_grid(RESOLVED, seed)
    error = relative_error(total_of(fit, g), g, epsilon)
    assert (
        error.max() <= 1.05 * fit.bound + 1e-12
    )  # the bound was taken on a grid, and these points lie between its own
    assert fit.bound <= 0.02  # the error that a small singular value may have
    assert error[g > 1e-3].max() <= 2e-3  # the large ones carry the Frobenius norm


@pytest.mark.parametrize("kind", FITS)
def test_on_the_spectra_of_photographs_the_frobenius_error_is_below_a_thousandth(kind, photographs):
    fit_of, total_of = FITS[kind]
    for patch, floor in ((16, 3.3e-6), (4, 6.7e-6)):  # the floors of 196 × 768 and 3136 × 48 in float32
        s = torch.linalg.svdvals(torch.nn.functional.unfold(photographs, patch, stride=patch).double()).numpy()
        r = s / s[:, :1]
        for epsilon in (0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.97):
            error = relative_error(total_of(fit_of(epsilon, floor), r**2), r**2, epsilon)
            assert np.linalg.norm(error * r**epsilon, axis=1).max() < 1e-3 * np.linalg.norm(r**epsilon, axis=1).min()
            assert error[r > RESOLVED].max() < 0.02


@pytest.mark.parametrize("kind", FITS)
def test_below_what_is_resolved_the_power_goes_on_linearly(kind):
    fit_of, total_of = FITS[kind]
    fit = fit_of(0.5, FLOOR)
    g = np.concatenate([[0.0], np.logspace(-16, 2 * np.log10(RESOLVED), 1000)])
    total = total_of(fit, g)
    # The gain is that of the floor at zero, and between floor and resolution never far from the power.
    assert abs(total[0] * FLOOR ** (1 - 0.5) - 1) < 0.3
    assert relative_error(total, g, 0.5).max() < 0.3
    assert (total > 0).all()


@pytest.mark.parametrize("kind", FITS)
def test_epsilon_one_is_the_identity(kind):
    fit_of, total_of = FITS[kind]
    g = np.concatenate([[0.0], fresh_grid(FLOOR, 0)])
    np.testing.assert_allclose(total_of(fit_of(1.0, FLOOR), g), 1, atol=1e-10)


@pytest.mark.parametrize("kind", FITS)
def test_weights_are_finite_and_fitted_once(kind):
    fit_of, _ = FITS[kind]
    fit = fit_of(0.5, FLOOR)
    numbers = [v for field in fit for v in (field if isinstance(field, tuple) else (field,))]
    assert np.isfinite(numbers).all()
    assert fit_of(0.5, FLOOR) is fit
    assert fit_of(np.float64(0.5), FLOOR) is fit


def test_small_epsilons_have_a_bound_too():
    fit = direct_fit(0.1, FLOOR)
    g = fresh_grid(RESOLVED, 1)
    assert relative_error(direct_sum(fit, g), g, 0.1).max() <= 1.05 * fit.bound <= 0.02
