"""The effective rank by products against that of all singular values, in float64."""

import numpy as np
import pytest
import torch

from wellcond.numerics.power_fit import ALPHA, iterates_of
from wellcond.numerics.singular import effective_rank
from wellcond.numerics.spectral_sums import _weights, effective_rank_by_products, steps_for


def truth(s: torch.Tensor) -> torch.Tensor:
    p = s / s.sum(-1, keepdim=True)
    return torch.special.entr(p).sum(-1).exp()


def gram_of(s: torch.Tensor, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    q = torch.linalg.qr(torch.randn(*s.shape, s.shape[-1], generator=generator, dtype=torch.float64))[0]
    return (q * s.square()[:, None, :]) @ q.mT


@pytest.mark.parametrize("m", [1, 2, 17, 64, 197])
def test_spectra_of_many_kinds(m):
    kinds = [torch.logspace(0, -decades, m, dtype=torch.float64) for decades in (0, 0.5, 2, 4, 6, 9)]
    kinds += [torch.linspace(1, 1e-3, m, dtype=torch.float64), torch.rand(m, dtype=torch.float64) + 1e-3]
    one_large = torch.full((m,), 1e-4, dtype=torch.float64)
    one_large[0] = 1
    zeros = torch.zeros(m, dtype=torch.float64)
    zeros[: (m + 1) // 2] = 3.0
    s = torch.stack([*kinds, one_large, zeros])
    got = effective_rank_by_products(gram_of(s) * 1e6)  # of any scale
    torch.testing.assert_close(got, truth(s), rtol=1e-2, atol=0)
    assert (got / truth(s) - 1).abs().median() < 2e-3


@pytest.mark.parametrize("level", [1e-5, 3e-6])
def test_many_small_values_beside_one_large(level):
    """Each errs by little, and 768 of them by more than 1 %, were it no less than for 256."""
    s = torch.full((1, 768), level, dtype=torch.float64)
    s[:, 0] = 1
    torch.testing.assert_close(effective_rank_by_products(gram_of(s)), truth(s), rtol=5e-3, atol=0)


@pytest.mark.parametrize("m", [8, 256, 300, 1024, 4096, 16384])
def test_the_fit_is_as_good_as_promised_at_every_value(m):
    steps = steps_for(m)
    sigma = np.concatenate([np.logspace(-9, 0, 5000), [0.0]])
    got = iterates_of(sigma**2, (ALPHA,) * steps) @ np.array(_weights(steps))
    allowed = 1.5e-3 * sigma + 1.5e-5 * min(1, 256 / m)
    assert (np.abs(got[:, 0] - sigma) <= allowed).all()
    assert (np.abs(got[:, 1] - sigma * np.log(np.where(sigma > 0, sigma, 1))) <= allowed).all()


@pytest.mark.gpu
def test_a_gpu_gives_what_a_cpu_gives():
    x = torch.randn(3, 197, 300, dtype=torch.float64) * torch.logspace(0, -3, 300, dtype=torch.float64)
    x = torch.cat([x, torch.zeros(1, 197, 300), torch.full((1, 197, 300), torch.nan)])
    torch.testing.assert_close(effective_rank(x.cuda()).cpu(), effective_rank(x), rtol=1e-2, atol=0, equal_nan=True)
