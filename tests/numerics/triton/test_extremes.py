"""Extreme eigenvalues of Gram matrices by the fused kernels against float64 singular values."""

import pytest
import torch

from wellcond.bench.kappa import matrices
from wellcond.numerics.extremes import FUSED_RESIDUAL
from wellcond.numerics.triton.extremes import extreme_eigenvalues
from wellcond.numerics.triton.gram import padded

pytestmark = pytest.mark.filterwarnings("ignore:All-NaN slice encountered:RuntimeWarning")  # the interpreter's maximum


def extremes(x: torch.Tensor, device: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    gram = x @ x.mT
    size = gram.diagonal(dim1=-2, dim2=-1).sum(-1)
    room = padded(x.shape[1]) - x.shape[1]
    gram = torch.nn.functional.pad(gram / size[:, None, None], (0, room, 0, room))
    return extreme_eigenvalues(x.to(device), gram.to(device), size.to(device))


@pytest.mark.parametrize(("side", "kappa"), [(20, 1.0), (20, 1e3), (20, 8e6), (70, 1e1), (70, 1e5), (70, 1e6)])
def test_condition_numbers(device, side, kappa):
    x = matrices(1, side, 100, kappa).double()
    s = torch.linalg.svdvals(x)
    largest, smallest, residual = extremes(x, device)
    found = (largest / smallest).sqrt().cpu() / (s[:, 0] / s[:, -1])
    trusted = (residual <= FUSED_RESIDUAL * smallest).cpu()
    assert ((found - 1).abs() < 1e-3)[trusted].all()
    assert (found < 1 + 1e-4).all()  # never too large, trusted or not
    if kappa <= 1e5:
        assert trusted.all()


@pytest.mark.parametrize("width", [1e-3, 3e-2])
def test_eigenvalues_all_in_one_cluster(device, width):
    """Power iteration gains next to nothing at first, long before it has converged."""
    generator = torch.Generator().manual_seed(2)
    q = torch.linalg.qr(torch.randn(1, 20, 20, dtype=torch.float64, generator=generator))[0]
    values = torch.linspace(1, 1 + width, 20, dtype=torch.float64)
    largest, smallest, _ = extremes(q * values.sqrt(), device)
    assert float((largest / smallest).sqrt()) == pytest.approx((1 + width) ** 0.5, rel=1e-3)


def test_a_cluster_at_the_small_end(device):
    generator = torch.Generator().manual_seed(1)
    q = torch.linalg.qr(torch.randn(1, 32, 32, dtype=torch.float64, generator=generator))[0]
    values = torch.cat([torch.ones(16, dtype=torch.float64), torch.linspace(1e-4, 1.05e-4, 16, dtype=torch.float64)])
    largest, smallest, _ = extremes(q * values.sqrt(), device)
    assert float(largest / smallest) == pytest.approx(1e4, rel=2e-3)


def test_a_singular_matrix_is_seen_to_be_beyond_any_ceiling(device):
    x = matrices(3, 40, 60, 10.0).double()
    x[0, 1] = x[0, 0]
    x[1] = x[1, :1]
    x[2, 20:] = 0
    largest, smallest, _ = extremes(x, device)
    assert (largest > 2.0**46 * smallest).all()


def test_a_nan_is_never_trusted(device):
    x = matrices(2, 40, 60, 10.0).double()
    x[0, 3, 5] = torch.nan
    _, smallest, residual = extremes(x, device)
    assert (residual <= FUSED_RESIDUAL * smallest).tolist() == [False, True]
