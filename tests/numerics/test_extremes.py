"""Each stage of the extreme singular values by itself, on both routes: by vectors (CPU) and by products (elsewhere)."""

import math

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from wellcond.numerics import extremes
from wellcond.numerics.extremes import extreme_singular_values, largest_singular_value, scaled_gram

ROUTES = ("vectors", "products")


@pytest.fixture(params=ROUTES)
def route(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(extremes, "_by_products", lambda a: request.param == "products")
    return request.param


@pytest.fixture
def no_svd(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args, **kwargs):
        raise AssertionError("an SVD was taken")

    monkeypatch.setattr(torch.linalg, "svdvals", refuse)


def matrices(values: Tensor, d: int, batch: int = 2) -> Tensor:
    """(batch, m, d) float64 with these m singular values."""
    m = values.numel()
    u = torch.linalg.qr(torch.randn(batch, m, m, dtype=torch.float64))[0]
    v = torch.linalg.qr(torch.randn(batch, d, m, dtype=torch.float64))[0]
    return (u * values) @ v.mT


def spread(kappa: float, m: int) -> Tensor:
    return torch.logspace(0, -math.log10(kappa), m, dtype=torch.float64)


@pytest.mark.parametrize("size", [(2, 2), (5, 40), (30, 33), (20, 200), (140, 150)])
@pytest.mark.parametrize("kappa", [1, 10, 1e4, 1e5, 3e5, 1e6, 1.1e6, 1.2e6, 8e6])
def test_float32_needs_no_svd(size, kappa, route, request):
    m, d = size
    if route == "products" or m >= extremes.FACTOR_FROM:
        request.getfixturevalue("no_svd")
    w = matrices(spread(kappa, m), d)
    largest, smallest = extreme_singular_values(w, ceiling=2**23)
    assert_close(largest, torch.ones(2).double(), rtol=1e-5, atol=0)
    assert_close(smallest, torch.full((2,), 1 / kappa).double(), rtol=3e-4 if 3e5 < kappa < 1.2e6 else 5e-5, atol=0)


@pytest.mark.parametrize("kappa", [1e7, 2e7, 1e8, 1e10, 1e14, math.inf])
@pytest.mark.parametrize("size", [(20, 40), (20, 200), (140, 150)])
def test_beyond_the_ceiling_needs_no_svd_either(size, kappa, route, no_svd):
    m, d = size
    values = spread(min(kappa, 1e7), m)
    values[-1] = 0 if kappa == math.inf else 1 / kappa
    largest, smallest = extreme_singular_values(matrices(values, d), ceiling=2**23)
    assert (largest / smallest > 2**23).all()
    if kappa < 2**24:  # up to twice the ceiling it is still exact, so the edge itself is sharp
        assert_close(largest / smallest, torch.full((2,), kappa).double(), rtol=1e-4, atol=0)


@pytest.mark.parametrize("kappa", [1e7, 1e9, 9e9])
def test_float64_needs_no_svd_up_to_the_limit_of_the_factor(kappa, route, no_svd):
    w = matrices(spread(kappa, 60), 70)
    largest, smallest = extreme_singular_values(w, ceiling=2**52)
    assert_close(largest / smallest, torch.full((2,), kappa).double(), rtol=1e-5, atol=0)


@pytest.mark.parametrize("kappa", [1e11, 1e13, 1e14])
@pytest.mark.parametrize(("m", "d"), [(20, 30), (65, 192), (33, 33)])
def test_float64_beyond_it_is_as_exact_as_the_svd(kappa, m, d, route):
    """Which errs itself by some 1e-16·κ there; on a CPU it is what is taken."""
    w = matrices(spread(kappa, m), d)
    largest, smallest = extreme_singular_values(w, ceiling=2**52)
    s = torch.linalg.svdvals(w.mT)
    assert_close(largest, s[:, 0])
    assert_close(smallest, s[:, -1], rtol=1e-12 if route == "vectors" else 1e-16 * kappa, atol=0)


@pytest.mark.parametrize("kappa", [1e11, 1e13])
def test_products_need_no_svd_beyond_it_either(kappa, no_svd, monkeypatch):
    monkeypatch.setattr(extremes, "_by_products", lambda _a: True)
    largest, smallest = extreme_singular_values(matrices(spread(kappa, 40), 50), ceiling=2**52)
    assert_close(largest / smallest, torch.full((2,), kappa).double(), rtol=1e-15 * kappa, atol=0)


def test_stages_mix_in_one_batch(route):
    kappas = (1e2, 1e6, 1e12, 30, 7e6, 1e9)
    w = torch.cat([matrices(spread(kappa, 140), 150, batch=1) for kappa in kappas])
    largest, smallest = extreme_singular_values(w, ceiling=2**52)
    assert_close(largest / smallest, torch.tensor(kappas).double(), rtol=5e-4, atol=0)


def test_scale_is_left_to_the_trace(route):
    w = matrices(spread(1e6, 40), 50)
    largest, smallest = extreme_singular_values(w, ceiling=2**23)
    for scale in (2.0**-140, 2.0**128):  # what float32 can hold
        found = extreme_singular_values(w * scale, ceiling=2**23)
        assert torch.equal(found[0], largest * scale)
        assert torch.equal(found[1], smallest * scale)


@pytest.mark.parametrize("m", [1, 2, 60, 140])
def test_the_largest_alone(m, route):
    for values in (spread(10, m), torch.ones(m).double(), torch.linspace(1, 0.999, m).double(), spread(1e12, m)):
        w = matrices(values / values[0], m + 3)
        assert_close(largest_singular_value(w), torch.ones(2).double(), rtol=1e-5, atol=0)


def test_what_does_not_converge_is_not_believed(route, monkeypatch):
    """With the bounds out of reach every matrix goes on to the next stage, and the answer stays right."""
    monkeypatch.setattr(extremes, "TOLERANCE", -1.0)
    taken = []
    svdvals = torch.linalg.svdvals

    def spy(a: Tensor) -> Tensor:
        taken.append(len(a))
        return svdvals(a)

    monkeypatch.setattr(torch.linalg, "svdvals", spy)
    w = matrices(spread(1e3, 140), 150)
    largest, smallest = extreme_singular_values(w, ceiling=2**23)
    assert taken == [2]
    assert_close(largest / smallest, torch.full((2,), 1e3).double(), rtol=1e-9, atol=0)


def test_lanczos_ends_at_a_bound_before_it_converges():
    w = matrices(spread(1e4, 140), 150)
    factor = torch.linalg.cholesky(w @ w.mT)
    value, converged = extremes._largest_of_inverse(factor, torch.tensor([1e5, 1e12]).double(), w)
    assert 1e5 < value[0] <= 1e8 * (1 + 1e-6)
    assert not converged[0]
    assert converged[1]
    assert_close(value[1].item(), 1e8, rtol=1e-5, atol=0)


def test_no_vector_hides_from_the_start():
    """A start that is the same for all matrices misses what is orthogonal to it, and says that it has converged."""
    uniform = torch.rand(2, 200, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    once = (uniform[0] - 0.5).sign() * (uniform[1] + 0.5)  # what all of them started from
    for start in (once, extremes._starts(matrices(spread(10, 200), 210, batch=1))[0]):
        basis = torch.randn(200, 200, dtype=torch.float64)
        basis[:, 0] = start
        basis = torch.linalg.qr(basis)[0]  # all but the first are orthogonal to the start
        basis[:, :-1] @= torch.linalg.qr(torch.randn(199, 199, dtype=torch.float64))[0]  # now the last one alone
        values = torch.linspace(0.2, 0.1, 200, dtype=torch.float64)
        values[0], values[-1] = 1.0, 3.0  # the first is found before rounding shows any of the last
        largest, smallest = extreme_singular_values((basis * values @ basis.mT)[None], ceiling=2**23)
        assert_close(largest.item(), 3.0, rtol=1e-5, atol=0)
        assert_close(smallest.item(), values.min().item(), rtol=1e-4, atol=0)


def test_a_start_is_the_matrixs_own():
    w = matrices(spread(10, 130), 140, batch=3)
    starts = extremes._starts(w)
    assert torch.equal(extremes._starts(w[1:2]), starts[1:2])
    assert torch.equal(extremes._starts(w * 2.0**-9), starts)
    assert (starts @ starts.mT - torch.eye(3).double()).abs().max() < 0.4
    assert (starts.abs() > 0.4 / 130**0.5).all()
    w[0, -1] += 1e-3
    assert (extremes._starts(w)[0] @ starts[0]).abs() < 0.4


def test_squaring_meets_its_bound_for_equal_eigenvalues():
    a = torch.eye(50, dtype=torch.float64).repeat(3, 1, 1) * torch.tensor([1e-8, 1.0, 1e8]).double()[:, None, None]
    value, converged = extremes._largest_by_squaring(a)
    assert converged.all()
    assert_close(value, torch.tensor([1e-8, 1.0, 1e8]).double())


def test_gram_has_trace_one():
    gram, size = scaled_gram(matrices(spread(10, 5), 9) * 7)
    assert_close(gram.diagonal(dim1=-2, dim2=-1).sum(-1), torch.ones(2).double())
    assert_close(size, torch.full((2,), 49.0).double() * spread(10, 5).square().sum())


@pytest.mark.parametrize("m", [2, 31, 65, 128, 197])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("tall", [False, True])
def test_a_gram_matrix_with_room_for_whole_blocks(m, dtype, tall):
    pytest.importorskip("triton", reason="the room is that of its kernels")
    w = torch.randn(3, m, 230, dtype=dtype, generator=torch.Generator().manual_seed(m))
    if tall:
        w = w.mT.contiguous().mT
    room, size = extremes._gram_with_room(w)
    gram, trace = scaled_gram(w.double())
    assert_close(room[:, :m, :m], gram, rtol=1e-12, atol=1e-14)
    assert_close(size, trace)
    assert not room[:, m:].any()
    assert not room[:, :, m:].any()
