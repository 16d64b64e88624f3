"""Bidiagonalisation against matrices whose singular values are known."""

import math
import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

from wellcond.numerics import lanczos
from wellcond.numerics.lanczos import Bidiagonalization, largest_singular_values


class Matrix:
    """A matrix that only shows its products."""

    def __init__(self, a: Tensor):
        self.a = a
        self.outputs, self.inputs = a.shape
        self.device, self.dtype = a.device, a.dtype
        self.products = 0

    def jvp(self, v: Tensor, /) -> Tensor:
        self.products += 1
        return self.a @ v

    def vjp(self, u: Tensor, /) -> Tensor:
        self.products += 1
        return self.a.mT @ u


def with_singular_values(sigma: Tensor, m: int, n: int) -> Tensor:
    u = torch.linalg.qr(torch.randn(m, m, dtype=torch.float64)).Q[:, : len(sigma)]
    v = torch.linalg.qr(torch.randn(n, n, dtype=torch.float64)).Q[:, : len(sigma)]
    return u * sigma @ v.mT


@given(st.integers(1, 24), st.integers(1, 24), st.integers(0, 100))
def test_to_the_end_it_is_an_exact_decomposition(m: int, n: int, seed: int) -> None:
    a = torch.randn(m, n, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    found = largest_singular_values(Matrix(a), min(m, n), seed=seed)
    assert found.complete
    assert found.converged
    exact = torch.linalg.svdvals(a)
    assert_close(found.values, exact, rtol=0, atol=1e-12)
    assert_close(found.smallest, exact, rtol=0, atol=1e-12)


@pytest.mark.parametrize("shape", [(200, 300), (300, 200)])
@pytest.mark.parametrize("decay", [0.9, 0.99])
def test_errors_are_bounds_and_few_steps_do(shape: tuple[int, int], decay: float) -> None:
    sigma = decay ** torch.arange(200, dtype=torch.float64)
    operator = Matrix(with_singular_values(sigma, *shape))
    found = largest_singular_values(operator, 5)
    assert found.converged
    assert not found.complete
    assert ((found.values - sigma[:5]).abs() <= found.errors + 1e-13).all()
    assert (found.smallest >= sigma[-5:]).all()
    assert operator.products <= 2 * found.steps + 200


def test_before_convergence_no_error_is_claimed() -> None:
    """A residual says that some value is near, and is smaller here than the distance to the one of the same rank."""
    sigma = torch.tensor([2.0, 2.0] + [0.995**i for i in range(298)], dtype=torch.float64)
    found = largest_singular_values(Matrix(with_singular_values(sigma, 300, 300)), 4, max_steps=12)
    assert not found.converged
    assert found.errors.isinf().all()
    nearest = (found.values[:, None] - sigma).abs().amin(1)
    assert (nearest <= found.residuals + 1e-13).all()
    assert (found.values <= sigma[:4] + 1e-13).all()
    assert ((sigma[:4] - found.values) > 2 * found.residuals).any()


def a_spectrum(draw: random.Random) -> Tensor:
    """Some equal values on top of, among or below others: evenly spread, in a cluster, in groups, falling, or zero."""
    n, equal = draw.choice([20, 60, 100, 200]), draw.choice([1, 2, 3, 8, 12])
    i = torch.arange(n - equal, dtype=torch.float64)
    rest = draw.choice(
        [
            i / len(i),
            1 - 10.0 ** -draw.choice([3, 6, 8, 9, 12]) * i,
            (i // draw.choice([2, 5])) / len(i),
            draw.choice([0.5, 0.9, 0.97]) ** i,
            torch.zeros_like(i),
        ]
    )
    return torch.cat([torch.full((equal,), draw.choice([2.0, 1.02, 1.0, 0.9])), rest]).sort(descending=True).values


@pytest.mark.parametrize("part", range(4))
def test_nothing_is_claimed_that_is_not_so(part: int) -> None:
    """The values of a diagonal matrix are known, and no other is harder for random starts."""
    converged = 0
    for seed in range(75 * part, 75 * (part + 1)):
        draw = random.Random(seed)
        sigma, k, steps = a_spectrum(draw), draw.choice([1, 2, 4, 8, 12]), draw.choice([300, 300, 60, 24])
        found = largest_singular_values(Matrix(torch.diag(sigma)), k, max_steps=steps, seed=seed)
        told = f"seed {seed}: k = {k}, {steps} steps, {found}"
        assert (found.values <= sigma[:k] + 1e-12).all(), told
        assert ((found.values[:, None] - sigma).abs().amin(1) <= found.residuals + 1e-12).all(), told
        assert (sigma[:k] - found.values <= found.errors + 1e-12).all(), told
        assert not found.converged or bool((found.errors <= 1e-8 * found.values[0]).all()), told
        assert found.converged or steps < 300, told
        converged += found.converged
    assert converged >= 50


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("n", "k"), [(100, 8), (400, 12)])
def test_as_many_equal_values_as_are_asked_for(n: int, k: int, seed: int) -> None:
    sigma = torch.cat([torch.full((k,), 2.0), torch.linspace(1, 0, n - k)]).double()
    found = largest_singular_values(Matrix(torch.diag(sigma)), k, seed=seed)
    assert found.converged
    assert_close(found.values, sigma[:k], rtol=1e-9, atol=0)


@pytest.mark.parametrize("multiplicity", [2, 3, 5])
def test_equal_values_are_all_found(multiplicity: int) -> None:
    """One start vector sees an eigenspace once; without the later sweeps the second value would be 3, not 5."""
    sigma = torch.cat([torch.full((multiplicity,), 5.0), 3 * 0.97 ** torch.arange(150.0)]).double()
    found = largest_singular_values(Matrix(with_singular_values(sigma, 160, 170)), 4)
    assert_close(found.values, sigma[:4], rtol=1e-9, atol=0)
    assert found.converged


def test_the_identity() -> None:
    found = largest_singular_values(Matrix(torch.eye(50, 70, dtype=torch.float64)), 4)
    assert_close(found.values, torch.ones(4, dtype=torch.float64))
    assert_close(found.smallest, torch.ones(4, dtype=torch.float64))


def test_low_rank_and_zero() -> None:
    a = with_singular_values(torch.tensor([3.0, 2.0, 1.0], dtype=torch.float64), 40, 60)
    found = largest_singular_values(Matrix(a), 5)
    assert_close(found.values, torch.tensor([3.0, 2, 1, 0, 0], dtype=torch.float64), rtol=0, atol=1e-12)
    zero = largest_singular_values(Matrix(torch.zeros(40, 60, dtype=torch.float64)), 3)
    assert zero.values.tolist() == [0, 0, 0]


def test_a_nan_is_not_a_number() -> None:
    a = torch.randn(30, 40, dtype=torch.float64)
    a[3, 4] = math.nan
    found = largest_singular_values(Matrix(a), 2)
    assert found.values.isnan().all()
    assert not found.converged


def test_the_same_seed_gives_the_same_bits() -> None:
    operator = Matrix(torch.randn(60, 80, dtype=torch.float64))
    first, again, other = (largest_singular_values(operator, 3, max_steps=20, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(first.values, again.values)
    assert not torch.equal(first.smallest, other.smallest)


def test_vectors_stay_orthogonal_over_many_orders_of_magnitude() -> None:
    """Without reorthogonalisation the largest values come back as ghosts."""
    sigma = torch.logspace(0, -10, 120, dtype=torch.float64)
    process = Bidiagonalization(Matrix(with_singular_values(sigma, 120, 140)), torch.Generator().manual_seed(0), 120)
    for _ in range(100):
        process.step()
    left, right = process._left[:100], process._right[:100]
    eye = torch.eye(100, dtype=torch.float64)
    assert_close(left @ left.mT, eye, rtol=0, atol=1e-13)
    assert_close(right @ right.mT, eye, rtol=0, atol=1e-13)


@pytest.mark.parametrize("shape", [(100, 150), (150, 100)])
def test_without_the_long_vectors(shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    sigma = torch.logspace(0, -5, 100, dtype=torch.float64)
    operator = Matrix(with_singular_values(sigma, *shape))
    monkeypatch.setattr(lanczos, "LONG_ENTRIES", 0)
    found = largest_singular_values(operator, 6)
    assert found.converged
    assert_close(found.values, sigma[:6], rtol=1e-9, atol=0)
