"""The near-unit share is that of a plain implementation: whiten, least squares, eigenvalues."""

import math

import hypothesis.strategies as st
import numpy as np
import pytest
import scipy.linalg
import torch
from hypothesis import given
from torch import Tensor

from wellcond.numerics.layer_map import NEAR_UNIT, near_unit_share, near_unit_shares

EPSILON = 1e-5


def plainly(x: Tensor, y: Tensor, near=NEAR_UNIT) -> float:
    """Principal components of x, each scaled to about one; the map between the whitened tokens by least squares."""
    x, y = (t.double().reshape(-1, t.shape[-1]).numpy() for t in (x, y))
    x, y = x - x.mean(0), y - y.mean(0)
    _, s, vh = scipy.linalg.svd(x, full_matrices=False)
    variance = s**2 / len(x)
    ridge = EPSILON * variance.sum() / x.shape[1]
    kept = variance > ridge
    whiten = vh[kept].T / np.sqrt(variance[kept] + ridge)
    a, *_ = scipy.linalg.lstsq(x @ whiten, y @ whiten)
    size = np.abs(scipy.linalg.eigvals(a))
    return float(np.mean((size >= near[0]) & (size <= near[1])))


def orthogonal(d: int) -> Tensor:
    return torch.linalg.qr(torch.randn(d, d, dtype=torch.float64))[0]


@given(
    st.integers(1, 3), st.integers(2, 40), st.integers(1, 12), st.floats(0, 2), st.floats(0, 2), st.integers(0, 10**6)
)
def test_it_is_that_of_a_plain_implementation(b, n, d, skip, noise, seed):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(b, n, d, generator=generator, dtype=torch.float64)
    y = skip * x + x @ torch.randn(d, d, generator=generator, dtype=torch.float64) / 2
    y = y + noise * torch.randn(b, n, d, generator=generator, dtype=torch.float64) + 5
    near = (0.5, 1.5)  # wide, so that of few eigenvalues some lie in it
    assert near_unit_share(x, y, near=near) == pytest.approx(plainly(x, y, near))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_maps_that_are_known(dtype):
    x = torch.randn(4, 50, 16).to(dtype) + 3
    assert near_unit_share(x, x) == 1.0
    assert near_unit_share(x, x * 0.5) == 0.0
    assert near_unit_share(x, x * 2) == 0.0
    assert near_unit_share(x, torch.zeros_like(x)) == 0.0
    assert near_unit_share(x, -x) == 1.0
    if dtype != torch.bfloat16:
        turned = x.double() @ orthogonal(16)
        assert near_unit_share(x.double(), turned) == 1.0
        assert near_unit_share(x.double(), turned + torch.randn(16)) == 1.0  # both are centred
        assert near_unit_share(x.double(), 0.5 * turned) == 0.0


def test_a_share_between_and_its_edges():
    x = torch.randn(200, 8, dtype=torch.float64)
    scales = torch.tensor([0.5, 0.89, 0.91, 1.0, 1.04, 1.06, 2.0, 0.0], dtype=torch.float64)
    assert near_unit_share(x, x * scales) == 3 / 8
    basis = torch.randn(8, 8, dtype=torch.float64)  # eigenvalues do not ask for the basis
    assert near_unit_share(x @ basis, x * scales @ basis) == 3 / 8
    assert near_unit_share(x, x * scales, near=(0.0, 0.6)) == 2 / 8


def test_directions_without_variance_do_not_count():
    x = torch.randn(100, 3, dtype=torch.float64) @ torch.randn(3, 10, dtype=torch.float64)  # rank 3
    assert near_unit_share(x, x) == 1.0
    assert near_unit_share(x, 0.5 * x) == 0.0
    y = torch.randn(100, 10, dtype=torch.float64)
    assert near_unit_share(x, x + 0.3 * y) == pytest.approx(plainly(x, x + 0.3 * y))
    few = torch.randn(4, 30, dtype=torch.float64)  # fewer tokens than values: what they span
    assert near_unit_share(few, few) == 1.0
    assert near_unit_share(few, 0.5 * few) == 0.0


def test_only_the_largest_directions_are_taken():
    x = torch.randn(500, 6, dtype=torch.float64) * torch.tensor([9.0, 8, 7, 0.3, 0.2, 0.1])
    y = x * torch.tensor([1.0, 1, 2, 1, 1, 1])
    assert near_unit_share(x, y) == 5 / 6
    assert near_unit_share(x, y, rank=3) == pytest.approx(2 / 3)


def test_where_there_is_no_map():
    x = torch.randn(2, 5, 4)
    for bad in (math.nan, math.inf):
        spoiled = x.clone()
        spoiled[0, 1, 2] = bad
        assert math.isnan(near_unit_share(spoiled, x))
        assert math.isnan(near_unit_share(x, spoiled))
    assert math.isnan(near_unit_share(x[:1, :1], x[:1, :1]))
    assert math.isnan(near_unit_share(torch.ones(2, 5, 4), x))
    assert math.isnan(near_unit_share(x[:0], x[:0]))


@pytest.mark.parametrize("size", [1e150, 1e154, 1e160, 1e300, 1.7e308])
def test_tokens_near_the_limit_of_float64(size):
    """A number if it can be computed, else NaN: neither 0, which would be one, nor an error of LAPACK."""
    x = (2 * torch.rand(3, 6, 4, dtype=torch.float64) - 1) * size
    for found in (near_unit_share(x, x), *near_unit_shares([(x, x), (x.flip(0), x.flip(0))])):
        assert found == 1.0 or (math.isnan(found) and size >= 1e154)
    ordinary = torch.randn(3, 6, 4, dtype=torch.float64)
    assert near_unit_share(ordinary, ordinary) == 1.0
    found = near_unit_share(ordinary, x)  # so large a map has no eigenvalue near 1
    assert found == 0.0 or (math.isnan(found) and size >= 1e300)
    if size > 1e308:
        beyond = torch.full((3, 6, 4), size, dtype=torch.float64)  # their sum overflows
        beyond[0] *= -0.5
        assert math.isnan(near_unit_share(ordinary, beyond))


@pytest.mark.parametrize("shapes", [((2, 5, 4), (2, 5, 3)), ((2, 5, 4), (2, 1, 4)), ((4,), (4,))])
def test_shapes_that_do_not_fit(shapes):
    with pytest.raises(ValueError, match="input and output have one shape"):
        near_unit_share(*(torch.randn(shape) for shape in shapes))


def test_many_at_once():
    pairs = [(x, x * scale) for scale in (1.0, 0.5) for x in (torch.randn(2, 9, 4), torch.randn(3, 5, 8))]
    pairs.append((torch.zeros(2, 3, 4), torch.zeros(2, 3, 4)))
    assert near_unit_shares([]) == []
    assert near_unit_shares(pairs) == pytest.approx([near_unit_share(x, y) for x, y in pairs], nan_ok=True)


def test_no_gradient_is_needed_nor_made():
    x = torch.randn(3, 6, 4, requires_grad=True)
    assert near_unit_share(x, x * 1.0) == 1.0
