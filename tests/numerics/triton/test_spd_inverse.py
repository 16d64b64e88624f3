"""Block sweeps against dense float64 inverses."""

import pytest
import torch

from wellcond.numerics.triton.spd_inverse import negative_inverse

pytestmark = pytest.mark.filterwarnings("ignore:All-NaN slice encountered:RuntimeWarning")  # the interpreter's maximum


def spd(side: int, kappa: float, *, seed: int = 0, batch: int = 2) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    q = torch.linalg.qr(torch.randn(batch, side, side, dtype=torch.float64, generator=generator))[0]
    values = torch.logspace(0, -torch.log10(torch.tensor(kappa)).item(), side, dtype=torch.float64)
    return (q * values) @ q.mT


@pytest.mark.parametrize("blocks", [1, 2, 3])
@pytest.mark.parametrize("kappa", [1.0, 1e2, 1e5])
def test_inverse(device, blocks, kappa):
    a = spd(32 * blocks, kappa).to(device)
    inverse, pivots = negative_inverse(a.clone())
    want = torch.linalg.inv(a.cpu())
    error = torch.linalg.matrix_norm(-inverse.cpu() - want) / torch.linalg.matrix_norm(want)
    assert error.max() < 1e-14 * kappa * 32 * blocks
    assert (pivots > 0).all()
    torch.testing.assert_close(inverse, inverse.mT, rtol=1e-9, atol=1e-15 * kappa * float(want.abs().max()))


def test_a_matrix_that_is_not_positive_definite_shows_in_its_smallest_pivot(device):
    a = spd(64, 10.0).to(device)
    a[1] -= 0.5 * torch.eye(64, dtype=torch.float64, device=device)
    _, pivots = negative_inverse(a)
    assert pivots[0] > 0
    assert pivots[1] <= 0


def test_matrices_do_not_see_each_other(device):
    a = spd(64, 100.0, batch=3).to(device)
    alone, _ = negative_inverse(a[1:2].clone())
    a[0] = torch.nan
    together, _ = negative_inverse(a.clone())
    assert torch.equal(together[1:2], alone)
    assert together[0].isnan().any()
