"""The spectral power against an SVD in float64: what it computes, its gradients, and what it does with bad input."""

import math

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from wellcond.numerics.fastpaths import plain_twins
from wellcond.numerics.spectral import (
    _PLAIN,
    explain_spectral_power,
    power_floor,
    products_bound,
    spectral_power,
)

METHODS = ["svd", "eigh", "products"]
SHAPES = [(12, 30), (30, 12), (20, 20), (1, 9), (9, 1), (1, 1), (2, 60)]
EPSILONS = [0.5, 0.95]  # a fit takes half a second, so tests share them
# Of a singular value above 1e-5 · σmax, in float64; `products` is held to its bound.
TOLERANCE = {"svd": 1e-9, "eigh": 1e-5}


@pytest.fixture(autouse=True)
def _plain():
    """The plain methods are tested here on every device; the fused kernels have their own files."""
    with plain_twins():
        yield


def tolerance(method, epsilon):
    return TOLERANCE[method] if method != "products" else products_bound(epsilon, 12, 30) + 1e-4


def matrices(values, n, d, seed=0, batch=None):
    """Matrices with these singular values, as exactly as float64 gives them."""
    generator = torch.Generator().manual_seed(seed)
    k = min(n, d)
    values = torch.as_tensor(values, dtype=torch.float64)
    lead = () if batch is None else (batch,)
    u, _ = torch.linalg.qr(torch.randn(*lead, n, k, dtype=torch.float64, generator=generator))
    v, _ = torch.linalg.qr(torch.randn(*lead, d, k, dtype=torch.float64, generator=generator))
    return (u * values) @ v.mT


def truth(x, epsilon, floor=0.0, restore_scale=True):
    """U f(Σ) Vᵀ by NumPy's SVD in float64."""
    u, s, vh = np.linalg.svd(x.detach().double().cpu().numpy(), full_matrices=False)
    top = np.maximum(s[..., :1], np.finfo(np.float64).tiny)
    r = s / top
    linear = r * floor ** (epsilon - 1) if floor else np.zeros_like(r)
    with np.errstate(divide="ignore"):
        f = np.where(r > floor, r**epsilon, linear)
    return torch.from_numpy((u * (f * (top if restore_scale else 1))[..., None, :]) @ vh)


def relative(got, want):
    got, want = got.detach().double().cpu(), want.double().cpu()
    return (torch.linalg.matrix_norm(got - want) / torch.linalg.matrix_norm(want).clamp_min(1e-300)).max().item()


def spectrum(kind, k):
    return {
        "log-spaced": torch.logspace(0, -5, k, dtype=torch.float64),
        "equal": torch.ones(k, dtype=torch.float64),
        "pairs": torch.logspace(0, -4, k, dtype=torch.float64)[torch.arange(k) // 2],
        "two clusters": torch.where(torch.arange(k) < (k + 1) // 2, 1.0, 1e-5).double(),
        "deficient": torch.where(torch.arange(k) < (k + 1) // 2, torch.logspace(0, -2, k), 0.0).double(),
    }[kind]


KINDS = ["log-spaced", "equal", "pairs", "two clusters", "deficient"]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_known_singular_values_become_their_powers(method, shape, kind):
    s = spectrum(kind, min(shape))
    x = matrices(s, *shape)
    for epsilon in EPSILONS:
        got = spectral_power(x, epsilon, method=method)
        want = (s.max() * (s / s.max()) ** epsilon).sort(descending=True).values
        values = torch.linalg.svdvals(got)
        kept = want > 0
        assert ((values - want).abs() / want)[kept].max() < tolerance(method, epsilon)
        assert (
            values[~kept] < 1e-8
        ).all()  # √1e-17: the matrix itself is rounded, and what it has there is not quite 0
        assert relative(got, truth(x, epsilon, 1e-12)) < max(tolerance(method, epsilon), 1e-6)  # and its vectors stay


@settings(max_examples=20)
@given(
    n=st.integers(1, 24),
    d=st.integers(1, 24),
    seed=st.integers(0, 2**31),
    method=st.sampled_from(METHODS),
    epsilon=st.sampled_from(EPSILONS),
    dtype=st.sampled_from([torch.float16, torch.bfloat16, torch.float32, torch.float64]),
    restore_scale=st.booleans(),
)
@example(  # a power iteration from one start alone was all but orthogonal to what it sought
    n=22, d=21, seed=462, method="products", epsilon=0.5, dtype=torch.float16, restore_scale=False
)
def test_any_matrix_in_any_dtype(n, d, seed, method, epsilon, dtype, restore_scale):
    x = torch.randn(2, n, d, generator=torch.Generator().manual_seed(seed)).to(dtype)
    got = spectral_power(x, epsilon, method=method, restore_scale=restore_scale)
    assert (got.dtype, got.shape) == (dtype, x.shape)
    # The input is taken as it is; only the result is rounded.
    assert (
        relative(got, truth(x, epsilon, restore_scale=restore_scale))
        < tolerance(method, epsilon) + 2 * torch.finfo(dtype).eps
    )


@pytest.mark.parametrize("patch", [16, 4])
@pytest.mark.parametrize("epsilon", [0.5, 0.7, 0.9, 0.95, 0.97])
def test_photographs_reach_the_power_of_their_condition_number(photographs, patch, epsilon, device):
    tokens = torch.nn.functional.unfold(photographs, patch, stride=patch).mT.to(device)
    _check_photographs(tokens, epsilon, ["eigh", "products"])


def test_photographs_by_svd(photographs, device):
    _check_photographs(torch.nn.functional.unfold(photographs[:2], 16, stride=16).mT.to(device), 0.5, ["svd"])


def _check_photographs(tokens, epsilon, methods):
    u, s, vh = torch.linalg.svd(tokens.double(), full_matrices=False)
    want = s[:, :1] * (s / s[:, :1]) ** epsilon
    exact = (u * want[:, None, :]) @ vh
    for method in methods:
        got = spectral_power(tokens, epsilon, method=method).double()
        values = torch.linalg.svdvals(got)
        kappa, kappa_before = values[:, 0] / values[:, -1], s[:, 0] / s[:, -1]
        assert (kappa / kappa_before**epsilon - 1).abs().max() < 0.02
        assert (values / want - 1).abs()[s > 1e-5 * s[:, :1]].max() < 0.02
        assert relative(got, exact) < 1e-3


def test_no_vector_hides_from_the_power_iteration():
    """The largest singular vector is orthogonal to eight starts that all matrices once had."""
    position, start = torch.arange(32, dtype=torch.float64)[:, None], torch.arange(8, dtype=torch.float64)
    once = 1 + (1 + start) / 2 * torch.cos(12.9898 * position + (0.7 + start) * (1 + position))
    basis = torch.linalg.qr(torch.cat([once, torch.randn(32, 24, dtype=torch.float64)], 1))[0]
    basis[:, :-1] @= torch.linalg.qr(torch.randn(31, 31, dtype=torch.float64))[0]
    sigma = torch.linspace(1, 0.1, 32, dtype=torch.float64)
    sigma[-1] = 1.15
    x = basis * sigma @ basis.mT
    wanted = basis * (1.15 * (sigma / 1.15) ** 0.5) @ basis.mT
    assert relative(spectral_power(x, 0.5, method="products"), wanted) < 0.01


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("epsilon", EPSILONS)
def test_without_the_scale_the_largest_value_becomes_one(method, epsilon):
    x = 37.0 * matrices(torch.logspace(0, -4, 10), 10, 14)
    got = spectral_power(x, epsilon, method=method, restore_scale=False)
    assert relative(got, truth(x, epsilon, restore_scale=False)) < tolerance(method, epsilon)
    assert torch.linalg.matrix_norm(got, 2).item() == pytest.approx(1, abs=tolerance(method, epsilon))
    kept = spectral_power(x, epsilon, method=method)
    assert torch.linalg.matrix_norm(kept, 2).item() == pytest.approx(37, rel=tolerance(method, epsilon))


@pytest.mark.parametrize("method", METHODS)
def test_epsilon_one_changes_nothing(method):
    x = torch.randn(3, 8, 5)
    x[1] = 0
    torch.testing.assert_close(spectral_power(x, 1.0, method=method), x, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(spectral_power(x.double(), 1, method=method), x.double(), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_scale_comes_out_as_it_went_in(method, dtype):
    x = matrices(torch.logspace(0, -3, 6), 6, 9).to(dtype)
    alone = spectral_power(x, 0.95, method=method).double()
    powers = [-60, -20, 0, 20, 60] if dtype == torch.float32 else [-300, -60, 0, 60, 300]  # of two, so exact
    batch = torch.stack([x * 2.0**p for p in powers])
    for got, p in zip(spectral_power(batch, 0.95, method=method).double(), powers, strict=True):
        assert relative(got * 2.0**-p, alone) < 1e-6
    printed = spectral_power(batch, 0.95, method=method, restore_scale=False).double()
    assert relative(printed, printed[2].expand_as(printed)) < 1e-6


@pytest.mark.parametrize("method", METHODS)
def test_zeros_stay_zero_and_a_nan_stays_in_its_matrix(method):
    x = torch.randn(5, 7, 4)
    x[1] = 0
    x[2, 3, 1] = torch.nan
    x[3, 0, 0] = torch.inf
    for restore_scale in (True, False):
        got = spectral_power(x, 0.95, method=method, restore_scale=restore_scale)
        assert (got[1] == 0).all()
        assert got[2].isnan().all()
        assert got[3].isnan().all()
        for i in (0, 4):
            torch.testing.assert_close(got[i], spectral_power(x[i], 0.95, method=method, restore_scale=restore_scale))


@pytest.mark.parametrize("method", [*METHODS, "auto"])
def test_a_matrix_does_not_see_its_batch(method):
    x = torch.randn(2, 3, 10, 16) * torch.logspace(-3, 3, 6).reshape(2, 3, 1, 1)
    got = spectral_power(x, 0.95, method=method)
    assert got.shape == x.shape
    for i in range(2):
        for j in range(3):
            torch.testing.assert_close(got[i, j], spectral_power(x[i, j], 0.95, method=method), rtol=1e-6, atol=0)


@pytest.mark.parametrize("method", METHODS)
def test_layout_and_autocast_do_not_matter(method):
    x = torch.randn(2, 9, 6)
    plain = spectral_power(x, 0.95, method=method)
    torch.testing.assert_close(spectral_power(x.mT.contiguous().mT, 0.95, method=method), plain)
    torch.testing.assert_close(spectral_power(torch.stack([x, x], -1)[..., 0], 0.95, method=method), plain)
    with torch.autocast("cpu", torch.bfloat16):
        under = spectral_power(x, 0.95, method=method)
    assert torch.equal(under, plain)
    assert spectral_power(x[:0], 0.95, method=method).shape == (0, 9, 6)


@pytest.mark.parametrize("method", METHODS)
def test_below_the_floor_every_method_goes_on_linearly(method):
    """In float32 with a side above 70 every method has the same floor; a diagonal matrix has no rounding noise."""
    n, d, epsilon = 80, 100, 0.5
    floor = power_floor(torch.float32, n, d)
    assert floor > 1e-6
    values = torch.tensor([1.0, 0.5, 1e-3, 0.1 * floor, 0.01 * floor, 1e-3 * floor])
    x = torch.zeros(n, d)
    x[range(6), range(6)] = values
    got = torch.stack([spectral_power(x, epsilon, method=method)[i, i] for i in range(6)])
    want = torch.where(values > floor, values**epsilon, values * floor ** (epsilon - 1))
    # Below 1e-5 · σmax the fitted sums are only roughly the power.
    torch.testing.assert_close(got, want, rtol=0.2 if method == "products" else 1e-5, atol=0)


def test_the_bound_of_products_is_respected_on_spectra_that_fill_the_range():
    for epsilon in EPSILONS:
        bound = products_bound(epsilon, 40, 60)
        assert bound <= 0.02
        for seed in range(3):
            s = 10 ** (-5 * torch.rand(40, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)))
            s = (s / s.max()).clamp_min(1e-5).sort(descending=True).values
            values = torch.linalg.svdvals(spectral_power(matrices(s, 40, 60, seed), epsilon, method="products"))
            assert (values / s**epsilon - 1).abs().max() <= bound + 1e-4


# Gradients. σmax is not differentiable where it is repeated, so the repeated values of gradcheck lie below it.


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("restore_scale", [True, False])
@pytest.mark.parametrize("shape", [(3, 5), (5, 3), (4, 4), (1, 4), (4, 1)], ids=str)
def test_gradients_pass_gradcheck(method, restore_scale, shape):
    spectra = {
        1: [[2.0]],
        3: [[2.0, 0.7, 0.3], [2.0, 0.5, 0.5]],
        4: [[2.0, 0.5, 0.5, 0.5], [2.0, 0.7, 0.3, 0.3]],
    }[min(shape)]
    x = torch.stack([matrices(s, *shape, seed=i) for i, s in enumerate(spectra)]).requires_grad_()
    assert torch.autograd.gradcheck(
        lambda t: spectral_power(t, 0.5, method=method, restore_scale=restore_scale), (x,), atol=1e-5, rtol=1e-4
    )


@pytest.mark.parametrize("restore_scale", [True, False])
@pytest.mark.parametrize("shape", [(3, 5), (5, 3), (4, 4), (1, 4)], ids=str)
def test_second_derivatives_of_products(restore_scale, shape):
    """The vector of λmax moves with the matrix. The others refuse (test_first_order.py)."""
    x = matrices([2.0, 0.7, 0.3, 0.3][: min(shape)], *shape).requires_grad_()

    def power(t):
        return spectral_power(t, 0.5, method="products", restore_scale=restore_scale)

    assert torch.autograd.gradgradcheck(power, (x,), atol=1e-5, rtol=1e-4)
    weight = torch.randn(shape, dtype=torch.float64)

    def gradient(t):
        return torch.func.grad(lambda t: (power(t) * weight).sum())(t)

    def plain_gradient(t):
        return torch.autograd.grad((power(t) * weight).sum(), t, create_graph=True)[0]

    truth = torch.autograd.functional.jacobian(plain_gradient, x.detach())
    for derivative in (torch.func.jacrev, torch.func.jacfwd):
        torch.testing.assert_close(derivative(gradient)(x.detach()), truth, rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("restore_scale", [True, False])
@pytest.mark.parametrize("shape", [(3, 5), (5, 3), (4, 4)], ids=str)
def test_gradients_pass_gradcheck_below_the_floor(method, restore_scale, shape):
    """With a floor above what gradcheck disturbs by, zero singular values included, one and several."""
    k = min(shape)
    x = torch.stack([
        matrices([2.0, 0.7, *[0.0] * (k - 2)], *shape),
        matrices([2.0, *[0.01] * (k - 1)], *shape, seed=1),
    ]).requires_grad_()  # fmt: skip
    assert torch.autograd.gradcheck(lambda t: _PLAIN[method](t, 0.5, 0.05, restore_scale), (x,), atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_gradients_are_finite_everywhere(method, dtype):
    for shape in ((4, 6), (6, 4), (5, 5), (1, 3)):
        k = min(shape)
        x = torch.stack([
            torch.zeros(shape),
            torch.ones(shape),
            torch.eye(*shape),
            matrices([1.0, *[0.0] * (k - 1)], *shape).float(),
            matrices([1.0] * k, *shape, seed=1).float() * 1e-20,
        ]).to(dtype).requires_grad_()  # fmt: skip
        for restore_scale in (True, False):
            y = spectral_power(x, 0.5, method=method, restore_scale=restore_scale)
            (grad,) = torch.autograd.grad(y.sum(), x)
            assert grad.isfinite().all()
            assert grad.dtype == dtype


@pytest.mark.parametrize("method", ["eigh", "products"])
def test_the_methods_have_the_same_gradient(method):
    x = matrices(torch.logspace(0, -3, 12), 12, 20).requires_grad_()
    weight = torch.randn(12, 20, dtype=torch.float64)
    gradients = {}
    for m in ("svd", method):
        (gradients[m],) = torch.autograd.grad((spectral_power(x, 0.95, method=m) * weight).sum(), x)
    assert relative(gradients[method], gradients["svd"]) < (1e-8 if method == "eigh" else 0.01)


@pytest.mark.parametrize(
    ("x", "epsilon", "method", "words"),
    [
        (torch.ones(2, 2), 0.0, "auto", ("epsilon=0.0", "(0, 1]")),
        (torch.ones(2, 2), 1.2, "svd", ("epsilon=1.2",)),
        (torch.ones(2, 2), -0.5, "svd", ("epsilon=-0.5",)),
        (torch.ones(2, 2), math.nan, "svd", ("epsilon=nan",)),
        (torch.ones(2, 2, dtype=torch.int32), 0.5, "svd", ("int32", "x.float()")),
        (torch.ones(2, 2, dtype=torch.complex64), 0.5, "svd", ("complex64",)),
        (torch.ones(3), 0.5, "svd", ("(…, n, d)", "(3,)")),
        (torch.ones(()), 0.5, "svd", ("(…, n, d)", "()")),
        (torch.ones(2, 0, 3), 0.5, "svd", ("empty", "(2, 0, 3)")),
        (torch.ones(2, 3, 0), 0.5, "svd", ("empty", "(2, 3, 0)")),
        (torch.ones(2, 2), 0.5, "qr", ("'qr'", "svd", "eigh", "products")),
    ],
)
def test_errors_name_the_mistake(x, epsilon, method, words):
    with pytest.raises(ValueError) as error:  # noqa: PT011 (the words are checked below)
        spectral_power(x, epsilon, method=method)
    assert all(word in str(error.value) for word in words)


@pytest.mark.parametrize(
    ("dtype", "kind", "method"),
    [
        (torch.float32, "cpu", "eigh"),
        (torch.bfloat16, "cpu", "eigh"),
        (torch.float64, "cpu", "svd"),
        (torch.float32, "cuda", "products"),
        (torch.float64, "cuda", "svd"),
    ],
)
def test_auto_says_what_it_takes_and_why(dtype, kind, method):
    said, why = explain_spectral_power((196, 768), dtype, torch.device(kind), 0.95)
    assert said == method
    assert len(why.split()) >= 5
    if kind == "cpu":
        x = torch.randn(7, 9).to(dtype)
        assert torch.equal(spectral_power(x, 0.95), spectral_power(x, 0.95, method=said))


def test_the_floor_is_the_norm_of_rounding_noise():
    x = torch.randn(200, 300, dtype=torch.float64)
    noise = torch.linalg.matrix_norm(x.float().double() - x, 2) / torch.linalg.matrix_norm(x, 2)
    floor = power_floor(torch.float32, 200, 300)
    assert noise < floor
    assert power_floor(torch.bfloat16, 200, 300) == floor  # computed in float32 or better, whatever the input
    assert power_floor(torch.float64, 200, 300) < 1e-14
