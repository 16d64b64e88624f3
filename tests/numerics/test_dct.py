"""The DCT against SciPy's in float64, and the power of its coefficients against the formula."""

import numpy as np
import pytest
import scipy.fft
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from wellcond.numerics.dct import coefficient_floor, dct, dct2, dct_basis, dct_power, idct, idct2

LENGTHS = [1, 2, 3, 8, 49, 197, 768, 3136]
DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


def scipy_dct(x, axis=-1):
    return torch.from_numpy(scipy.fft.dct(x.double().numpy(), axis=axis, norm="ortho"))


def scipy_dct2(x):
    return torch.from_numpy(scipy.fft.dctn(x.double().numpy(), axes=(-2, -1), norm="ortho"))


@pytest.mark.parametrize("length", LENGTHS)
def test_dct_is_scipys_at_any_length(length):
    x = torch.randn(3, length, dtype=torch.float64)
    torch.testing.assert_close(dct(x), scipy_dct(x), rtol=0, atol=1e-12)
    torch.testing.assert_close(idct(dct(x)), x, rtol=0, atol=1e-12)
    torch.testing.assert_close(dct(x.float()).double(), scipy_dct(x.float()), rtol=0, atol=1e-5)


@given(shape=st.lists(st.integers(1, 6), min_size=1, max_size=4), data=st.data())
def test_dct_is_scipys_along_any_dimension(shape, data):
    dim = data.draw(st.integers(-len(shape), len(shape) - 1))
    x = torch.randn(shape, dtype=torch.float64)
    torch.testing.assert_close(dct(x, dim), scipy_dct(x, dim), rtol=0, atol=1e-13)
    torch.testing.assert_close(idct(dct(x, dim), dim), x, rtol=0, atol=1e-13)
    assert dct(x, dim).shape == x.shape


@pytest.mark.parametrize("shape", [(1, 1), (5, 7), (2, 3, 17, 4), (196, 768), (3136, 48)])
def test_dct2_is_scipys_dctn(shape):
    x = torch.randn(shape, dtype=torch.float64)
    torch.testing.assert_close(dct2(x), scipy_dct2(x), rtol=0, atol=1e-11)
    torch.testing.assert_close(idct2(dct2(x)), x, rtol=0, atol=1e-11)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_comes_back_rounded_once(dtype):
    x = torch.randn(4, 10, 30).to(dtype)
    got, truth = dct2(x), scipy_dct2(x)
    assert got.dtype == dtype
    # dct2 rounds its results after each of the two transforms; the sums are float32's or better.
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(got.double(), truth, rtol=2 * eps, atol=8 * eps)


@pytest.mark.parametrize("length", [1, 2, 49, 768])
def test_the_basis_is_orthonormal(length):
    basis = dct_basis(length, dtype=torch.float64)
    torch.testing.assert_close(basis @ basis.mT, torch.eye(length, dtype=torch.float64), rtol=0, atol=1e-13)


@pytest.mark.parametrize("length", [197, 3136])
def test_a_long_basis_is_exact_to_the_last_bits(length):
    rows = np.unique(np.linspace(0, length - 1, 60).astype(np.int64))
    phase = (2 * np.arange(length) + 1) * rows[:, None] % (4 * length)  # exact in integers
    pi = np.longdouble("3.14159265358979323846264338327950288")
    truth = np.cos(phase.astype(np.longdouble) * pi / (2 * length)) * np.sqrt(np.longdouble(2) / length)
    truth[0] = 1 / np.sqrt(np.longdouble(length))
    for dtype in (torch.float64, torch.float32):
        basis = dct_basis(length, dtype=dtype)[rows].double().numpy()
        assert np.abs(basis - truth).max() <= 8 * torch.finfo(dtype).eps * np.sqrt(2 / length)


def test_the_gradient_is_the_inverse_transform():
    x = torch.randn(4, 6, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(4, 6, dtype=torch.float64)
    (grad,) = torch.autograd.grad((dct2(x) * weight).sum(), x)
    torch.testing.assert_close(grad, idct2(weight))
    for transform in (dct, idct, lambda t: dct(t, 0), lambda t: idct(t, 0)):
        assert torch.autograd.gradcheck(transform, (x,))


def test_autocast_does_not_lower_the_precision():
    x = torch.randn(2, 30, 40)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(dct2(x), dct2(x))
        under = dct2(x), dct_power(x, 0.95)
    assert torch.equal(under[0], dct2(x))
    assert torch.equal(under[1], dct_power(x, 0.95))


def test_the_basis_is_built_once_and_results_do_not_share_its_memory():
    x = torch.eye(11)
    before = dct(x)
    dct(x).zero_()
    assert torch.equal(dct(x), before)
    assert dct_basis(11, dtype=torch.float32) is dct_basis(11, dtype=torch.float32)
    assert dct_basis(11, dtype=torch.float64).dtype == torch.float64


def test_a_basis_first_met_in_inference_mode_serves_training_later():
    length = 113  # no other test's
    with torch.inference_mode():
        dct(torch.randn(length))
    x = torch.randn(length, requires_grad=True)
    dct(x).square().sum().backward()
    torch.testing.assert_close(x.grad, 2 * x.detach(), rtol=0, atol=1e-5)


@pytest.mark.parametrize("warm", [False, True], ids=["traced first", "traced later"])
def test_a_tracer_neither_leaves_its_tensors_in_the_cache_nor_trips_over_real_ones(warm):
    length = 127 if warm else 131  # no other test's
    if warm:
        dct(torch.randn(length))
    with FakeTensorMode():
        assert dct(torch.randn(2, length)).shape == (2, length)
    x = torch.randn(2, length)
    torch.testing.assert_close(dct(x).double(), scipy_dct(x), rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: dct(torch.ones(3, dtype=torch.int64)), ("floating-point", "int64", "x.float()")),
        (lambda: idct(torch.ones(3, dtype=torch.complex64)), ("complex64",)),
        (lambda: dct(torch.tensor(1.0)), ("at least one dimension", "scalar")),
        (lambda: dct(torch.ones(2, 3), 2), ("dim=2", "(2, 3)")),
        (lambda: dct(torch.ones(2, 3), -3), ("dim=-3",)),
        (lambda: dct(torch.ones(2, 0)), ("(2, 0)", "no values")),
        (lambda: dct2(torch.ones(3)), ("dim=-2", "(3,)")),
    ],
)
def test_errors_name_the_mistake(call, words):
    with pytest.raises(ValueError) as error:  # noqa: PT011 (the words are checked below)
        call()
    assert all(word in str(error.value) for word in words)


def power_by_formula(x, epsilon, *, restore_scale=True, floor=0.0):
    c = scipy.fft.dctn(x.double().numpy(), axes=(-2, -1), norm="ortho")
    peak = np.abs(c).max(axis=(-2, -1), keepdims=True)
    r = np.abs(c) / peak
    linear = r * floor ** (epsilon - 1) if floor else r
    grown = np.sign(c) * np.where(r > floor, r**epsilon, linear) * (peak if restore_scale else 1)
    return torch.from_numpy(scipy.fft.idctn(grown, axes=(-2, -1), norm="ortho"))


@given(
    n=st.integers(1, 12),
    d=st.integers(1, 12),
    epsilon=st.sampled_from([0.1, 0.5, 0.95, 1.0]),
    restore_scale=st.booleans(),
    scale=st.sampled_from([1e-18, 1.0, 1e18]),
)
def test_dct_power_is_the_formula(n, d, epsilon, restore_scale, scale):
    x = torch.randn(2, n, d, dtype=torch.float64) * scale
    got = dct_power(x, epsilon, restore_scale=restore_scale)
    truth = power_by_formula(x, epsilon, restore_scale=restore_scale)
    size = scale if restore_scale else 1.0
    torch.testing.assert_close(got / size, truth / size, rtol=0, atol=1e-11)


@pytest.mark.parametrize("epsilon", [0.5, 0.7, 0.9, 0.95, 0.97])
def test_dct_power_of_photographs_in_float32(photographs, epsilon):
    tokens = torch.nn.functional.unfold(photographs, 16, stride=16).mT
    got = dct_power(tokens, epsilon).double()

    def error(truth):
        return (torch.linalg.matrix_norm(got - truth) / torch.linalg.matrix_norm(truth)).max()

    assert error(power_by_formula(tokens, epsilon, floor=coefficient_floor(torch.float32))) < 1e-5
    assert error(power_by_formula(tokens, epsilon)) < 1e-3  # and what the floor changes is small too


def test_dct_power_keeps_zero_and_a_nan_where_it_is():
    x = torch.randn(3, 6, 8)
    alone = dct_power(x[0], 0.9)
    x[1] = 0
    x[2, 3, 4] = torch.nan
    got = dct_power(x, 0.9)
    torch.testing.assert_close(got[0], alone)
    assert (got[1] == 0).all()
    assert got[2].isnan().all()


def test_the_slope_is_finite_at_zero_coefficients_and_right_elsewhere():
    x = torch.zeros(2, 5, 7, dtype=torch.float64)
    x[1] = 1.0  # one coefficient alone, all others zero
    x.requires_grad_()
    dct_power(x, 0.5).square().sum().backward()
    assert x.grad.isfinite().all()
    y = torch.randn(5, 7, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda t: dct_power(t, 0.7), (y,))
    assert torch.autograd.gradcheck(lambda t: dct_power(t, 0.7, restore_scale=False), (y,))
    assert torch.autograd.gradgradcheck(lambda t: dct_power(t, 0.7), (y,))
