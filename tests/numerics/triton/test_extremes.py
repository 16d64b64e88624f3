"""Extreme eigenvalues of Gram matrices by the fused kernels against float64 singular values."""

import pytest
import torch

from wellcond.bench.kappa import matrices
from wellcond.numerics.triton.extremes import extreme_eigenvalues

pytestmark = pytest.mark.filterwarnings("ignore:All-NaN slice encountered:RuntimeWarning")  # the interpreter's maximum


def unit_gram(x: torch.Tensor) -> torch.Tensor:
    gram = x @ x.mT
    return gram / gram.diagonal(dim1=-2, dim2=-1).sum(-1)[:, None, None]


@pytest.mark.parametrize("kappa", [1.0, 1e1, 1e3, 1e5])
@pytest.mark.parametrize("side", [20, 70])
def test_condition_numbers(device, side, kappa):
    x = matrices(2, side, 100, kappa).double()
    s = torch.linalg.svdvals(x)
    largest, smallest, pivots = extreme_eigenvalues(unit_gram(x).to(device))
    found = (largest / smallest).sqrt().cpu()
    assert (found / (s[:, 0] / s[:, -1]) - 1).abs().max() < 1e-3
    assert (pivots > 0).all()


@pytest.mark.parametrize("width", [1e-3, 6e-3, 3e-2])
def test_eigenvalues_all_in_one_cluster(device, width):
    """Power iteration gains next to nothing at first, long before it has converged."""
    generator = torch.Generator().manual_seed(2)
    q = torch.linalg.qr(torch.randn(1, 40, 40, dtype=torch.float64, generator=generator))[0]
    values = torch.linspace(1, 1 + width, 40, dtype=torch.float64)
    largest, smallest, _ = extreme_eigenvalues(((q * values) @ q.mT / values.sum()).to(device))
    assert float((largest / smallest).sqrt()) == pytest.approx((1 + width) ** 0.5, rel=1e-3)


def test_a_cluster_at_the_small_end(device):
    generator = torch.Generator().manual_seed(1)
    q = torch.linalg.qr(torch.randn(1, 64, 64, dtype=torch.float64, generator=generator))[0]
    values = torch.cat([torch.ones(32, dtype=torch.float64), torch.linspace(1e-4, 1.05e-4, 32, dtype=torch.float64)])
    gram = (q * values) @ q.mT
    gram = gram / values.sum()
    largest, smallest, _ = extreme_eigenvalues(gram.to(device))
    assert float(largest / smallest) == pytest.approx(1e4, rel=2e-3)


def test_a_singular_matrix_has_no_positive_smallest_pivot_or_a_vanishing_smallest_eigenvalue(device):
    x = matrices(1, 40, 60, 10.0).double()
    x[:, 1] = x[:, 0]
    largest, smallest, pivots = extreme_eigenvalues(unit_gram(x).to(device))
    assert bool((pivots <= 0) | ~(smallest > 1e-11 * largest))
